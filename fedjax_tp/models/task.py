"""A model with its loss and metrics, as pure functions: all that algorithms see."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_tp.models.attention import (
    MAPS,
    is_attention_projection,
    sown_by_layer,
)
from fedjax_tp.tree import path_name
from fedjax_tp.types import Array, Batch, Bool, Float, Int, Params, PRNGKey, Tree

STATISTICS = "batch_stats"
"""Where in the parameters a model's running statistics are."""


def is_statistic(path: str) -> bool:
    """Is the leaf at `path` a running statistic, which no gradient moves?"""
    return path.startswith(f"{STATISTICS}/")


class Metrics(NamedTuple):
    """Sums over the unmasked examples of a batch, so that they add up over batches.

    Attributes:
      correct: right predictions; of sequences, at the last position.
      loss: of sequences, the mean over positions.
      examples: as many.
      positions: of sequences, the share of positions that is right; else None.
    """

    correct: Float[Array, "*clients"]
    loss: Float[Array, "*clients"]
    examples: Float[Array, "*clients"]
    positions: Float[Array, "*clients"] | None = None


class Forward(NamedTuple):
    """What a model makes of a batch.

    Attributes:
      logits: `[batch, *positions, classes]`.
      features: what the layer `head` makes the logits of, `[batch, *positions, dim]`.
      statistics: new running statistics, at their place in the parameters; None of a
        model without, and where nothing is trained.
    """

    logits: Float[Array, "batch *positions classes"]
    features: Float[Array, "batch *positions dim"]
    statistics: Tree = None


Forwarding = Callable[
    [Params, Array, PRNGKey | None, Bool[Array, " batch"] | None], Forward
]
"""`(params, x, key, mask) -> Forward`; see `Task.forward`."""


def masked_mean(
    values: Float[Array, "batch *rest"], mask: Bool[Array, " batch"]
) -> Float[Array, "*rest"]:
    """Mean over the rows where `mask` holds; 0 where it holds nowhere."""
    kept = jnp.where(mask.reshape(-1, *[1] * (values.ndim - 1)), values, 0.0)
    return jnp.sum(kept, axis=0) / jnp.maximum(jnp.sum(mask), 1)


