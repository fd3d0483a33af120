"""Attention values in a few bits: pruning, and codes on a grid, without retraining.

After Ji, Jain, Ferdman, Milder, Schwartz and Balasubramanian, "On the Distribution,
Sparsity, and Inference-time Quantization of Attention Values in Transformers" (Findings
of ACL 2021). A value a in [0, 1] becomes one of 2^bits codes; code 0 is the value 0.
Rows are not made to sum to one again, unless `renormalize` is called.

Two things are done otherwise than in the authors' program: a value at or above 1 is in
the highest bin of every grid, and `boolean` counts within a row unless told otherwise.

On arrays with values every function refuses what is negative or NaN; under `jit` there
are no values to look at, and a negative number becomes 0, a NaN stays one.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_tp.types import Array, Bool, Float, InputError, Int, UInt8

MOST_BITS = 8
UNPRUNED_MINIMUM = 1e-10
"""Where the logarithmic grid without pruning begins."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["bits", "minimum"],
    meta_fields=["is_log"],
)
@dataclass(frozen=True)
class Grid:
    """2^bits - 1 bins over [minimum, 1], whose value is their middle; below them 0.

    bits and minimum may be traced: no program is compiled again for other ones.

    Attributes:
      bits: 1 to 8.
      minimum: the lower end of the lowest bin.
      is_log: are bins equal in log2 (with their geometric middle), or in value?
    """

    bits: int | Int[Array, ""]
    minimum: float | Float[Array, ""]
    is_log: bool = True

    @property
    def bins(self) -> int | Array:
        """How many bins there are."""
        return 2**self.bits - 1


def log_grid(bits: int | Array, minimum: float | Array) -> Grid:
    """The paper's: 2^bits - 1 logarithmic bins over [minimum, 1], below them 0.

    Raises:
      InputError: bits or minimum is out of range.
    """
    check_bits(bits)
    check_minimum(minimum)
    return Grid(bits, minimum)


def unpruned_log_grid(
    bits: int | Array, minimum: float | Array = UNPRUNED_MINIMUM
) -> Grid:
    """2^bits logarithmic bins over [minimum, 1], of which the lowest is 0.

    Raises:
      InputError: bits or minimum is out of range.
    """
    check_bits(bits)
    check_minimum(minimum)
    return Grid(bits, minimum ** (1 - 0.5**bits))


def linear_grid(bits: int | Array) -> Grid:
    """2^bits equal bins over [0, 1], of which the lowest is 0.

    Raises:
      InputError: bits is out of range.
    """
    return grid_above(0.0, bits, is_log=False)


def pruned_linear_grid(bits: int | Array, minimum: float | Array) -> Grid:
    """2^bits equal bins over [minimum, 1], of which the lowest is 0.

    Raises:
      InputError: bits or minimum is out of range.
    """
    check_minimum(minimum)
    return grid_above(minimum, bits, is_log=False)


def grid_above(
    threshold: float | Array, bits: int | Array, *, is_log: bool = True
) -> Grid:
    """The grid of values that a threshold has pruned; without one (0) the grid that
    prunes none: `log_grid` or `unpruned_log_grid`, or the linear ones.

    Raises:
      InputError: bits or threshold is out of range.
    """
    check_bits(bits)
    check_threshold(threshold)
    if not is_log:
        return Grid(bits, threshold + (1 - threshold) * 0.5**bits, is_log=False)
    unpruned = unpruned_log_grid(bits)
    if is_traced(threshold):
        return Grid(bits, jnp.where(threshold > 0, threshold, unpruned.minimum))
    return Grid(bits, threshold) if threshold > 0 else unpruned


def check_bits(bits: int | Array) -> None:
    """Raises InputError unless bits is a whole number from 1 to 8."""
    if is_traced(bits):
        return
    if np.ndim(bits) or not (1 <= bits <= MOST_BITS and int(bits) == bits):
        raise InputError(f"bits is {bits}; allowed is 1 to {MOST_BITS}")


def check_minimum(minimum: float | Array) -> None:
    """Raises InputError unless minimum is in (0, 1)."""
    _check_within(minimum, "minimum", zero_is_allowed=False)


def check_threshold(threshold: float | Array) -> None:
    """Raises InputError unless threshold is in [0, 1)."""
    _check_within(threshold, "threshold", zero_is_allowed=True)


def _check_within(value: float | Array, name: str, *, zero_is_allowed: bool) -> None:
    if is_traced(value):
        return
    # As the programs will have it: 1 - 1e-9 is 1 in float32.
    number = np.float32(value)
    above = number >= 0 if zero_is_allowed else number > 0
    if np.ndim(value) or not (above and number < 1):
        least = "0 or more" if zero_is_allowed else "above 0"
        raise InputError(f"{name} is {value}; allowed is {least}, and below 1")


def is_traced(value: object) -> bool:
    """Has this no value yet (under `jit` and the like), so that none can be checked?"""
    return isinstance(value, jax.core.Tracer)


