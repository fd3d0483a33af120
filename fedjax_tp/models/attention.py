"""Multi-head self-attention whose query, key and value projections are one parameter.

`qkv` has shape [dim, 3, heads, head_dim], bias-free and apart from the output
projection, so that a path ending in `attention/qkv` names all of what FedTP makes
personal, and one contraction writes queries, keys and values head by head.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import variance_scaling

from fedjax_tp.types import Array, Float

uniform_fan_in = variance_scaling(1 / 3, "fan_in", "uniform")
"""U(-1/sqrt(fan_in), 1/sqrt(fan_in)): the initializer FedTP's layers use."""

_uniform_qkv = variance_scaling(
    1 / 3, "fan_in", "uniform", in_axis=0, out_axis=(1, 2, 3)
)


def is_attention_projection(path: str) -> bool:
    """Is the parameter at `path` a query, key or value projection?"""
    return path.endswith("attention/qkv")


def attention(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch heads keys head_dim"],
    v: Float[Array, "batch heads keys head_dim"],
) -> Float[Array, "batch heads queries head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v (Vaswani et al. 2017, equation 1)."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


class Linear(nn.Module):
    """Dense layer, kernel and bias ~ U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch out"]:
        inputs = x.shape[-1]
        kernel = self.param("kernel", uniform_fan_in, (inputs, self.features))
        bias = self.param("bias", _uniform_bias(inputs), (self.features,))
        return x @ kernel + bias


def _uniform_bias(fan_in: int) -> nn.initializers.Initializer:
    def init(key, shape, dtype=jnp.float32):
        bound = fan_in**-0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class SelfAttention(nn.Module):
    """x -> concatenated heads -> output projection with bias and dropout.

    Attributes:
      heads, head_dim: heads * head_dim need not equal the width of x.
      dropout: rate after the output projection; attention weights have none.
    """

    heads: int
    head_dim: int
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch tokens dim"], *, deterministic: bool = True
    ) -> Float[Array, "batch tokens dim"]:
        dim = x.shape[-1]
        qkv = self.param("qkv", _uniform_qkv, (dim, 3, self.heads, self.head_dim))
        q, k, v = jnp.einsum("bnd,dthe->tbhne", x, qkv)
        out = attention(q, k, v)
        inner = jnp.moveaxis(out, 1, 2).reshape(
            *x.shape[:-1], self.heads * self.head_dim
        )
        out = Linear(dim, name="out")(inner)
        return nn.Dropout(self.dropout)(out, deterministic=deterministic)
