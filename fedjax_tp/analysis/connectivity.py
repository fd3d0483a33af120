"""Linear mode connectivity, layer by layer: what averaging does to the loss, and where.

Adilova et al. 2024 (ICLR, arXiv 2307.06966). A barrier is how much worse a model
between two others is than those two on average. Every barrier here is a point between
two models in which each layer has a share of its own; all points are evaluated in one
program.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_tp.analysis.layers import (
    Layers,
    by_layer,
    interpolate,
    layer_norms,
    set_members,
)
from fedjax_tp.models.cnn import BATCH_NORM_MOMENTUM
from fedjax_tp.models.task import STATISTICS, Task
from fedjax_tp.types import Array, Batch, Float, InputError, Params, PRNGKey

Shares = Float[np.ndarray, "points layers"]


class Found(NamedTuple):
    """Means over the examples of a batch, one a point.

    Attributes:
      loss: mean loss.
      error: share of the examples that is wrong.
    """

    loss: Float[Array, " points"]
    error: Float[Array, " points"]


def full_path(alphas: Sequence[float], layers: Layers) -> Shares:
    """All layers at once: share alpha of the second model in each."""
    return np.outer(alphas, np.ones(len(layers.names)))


def layer_wise(layers: Layers, share: float = 0.5) -> Shares:
    """One layer at a time is averaged, the others are the first model's."""
    return share * np.eye(len(layers.names))


def cumulative(order: Sequence[int], layers: Layers, share: float = 0.5) -> Shares:
    """More and more layers are averaged, in an order; point i has its first i + 1.

    Raises:
      InputError: the order names a layer twice, or one that is not there.
    """
    count = len(layers.names)
    if len(set(order)) < len(order) or not set(order) <= set(range(count)):
        raise InputError(
            f"order is {list(order)}; allowed are different layers from 0 to "
            f"{count - 1}"
        )
    members = np.zeros((len(order), count))
    for point, number in enumerate(order):
        members[point:, number] = share
    return members


def chosen(
    sets: Sequence[tuple[str, ...]], layers: Layers, share: float = 0.5
) -> Shares:
    """Sets of layers, by their names, are averaged; one point a set."""
    return share * np.stack([set_members(names, layers) for names in sets])


def from_second(shares: Shares) -> Shares:
    """The same points with the second model as the base: what was share s of the second
    in the first is share s of the first in the second."""
    return 1 - shares


def make_evaluate_points(
    task: Task, layers: Layers, *, recalibrate_with: Batch | None = None
) -> Callable[[Params, Params, Float[Array, "points layers"], Batch], Found]:
    """A jitted function of two models, points between them, and a batch.

    Args:
      task: model and loss.
      layers: of the model.
      recalibrate_with: batches, leaves `[steps, batch, ...]`, on which the statistics
        of batch normalization are computed anew at every point; None leaves the mean of
        the models' own.
    """

    def at(params: Params, batch: Batch) -> tuple[Array, Array]:
        if recalibrate_with is not None:
            params = recalibrate(task, params, recalibrate_with)
        found = task.metrics(params, batch)
        examples = jnp.maximum(found.examples, 1)
        return found.loss / examples, 1 - found.correct / examples

    @jax.jit
    def evaluate(first: Params, second: Params, shares: Array, batch: Batch) -> Found:
        return Found(
            *jax.lax.map(
                lambda share: at(interpolate(first, second, share, layers), batch),
                shares,
                batch_size=_POINTS_AT_A_TIME,
            )
        )

    return evaluate


# Vmapped points share the batch; more of them only take more memory.
_POINTS_AT_A_TIME = 4


def barriers(
    at_points: Float[Array, " points"],
    at_first: Float[Array, ""] | float,
    at_second: Float[Array, ""] | float,
) -> Float[Array, " points"]:
    """How much worse points are than the mean of the two whole models.

    Not less what lies between them on the line: a layer's barrier is of the models
    that it joins, as in the paper's definition 2.

    Args:
      at_points: loss or error at each point.
      at_first, at_second: of the two models.
    """
    return at_points - (at_first + at_second) / 2


def recalibrate(task: Task, params: Params, batches: Batch) -> Params:
    """The model with its running statistics set to their means over some batches.

    Batch normalization between two models has other activations than either: its
    statistics must be computed anew (Jordan et al. 2023). A model without any is
    returned as it is.

    Args:
      task: model; dropout is drawn from a fixed key.
      params: of the model.
      batches: leaves are `[steps, batch, ...]`; no batch is masked whole.
    """
    objective = task.loss_and_statistics
    if objective is None:
        return params
    zeros = jax.tree.map(jnp.zeros_like, params[STATISTICS])

    def of_batch(batch: Batch) -> Params:
        _, found = objective({**params, STATISTICS: zeros}, batch, jax.random.key(0))
        # From zero, a running mean has taken this share of the batch's own.
        share = 1 - BATCH_NORM_MOMENTUM
        return jax.tree.map(lambda leaf: leaf / share, found[STATISTICS])

    by_batch = jax.lax.map(of_batch, batches)
    means = jax.tree.map(lambda leaf: leaf.mean(axis=0), by_batch)
    return {**params, STATISTICS: means}


def random_direction(
    key: PRNGKey, first: Params, second: Params, layers: Layers
) -> Params:
    """A Gaussian direction that in every layer is as long as second - first."""
    leaves, structure = jax.tree.flatten(first)
    keys = jax.random.split(key, len(leaves))
    noise = jax.tree.unflatten(
        structure,
        [
            jax.random.normal(k, leaf.shape, leaf.dtype)
            for k, leaf in zip(keys, leaves, strict=True)
        ],
    )
    wanted = layer_norms(jax.tree.map(jnp.subtract, second, first), layers)
    norms = layer_norms(noise, layers)
    scales = by_layer(wanted / jnp.where(norms > 0, norms, 1.0), layers)
    return jax.tree.map(lambda n, scale: n * scale, noise, scales)


Basis = Float[Array, "models parameters"]
"""Orthonormal rows; a row of zeros where models were not independent."""


def trajectory_basis(
    models: Float[Array, "models parameters"], tolerance: float = 1e-5
) -> Basis:
    """An orthonormal basis of what models along training span.

    Args:
      models: flat, one a row.
      tolerance: singular values below this share of the largest count as 0.
    """
    _, values, basis = jnp.linalg.svd(models, full_matrices=False)
    counts = values > tolerance * values[0]
    return jnp.where(counts[:, None], basis, 0.0)


def direction_inside(key: PRNGKey, basis: Basis) -> Float[Array, " parameters"]:
    """A unit vector in the space of a basis, uniform over its directions."""
    inside = jax.random.normal(key, basis.shape[:1]) @ basis
    return inside / jnp.linalg.norm(inside)


def direction_outside(key: PRNGKey, basis: Basis) -> Float[Array, " parameters"]:
    """A unit vector orthogonal to that space, uniform over those directions."""
    draws = jax.random.normal(key, basis.shape[1:])
    # Twice: the first projection leaves what rounding lets through.
    for _ in range(2):
        draws = draws - (basis @ draws) @ basis
    return draws / jnp.linalg.norm(draws)