def check_weights(a: Float[Array, "..."]) -> None:
    """Raises InputError for a negative or NaN attention value; looks at values alone,
    so it does nothing under `jit`."""
    if is_traced(a):
        return
    is_bad = ~(np.asarray(a) >= 0)
    if is_bad.any():
        place = tuple(int(axis[0]) for axis in np.nonzero(is_bad))
        raise InputError(
            f"attention value at {list(place)} is {np.asarray(a)[place]}; allowed is 0 "
            "or more"
        )


def prune(
    a: Float[Array, "*axes"], threshold: float | Float[Array, ""]
) -> Float[Array, "*axes"]:
    """a where a > threshold, else 0: one absolute threshold for all.

    Raises:
      InputError: threshold is not in [0, 1); a has a negative or NaN value.
    """
    check_threshold(threshold)
    check_weights(a)
    return _prune(a, threshold)


def prune_relative(
    a: Float[Array, "*rows keys"], threshold: float | Float[Array, ""]
) -> Float[Array, "*rows keys"]:
    """a where a > threshold * the largest of its row, else 0.

    Raises:
      InputError: threshold is not in [0, 1); a has a negative or NaN value.
    """
    check_threshold(threshold)
    check_weights(a)
    return _prune(a, threshold * jnp.max(a, axis=-1, keepdims=True))


@jax.jit
def _prune(a: Array, threshold: Array) -> Array:
    return jnp.where(a <= threshold, jnp.zeros_like(a), a)


def threshold_for_share(
    a: Float[Array, "*axes"],
    share: float | Float[Array, ""],
    where: Bool[Array, "*axes"] | None = None,
) -> Float[Array, ""]:
    """The smallest value of `a` that, as a threshold, prunes at least this share.

    Below 1, as thresholds are: values of 1, where a query sees one key, are never
    pruned.

    Args:
      a: attention values.
      share: of the values, 0 to 1; 0 gives a threshold of 0.
      where: the values that count (those of no padding); None for all.

    Raises:
      InputError: share is not in [0, 1]; a has a negative or NaN value.
    """
    if not is_traced(share) and not 0 <= share <= 1:
        raise InputError(f"share is {share}; allowed is 0 to 1")
    check_weights(a)
    return _threshold_for_share(a, share, where)


@jax.jit
def _threshold_for_share(a: Array, share: Array, where: Array | None) -> Array:
    counts = jnp.ones(a.shape, bool) if where is None else where
    ordered = jnp.sort(jnp.where(counts, a, jnp.inf), axis=None)
    # In integers from here: in float32 a share of many values is off by some.
    place = jnp.ceil(share * jnp.sum(counts)).astype(jnp.int32) - 1
    found = ordered.at[jnp.maximum(place, 0)].get(mode="clip")
    found = jnp.minimum(found, np.nextafter(np.float32(1), np.float32(0)))
    return jnp.where((place < 0) | ~jnp.isfinite(found), jnp.zeros_like(found), found)


def encode(a: Float[Array, "*axes"], grid: Grid) -> UInt8[Array, "*axes"]:
    """The code of each value: 0 for what becomes 0, then upwards bin by bin.

    Raises:
      InputError: a has a negative or NaN value.
    """
    check_weights(a)
    return _encode(a, grid)


def decode(codes: UInt8[Array, "*axes"], grid: Grid) -> Float[Array, "*axes"]:
    """The value of each code: 0, or the middle of its bin."""
    return _decode(codes, grid)


def quantize(a: Float[Array, "*axes"], grid: Grid) -> Float[Array, "*axes"]:
    """decode(encode(a)), in the type of `a`.

    Raises:
      InputError: a has a negative or NaN value.
    """
    check_weights(a)
    return _quantize(a, grid)


@jax.jit
def _encode(a: Array, grid: Grid) -> Array:
    a = a.astype(jnp.float32)
    minimum = jnp.asarray(grid.minimum, jnp.float32)
    if grid.is_log:
        # 1 where a is 0: log2 of 0 is minus infinity.
        place = 1 - jnp.log2(jnp.where(a > 0, a, 1.0)) / jnp.log2(minimum)
    else:
        place = (a - minimum) / (1 - minimum)
    j = jnp.clip(jnp.floor(place * grid.bins), 0, grid.bins - 1)
    return jnp.where((a > 0) & (a >= minimum), j + 1, 0).astype(jnp.uint8)


@jax.jit
def _decode(codes: Array, grid: Grid) -> Array:
    middle = (codes.astype(jnp.float32) - 0.5) / grid.bins
    return jnp.where(codes == 0, 0.0, _at(middle, grid))


@jax.jit
def _quantize(a: Array, grid: Grid) -> Array:
    value = _decode(_encode(a, grid), grid).astype(a.dtype)
    return jnp.where(jnp.isnan(a), a, value)


def _at(place: Array, grid: Grid) -> Array:
    """The value at a place in the grid: 0 at the minimum, 1 at 1."""
    minimum = jnp.asarray(grid.minimum, jnp.float32)
    if grid.is_log:
        return jnp.exp2(jnp.log2(minimum) * (1 - place))
    return minimum + (1 - minimum) * place


def levels(grid: Grid) -> Float[Array, " codes"]:
    """The 2^bits values of a grid, by code; its bits must not be traced."""
    return decode(jnp.arange(2**grid.bits, dtype=jnp.uint8), grid)


