"""A model with its loss and metrics, as pure functions: all that algorithms know of it."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import optax

from fedjax_tp.types import Array, Batch, Float, Int, Params, PRNGKey


class Metrics(NamedTuple):
    """Sums over the unmasked examples of a batch, so that they add up over batches."""

    correct: Float[Array, "*clients"]
    loss: Float[Array, "*clients"]
    examples: Float[Array, "*clients"]


class Task(NamedTuple):
    """What to learn.

    Attributes:
      init: `(key) -> params`.
      apply: `(params, x) -> logits`, without dropout.
      loss: `(params, batch, key) -> mean loss` over the unmasked examples; the key
        draws dropout.
      metrics: `(params, batch) -> Metrics`, without dropout.
    """

    init: Callable[[PRNGKey], Params]
    apply: Callable[[Params, Array], Array]
    loss: Callable[[Params, Batch, PRNGKey], Array]
    metrics: Callable[[Params, Batch], Metrics]


def masked_mean(values: Float[Array, " batch"], mask: Array) -> Float[Array, ""]:
    """Mean over the rows where `mask` holds; 0 where it holds nowhere."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def cross_entropy(
    logits: Float[Array, "batch classes"], labels: Int[Array, " batch"]
) -> Float[Array, " batch"]:
    """-log softmax(logits)[label], one value an example."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def classification(module: nn.Module, example_shape: tuple[int, ...]) -> Task:
    """The task of classifying examples with a Flax module.

    Args:
      module: called as `module(x, deterministic=...)`, returns `[batch, classes]`.
      example_shape: shape of one example, without the batch axis.
    """

    def init(key: PRNGKey) -> Params:
        return module.init(key, jnp.zeros((1, *example_shape)))["params"]

    def apply(params: Params, x: Array) -> Array:
        return module.apply({"params": params}, x)

    def loss(params: Params, batch: Batch, key: PRNGKey) -> Array:
        logits = module.apply(
            {"params": params}, batch.x, deterministic=False, rngs={"dropout": key}
        )
        return masked_mean(cross_entropy(logits, batch.y), batch.mask)

    def metrics(params: Params, batch: Batch) -> Metrics:
        logits = apply(params, batch.x)
        mask = batch.mask.astype(jnp.float32)
        # A label is right only where its logit is the largest: NaN is never right.
        correct = (jnp.argmax(logits, axis=-1) == batch.y) & jnp.isfinite(logits).all(
            -1
        )
        losses = jnp.where(batch.mask, cross_entropy(logits, batch.y), 0.0)
        return Metrics(jnp.sum(correct * mask), jnp.sum(losses), jnp.sum(mask))

    return Task(init, apply, loss, metrics)
