"""Every client on its own test data with its own parameters."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_tp import tree
from fedjax_tp.algorithms.base import Algorithm, Message
from fedjax_tp.data.federated import FederatedDataset, client_sizes, gather
from fedjax_tp.models.task import Metrics, Task
from fedjax_tp.simulation.cohort import MESH_AXIS
from fedjax_tp.simulation.rounds import OVER_SEEDS, SimulationState
from fedjax_tp.types import Array, Float, Int, Tree

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
    batch_size = max(1, min(capacity, 256))
    devices = 1 if mesh is None else mesh.size

    def evaluate(state: SimulationState, data: FederatedDataset) -> Metrics:
        num_clients = data.num_clients
        padding = -num_clients % (devices * chunk_size)
        # Dealt in turns, so that each device has clients of every kind.
        ids = jnp.arange(num_clients + padding).reshape(-1, chunk_size, devices)
        by_device = jnp.moveaxis(ids, 2, 0)

        def on_device(state, data, ids):
            return jax.lax.map(lambda ids: evaluate_chunk(state, data, ids), ids[0])

        if mesh is None or devices == 1:
            chunks = jax.tree.map(lambda m: m[None], on_device(state, data, by_device))
        else:
            split, whole = PartitionSpec(MESH_AXIS), PartitionSpec()
            found = jax.shard_map(
                lambda *inputs: jax.tree.map(lambda m: m[None], on_device(*inputs)),
                mesh=mesh,
                in_specs=(whole, whole, split),
                out_specs=split,
                check_vma=False,
            )(state, data, by_device)
            # Every process reads all of it.
            chunks = jax.lax.with_sharding_constraint(found, NamedSharding(mesh, whole))
        return jax.tree.map(
            lambda leaf: jnp.moveaxis(leaf, 0, 2).reshape(-1)[:num_clients], chunks
        )

    def evaluate_chunk(
        state: SimulationState, data: FederatedDataset, ids: Int[Array, " chunk"]
    ) -> Metrics:
        message = algorithm.broadcast(state.server, ids)
        kept = tree.take(state.kept, ids)
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

    if over_seeds:
        return jax.jit(jax.vmap(evaluate, in_axes=(0, OVER_SEEDS)))
    return jax.jit(evaluate)


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
