"""Layca: every layer turns by the same angle in a step.

Carbonnelle and De Vleeschouwer 2018 (arXiv 1806.01603), algorithm 1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    client_sgd,
    is_nothing,
    partial_personalization,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Array, InputError, Params


def is_kernel(leaf: Array) -> bool:
    """Has a tensor two axes or more, as kernels have and biases and scales have not?"""
    return leaf.ndim >= 2


def layca(
    lr: float, is_turned: Callable[[Array], bool] = is_kernel
) -> optax.GradientTransformation:
    """Steps that turn layers and leave their norms as they are.

    The step is projected off the weights and scaled to their norm; then
    w <- (w - lr * step), scaled back to the norm of w: a rotation by arctan(lr),
    whatever the size of the gradient. Other parameters take w - lr * step. Comes last
    in a chain, after momentum.

    Args:
      lr: tangent of the angle of a step; for other parameters the step size.
      is_turned: of a tensor: is it turned? A tensor of zeros is not.

    Raises:
      InputError: lr is not above 0.
    """
    if not 0 < lr < float("inf"):
        raise InputError(f"learning rate is {lr}; allowed are finite numbers above 0")

    def of_leaf(step: Array, weight: Array) -> Array:
        if not is_turned(weight):
            return -lr * step
        squared = jnp.sum(weight**2)
        norm = jnp.sqrt(squared)
        along = jnp.sum(step * weight) / jnp.where(squared > 0, squared, 1.0)
        across = step - along * weight
        length = jnp.linalg.norm(across)
        # A step along the weights alone would turn nothing; 0 / 0 must not turn to NaN.
        has_both = (norm > 0) & (length > 1e-12 * jnp.linalg.norm(step))
        across = across * jnp.where(has_both, norm / jnp.where(has_both, length, 1), 0)
        moved = weight - lr * across
        return moved * norm / jnp.where(norm > 0, jnp.linalg.norm(moved), 1) - weight

    def update(
        steps: Params, state: optax.OptState, params: Params | None = None
    ) -> tuple[Params, optax.OptState]:
        if params is None:
            raise ValueError("layca needs the parameters it turns")
        return jax.tree.map(of_leaf, steps, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def fedavg_layca(task: Task, optimizer: ClientOptimizer, *, lr: float) -> Algorithm:
    """FedAvg whose clients turn kernels by arctan(lr) a step.

    Args:
      task: model and loss.
      optimizer: its momentum and weight decay are used; its step size is not.
      lr: of `layca`.
    """
    # What comes out of unit-lr SGD is the momentum's mean, with the sign of a descent.
    before = client_sgd(
        ClientOptimizer(1.0, optimizer.momentum, optimizer.weight_decay)
    )
    chain = optax.chain(before, optax.scale(-1.0), layca(lr))
    return partial_personalization(
        "fedavg_layca", task, optimizer, is_nothing, local_optimizer=chain
    )
