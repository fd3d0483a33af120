"""Averaging without a server: clients mix their models with their neighbours'.

Decentralized SGD with several local steps (Koloskova et al. 2020, ICML), Metropolis
weights (Xiao and Boyd 2004, Systems and Control Letters) on the part of the graph whose
clients take part in the round.

The state that a server has elsewhere is here all clients' models, one a row; nobody
sees it whole. Bytes are counted once each way for a client: over a graph a client sends
its model to each of its neighbours.
"""

import math
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
from fedjax_tp.types import Array, Bool, Float, InputError, Int, Params, PRNGKey

GRAPHS = ("ring", "torus", "regular")
_MOST_CLIENTS = 4096

Adjacency = Bool[np.ndarray, "clients clients"]


class DecentralizedState(NamedTuple):
    """The models of all clients, stacked."""

    models: Params


def decentralized(
    task: Task, optimizer: ClientOptimizer, adjacency: Adjacency
) -> Algorithm:
    """Every client trains its own model, then takes a mean with its neighbours'.

    Clients that are not sampled neither train nor mix.

    Args:
      task: model and loss.
      optimizer: of local training.
      adjacency: who is whose neighbour; symmetric, nobody its own.

    Raises:
      InputError: the adjacency is not so.
    """
    if adjacency.shape[0] != adjacency.shape[1]:
        raise InputError(f"adjacency is {adjacency.shape}; allowed is a square matrix")
    if (adjacency != adjacency.T).any() or adjacency.diagonal().any():
        raise InputError("adjacency must be symmetric, with nobody its own neighbour")
    num_clients = len(adjacency)
    neighbours = jnp.asarray(adjacency)

    def init(key: PRNGKey) -> DecentralizedState:
        return DecentralizedState(tree.stack_copies(task.init(key), num_clients))

    def server_update(
        state: DecentralizedState,
        ids: Int[Array, " cohort"],
        update: Update,
        weights: Float[Array, " cohort"],
    ) -> DecentralizedState:
        trained = tree.put(state.models, ids, update.personal)
        active = jnp.zeros(num_clients, bool).at[ids].set(weights > 0, mode="drop")
        mixing = metropolis_weights(neighbours, active)
        return DecentralizedState(tree.weighted_sums(trained, mixing))

    return of_whole_models(
        "decentralized",
        task,
        optimizer,
        init=init,
        models=lambda state, ids: tree.take(state.models, ids),
        server_update=server_update,
    )


def metropolis_weights(
    adjacency: Bool[Array, "clients clients"], active: Bool[Array, " clients"]
) -> Float[Array, "clients clients"]:
    """w_ij = 1 / (1 + max(d_i, d_j)) between neighbours, the rest of 1 on the diagonal.

    Symmetric and doubly stochastic, so the mean of all models stays what it is.

    Args:
      adjacency: who is whose neighbour.
      active: who takes part; the others' rows are those of the identity.
    """
    edges = adjacency & active[:, None] & active[None, :]
    degree = edges.sum(axis=1)
    between = 1 / (1 + jnp.maximum(degree[:, None], degree[None, :]))
    weights = jnp.where(edges, between, 0.0)
    return weights + jnp.diag(1 - weights.sum(axis=1))


def make_graph(kind: str, num_clients: int, degree: int, seed: int = 0) -> Adjacency:
    """A connected graph of clients.

    Args:
      kind: one of `GRAPHS`: a ring; a torus, as square as the number allows; or a
        random regular graph.
      num_clients: as many nodes.
      degree: neighbours of each, for `regular`.
      seed: of `regular`.

    Raises:
      InputError: there is no such graph.
    """
    if not 3 <= num_clients <= _MOST_CLIENTS:
        raise InputError(
            f"a graph of {num_clients} clients; allowed is 3 to {_MOST_CLIENTS}"
        )
    if kind == "ring":
        return _of_edges(num_clients, [(i, i + 1) for i in range(num_clients)])
    if kind == "torus":
        rows = next(
            r for r in range(math.isqrt(num_clients), 0, -1) if num_clients % r == 0
        )
        if rows < 3:
            raise InputError(
                f"a torus of {num_clients} clients; allowed are numbers that are a "
                "product of two factors of 3 or more, such as 9, 12, 16, 20"
            )
        return _torus(rows, num_clients // rows)
    if kind == "regular":
        return _random_regular(num_clients, degree, seed)
    raise InputError(f"graph is {kind!r}; allowed is one of {', '.join(GRAPHS)}")


def _of_edges(num_clients: int, edges: list[tuple[int, int]]) -> Adjacency:
    adjacency = np.zeros((num_clients, num_clients), bool)
    for i, j in edges:
        adjacency[i % num_clients, j % num_clients] = True
    return adjacency | adjacency.T


def _torus(rows: int, columns: int) -> Adjacency:
    place = np.arange(rows * columns).reshape(rows, columns)
    edges = [
        (int(i), int(j))
        for axis in (0, 1)
        for i, j in zip(place.ravel(), np.roll(place, -1, axis).ravel(), strict=True)
    ]
    return _of_edges(rows * columns, edges)


def _random_regular(num_clients: int, degree: int, seed: int) -> Adjacency:
    """Random swaps of the ends of two edges, which leave every degree as it is and the
    graph simple, until it is mixed and connected."""
    if not 2 <= degree < num_clients or num_clients * degree % 2:
        raise InputError(
            f"graph degree is {degree} with {num_clients} clients; allowed is 2 to "
            f"{num_clients - 1}, the product with the clients being even"
        )
    rng = np.random.default_rng(seed)
    # From a regular graph that is there: each client and its next ones round the ring.
    edges = [
        (i, (i + step) % num_clients)
        for step in range(1, degree // 2 + 1)
        for i in range(num_clients)
    ]
    if degree % 2:
        half = num_clients // 2
        edges += [(i, i + half) for i in range(half)]
    present = {frozenset(edge) for edge in edges}
    pairs = sorted({(min(edge), max(edge)) for edge in edges})
    while True:
        for _ in range(20 * len(pairs)):
            first, second = rng.integers(len(pairs), size=2)
            (a, b), (c, d) = pairs[first], pairs[second]
            if rng.integers(2):
                c, d = d, c
            new = (frozenset((a, d)), frozenset((c, b)))
            is_simple = len({a, b, c, d}) == 4 and not any(e in present for e in new)
            if is_simple:
                present -= {frozenset((a, b)), frozenset((c, d))}
                present |= set(new)
                pairs[first], pairs[second] = (a, d), (c, b)
        adjacency = _of_edges(num_clients, pairs)
        if is_connected(adjacency):
            return adjacency


def is_connected(adjacency: Adjacency) -> bool:
    """Can every client reach every other?"""
    reached = np.zeros(len(adjacency), bool)
    reached[0] = True
    while True:
        more = reached | adjacency[reached].any(axis=0)
        if (more == reached).all():
            return bool(reached.all())
        reached = more
