"""The linear layer of FedTP's models, and a dropout that costs next to nothing."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import variance_scaling

from fedjax_tp.types import Array, Float, PRNGKey, UInt32

uniform_fan_in = variance_scaling(1 / 3, "fan_in", "uniform")
"""U(-1/sqrt(fan_in), 1/sqrt(fan_in)): the initializer FedTP's layers use."""


class Linear(nn.Module):
    """Dense layer, kernel and bias ~ U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""

    features: int

    @nn.compact
    def weights(
        self, inputs: int
    ) -> tuple[Float[Array, "inputs out"], Float[Array, " out"]]:
        """Kernel and bias, for a caller that multiplies by itself."""
        kernel = self.param("kernel", uniform_fan_in, (inputs, self.features))
        return kernel, self.param("bias", _uniform_bias(inputs), (self.features,))

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch out"]:
        kernel, bias = self.weights(x.shape[-1])
        return x @ kernel + bias


def _uniform_bias(fan_in: int) -> nn.initializers.Initializer:
    def init(key, shape, dtype=jnp.float32):
        bound = fan_in**-0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Dropout(nn.Module):
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate).

    Drops what `flax.linen.Dropout` drops from the same key.
    """

    rate: float

    @nn.compact
    def __call__(
        self, x: Float[Array, "*shape"], *, deterministic: bool
    ) -> Float[Array, "*shape"]:
        if deterministic or self.rate == 0:
            return x
        keep = 1 - self.rate
        # A uniform float32 has 23 random bits.
        bound = math.ceil(float(np.float32(keep)) * 2**23)
        is_kept = random_bits(self.make_rng("dropout"), x.shape) >> 9 < bound
        return jnp.where(is_kept, x / keep, 0)


def random_bits(key: PRNGKey, shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """The bits of `jax.random.bits(key, shape)`, in one loop over the elements.

    Threefry-2x32 with 20 rounds (Salmon et al. 2011) of (0, index), written out. On CPU
    JAX's own keeps its rounds in a loop, and each round passes over memory: a tenth of
    the time of a training step.
    """
    if str(jax.random.key_impl(key)) != "threefry2x32":
        return jax.random.bits(key, shape)
    index = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    first, second = _threefry(jax.random.key_data(key), jnp.uint32(0), index)
    return first ^ second


def _threefry(key: UInt32[Array, "2"], x0: Array, x1: Array) -> tuple[Array, Array]:
    parity = jnp.uint32(0x1BD11BDA)
    schedule = (key[0], key[1], key[0] ^ key[1] ^ parity)
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(5):
        for rotation in rotations[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << rotation | x1 >> 32 - rotation)
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
