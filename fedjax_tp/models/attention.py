"""Multi-head self-attention whose query, key and value projections are one parameter.

`qkv` has shape [dim, 3, heads, head_dim], bias-free and apart from the output
projection, so that a path ending in `attention/qkv` names all of what FedTP makes
personal, and one contraction writes queries, keys and values head by head.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import variance_scaling

from fedjax_tp.models.layers import Dropout, Linear
from fedjax_tp.types import Array, Float

MAPS = "maps"
"""The collection into which attention layers sow their weights, if it is mutable."""

ATTENDED = "attended"
"""The collection for statistics that an attention function returns, if mutable."""

AttentionFunction = Callable[..., Any]
"""`(q, k, v, *, causal) -> output`, all `[batch, tokens, heads, head_dim]`, to be used
instead of full attention (such as `fedjax_tp.inference.attention.quantized_attention`
with its flags bound); or a pair of the output and statistics, a pytree. Pretrained
encoders also pass `lengths`, the tokens of each sequence that are no padding."""

_uniform_qkv = variance_scaling(
    1 / 3, "fan_in", "uniform", in_axis=0, out_axis=(1, 2, 3)
)


def is_attention_projection(path: str) -> bool:
    """Is the parameter at `path` a query, key or value projection?"""
    return path.endswith("attention/qkv")


def attention(
    q: Float[Array, "*batch queries head_dim"],
    k: Float[Array, "*batch keys head_dim"],
    v: Float[Array, "*batch keys head_dim"],
    *,
    causal: bool = False,
) -> Float[Array, "*batch queries head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v (Vaswani et al. 2017, equation 1).

    Gradients are written by hand: five matrix products in this layout, and the
    softmax's as a * (g - sum(a * g)). The softmax is computed in float32 whatever the
    inputs are.

    Args:
      q, k, v: queries, keys and values.
      causal: a query sees the keys up to its own place alone.
    """
    return _attention(causal, q, k, v)


def attention_weights(
    q: Float[Array, "*batch queries head_dim"],
    k: Float[Array, "*batch keys head_dim"],
    *,
    causal: bool = False,
) -> Float[Array, "*batch queries keys"]:
    """softmax(q k^T / sqrt(head_dim)) in float32; see `attention`."""
    scores = jnp.matmul(
        q * q.shape[-1] ** -0.5, k.mT, preferred_element_type=jnp.float32
    )
    if causal:
        is_seen = jnp.tri(q.shape[-2], k.shape[-2], dtype=bool)
        scores = jnp.where(is_seen, scores, -jnp.inf)
    return jax.nn.softmax(scores)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(causal: bool, q: Array, k: Array, v: Array) -> Array:
    return _attention_forward(causal, q, k, v)[0]


def _attention_forward(
    causal: bool, q: Array, k: Array, v: Array
) -> tuple[Array, tuple]:
    weights = attention_weights(q, k, causal=causal).astype(v.dtype)
    return jnp.matmul(weights, v), (q, k, v, weights)


def _attention_backward(
    causal: bool, residuals: tuple, d_out: Array
) -> tuple[Array, Array, Array]:
    # Where a key is not seen its weight is 0, and so is its score's gradient.
    q, k, v, weights = residuals
    d_v = jnp.matmul(weights.mT, d_out)
    d_weights = jnp.matmul(d_out, v.mT, preferred_element_type=jnp.float32)
    inner = jnp.sum(weights * d_weights, axis=-1, keepdims=True)
    d_scores = weights * (d_weights - inner) * q.shape[-1] ** -0.5
    d_scores = d_scores.astype(q.dtype)
    return jnp.matmul(d_scores, k), jnp.matmul(d_scores.mT, q), d_v


_attention.defvjp(_attention_forward, _attention_backward)


def multi_head_attention(
    x: Float[Array, "batch tokens dim"],
    qkv: Float[Array, "dim 3 heads head_dim"],
    out: Float[Array, "heads head_dim width"],
    *,
    causal: bool = False,
    cache_bytes: int = 8 << 20,
) -> Float[Array, "batch tokens width"]:
    """Self-attention with its projections: sum_h attention(x Q_h, x K_h, x V_h) O_h.

    On CPU, where all heads together are larger than the caches, heads are computed one
    after another: every product then has its operands in cache, and activations are
    never transposed. Elsewhere all heads are computed at once.

    Args:
      x: activations.
      qkv: query, key and value projections, without bias.
      out: output projection.
      causal: a token sees those up to its own place alone.
      cache_bytes: about the share of the last levels of cache that one core has.
    """
    if jax.default_backend() != "cpu":
        q, k, v = jnp.einsum("bnd,dthe->tbnhe", x, qkv)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
        return jnp.einsum("bnhe,hew->bnw", attended, out)
    batch, tokens, _ = x.shape
    _, _, heads, head_dim = qkv.shape
    # What the backward pass of attention alone reads and writes.
    numbers = batch * heads * tokens * (8 * head_dim + 3 * tokens)
    if numbers * x.dtype.itemsize <= cache_bytes:
        return _all_heads(causal, x, qkv, out)
    return _head_by_head(causal, x, jnp.transpose(qkv, (2, 1, 0, 3)), out)


