"""FedAvg with an optimizer on the server: FedAvgM, FedAdam, FedYogi.

Reddi et al. 2021 (ICLR), algorithm 2; FedAvgM is Hsu et al. 2019 (arXiv 1909.06335),
section 4.3. Updates are weighted by n_k, as in FedAvg.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    is_nothing,
    partial_personalization,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Array, Params


def fedavgm(
    task: Task, optimizer: ClientOptimizer, *, lr: float, momentum: float
) -> Algorithm:
    """v <- momentum * v + (w - mean); w <- w - lr * v; FedAvg with lr 1, momentum 0."""
    return _with_server("fedavgm", task, optimizer, optax.sgd(lr, momentum))


def fedadam(
    task: Task, optimizer: ClientOptimizer, *, lr: float, tau: float
) -> Algorithm:
    """v <- 0.99 v + 0.01 d^2, d being mean - w; see `adaptive`."""
    server = adaptive(lr, tau, lambda v, d: 0.99 * v + 0.01 * d**2)
    return _with_server("fedadam", task, optimizer, server)


def fedyogi(
    task: Task, optimizer: ClientOptimizer, *, lr: float, tau: float
) -> Algorithm:
    """v <- v - 0.01 d^2 sign(v - d^2), d being mean - w; see `adaptive`."""
    server = adaptive(lr, tau, lambda v, d: v - 0.01 * d**2 * jnp.sign(v - d**2))
    return _with_server("fedyogi", task, optimizer, server)


class AdaptiveState(NamedTuple):
    """First and second moments of the pseudo-gradient."""

    first: Params
    second: Params


def adaptive(
    lr: float, tau: float, second_moment: Callable[[Array, Array], Array]
) -> optax.GradientTransformation:
    """w <- w + lr * m / (sqrt(v) + tau), m <- 0.9 m + 0.1 d, without bias correction.

    Args:
      lr: step size of the server.
      tau: degree of adaptivity; v starts at tau^2, the least that the paper allows.
      second_moment: `(v, d) -> v`.
    """

    def init(params: Params) -> AdaptiveState:
        return AdaptiveState(
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(lambda leaf: jnp.full_like(leaf, tau**2), params),
        )

    def update(
        gradient: Params, state: AdaptiveState, params: Params | None = None
    ) -> tuple[Params, AdaptiveState]:
        first = jax.tree.map(lambda m, g: 0.9 * m - 0.1 * g, state.first, gradient)
        second = jax.tree.map(second_moment, state.second, gradient)
        steps = jax.tree.map(lambda m, v: lr * m / (jnp.sqrt(v) + tau), first, second)
        return steps, AdaptiveState(first, second)

    return optax.GradientTransformation(init, update)


def _with_server(
    name: str,
    task: Task,
    optimizer: ClientOptimizer,
    server: optax.GradientTransformation,
) -> Algorithm:
    return partial_personalization(
        name, task, optimizer, is_nothing, server_optimizer=server
    )
