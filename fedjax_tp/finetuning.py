"""Fine-tuning a pretrained encoder: its heads, its last blocks too, or all of it.

What is frozen is computed once: `frozen_states` gives the input of the first block that
is trained, and training goes on from there.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Integer

from fedjax_tp import tree
from fedjax_tp.models.bert import Bert
from fedjax_tp.types import Array, Float, InputError, Params, PRNGKey, Tree

WIDTHS = (16, 32, 64, 128, 256, 384, 512)
"""Lengths that sequences are padded to: a program is compiled for each that occurs."""


class Texts(NamedTuple):
    """Sequences of tokens and what is to be predicted of them; leaves are stacked.

    Attributes:
      tokens: `[texts, width]`, padded.
      lengths: real tokens of each.
      types: segments, as `tokens`.
      target: labels `[texts]`, or first and last token of answers `[texts, 2]`.
      is_real: False of texts that fill up a batch.
      states: what the first trained block sees, `[texts, width, dim]`; None where all
        is trained.
    """

    tokens: Any
    lengths: Any
    types: Any
    target: Any
    is_real: Any
    states: Any = None


class Tuned(NamedTuple):
    """Where fine-tuning stands: what is trained, what is not, and the optimizer."""

    trained: Params
    frozen: Params
    optimizer: Tree


def batches(
    texts: Texts, size: int, *, rng: np.random.Generator | None = None
) -> Iterator[tuple[Integer[np.ndarray, " batch"], Texts]]:
    """Batches of texts of about equal length, cut to one of `WIDTHS`.

    Args:
      texts: all of them, as NumPy arrays.
      size: texts of a batch; the last of a width is filled up with its first text.
      rng: draws the order; None keeps it.

    Yields:
      The numbers of the texts, -1 where filled up, and the texts.
    """
    widths = [w for w in WIDTHS if w < texts.tokens.shape[1]] + [texts.tokens.shape[1]]
    which = np.searchsorted(widths, texts.lengths)
    groups = []
    for place, width in enumerate(widths):
        rows = np.flatnonzero(which == place)
        if rng is not None:
            rows = rng.permutation(rows)
        groups += [(width, rows[i : i + size]) for i in range(0, len(rows), size)]
    order = range(len(groups)) if rng is None else rng.permutation(len(groups))
    for group in order:
        width, rows = groups[group]
        is_real = np.arange(size) < len(rows)
        filled = np.resize(rows, size)
        filled[~is_real] = rows[0]
        yield np.where(is_real, filled, -1), _cut(texts, filled, width, is_real)


def _cut(texts: Texts, rows: np.ndarray, width: int, is_real: np.ndarray) -> Texts:
    states = None if texts.states is None else texts.states[rows, :width]
    return Texts(
        texts.tokens[rows, :width],
        texts.lengths[rows],
        texts.types[rows, :width],
        texts.target[rows],
        is_real,
        states,
    )


def check_layers(layers: int | None, depth: int) -> None:
    """Raises InputError unless so many last blocks are there; None is all."""
    if layers is not None and not 0 <= layers <= depth:
        raise InputError(
            f"layers is {layers}; allowed is 0 to {depth}, or unset for all"
        )


def is_trained(layers: int | None, depth: int) -> tree.PathPredicate:
    """Which parameters are trained: heads and the last `layers` blocks; None: all."""

    def predicate(path: str) -> bool:
        name = path.split("/")[0]
        if layers is None:
            return True
        if name.startswith("block_"):
            return int(name.removeprefix("block_")) >= depth - layers
        return name in ("pooler", "head", "answer_head")

    return predicate


def frozen_states(
    module: Bert, params: Params, texts: Texts, layers: int, *, size: int = 64
) -> Float[np.ndarray, "texts width dim"]:
    """What the first of the last `layers` blocks sees of each text."""
    last = module.config.depth - layers

    @jax.jit
    def states(params: Params, batch: Texts) -> Array:
        variables = {"params": params}
        x = module.apply(variables, batch.tokens, batch.types, method="embed")
        x = module.apply(variables, x, batch.lengths, 0, last, method="encode")
        return cast(Array, x)

    found = np.zeros((*texts.tokens.shape, module.config.dim), np.float32)
    for rows, batch in batches(texts, size):
        real = rows >= 0
        width = batch.tokens.shape[1]
        found[rows[real], :width] = np.asarray(states(params, batch))[real]
    return found


def logits_of(
    module: Bert, params: Params, batch: Texts, layers: int | None, key: PRNGKey | None
) -> Array:
    """Logits of labels, or of first and last tokens if the module finds answers.

    Args:
      module: with one of the two heads.
      params: of all of it.
      batch: has `states`, unless all is trained.
      layers: the last blocks that are trained; None for all.
      key: draws dropout; None turns it off.
    """
    variables = {"params": params}
    more: dict[str, Any] = {"deterministic": key is None}
    if key is not None:
        more["rngs"] = {"dropout": key}
    first = 0
    if layers is None:
        x = module.apply(variables, batch.tokens, batch.types, method="embed", **more)
    else:
        x, first = batch.states, module.config.depth - layers
    hidden = module.apply(
        variables, x, batch.lengths, first, None, method="encode", **more
    )
    logits = module.apply(variables, hidden, batch.lengths, method="predict")
    return cast(Array, logits)


def loss_of(logits: Array, batch: Texts) -> Float[Array, ""]:
    """Mean cross entropy of labels, or of first and last tokens, over real texts."""
    if logits.ndim == 2:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.target)
    else:
        is_token = jnp.arange(logits.shape[1]) < batch.lengths[:, None]
        seen = jnp.where(is_token[..., None], logits, -1e9)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            jnp.moveaxis(seen, 2, 1), batch.target
        ).mean(axis=1)
    total = jnp.sum(jnp.where(batch.is_real, losses, 0))
    return total / jnp.maximum(jnp.sum(batch.is_real), 1)


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with gradients clipped at norm 1; a tenth of the steps warms up, then the
    rate falls in a line to 0."""
    warm_up = max(1, steps // 10)
    rate = optax.join_schedules(
        [
            optax.linear_schedule(
                learning_rate / warm_up, learning_rate, max(1, warm_up - 1)
            ),
            optax.linear_schedule(learning_rate, 0.0, max(1, steps - warm_up)),
        ],
        [warm_up],
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01)
    )


