"""Aggregation that a few bad clients cannot move far, on any algorithm.

Coordinate-wise median and trimmed mean: Yin et al. 2018 (ICML). Geometric median:
Pillutla et al. 2022 (IEEE TSP), with smoothed Weiszfeld steps.

Each needs every client's update by itself: memory grows with the cohort, and the server
sees single updates.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    Carry,
    Message,
    ServerState,
    Update,
    client_shapes,
)
from fedjax_tp.types import Array, Bool, Float, InputError, Int, Tree

Aggregate = Callable[[Tree, Float[Array, " cohort"]], Tree]
"""`(stacked, weights) -> one tree`; a row of weight 0 does not count."""

_WEISZFELD_STEPS = 20
_SMOOTHING = 1e-6


def with_aggregate(algorithm: Algorithm, name: str, aggregate: Aggregate) -> Algorithm:
    """The algorithm with another aggregate in place of the weighted mean.

    Args:
      algorithm: any that averages something.
      name: of the result.
      aggregate: of the part of the updates that would be averaged.

    Raises:
      InputError: the algorithm averages nothing.
    """
    if not jax.tree.leaves(client_shapes(algorithm).update.mean):
        raise InputError(
            f"{name}: {algorithm.name} averages nothing on the server that could be "
            "aggregated in another way"
        )

    def client_finish(message: Message, carry: Carry) -> Update:
        update = algorithm.client_finish(message, carry)
        return update._replace(mean=None, personal=(update.mean, update.personal))

    def server_update(
        state: ServerState,
        ids: Int[Array, " cohort"],
        update: Update,
        weights: Float[Array, " cohort"],
    ) -> ServerState:
        stacked, personal = update.personal
        mean = aggregate(stacked, weights)
        return algorithm.server_update(
            state, ids, update._replace(mean=mean, personal=personal), weights
        )

    return algorithm._replace(
        name=name,
        client_finish=client_finish,
        server_update=server_update,
        # The update is built another way now: codecs come before.
        reference=None,
    )


def coordinate_median(stacked: Tree, weights: Float[Array, " cohort"]) -> Tree:
    """The median of every number over the clients that count, each once."""
    counts = weights > 0
    number = jnp.sum(counts)

    def of_leaf(leaf: Array) -> Array:
        ordered = _sorted(leaf, counts)
        low = ordered[jnp.maximum(number - 1, 0) // 2]
        high = ordered[jnp.minimum(number // 2, len(ordered) - 1)]
        return (low + (high - low) / 2).astype(leaf.dtype)

    return jax.tree.map(of_leaf, stacked)


def trimmed_mean(
    stacked: Tree, weights: Float[Array, " cohort"], *, share: float
) -> Tree:
    """The mean of every number without the largest and smallest, each client once.

    Args:
      stacked: a row a client.
      weights: 0 for a client that does not count.
      share: of the clients, cut at each end (rounded down); below 1/2.
    """
    counts = weights > 0
    number = jnp.sum(counts)
    # The small term keeps 0.29 * 100, which floats make 28.999..., at 29.
    cut = jnp.floor(share * number + 1e-4).astype(jnp.int32)
    # One is left at least, whatever floats make of a share just below 1/2.
    cut = jnp.minimum(cut, (number - 1) // 2)
    place = jnp.arange(len(weights))
    is_kept = (place >= cut) & (place < number - cut)

    def of_leaf(leaf: Array) -> Array:
        ordered = _sorted(leaf, counts)
        kept = jnp.where(_over_rows(is_kept, leaf), ordered, 0.0)
        return (kept.sum(axis=0) / jnp.maximum(number - 2 * cut, 1)).astype(leaf.dtype)

    return jax.tree.map(of_leaf, stacked)


def geometric_median(stacked: Tree, weights: Float[Array, " cohort"]) -> Tree:
    """The point with the least weighted sum of distances to the clients' updates.

    All numbers of an update are one point. Starts at the weighted mean and takes a
    fixed number of Weiszfeld's steps, distances being at least a small constant.
    """

    def mean_with(shares: Float[Array, " cohort"]) -> Tree:
        total = jnp.maximum(shares.sum(), jnp.finfo(shares.dtype).tiny)
        sums = tree.weighted_sums(stacked, (shares / total)[None])
        return jax.tree.map(lambda leaf: leaf[0], sums)

    def step(_: Array, center: Tree) -> Tree:
        squares = jax.tree.map(
            lambda leaf, c: jnp.sum(
                jnp.square(leaf - c).reshape(len(leaf), -1), axis=1
            ),
            stacked,
            center,
        )
        distance = jnp.sqrt(sum(jax.tree.leaves(squares), jnp.zeros_like(weights)))
        return mean_with(weights / jnp.maximum(distance, _SMOOTHING))

    return jax.lax.fori_loop(0, _WEISZFELD_STEPS, step, mean_with(weights))


def _over_rows(rows: Bool[Array, " cohort"], leaf: Array) -> Array:
    return rows.reshape(-1, *[1] * (leaf.ndim - 1))


def _sorted(leaf: Array, counts: Bool[Array, " cohort"]) -> Array:
    """Every number's values over the clients, ascending; those not counting last."""
    return jnp.sort(jnp.where(_over_rows(counts, leaf), leaf, jnp.inf), axis=0)
