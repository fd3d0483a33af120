"""Every client on its own test data with its own parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_tp import tree
from fedjax_tp.algorithms.base import Algorithm, Message, ServerState
from fedjax_tp.data.federated import FederatedDataset, client_sizes, gather
from fedjax_tp.models.task import Metrics, Task
from fedjax_tp.simulation.cohort import MESH_AXIS
from fedjax_tp.simulation.rounds import OVER_SEEDS, SimulationState, kept_shapes
from fedjax_tp.types import Array, Float, Tree

Evaluate = Callable[[SimulationState, FederatedDataset], Metrics]


class Summary(NamedTuple):
    """One evaluation of all clients that have test examples.

    Attributes:
      pooled: correct / test examples over all clients, the paper's metric.
      mean, std: over clients, each counting once (population standard deviation).
      worst_decile: mean accuracy of the worst tenth of the clients, at least one.
      loss: mean test loss over all test examples.
    """

    pooled: float
    mean: float
    std: float
    worst_decile: float
    loss: float


def make_evaluate(
    algorithm: Algorithm,
    task: Task,
    *,
    capacity: int,
    chunk_size: int,
    mesh: Mesh | None = None,
    over_seeds: bool = False,
) -> Evaluate:
    """Compiles `evaluate(state, data) -> Metrics`, one sum a client, `[clients]`.

    Args:
      algorithm: gives each client's parameters.
      task: gives the metrics.
      capacity: test examples of the largest client.
      chunk_size: clients evaluated at a time on one device.
      mesh: as in `LocalSchedule`.
      over_seeds: as in `make_advance`; metrics are `[seeds, clients]`.
    """
    devices = 1 if mesh is None else mesh.size
    evaluate_ids = _evaluate_ids(algorithm, task, capacity, chunk_size, mesh)

    def evaluate(state: SimulationState, data: FederatedDataset) -> Metrics:
        num_clients = data.num_clients
        ids = jnp.arange(num_clients + -num_clients % (devices * chunk_size))
        found = evaluate_ids(state.server, state.kept, ids, ids, data)
        return jax.tree.map(lambda leaf: leaf[:num_clients], found)

    if over_seeds:
        return jax.jit(jax.vmap(evaluate, in_axes=(0, OVER_SEEDS)))
    return jax.jit(evaluate)


def make_evaluate_rows(
    algorithm: Algorithm,
    task: Task,
    *,
    capacity: int,
    chunk_size: int,
    mesh: Mesh | None = None,
) -> Any:
    """Compiles `evaluate(server, rows, ids, data) -> Metrics` of some clients.

    For what clients keep outside the device: `rows` is theirs as `tree.flatten_rows`
    gives it. There are as many ids as devices times `chunk_size`, or a multiple; an id
    past the end is padding.

    Args:
      algorithm, task, capacity, chunk_size, mesh: as for `make_evaluate`.
    """
    evaluate_ids = _evaluate_ids(algorithm, task, capacity, chunk_size, mesh)

    @jax.jit
    def evaluate(server, rows, ids, data):
        kept = tree.unflatten_rows(rows, kept_shapes(algorithm, server))
        return evaluate_ids(server, kept, jnp.arange(len(ids)), ids, data)

    return evaluate


def _evaluate_ids(
    algorithm: Algorithm,
    task: Task,
    capacity: int,
    chunk_size: int,
    mesh: Mesh | None,
) -> Callable[[ServerState, Tree, Array, Array, FederatedDataset], Metrics]:
    """A function of server, kept rows, which row is each client's, ids, and data."""
    batch_size = max(1, min(capacity, 256))
    devices = 1 if mesh is None else mesh.size

    def deal(ids: Array) -> Array:
        # In turns, so that each device has clients of every kind.
        return jnp.moveaxis(ids.reshape(-1, chunk_size, devices), 2, 0)

    def evaluate(
        server: ServerState,
        kept: Tree,
        places: Array,
        ids: Array,
        data: FederatedDataset,
    ) -> Metrics:
        def on_device(server, kept, data, places, ids):
            # A chunk's rows at a time: all of them may be most of the memory.
            found = jax.lax.map(
                lambda dealt: evaluate_chunk(
                    server, data, dealt[1], tree.take(kept, dealt[0])
                ),
                (places[0], ids[0]),
            )
            return jax.tree.map(lambda leaf: leaf[None], found)

        inputs = (server, kept, data, deal(places), deal(ids))
        if mesh is None or devices == 1:
            chunks = on_device(*inputs)
        else:
            split, whole = PartitionSpec(MESH_AXIS), PartitionSpec()
            found = jax.shard_map(
                on_device,
                mesh=mesh,
                in_specs=(whole, whole, whole, split, split),
                out_specs=split,
                check_vma=False,
            )(*inputs)
            # Every process reads all of it.
            chunks = jax.lax.with_sharding_constraint(found, NamedSharding(mesh, whole))
        return jax.tree.map(
            lambda leaf: jnp.moveaxis(leaf, 0, 2).reshape(-1, *leaf.shape[3:]), chunks
        )

    def evaluate_chunk(
        server: ServerState, data: FederatedDataset, ids: Array, kept: Tree
    ) -> Metrics:
        message = algorithm.broadcast(server, ids)
        sizes = client_sizes(data, ids)

        def one_client(
            step: Array, id: Array, size: Array, personal: Tree, kept: Tree
        ) -> Metrics:
            places = step * batch_size + jnp.arange(batch_size)
            batch = gather(data, id, places, places < size)
            # The shared part is closed over, not mapped: one copy for all clients.
            own = Message(message.shared, personal)
            return task.metrics(algorithm.client_params(own, kept), batch)

        def add_step(step: Array, total: Metrics) -> Metrics:
            over_clients = jax.vmap(one_client, in_axes=(None, 0, 0, 0, 0))
            found = over_clients(step, ids, sizes, message.personal, kept)
            return jax.tree.map(jnp.add, total, found)

        zeros = Metrics(*jnp.zeros((3, chunk_size)))
        num_steps = -(-sizes.max() // batch_size)
        return jax.lax.fori_loop(0, num_steps, add_step, zeros)

    return evaluate


def accuracies(metrics: Metrics) -> Float[np.ndarray, " clients"]:
    """Accuracy of each client; NaN for a client without test examples."""
    correct, examples = np.asarray(metrics.correct), np.asarray(metrics.examples)
    return np.where(examples > 0, correct / np.maximum(examples, 1), np.nan)


def summarize(metrics: Metrics) -> Summary:
    """The figures of one evaluation; clients without test examples are left out."""
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
    )
