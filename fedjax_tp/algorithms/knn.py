"""kNN-Per: a memory of the client's own examples (Marfoq et al. 2022, ICML), section 3.

On top of any algorithm whose clients use one model; nothing is trained for it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_tp.algorithms.base import Algorithm, forward_of
from fedjax_tp.models.task import Task
from fedjax_tp.types import (
    Array,
    Batch,
    Bool,
    Float,
    InputError,
    Int,
    Params,
    PRNGKey,
)


class Memory(NamedTuple):
    """A client's model and its examples, as the head of the model sees them."""

    params: Params
    features: Float[Array, "examples dim"]
    labels: Int[Array, " examples"]
    mask: Bool[Array, " examples"]


def with_memory(
    algorithm: Algorithm,
    task: Task,
    *,
    neighbours: int,
    share: float,
) -> Algorithm:
    """p = share * p_kNN + (1 - share) * softmax.

    p_kNN weighs the labels of the nearest examples by exp(-|f - f_i|^2 / dim), as
    FedTP's code does; the paper has a scale to be chosen.

    Args:
      algorithm: any whose `client_params` is a model of the task.
      task: model and loss, of images.
      neighbours: as many, or all if the client has fewer.
      share: lambda of the paper; 0 is the algorithm itself.

    Raises:
      InputError: clients of the algorithm use more than a model, the model has no layer
        `head`, or it is one of sequences.
    """
    name = f"{algorithm.name}_knn"
    forward = forward_of(task, name)
    if algorithm.predict is not None or task.is_sequence:
        what = "texts" if task.is_sequence else algorithm.name
        raise InputError(f"{name}: a memory of examples does not go with {what}")

    def adapt(params: Params, batches: Batch, key: PRNGKey) -> Memory:
        if algorithm.adapt is not None:
            params = algorithm.adapt(params, batches, key)
        features = jax.lax.map(
            lambda x: forward(params, x, None, None).features, batches.x
        )
        return Memory(
            params,
            features.reshape(-1, features.shape[-1]),
            batches.y.reshape(-1),
            batches.mask.reshape(-1),
        )

    def predict(memory: Memory, x: Array) -> Array:
        found = forward(memory.params, x, None, None)
        nearest = neighbour_probabilities(
            memory, found.features, found.logits.shape[-1], neighbours
        )
        mixed = share * nearest + (1 - share) * jax.nn.softmax(found.logits)
        # A model that is not finite stays so: it is never right.
        return jnp.log(jnp.maximum(mixed, jnp.finfo(mixed.dtype).tiny))

    return algorithm._replace(name=name, adapt=adapt, predict=predict)


def neighbour_probabilities(
    memory: Memory,
    features: Float[Array, "batch dim"],
    num_classes: int,
    neighbours: int,
) -> Float[Array, "batch classes"]:
    """Labels of the nearest examples, weighed by exp(-squared distance / dim)."""
    dim = features.shape[-1]
    products = jnp.matmul(features, memory.features.T, precision="highest")
    squares = (
        jnp.sum(features**2, axis=1)[:, None]
        - 2 * products
        + jnp.sum(memory.features**2, axis=1)
    )
    closeness = jnp.where(memory.mask, -squares / dim, -jnp.inf)
    best, places = jax.lax.top_k(closeness, min(neighbours, len(memory.labels)))
    # Only ratios matter; far from all examples, the weights themselves would be 0.
    weights = jax.nn.softmax(best)
    votes = jax.nn.one_hot(memory.labels[places], num_classes)
    return jnp.sum(weights[..., None] * votes, axis=1)
