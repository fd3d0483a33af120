"""Every client on its own test data with its own parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    Message,
    ServerState,
    message_for_use,
)
from fedjax_tp.data.federated import (
    FederatedDataset,
    client_sizes,
    gather,
    shuffled,
)
from fedjax_tp.models.task import Metrics, Task
from fedjax_tp.simulation.cohort import MESH_AXIS, LocalSchedule
from fedjax_tp.simulation.rounds import OVER_SEEDS, SimulationState, kept_shapes
from fedjax_tp.types import Array, Batch, Float, Int, PRNGKey, Tree

Evaluate = Callable[[SimulationState, FederatedDataset, FederatedDataset], Metrics]


# Clients of the same chunk take as many steps as the largest: in small ones a client
# with a few examples among larger ones wastes little.
_EXAMPLES_A_STEP = 32


class Summary(NamedTuple):
    """One evaluation of all clients that have test examples.

    Attributes:
      pooled: correct / test examples over all clients, the paper's metric.
      mean, std: over clients, each counting once (population standard deviation).
      worst_decile: mean accuracy of the worst tenth of the clients, at least one.
      loss: mean test loss over all test examples.
      positions: of sequences, the share of all positions that is right; else None.
    """

    pooled: float
    mean: float
    std: float
    worst_decile: float
    loss: float
    positions: float | None = None


def make_evaluate(
    algorithm: Algorithm,
    task: Task,
    *,
    capacity: int,
    chunk_size: int,
    schedule: LocalSchedule,
    over_seeds: bool = False,
) -> Evaluate:
    """Compiles `evaluate(state, test, train) -> Metrics`, sums a client, `[clients]`.

    The training split is used by algorithms whose clients adapt before they are used.

    Args:
      algorithm: gives each client's parameters.
      task: gives the metrics.
      capacity: test examples of the largest client.
      chunk_size: clients evaluated at a time on one device.
      schedule: of the training: its mesh, and the batches in which clients adapt.
      over_seeds: as in `make_advance`; metrics are `[seeds, clients]`.
    """
    devices = 1 if schedule.mesh is None else schedule.mesh.size
    evaluate_ids = _evaluate_ids(algorithm, task, capacity, chunk_size, schedule)

    def evaluate(
        state: SimulationState, test: FederatedDataset, train: FederatedDataset
    ) -> Metrics:
        num_clients = test.num_clients
        ids = jnp.arange(num_clients + -num_clients % (devices * chunk_size))
        found = evaluate_ids(state.server, state.kept, ids, ids, test, train)
        return jax.tree.map(lambda leaf: leaf[:num_clients], found)

    if over_seeds:
        return jax.jit(jax.vmap(evaluate, in_axes=(0, OVER_SEEDS, OVER_SEEDS)))
    return jax.jit(evaluate)


def make_evaluate_rows(
    algorithm: Algorithm,
    task: Task,
    *,
    capacity: int,
    chunk_size: int,
    schedule: LocalSchedule,
) -> Any:
    """Compiles `evaluate(server, rows, ids, test, train) -> Metrics` of some clients.

    For what clients keep outside the device: `rows` is theirs as `tree.flatten_rows`
    gives it. There are as many ids as devices times `chunk_size`, or a multiple; an id
    past the end is padding.

    Args:
      algorithm, task, capacity, chunk_size, schedule: as for `make_evaluate`.
    """
    evaluate_ids = _evaluate_ids(algorithm, task, capacity, chunk_size, schedule)

    @jax.jit
    def evaluate(server, rows, ids, test, train):
        kept = tree.unflatten_rows(rows, kept_shapes(algorithm, server))
        return evaluate_ids(server, kept, jnp.arange(len(ids)), ids, test, train)

    return evaluate


def _evaluate_ids(
    algorithm: Algorithm,
    task: Task,
    capacity: int,
    chunk_size: int,
    schedule: LocalSchedule,
) -> Callable[..., Metrics]:
    """A function of server, kept rows, which row is each client's, ids, test, train."""
    mesh = schedule.mesh
    batch_size = max(1, min(capacity, _EXAMPLES_A_STEP))
    devices = 1 if mesh is None else mesh.size

    def deal(ids: Array) -> Array:
        # In turns, so that each device has clients of every kind.
        return jnp.moveaxis(ids.reshape(-1, chunk_size, devices), 2, 0)

    def evaluate(
        server: ServerState,
        kept: Tree,
        places: Array,
        ids: Array,
        test: FederatedDataset,
        train: FederatedDataset,
    ) -> Metrics:
        def on_device(server, kept, test, train, places, ids):
            # A chunk's rows at a time: all of them may be most of the memory.
            found = jax.lax.map(
                lambda dealt: evaluate_chunk(
                    server, test, train, dealt[1], tree.take(kept, dealt[0])
                ),
                (places[0], ids[0]),
            )
            return jax.tree.map(lambda leaf: leaf[None], found)

        inputs = (server, kept, test, train, deal(places), deal(ids))
        if mesh is None or devices == 1:
            chunks = on_device(*inputs)
        else:
            split, whole = PartitionSpec(MESH_AXIS), PartitionSpec()
            found = jax.shard_map(
                on_device,
                mesh=mesh,
                in_specs=(whole, whole, whole, whole, split, split),
                out_specs=split,
                check_vma=False,
            )(*inputs)
            # Every process reads all of it.
            chunks = jax.lax.with_sharding_constraint(found, NamedSharding(mesh, whole))
        return jax.tree.map(
            lambda leaf: jnp.moveaxis(leaf, 0, 2).reshape(-1, *leaf.shape[3:]), chunks
        )

    def evaluate_chunk(
        server: ServerState,
        test: FederatedDataset,
        train: FederatedDataset,
        ids: Array,
        kept: Tree,
    ) -> Metrics:
        message = message_for_use(algorithm, server, ids)
        sizes = client_sizes(test, ids)

        def params_of(personal: Tree, kept: Tree) -> Tree:
            # The shared part is closed over, not mapped: one copy for all clients.
            return algorithm.client_params(Message(message.shared, personal), kept)

        def adapted(id: Array, size: Array, own: tuple[Tree, Tree]) -> Tree:
            assert algorithm.adapt is not None
            # The order of its batches is the same whenever a client is evaluated.
            key = jax.random.fold_in(jax.random.key(0), id)
            order_key, adapt_key = jax.random.split(key)
            batches = own_batches(order_key, train, id, size, schedule)
            return algorithm.adapt(params_of(*own), batches, adapt_key)

        own = (message.personal, kept)
        if algorithm.adapt is not None:
            own = jax.vmap(adapted)(ids, client_sizes(train, ids), own)

        def one_client(step: Array, id: Array, size: Array, own: Tree) -> Metrics:
            places = step * batch_size + jnp.arange(batch_size)
            batch = gather(test, id, places, places < size)
            params = params_of(*own) if algorithm.adapt is None else own
            if algorithm.predict is None:
                return task.metrics(params, batch)
            return task.score(algorithm.predict(params, batch.x), batch)

        def of_step(step: Array) -> Metrics:
            over_clients = jax.vmap(one_client, in_axes=(None, 0, 0, 0))
            return over_clients(step, ids, sizes, own)

        def add_step(step: Array, total: Metrics) -> Metrics:
            return jax.tree.map(jnp.add, total, of_step(step))

        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(of_step, jnp.int32(0)),
        )
        num_steps = -(-sizes.max() // batch_size)
        return jax.lax.fori_loop(0, num_steps, add_step, zeros)

    return evaluate


def own_batches(
    key: PRNGKey,
    data: FederatedDataset,
    client: Int[Array, ""],
    size: Int[Array, ""],
    schedule: LocalSchedule,
) -> Batch:
    """All examples of a client in random order: leaves are `[steps, batch, ...]`.

    Args:
      key: draws the order.
      data: the split.
      client: the client's id.
      size: its number of examples; steps past the last of them are masked.
      schedule: batch size and capacity.
    """
    steps = -(-schedule.capacity // schedule.batch_size)
    order = shuffled(key, size, schedule.capacity)
    places = jnp.arange(steps * schedule.batch_size)
    batch = gather(data, client, order.at[places].get(mode="clip"), places < size)
    return jax.tree.map(
        lambda leaf: leaf.reshape(steps, schedule.batch_size, *leaf.shape[1:]), batch
    )


def accuracies(metrics: Metrics) -> Float[np.ndarray, " clients"]:
    """Accuracy of each client; NaN for a client without test examples."""
    correct, examples = np.asarray(metrics.correct), np.asarray(metrics.examples)
    return np.where(examples > 0, correct / np.maximum(examples, 1), np.nan)


def summarize(metrics: Metrics) -> Summary:
    """The figures of one evaluation; clients without test examples are left out."""
    positions = None
    if metrics.positions is not None:
        right = np.asarray(metrics.positions, np.float64)
        positions = float(right.sum() / np.sum(metrics.examples, dtype=np.float64))
    by_client = accuracies(metrics)
    by_client = np.sort(by_client[~np.isnan(by_client)])
    correct, loss, examples = (
        np.asarray(m, np.float64)
        for m in (metrics.correct, metrics.loss, metrics.examples)
    )
    return Summary(
        pooled=float(correct.sum() / examples.sum()),
        mean=float(by_client.mean()),
        std=float(by_client.std()),
        worst_decile=float(by_client[: max(1, len(by_client) // 10)].mean()),
        loss=float(loss.sum() / examples.sum()),
        positions=positions,
    )
