"""Updates in fewer bits, on any algorithm: quantization, signs, the largest entries.

Stochastic uniform and rotated quantization: Suresh et al. 2017 (ICML), sections 2 and
3. Signs: Bernstein et al. 2018 (ICML). Biased codecs come with error feedback
(Karimireddy et al. 2019, ICML): a client adds next time what was lost this time.

A codec is a record of pure functions of one tensor, flat. What is encoded is the
difference to what the client was sent; running statistics are sent as they are. Codes
are held a byte or two each; bits are counted as packed, which is what would be sent.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    Carry,
    Message,
    ServerState,
    Update,
    client_shapes,
    reference_of,
)
from fedjax_tp.models.task import is_statistic
from fedjax_tp.types import Array, Batch, Float, InputError, PRNGKey, Progress, Tree

_FLOAT = 32


class Codec(NamedTuple):
    """How one tensor of an update is sent.

    Attributes:
      name: what stands behind the algorithm's name.
      encode: `(key, values) -> payload`, a pytree of arrays.
      decode: `(payload, size) -> values`; `size` is static.
      bits: `(size) -> bits of a payload`, exact.
      is_biased: is the mean of what is decoded another than what was encoded?
    """

    name: str
    encode: Callable[[PRNGKey, Float[Array, " n"]], Any]
    decode: Callable[[Any, int], Float[Array, " n"]]
    bits: Callable[[int], int]
    is_biased: bool


class Uniform(NamedTuple):
    """Levels between the least and the largest value."""

    codes: Array
    low: Float[Array, ""]
    high: Float[Array, ""]


def uniform(bits: int) -> Codec:
    """2^bits equal levels from the least value to the largest, rounded at random to one
    of the two next so that the mean is right.

    Args:
      bits: of a value, 1 to 16.

    Raises:
      InputError: bits is not in that range.
    """
    check_bits(bits)
    steps = 2**bits - 1

    def encode(key: PRNGKey, values: Array) -> Uniform:
        low, high = values.min(), values.max()
        width = jnp.where(high > low, (high - low) / steps, 1.0)
        places = (values - low) / width + jax.random.uniform(key, values.shape)
        codes = jnp.clip(jnp.floor(places), 0, steps)
        return Uniform(codes.astype(_code_type(bits)), low, high)

    def decode(payload: Uniform, size: int) -> Array:
        width = (payload.high - payload.low) / steps
        return payload.low + width * payload.codes.astype(jnp.float32)

    return Codec("uniform", encode, decode, lambda n: bits * n + 2 * _FLOAT, False)


class Rotated(NamedTuple):
    """`Uniform` codes after a rotation that the key draws."""

    codes: Uniform
    key: PRNGKey


def rotated(bits: int) -> Codec:
    """`uniform` after a random rotation, which makes all values about as large: random
    signs, then the Walsh-Hadamard transform, padded to a power of two.

    Args:
      bits: of a value, 1 to 16.

    Raises:
      InputError: bits is not in that range.
    """
    inner = uniform(bits)

    def encode(key: PRNGKey, values: Array) -> Rotated:
        sign_key, code_key = jax.random.split(key)
        padded = jnp.pad(values, (0, _power_of_two(values.size) - values.size))
        turned = hadamard(padded * _signs(sign_key, padded.size))
        return Rotated(inner.encode(code_key, turned), sign_key)

    def decode(payload: Rotated, size: int) -> Array:
        padded = _power_of_two(size)
        turned = hadamard(inner.decode(payload.codes, padded))
        return (turned * _signs(payload.key, padded))[:size]

    seed_bits = 64
    return Codec(
        "rotated",
        encode,
        decode,
        lambda n: inner.bits(_power_of_two(n)) + seed_bits,
        False,
    )


def hadamard(values: Float[Array, " n"]) -> Float[Array, " n"]:
    """The orthonormal Walsh-Hadamard transform, its own inverse; n a power of two."""
    size = values.size
    for level in range(size.bit_length() - 1):
        pairs = values.reshape(-1, 2, 2**level)
        first, second = pairs[:, 0], pairs[:, 1]
        values = jnp.stack([first + second, first - second], axis=1).reshape(size)
    return values / math.sqrt(size)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _signs(key: PRNGKey, size: int) -> Array:
    return jax.random.rademacher(key, (size,), jnp.float32)


class Signs(NamedTuple):
    """Which values are not negative, and the mean of their absolute values."""

    is_positive: Array
    scale: Float[Array, ""]


def sign() -> Codec:
    """The sign of each value, times the mean absolute value of the tensor."""

    def encode(key: PRNGKey, values: Array) -> Signs:
        return Signs(values >= 0, jnp.abs(values).mean())

    def decode(payload: Signs, size: int) -> Array:
        return jnp.where(payload.is_positive, payload.scale, -payload.scale)

    return Codec("sign", encode, decode, lambda n: n + _FLOAT, True)


class Largest(NamedTuple):
    """Some values, and where they stand."""

    values: Array
    places: Array


def topk(share: float) -> Codec:
    """The values that are largest by amount, the others as 0.

    Args:
      share: of each tensor's values, rounded up; above 0, at most 1.

    Raises:
      InputError: share is not in that range.
    """
    if not 0 < share <= 1:
        raise InputError(f"topk share is {share}; allowed is 0 < share <= 1")

    def count(size: int) -> int:
        # The small term keeps 0.07 * 100, which floats make 7.000...1, at 7.
        return min(size, max(1, math.ceil(share * size - 1e-9)))

    def encode(key: PRNGKey, values: Array) -> Largest:
        _, places = jax.lax.top_k(jnp.abs(values), count(values.size))
        return Largest(values[places], places)

    def decode(payload: Largest, size: int) -> Array:
        return (
            jnp.zeros(size, payload.values.dtype).at[payload.places].set(payload.values)
        )

    def bits(size: int) -> int:
        place_bits = max(1, (size - 1).bit_length())
        return count(size) * (_FLOAT + place_bits)

    return Codec("topk", encode, decode, bits, True)


def check_bits(bits: int) -> None:
    """Raises InputError for bits of a code that are not 1 to 16."""
    if not 1 <= bits <= 16:
        raise InputError(f"codec bits is {bits}; allowed is 1 to 16")


def _code_type(bits: int) -> Any:
    return jnp.uint8 if bits <= 8 else jnp.uint16


def transmit(
    codec: Codec, key: PRNGKey, values: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
    """What arrives of a tensor: decode(encode(values))."""
    payload = codec.encode(key, values.ravel().astype(jnp.float32))
    found = codec.decode(payload, values.size)
    return found.reshape(values.shape).astype(values.dtype)


class CompressedKept(NamedTuple):
    """What a client keeps: the algorithm's own, and what was lost so far; None where
    nothing is fed back."""

    inner: Tree
    lost: Tree


class CompressedCarry(NamedTuple):
    """A client in training, the key of its codes, and what was lost so far."""

    inner: Carry
    key: PRNGKey
    lost: Tree


def compressed(algorithm: Algorithm, codec: Codec) -> Algorithm:
    """The algorithm with its updates sent through a codec.

    The server sees what it decodes; the sum over clients is of decoded updates.

    Args:
      algorithm: any whose updates are close to what clients were sent.
      codec: of each tensor.

    Raises:
      InputError: the algorithm does not say what its update is to be compared with, or
        it is compressed already.
    """
    if algorithm.bits_up is not None:
        raise InputError(f"{algorithm.name} is compressed already; allowed is once")
    shapes = client_shapes(algorithm).update
    sent = (shapes.mean, shapes.personal)
    reference = reference_of(algorithm)

    def init_kept(state: ServerState) -> CompressedKept:
        lost = None
        if codec.is_biased:
            lost = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sent)
        return CompressedKept(algorithm.init_kept(state), lost)

    def client_start(
        message: Message, kept: CompressedKept, key: PRNGKey
    ) -> CompressedCarry:
        # The algorithm's own key stays what it would be without a codec.
        carry = algorithm.client_start(message, kept.inner, key)
        return CompressedCarry(carry, jax.random.fold_in(key, _CODEC_STREAM), kept.lost)

    def client_step(
        carry: CompressedCarry, batch: Batch, progress: Progress
    ) -> CompressedCarry:
        inner = algorithm.client_step(carry.inner, batch, progress)
        return carry._replace(inner=inner)

    def client_finish(message: Message, carry: CompressedCarry) -> Update:
        update = algorithm.client_finish(message, carry.inner)
        known = reference(message)
        wanted = jax.tree.map(jnp.subtract, (update.mean, update.personal), known)
        if carry.lost is not None:
            wanted = jax.tree.map(jnp.add, wanted, carry.lost)
        arrived = transmit_all(codec, carry.key, wanted)
        lost = None
        if carry.lost is not None:
            lost = jax.tree.map(jnp.subtract, wanted, arrived)
        mean, personal = jax.tree.map(jnp.add, known, arrived)
        kept = CompressedKept(update.kept, lost)
        return update._replace(mean=mean, personal=personal, kept=kept)

    return algorithm._replace(
        name=f"{algorithm.name}_{codec.name}",
        init_kept=init_kept,
        client_start=client_start,
        client_step=client_step,
        client_finish=client_finish,
        client_params=lambda message, kept: algorithm.client_params(
            message, kept.inner
        ),
        bits_up=_bits(codec, sent),
    )


_CODEC_STREAM = 0x636F6465


def _is_raw(path: tuple) -> bool:
    """Running statistics, wherever in the update they are, go as they are."""
    name = tree.path_name(path)
    parts = name.split("/")
    return any(is_statistic("/".join(parts[i:])) for i in range(len(parts)))


def transmit_all(codec: Codec, key: PRNGKey, values: Tree) -> Tree:
    """What arrives of a tree: each leaf by itself, running statistics as they are."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(values)
    return jax.tree.unflatten(
        structure,
        [
            leaf if _is_raw(path) else transmit(codec, jax.random.fold_in(key, i), leaf)
            for i, (path, leaf) in enumerate(leaves)
        ],
    )


def _bits(codec: Codec, sent: Tree) -> int:
    return sum(
        _FLOAT * math.prod(leaf.shape)
        if _is_raw(path)
        else codec.bits(math.prod(leaf.shape))
        for path, leaf in jax.tree_util.tree_leaves_with_path(sent)
    )


def mean_sign(
    theta: Float[np.ndarray, "*axes"], sigma: float
) -> Float[np.ndarray, "*axes"]:
    """Mean of the signs that clients send of weights ~ N(theta, sigma^2).

    erf(theta / (sqrt 2 sigma)); our form, for binary uplinks as in Yang et al. 2021
    (arXiv 2110.02226).
    """
    return np.asarray(jax.scipy.special.erf(np.asarray(theta) / (math.sqrt(2) * sigma)))


def weight_from_mean_sign(
    mean: Float[np.ndarray, "*axes"], sigma: float
) -> Float[np.ndarray, "*axes"]:
    """The theta that makes a mean sign most likely: undoes `mean_sign`."""
    inverse = jax.scipy.special.erfinv(np.asarray(mean))
    return np.asarray(math.sqrt(2) * sigma * inverse)