def _all_heads(causal: bool, x: Array, qkv: Array, out: Array) -> Array:
    # The weights are cut in three, not the projections: those are larger.
    q, k, v = (jnp.einsum("bnd,dhe->bhne", x, qkv[:, i]) for i in range(3))
    heads = jnp.moveaxis(_attention(causal, q, k, v), 1, 2)
    return heads.reshape(*x.shape[:2], -1) @ out.reshape(-1, out.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head_by_head(causal: bool, x: Array, qkv: Array, out: Array) -> Array:
    """`multi_head_attention` with `qkv` as [heads, 3, dim, head_dim]."""
    return _head_by_head_forward(causal, x, qkv, out)[0]


def _head_by_head_forward(
    causal: bool, x: Array, qkv: Array, out: Array
) -> tuple[Array, tuple]:
    batch, tokens, dim = x.shape
    rows = x.reshape(batch * tokens, dim)

    def one_head(total: Array, weights: tuple[Array, Array]) -> tuple[Array, tuple]:
        q, k, v = ((rows @ w).reshape(batch, tokens, -1) for w in weights[0])
        attended, (*_, attends_to) = _attention_forward(causal, q, k, v)
        total = total + _rows(attended) @ weights[1]
        return total, (q, k, v, attends_to, attended)

    zeros = jnp.zeros((batch * tokens, out.shape[-1]), x.dtype)
    total, by_head = jax.lax.scan(one_head, zeros, (qkv, out))
    return total.reshape(batch, tokens, -1), (x, qkv, out, by_head)


def _head_by_head_backward(
    causal: bool, residuals: tuple, d_total: Array
) -> tuple[Array, Array, Array]:
    x, qkv, out, by_head = residuals
    d_rows = _rows(d_total)
    # Transposed once and not by every head: products with the left side transposed are
    # slow where the contraction is long.
    columns = jax.lax.optimization_barrier(_rows(x).T)

    def one_head(d_x: Array, inputs: tuple) -> tuple[Array, tuple[Array, Array]]:
        weights, out, (q, k, v, attends_to, attended) = inputs
        d_attended = (d_rows @ out.T).reshape(attended.shape)
        d_qkv = _attention_backward(causal, (q, k, v, attends_to), d_attended)
        d_weights = jnp.stack([columns @ _rows(d) for d in d_qkv])
        for d, w in zip(d_qkv, weights, strict=True):
            d_x = d_x + _rows(d) @ w.T
        return d_x, (d_weights, _rows(attended).T @ d_rows)

    zeros = jnp.zeros_like(_rows(x))
    d_x, (d_qkv, d_out) = jax.lax.scan(one_head, zeros, (qkv, out, by_head))
    return d_x.reshape(x.shape), d_qkv, d_out


_head_by_head.defvjp(_head_by_head_forward, _head_by_head_backward)


def _rows(x: Array) -> Array:
    """[batch, tokens, width] as [batch * tokens, width]."""
    return x.reshape(-1, x.shape[-1])


def sow_statistics(module: nn.Module, found: Any) -> Array:
    """The output that an attention function returned, alone or with statistics; sows
    those as `statistics` where the collection `ATTENDED` is mutable."""
    if not isinstance(found, tuple):
        return found
    output, statistics = found
    module.sow(ATTENDED, "statistics", statistics)
    return output


def sown_by_layer(collection: Mapping[str, Any], name: str) -> list[Any]:
    """What the attention layers of a model sowed under a name, first block first.

    Args:
      collection: one of those that `apply` returns, such as `MAPS`.
      name: of what was sown.
    """
    # By number: block_10 comes after block_9.
    blocks = sorted(collection, key=lambda block: int(block.rpartition("_")[2]))
    return [collection[block]["attention"][name][0] for block in blocks]


class SelfAttention(nn.Module):
    """x -> concatenated heads -> output projection with bias and dropout.

    Attributes:
      heads, head_dim: heads * head_dim need not equal the width of x.
      dropout: rate after the output projection; attention weights have none.
      causal: a token sees those up to its own place alone.
      attend: what attends instead of full attention.

    Sows its attention weights, `[batch, heads, tokens, tokens]`, as
    `attention_weights` where the collection `MAPS` is mutable, and what `attend`
    returns besides its output as `statistics` where `ATTENDED` is.
    """

    heads: int
    head_dim: int
    dropout: float = 0.0
    causal: bool = False
    attend: AttentionFunction | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch tokens dim"], *, deterministic: bool = True
    ) -> Float[Array, "batch tokens dim"]:
        dim = x.shape[-1]
        qkv = self.param("qkv", _uniform_qkv, (dim, 3, self.heads, self.head_dim))
        kernel, bias = Linear(dim, name="out").weights(self.heads * self.head_dim)
        kernel = kernel.reshape(self.heads, self.head_dim, dim)
        if self.is_mutable_collection(MAPS) and not self.is_initializing():
            q, k = (jnp.einsum("bnd,dhe->bhne", x, qkv[:, i]) for i in range(2))
            weights = attention_weights(q, k, causal=self.causal)
            self.sow(MAPS, "attention_weights", weights)
        if self.attend is None:
            x = multi_head_attention(x, qkv, kernel, causal=self.causal)
        else:
            q, k, v = jnp.einsum("bnd,dthe->tbnhe", x, qkv)
            attended = sow_statistics(self, self.attend(q, k, v, causal=self.causal))
            x = jnp.einsum("bnhe,hew->bnw", attended, kernel)
        x = x + bias
        return Dropout(self.dropout)(x, deterministic=deterministic)