def cross_entropy(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """-log softmax(logits)[label], one value an example (or position)."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _class_loss(logits: Array, batch: Batch) -> Float[Array, ""]:
    return masked_mean(cross_entropy(logits, batch.y), batch.mask)


def _class_score(logits: Array, batch: Batch) -> Metrics:
    mask = batch.mask.astype(jnp.float32)
    correct = _is_correct(logits, batch.y)
    losses = jnp.where(batch.mask, cross_entropy(logits, batch.y), 0.0)
    return Metrics(jnp.sum(correct * mask), jnp.sum(losses), jnp.sum(mask))


def _is_correct(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]
) -> Bool[Array, "*batch"]:
    # NaN is never right, whatever argmax makes of it.
    is_finite = jnp.isfinite(logits).all(axis=-1)
    return (jnp.argmax(logits, axis=-1) == labels) & is_finite


class Task(NamedTuple):
    """What to learn.

    Attributes:
      init: `(key) -> params`.
      apply: `(params, x) -> logits`, without dropout.
      loss: `(params, batch, key) -> mean loss` over the unmasked examples; the key
        draws dropout.
      metrics: `(params, batch) -> Metrics`, without dropout.
      loss_of: `(logits, batch) -> mean loss` of any logits; of classes by default.
      score: `(logits, batch) -> Metrics` of any logits.
      forward: `(params, x, key, mask) -> Forward`; a key turns training on. None for
        a task that is no model with a layer `head`.
      loss_and_statistics: as `loss`, with the running statistics after the batch;
        None for a model without.
      is_sequence: is there a prediction at each position of an example?
      maps: `(params, x) -> [layers, batch, heads, tokens, tokens]`, the attention
        weights of a transformer; else None.
    """

    init: Callable[[PRNGKey], Params]
    apply: Callable[[Params, Array], Array]
    loss: Callable[[Params, Batch, PRNGKey], Array]
    metrics: Callable[[Params, Batch], Metrics]
    loss_of: Callable[[Array, Batch], Array] = _class_loss
    score: Callable[[Array, Batch], Metrics] = _class_score
    forward: Forwarding | None = None
    loss_and_statistics: (
        Callable[[Params, Batch, PRNGKey], tuple[Array, Tree]] | None
    ) = None
    is_sequence: bool = False
    maps: Callable[[Params, Array], Array] | None = None


def apply_head(params: Params, features: Array) -> Array:
    """Logits that the layer `head` makes of features."""
    logits = features @ params["head"]["kernel"]
    return logits + params["head"]["bias"] if "bias" in params["head"] else logits


def classification(module: nn.Module, example_shape: tuple[int, ...]) -> Task:
    """The task of classifying examples with a Flax module.

    Args:
      module: called as `module(x, deterministic=...)`, returns `[batch, classes]` and
        sows what its layer `head` takes as `features`. If it has running statistics, it
        also takes `mask=...`, the rows that count for them.
      example_shape: shape of one example, without the batch axis.
    """
    return _of_module(module, example_shape, _class_loss, _class_score)


def next_character(module: nn.Module, length: int) -> Task:
    """The task of predicting, at every position of a text, the character after it.

    An example is `length` characters x with the one that follows, y. The loss is over
    all positions; `Metrics.correct` is of the last one alone, which sees all of x.

    Args:
      module: as for `classification`; returns `[batch, length, characters]`.
      length: characters of an example.
    """
    return _of_module(module, (length,), _text_loss, _text_score)


def _of_module(
    module: nn.Module,
    example_shape: tuple[int, ...],
    loss_of: Callable[[Array, Batch], Array],
    score: Callable[[Array, Batch], Metrics],
) -> Task:
    def init(key: PRNGKey) -> Params:
        variables = module.init(key, jnp.zeros((1, *example_shape)))
        statistics = {k: v for k, v in variables.items() if k == STATISTICS}
        return {**variables["params"], **statistics}

    shapes = jax.eval_shape(init, jax.random.key(0))
    has_statistics = STATISTICS in shapes
    has_attention = any(
        is_attention_projection(path_name(path))
        for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
    )

    def forward(
        params: Params,
        x: Array,
        key: PRNGKey | None = None,
        mask: Bool[Array, " batch"] | None = None,
    ) -> Forward:
        weights = {name: leaf for name, leaf in params.items() if name != STATISTICS}
        variables = {"params": weights}
        more: dict[str, Any] = {}
        if has_statistics:
            variables[STATISTICS] = params[STATISTICS]
            more["mask"] = mask
        logits, sown = module.apply(
            variables,
            x,
            deterministic=key is None,
            rngs={} if key is None else {"dropout": key},
            mutable=["intermediates", STATISTICS],
            **more,
        )
        statistics = None
        if has_statistics and key is not None:
            nothing = jax.tree.map(lambda _: None, weights)
            statistics = {**nothing, STATISTICS: sown[STATISTICS]}
        features = sown["intermediates"]["features"][0]
        return Forward(cast(Array, logits), features, statistics)

    def maps(params: Params, x: Array) -> Array:
        _, sown = module.apply({"params": params}, x, mutable=[MAPS])
        return jnp.stack(sown_by_layer(sown[MAPS], "attention_weights"))

    def loss_and_statistics(
        params: Params, batch: Batch, key: PRNGKey
    ) -> tuple[Array, Tree]:
        found = forward(params, batch.x, key, batch.mask)
        return loss_of(found.logits, batch), found.statistics

    return _task(
        init,
        lambda params, x: forward(params, x).logits,
        lambda params, batch, key: loss_and_statistics(params, batch, key)[0],
        loss_of,
        score,
        forward=forward,
        loss_and_statistics=loss_and_statistics if has_statistics else None,
        is_sequence=score is _text_score,
        maps=maps if has_attention else None,
    )


def from_apply(
    init: Callable[[PRNGKey], Params],
    apply: Callable[[Params, Array, PRNGKey | None], Array],
) -> Task:
    """The task of classifying examples with any pure function.

    Args:
      init: `(key) -> params`.
      apply: `(params, x, key) -> logits`; the key draws dropout, None turns it off.
    """
    return _task(
        init,
        lambda params, x: apply(params, x, None),
        lambda params, batch, key: _class_loss(apply(params, batch.x, key), batch),
        _class_loss,
        _class_score,
    )


def _task(
    init: Callable[[PRNGKey], Params],
    apply: Callable[[Params, Array], Array],
    loss: Callable[[Params, Batch, PRNGKey], Array],
    loss_of: Callable[[Array, Batch], Array],
    score: Callable[[Array, Batch], Metrics],
    **rest: Any,
) -> Task:
    def metrics(params: Params, batch: Batch) -> Metrics:
        return score(apply(params, batch.x), batch)

    return Task(init, apply, loss, metrics, loss_of, score, **rest)


def next_characters(batch: Batch) -> Int[Array, "batch length"]:
    """The target at each position of a batch of texts."""
    following = batch.x[:, 1:].astype(batch.y.dtype)
    return jnp.concatenate([following, batch.y[:, None]], axis=1)


def _text_loss(logits: Array, batch: Batch) -> Float[Array, ""]:
    losses = cross_entropy(logits, next_characters(batch))
    return masked_mean(losses.mean(axis=1), batch.mask)


def _text_score(logits: Array, batch: Batch) -> Metrics:
    targets = next_characters(batch)
    mask = batch.mask.astype(jnp.float32)
    correct = _is_correct(logits, targets)
    losses = jnp.where(batch.mask, cross_entropy(logits, targets).mean(axis=1), 0.0)
    return Metrics(
        jnp.sum(correct[:, -1] * mask),
        jnp.sum(losses),
        jnp.sum(mask),
        jnp.sum(correct.mean(axis=1) * mask),
    )