def start(
    params: Params,
    layers: int | None,
    depth: int,
    optimizer: optax.GradientTransformation,
) -> Tuned:
    """Before the first step; steps take the memory of `params` for their own.

    Raises:
      InputError: there are not so many blocks.
    """
    check_layers(layers, depth)
    trained, frozen = tree.split(params, is_trained(layers, depth))
    return Tuned(trained, frozen, optimizer.init(trained))


def make_step(
    module: Bert, layers: int | None, optimizer: optax.GradientTransformation
) -> Callable[[Tuned, Texts, PRNGKey], tuple[Tuned, Array]]:
    """A jitted `(tuned, batch, key) -> (tuned, loss)`; one program for each width.

    The arrays of the given `tuned` are used up.
    """

    def loss(trained: Params, frozen: Params, batch: Texts, key: PRNGKey) -> Array:
        params = tree.merge(trained, frozen)
        return loss_of(logits_of(module, params, batch, layers, key), batch)

    def step(tuned: Tuned, batch: Texts, key: PRNGKey) -> tuple[Tuned, Array]:
        value, gradient = jax.value_and_grad(loss)(
            tuned.trained, tuned.frozen, batch, key
        )
        updates, state = optimizer.update(gradient, tuned.optimizer, tuned.trained)
        trained = optax.apply_updates(tuned.trained, updates)
        return Tuned(trained, tuned.frozen, state), value

    return jax.jit(step, donate_argnums=0)


def pad(rows: Sequence[Sequence[int]], value: int) -> Integer[np.ndarray, "rows width"]:
    """Rows of unequal length as one array."""
    found = np.full((len(rows), max(map(len, rows))), value, np.int32)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found
