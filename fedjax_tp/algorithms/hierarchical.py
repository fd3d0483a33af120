"""Hierarchical averaging: clients to edges each round, edges to the cloud now and then.

Liu et al. 2020 (ICC, arXiv 1905.06641), with a round of local training between two
edge aggregations. Which edge a client belongs to balances the edges' classes, as in
Mhaisen et al. 2022 (IEEE TNSE), who average gradients at the edges after every step.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    Update,
    of_whole_models,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Array, Float, InputError, Int, Params, PRNGKey


class HierarchicalState(NamedTuple):
    """The edges' models, stacked, and how clients and edges belong together.

    The latter does not change, but must come back with a checkpoint, whatever is known
    of the clients when it is read.

    Attributes:
      edges: a model an edge.
      rounds: rounds done.
      edge_of: the edge of each client.
      at_cloud: weight of each edge at the cloud; they sum to 1.
    """

    edges: Params
    rounds: Int[Array, ""]
    edge_of: Int[Array, " clients"]
    at_cloud: Float[Array, " edges"]


def hierarchical(
    task: Task,
    optimizer: ClientOptimizer,
    edge_of: Int[np.ndarray, " clients"],
    edge_weights: Float[np.ndarray, " edges"],
    *,
    cloud_every: int,
) -> Algorithm:
    """A client is sent the model of its edge, and uses that.

    An edge adopts the n_k-weighted mean of its clients' models, or keeps its own if
    none was sampled. Every `cloud_every` rounds all adopt their weighted mean.

    Args:
      task: model and loss.
      optimizer: of local training.
      edge_of: the edge of each client.
      edge_weights: of each edge at the cloud: its clients' examples, say.
      cloud_every: rounds between two averages at the cloud; with 1, this is FedAvg
        whose edges count by `edge_weights` whoever was sampled.
    """
    num_edges = len(edge_weights)

    def init(key: PRNGKey) -> HierarchicalState:
        edges = tree.stack_copies(task.init(key), num_edges)
        return HierarchicalState(
            edges,
            jnp.zeros((), jnp.int32),
            jnp.asarray(edge_of, jnp.int32),
            jnp.asarray(edge_weights / edge_weights.sum(), jnp.float32),
        )

    def server_update(
        state: HierarchicalState,
        ids: Int[Array, " cohort"],
        update: Update,
        weights: Float[Array, " cohort"],
    ) -> HierarchicalState:
        is_of_edge = jnp.arange(num_edges)[:, None] == tree.take(state.edge_of, ids)
        shares = jnp.where(is_of_edge, weights, 0.0)
        totals = shares.sum(axis=1)
        means = tree.weighted_sums(
            update.personal, shares / jnp.where(totals > 0, totals, 1.0)[:, None]
        )
        edges = tree.where_rows(totals > 0, means, state.edges)
        rounds = state.rounds + 1
        everywhere = jnp.broadcast_to(state.at_cloud, (num_edges, num_edges))
        edges = tree.choose(
            rounds % cloud_every == 0, tree.weighted_sums(edges, everywhere), edges
        )
        return state._replace(edges=edges, rounds=rounds)

    return of_whole_models(
        "hierarchical",
        task,
        optimizer,
        init=init,
        models=lambda state, ids: tree.take(state.edges, tree.take(state.edge_of, ids)),
        server_update=server_update,
    )


def assign_edges(
    counts: Int[np.ndarray, "clients classes"], num_edges: int
) -> Int[np.ndarray, " clients"]:
    """Edges of nearly equal numbers of clients whose classes are as all clients' are.

    Largest clients first, each to the edge with a free place that leaves the edges'
    distances to the population, weighted by examples, smallest; then clients of two
    edges change places while that helps.

    Args:
      counts: examples of each class at each client.
      num_edges: as many.

    Raises:
      InputError: there are fewer clients than edges.
    """
    num_clients = len(counts)
    if not 1 <= num_edges <= num_clients:
        raise InputError(f"edges is {num_edges}; allowed is 1 to {num_clients}")
    population = counts.sum(axis=0) / max(counts.sum(), 1)
    held = np.zeros((num_edges, counts.shape[1]))
    free = np.full(num_edges, num_clients // num_edges)
    free[: num_clients % num_edges] += 1
    edge_of = np.zeros(num_clients, int)

    def unfairness(held: Float[np.ndarray, "*more classes"]) -> np.ndarray:
        # Examples times distance: |held - examples * population|.
        return np.abs(held - held.sum(axis=-1, keepdims=True) * population).sum(axis=-1)

    for client in np.argsort(-counts.sum(axis=1), kind="stable"):
        added = unfairness(held + counts[client]) - unfairness(held)
        # Of equally good ones that with the fewest examples, so that none stays empty.
        order = np.lexsort((held.sum(axis=1), np.round(added, 9)))
        edge = next(edge for edge in order if free[edge] > 0)
        edge_of[client], free[edge] = edge, free[edge] - 1
        held[edge] += counts[client]
    for _ in range(_PASSES if num_clients <= _MOST_SWAPPED else 0):
        improved = False
        for a in range(num_clients):
            for b in range(a + 1, num_clients):
                i, j = edge_of[a], edge_of[b]
                if i == j:
                    continue
                change = counts[b] - counts[a]
                swapped = np.stack([held[i] + change, held[j] - change])
                gain = unfairness(held[[i, j]]).sum() - unfairness(swapped).sum()
                if gain > 1e-9:
                    held[[i, j]] = swapped
                    edge_of[a], edge_of[b] = j, i
                    improved = True
        if not improved:
            break
    return edge_of


_PASSES, _MOST_SWAPPED = 10, 300
