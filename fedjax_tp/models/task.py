"""A model with its loss and metrics, as pure functions: all that algorithms see."""

from collections.abc import Callable
from typing import NamedTuple, cast

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

    def apply(params: Params, x: Array, key: PRNGKey | None) -> Array:
        rngs = {} if key is None else {"dropout": key}
        logits = module.apply({"params": params}, x, deterministic=not rngs, rngs=rngs)
        return cast(Array, logits)

    return from_apply(init, apply)


def from_apply(
    init: Callable[[PRNGKey], Params],
    apply: Callable[[Params, Array, PRNGKey | None], Array],
) -> Task:
    """The task of classifying examples with any pure function.

    Args:
      init: `(key) -> params`.
      apply: `(params, x, key) -> logits`; the key draws dropout, None turns it off.
    """

    def loss(params: Params, batch: Batch, key: PRNGKey) -> Array:
        logits = apply(params, batch.x, key)
        return masked_mean(cross_entropy(logits, batch.y), batch.mask)

    def metrics(params: Params, batch: Batch) -> Metrics:
        logits = apply(params, batch.x, None)
        mask = batch.mask.astype(jnp.float32)
        # NaN is never right, whatever argmax makes of it.
        is_finite = jnp.isfinite(logits).all(axis=-1)
        correct = (jnp.argmax(logits, axis=-1) == batch.y) & is_finite
        losses = jnp.where(batch.mask, cross_entropy(logits, batch.y), 0.0)
        return Metrics(jnp.sum(correct * mask), jnp.sum(losses), jnp.sum(mask))

    return Task(init, lambda params, x: apply(params, x, None), loss, metrics)