def cut_points(grid: Grid) -> Float[Array, " cuts"]:
    """The lower ends of the bins, ascending; grid.bits must not be traced."""
    return _at(jnp.arange(grid.bins) / grid.bins, grid)


def log_quantize(
    a: Float[Array, "*axes"], *, bits: int | Array, minimum: float | Array
) -> Float[Array, "*axes"]:
    """The paper's method: 2^bits - 1 logarithmic levels over [minimum, 1], else 0.

    With D = -log2(minimum) / (2^bits - 1) and j = floor((log2 a - log2 minimum) / D),
    a becomes 2^(log2 minimum + (j + 1/2) D), and 0 below minimum.

    Raises:
      InputError: bits, minimum or a value of `a` is out of range.
    """
    return quantize(a, log_grid(bits, minimum))


def log_quantize_unpruned(
    a: Float[Array, "*axes"],
    *,
    bits: int | Array,
    minimum: float | Array = UNPRUNED_MINIMUM,
) -> Float[Array, "*axes"]:
    """2^bits logarithmic bins over [minimum, 1], of which the lowest is 0.

    Raises:
      InputError: bits, minimum or a value of `a` is out of range.
    """
    return quantize(a, unpruned_log_grid(bits, minimum))


def linear_quantize(
    a: Float[Array, "*axes"], *, bits: int | Array
) -> Float[Array, "*axes"]:
    """2^bits equal bins over [0, 1], of which the lowest is 0.

    Raises:
      InputError: bits or a value of `a` is out of range.
    """
    return quantize(a, linear_grid(bits))


def linear_quantize_pruned(
    a: Float[Array, "*axes"], *, bits: int | Array, minimum: float | Array
) -> Float[Array, "*axes"]:
    """2^bits equal bins over [minimum, 1], of which the lowest is 0: more than what is
    below minimum.

    Raises:
      InputError: bits, minimum or a value of `a` is out of range.
    """
    return quantize(a, pruned_linear_grid(bits, minimum))


def boolean(
    a: Float[Array, "*axes"],
    threshold: float | Float[Array, ""],
    *,
    axis: int | None = -1,
) -> Float[Array, "*axes"]:
    """Who is at or above the threshold, all with the same value: one by their number.

    Args:
      a: attention values.
      threshold: in [0, 1).
      axis: along which they are counted; None counts them in the whole array, as the
        authors' program does.

    Raises:
      InputError: threshold is not in [0, 1); a has a negative or NaN value.
    """
    check_threshold(threshold)
    check_weights(a)
    is_kept = (a >= threshold) & (a > 0)
    count = jnp.sum(is_kept, axis=axis, keepdims=axis is not None)
    return jnp.where(is_kept, 1 / jnp.maximum(count, 1), 0).astype(a.dtype)


def renormalize(a: Float[Array, "*rows keys"]) -> Float[Array, "*rows keys"]:
    """Each row by its sum; rows of zeros stay zeros. The paper does not do this."""
    total = jnp.sum(a, axis=-1, keepdims=True)
    return jnp.where(total > 0, a / jnp.where(total > 0, total, 1), 0).astype(a.dtype)


def pack(codes: UInt8[Array, "*rows keys"], bits: int) -> UInt8[Array, "*rows bytes"]:
    """Codes of 2 or 4 bits, four or two to a byte, the first in the lowest bits.

    The last byte of a row is filled up with code 0.

    Raises:
      InputError: bits is neither 2 nor 4; a code does not fit (looked at outside `jit`
        alone).
    """
    per_byte = _per_byte(bits)
    if not is_traced(codes) and codes.size and int(jnp.max(codes)) >= 2**bits:
        raise InputError(
            f"code is {int(jnp.max(codes))}; allowed in {bits} bits is 0 to "
            f"{2**bits - 1}"
        )
    fill = -codes.shape[-1] % per_byte
    padded = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, fill)])
    grouped = padded.reshape(*codes.shape[:-1], -1, per_byte)
    shifts = bits * jnp.arange(per_byte, dtype=jnp.uint8)
    return jnp.bitwise_or.reduce(grouped << shifts, axis=-1).astype(jnp.uint8)


def unpack(
    packed: UInt8[Array, "*rows bytes"], bits: int, length: int
) -> UInt8[Array, "*rows keys"]:
    """Undoes `pack`; `length` is the number of codes of a row.

    Raises:
      InputError: bits is neither 2 nor 4, or so many codes are not in a row.
    """
    per_byte = _per_byte(bits)
    if not 0 <= length <= packed.shape[-1] * per_byte:
        raise InputError(
            f"length is {length}; allowed is 0 to {packed.shape[-1] * per_byte}, what "
            f"{packed.shape[-1]} bytes hold"
        )
    shifts = bits * jnp.arange(per_byte, dtype=jnp.uint8)
    codes = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :length]


def _per_byte(bits: int) -> int:
    if bits not in (2, 4):
        raise InputError(f"bits is {bits}; allowed for packed codes is 2 or 4")
    return 8 // bits
