"""What a server makes of successive aggregates: averages over rounds, on any algorithm.

Iterative moving average: Zhou et al. 2024 (IEEE TMC, arXiv 2305.07845), FedIMA.
Averages of checkpoints are used for inference alone: training goes on from the last.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    Message,
    ServerState,
    Update,
    client_shapes,
    message_for_use,
)
from fedjax_tp.types import Array, Float, InputError, Int, PRNGKey, Tree


class WithBuffer(NamedTuple):
    """A server that remembers.

    Attributes:
      inner: the algorithm's own state.
      buffer: the last trees, stacked; the newest at (seen - 1) modulo the window.
      seen: as many trees.
    """

    inner: ServerState
    buffer: Tree
    seen: Int[Array, ""]


def iterative_moving_average(
    algorithm: Algorithm, *, window: int, start: int
) -> Algorithm:
    """From a round on, the server adopts the mean of the last aggregates.

    What is buffered are the aggregates as they came from the clients, not the means
    that were adopted. The paper also lowers the clients' step size from then on, which
    this does not.

    Args:
      algorithm: any; its averaged part is what is averaged over rounds too.
      window: aggregates in the mean.
      start: the first round, counted from 1, whose mean is adopted.

    Raises:
      InputError: the algorithm averages nothing, or more than a model.
    """
    shapes = client_shapes(algorithm).update
    if not jax.tree.leaves(shapes.mean):
        raise InputError(
            f"{algorithm.name}_ima: {algorithm.name} averages nothing on the server; "
            "behind a robust aggregate, _ima comes first (fedavg_ima_median)"
        )
    if algorithm.reference is not None:
        raise InputError(
            f"{algorithm.name}_ima: what {algorithm.name} averages is more than a "
            "model, and must not be averaged over rounds"
        )

    def init(key: PRNGKey) -> WithBuffer:
        return WithBuffer(
            algorithm.init(key), _empty(shapes.mean, window), jnp.zeros((), jnp.int32)
        )

    def server_update(
        state: WithBuffer,
        ids: Int[Array, " cohort"],
        update: Update,
        weights: Float[Array, " cohort"],
    ) -> WithBuffer:
        buffer, count = _remember(state, update.mean, window)
        averaged = _mean_of(buffer, jnp.minimum(count, window))
        mean = tree.choose(count >= start, averaged, update.mean)
        inner = algorithm.server_update(
            state.inner, ids, update._replace(mean=mean), weights
        )
        return WithBuffer(inner, buffer, count)

    return _on_inner(algorithm, f"{algorithm.name}_ima", init, server_update)


def mean_of_last(algorithm: Algorithm, *, window: int) -> Algorithm:
    """Clients use the mean of the server's last states; training does not see it.

    Args:
      algorithm: any; all numbers of its server's state are averaged.
      window: states in the mean.

    Raises:
      InputError: nothing of the server's state comes to clients.
    """
    _check_sends_something(algorithm, "last")
    shapes = jax.eval_shape(algorithm.init, jax.random.key(0))

    def init(key: PRNGKey) -> WithBuffer:
        buffer = _empty(_numbers(shapes), window)
        return WithBuffer(algorithm.init(key), buffer, jnp.zeros((), jnp.int32))

    def server_update(
        state: WithBuffer,
        ids: Int[Array, " cohort"],
        update: Update,
        weights: Float[Array, " cohort"],
    ) -> WithBuffer:
        inner = algorithm.server_update(state.inner, ids, update, weights)
        buffer, count = _remember(state, _numbers(inner), window)
        return WithBuffer(inner, buffer, count)

    def average(state: WithBuffer) -> Tree:
        return _mean_of(state.buffer, jnp.clip(state.seen, 1, window))

    named = _on_inner(algorithm, f"{algorithm.name}_last", init, server_update)
    return named._replace(broadcast_for_use=_using(algorithm, average))


class WithAverage(NamedTuple):
    """A server beside an exponential average of its states.

    Attributes:
      inner: the algorithm's own state.
      average: of all numbers of the states so far.
      seen: states so far.
    """

    inner: ServerState
    average: Tree
    seen: Int[Array, ""]


def exponential_mean(algorithm: Algorithm, *, decay: float) -> Algorithm:
    """Clients use an exponential mean of the server's states; training does not see it.

    The state of a round has a weight proportional to decay^(rounds since).

    Args:
      algorithm: any; all numbers of its server's state are averaged.
      decay: 0 uses the newest state alone.

    Raises:
      InputError: nothing of the server's state comes to clients.
    """
    _check_sends_something(algorithm, "ema")

    def init(key: PRNGKey) -> WithAverage:
        inner = algorithm.init(key)
        zeros = jax.tree.map(jnp.zeros_like, _numbers(inner))
        return WithAverage(inner, zeros, jnp.zeros((), jnp.int32))

    def server_update(
        state: WithAverage,
        ids: Int[Array, " cohort"],
        update: Update,
        weights: Float[Array, " cohort"],
    ) -> WithAverage:
        inner = algorithm.server_update(state.inner, ids, update, weights)
        count = state.seen + 1
        # Of t states the newest has (1 - d) / (1 - d^t): all weights sum to 1.
        # expm1, since 1 - d^t of a d near 1 has no digits left in float32.
        share = jnp.ones(())
        if decay > 0:
            share = (1 - decay) / -jnp.expm1(count * math.log(decay))
        average = jax.tree.map(
            lambda old, new: old + share.astype(old.dtype) * (new - old),
            state.average,
            _numbers(inner),
        )
        return WithAverage(inner, average, count)

    named = _on_inner(algorithm, f"{algorithm.name}_ema", init, server_update)
    used = _using(algorithm, lambda state: state.average)
    return named._replace(broadcast_for_use=used)


def _using(
    algorithm: Algorithm, average: Callable[[Any], Tree]
) -> Callable[[Any, Int[Array, " cohort"]], Message]:
    """`broadcast_for_use` of an average of states, once there has been a round."""

    def used(state: Any, ids: Int[Array, " cohort"]) -> Message:
        averaged = tree.merge(average(state), state.inner)
        return message_for_use(
            algorithm, tree.choose(state.seen > 0, averaged, state.inner), ids
        )

    return used


def _check_sends_something(algorithm: Algorithm, suffix: str) -> None:
    def sent(key: PRNGKey) -> Message:
        state = algorithm.init(key)
        return message_for_use(algorithm, state, jnp.zeros(1, jnp.int32))

    if not jax.tree.leaves(jax.eval_shape(sent, jax.random.key(0))):
        raise InputError(
            f"{algorithm.name}_{suffix}: clients of {algorithm.name} are sent nothing "
            "that could be averaged over rounds"
        )


def _on_inner(
    algorithm: Algorithm,
    name: str,
    init: Callable[[PRNGKey], Any],
    server_update: Callable[..., Any],
) -> Algorithm:
    """The algorithm with a state around its server's."""
    used = algorithm.broadcast_for_use
    return algorithm._replace(
        name=name,
        init=init,
        init_kept=lambda state: algorithm.init_kept(state.inner),
        broadcast=lambda state, ids: algorithm.broadcast(state.inner, ids),
        broadcast_for_use=None if used is None else lambda s, ids: used(s.inner, ids),
        server_update=server_update,
    )


def _empty(shapes: Tree, window: int) -> Tree:
    return jax.tree.map(
        lambda leaf: jnp.zeros((window, *leaf.shape), leaf.dtype), shapes
    )


def _remember(state: WithBuffer, newest: Tree, window: int) -> tuple[Tree, Array]:
    place = state.seen % window
    buffer = jax.tree.map(
        lambda rows, row: rows.at[place].set(row), state.buffer, newest
    )
    return buffer, state.seen + 1


def _mean_of(buffer: Tree, count: Array) -> Tree:
    """Of the first `count` rows; those after them are zeros."""
    return jax.tree.map(
        lambda rows: (rows.sum(axis=0) / count).astype(rows.dtype), buffer
    )


def _numbers(state: ServerState) -> Tree:
    """The state with None for what is no floating-point number: counters, keys."""
    return jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None, state
    )
