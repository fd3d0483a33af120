"""Quantized attention in one Pallas kernel for GPU and TPU: nothing of size length².

A program has a block of queries of one head and goes twice over the blocks of keys. The
first pass finds each row's logsumexp, and keeps each block's maximum. The second
computes scores again, turns them into codes (a floor of an affine function) and
multiplies what the codes stand for with the values; a block whose every value is pruned
is skipped. Levels are products of powers of the grid's ratio, chosen by the bits of the
code: the second pass has no exponential.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from fedjax_tp.inference.quantizers import MOST_BITS
from fedjax_tp.types import Array, Float, Int

PLATFORMS = ("gpu", "tpu")
HEAD_DIMS = (16, 128)

# Places in the array of numbers that a program reads.
_SCALE, _SLOPE, _BINS, _BASE, _THRESHOLD, _LOG_THRESHOLD, _FACTORS = range(7)
_NUMBERS = _FACTORS + MOST_BITS
_LOWEST = -1e30
"""Of a score that is not seen; finite, since inf - inf is NaN."""


class Attended(NamedTuple):
    """What the kernel returns.

    Attributes:
      out: as of `quantized_attention`.
      histogram: how many seen values have each code; None if not asked for.
      blocks: of each head, blocks of values that are seen, and those of them that were
        skipped in the second pass; None if not asked for.
    """

    out: Float[Array, "batch length heads head_dim"]
    histogram: Int[Array, "batch heads codes"] | None
    blocks: Int[Array, "batch heads 2"] | None


def unsupported(
    q: Array, *, is_log: bool, has_mask: bool, platform: str | None = None
) -> str | None:
    """What the kernel would need of its inputs; None if it can do with them."""
    least, most = HEAD_DIMS
    if not is_log:
        return "logarithmic codes"
    if has_mask:
        return "no mask"
    if not least <= q.shape[-1] <= most:
        return f"head_dim {least} to {most} (it is {q.shape[-1]})"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"float32 or bfloat16 (it is {q.dtype})"
    longest = _longest(q, platform or jax.default_backend())
    if q.shape[1] > longest:
        return f"at most {longest} tokens (there are {q.shape[1]})"
    return None


def _longest(q: Array, platform: str) -> int:
    if platform == "tpu":
        # Keys and values of a head, both twice (the next head's are on their way), in
        # three quarters of the fast memory's 16 MiB; rows take 128 lanes at least.
        return (12 << 20) // (4 * 128 * q.dtype.itemsize)
    # A program has the maximum of each block in registers.
    return 16384


def attend(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch length heads head_dim"],
    v: Float[Array, "batch length heads head_dim"],
    lengths: Int[Array, " batch"] | None,
    *,
    scale: float | Float[Array, ""],
    threshold: Float[Array, ""],
    grid: tuple[Any, Any] | None,
    causal: bool = False,
    renormalize: bool = False,
    codes: int = 2,
    counted: int | None = None,
    return_statistics: bool = False,
    interpret: bool = False,
    platform: str | None = None,
    block: tuple[int, int] | None = None,
) -> Attended:
    """Attention with pruned and coded values; inputs are not checked.

    Args:
      q, k, v, lengths, scale, threshold, causal, renormalize: as of
        `fedjax_tp.inference.attention.quantized_attention`.
      grid: number of bins and minimum of the logarithmic grid; None prunes alone.
      codes: of the grid, or of the largest there may be if it is traced.
      counted: length of the histogram, `codes` by default; the last entry also counts
        the codes above it.
      return_statistics: count codes, and the blocks that are skipped.
      interpret: run without a GPU or TPU.
      platform: "gpu" or "tpu"; by default the one of this process.
      block: queries and keys of a block.
    """
    batch, length, heads, head_dim = q.shape
    platform = platform or jax.default_backend()
    block_q, block_k = block or _block_sizes(platform, length)
    padded = -(-length // math.lcm(block_q, block_k)) * math.lcm(block_q, block_k)
    # A power of two, as the matrix units want it; zeros add nothing to scores.
    width = max(16, _power(head_dim))
    fill = ((0, 0), (0, padded - length), (0, width - head_dim))

    def by_head(x: Array) -> Array:
        x = jnp.moveaxis(x, 2, 1).reshape(batch * heads, length, head_dim)
        return jnp.pad(x, fill)

    if lengths is None:
        lengths = jnp.full(batch, length, jnp.int32)
    # Under jit nobody has checked them, and keys past the end are another head's.
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, length)
    by_head_lengths = jnp.repeat(lengths, heads, total_repeat_length=batch * heads)
    counted = codes if counted is None else counted
    blocks_q = padded // block_q
    shapes = [_like(q, (batch * heads, padded, width), q.dtype)]
    specs = [pl.BlockSpec((None, block_q, width), lambda head, i: (head, i, 0))]
    if return_statistics:
        counts_width = _power(counted + 2)
        shape = (batch * heads, blocks_q, 1, counts_width)
        shapes.append(_like(q, shape, jnp.int32))
        specs.append(
            pl.BlockSpec((None, None, 1, counts_width), lambda head, i: (head, i, 0, 0))
        )
    scalars = _scalar_spec(platform, interpret)
    whole = pl.BlockSpec((None, padded, width), lambda head, i: (head, 0, 0))
    found = pl.pallas_call(
        partial(
            _kernel,
            block_k=block_k,
            blocks_k=padded // block_k,
            has_grid=grid is not None,
            causal=causal,
            renormalize=renormalize,
            codes=codes,
            counted=counted,
        ),
        out_shape=shapes,
        grid=(batch * heads, blocks_q),
        in_specs=[scalars(_NUMBERS), scalars(batch * heads), specs[0], whole, whole],
        out_specs=specs,
        interpret=interpret,
        name="quantized_attention",
        **_compiler_params(platform, interpret),
    )(
        _numbers(scale, threshold, grid)[None],
        by_head_lengths[None],
        *map(by_head, (q, k, v)),
    )
    out = found[0][:, :length, :head_dim].reshape(batch, heads, length, head_dim)
    out = jnp.moveaxis(out, 1, 2)
    if not return_statistics:
        return Attended(out, None, None)
    counts = jnp.sum(found[1], axis=(1, 2)).reshape(batch, heads, -1)
    return Attended(out, counts[..., :counted], counts[..., counted : counted + 2])


def _block_sizes(platform: str, length: int) -> tuple[int, int]:
    if platform == "tpu":
        return 128, 128
    size = min(64, max(16, _power(length)))
    return size, size


def _scalar_spec(platform: str, interpret: bool) -> Any:
    # Of two axes, so that a third from vmap leaves the last two whole.
    space = pltpu.SMEM if platform == "tpu" and not interpret else None
    return lambda size: pl.BlockSpec(
        (1, size), lambda head, i: (0, 0), memory_space=space
    )


def _like(q: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape of a result that varies over the same mesh axes as `q`."""
    kind = getattr(jax.typeof(q), "manual_axis_type", None)
    more = {} if kind is None else {"manual_axis_type": kind}
    return jax.ShapeDtypeStruct(shape, dtype, **more)


def _compiler_params(platform: str, interpret: bool) -> dict[str, Any]:
    if interpret:
        return {}
    if platform == "tpu":
        parallel = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"))
        return {"compiler_params": parallel}
    return {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=2)}


def _numbers(
    scale: float | Array, threshold: Array, grid: tuple[Any, Any] | None
) -> Float[Array, " numbers"]:
    """What a program needs of the rule, as numbers, so that they may be traced."""
    if grid is None:
        slope = bins = base = jnp.zeros(())
        factors = jnp.ones(MOST_BITS)
    else:
        bins, minimum = (jnp.asarray(number, jnp.float32) for number in grid)
        bin_width = -jnp.log2(minimum) / bins
        slope = math.log2(math.e) / bin_width
        base = jnp.exp2(jnp.log2(minimum) + 0.5 * bin_width)
        factors = jnp.exp2(bin_width * 2.0 ** jnp.arange(MOST_BITS))
        # What is pruned by the grid: its minimum is the threshold, if there is one.
        threshold = minimum
    head = [scale, slope, bins, base, threshold, jnp.log(threshold)]
    return jnp.concatenate([jnp.stack([jnp.float32(x) for x in head]), factors])


def _kernel(
    numbers_ref: Any,
    lengths_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    counts_ref: Any = None,
    *,
    block_k: int,
    blocks_k: int,
    has_grid: bool,
    causal: bool,
    renormalize: bool,
    codes: int,
    counted: int,
) -> None:
    length = lengths_ref[0, pl.program_id(0)]
    q = q_ref[...]
    block_q = q.shape[0]
    rows = pl.program_id(1) * block_q + jax.lax.broadcasted_iota(
        jnp.int32, (block_q, 1), 0
    )
    # Blocks of keys that a query of this block may see.
    end = (length + block_k - 1) // block_k
    if causal:
        last_row = (pl.program_id(1) + 1) * block_q
        end = jnp.minimum(end, (last_row + block_k - 1) // block_k)
    is_row = rows < length
    end = jnp.where(pl.program_id(1) * block_q < length, end, 0)

    def scores(j):
        k = k_ref[pl.ds(j * block_k, block_k), :]
        found = numbers_ref[0, _SCALE] * _dot(q, k, transposed=True)
        columns = j * block_k + jax.lax.broadcasted_iota(jnp.int32, (1, block_k), 1)
        seen = is_row & (columns < length)
        if causal:
            seen &= columns <= rows
        return jnp.where(seen, found, _LOWEST), seen

    place_of_block = jax.lax.broadcasted_iota(jnp.int32, (1, _power(blocks_k)), 1)

    def statistics(j, carry):
        largest, total, by_block, num_seen = carry
        found, seen = scores(j)
        largest_here = jnp.max(found, axis=1, keepdims=True)
        by_block = jnp.where(place_of_block == j, largest_here, by_block)
        larger = jnp.maximum(largest, largest_here)
        # Where no key is seen yet, all are as low as the lowest: they do not count.
        grown = jnp.sum(
            jnp.where(seen, jnp.exp(found - larger), 0), axis=1, keepdims=True
        )
        total = total * jnp.exp(largest - larger) + grown
        num_seen = num_seen + jnp.sum(seen.astype(jnp.int32))
        return larger, total, by_block, num_seen

    column = jnp.full((block_q, 1), _LOWEST, jnp.float32)
    by_block = jnp.full((block_q, _power(blocks_k)), _LOWEST, jnp.float32)
    largest, total, by_block, num_seen = jax.lax.fori_loop(
        0, end, statistics, (column, jnp.zeros_like(column), by_block, jnp.int32(0))
    )
    normalizer = jnp.where(total > 0, largest + jnp.log(total), -_LOWEST)
    log_threshold = numbers_ref[0, _LOG_THRESHOLD]
    # By row of the block: does it keep anything there?
    keeps = (by_block - normalizer > log_threshold).astype(jnp.int32)

    def values(j, carry):
        above = scores(j)[0] - normalizer
        if has_grid:
            place = above * numbers_ref[0, _SLOPE] + numbers_ref[0, _BINS]
            is_kept = place > 0
            code = jnp.clip(place, 0, numbers_ref[0, _BINS] - 1).astype(jnp.int32)
            value = jnp.where(is_kept, numbers_ref[0, _BASE], 0)
            for bit in range((codes - 1).bit_length()):
                factor = numbers_ref[0, _FACTORS + bit]
                value = value * jnp.where((code >> bit) & 1 == 1, factor, 1.0)
        else:
            value = jnp.exp(above)
            is_kept = value > numbers_ref[0, _THRESHOLD]
            value = jnp.where(is_kept, value, 0)
            code = jnp.zeros_like(above, dtype=jnp.int32)
        v = v_ref[pl.ds(j * block_k, block_k), :]
        out, rest, counts, skipped = carry
        out = out + _dot(value.astype(v.dtype), v)
        if renormalize:
            rest = rest + jnp.sum(value, axis=1, keepdims=True)
        if counts_ref is not None:
            counts = _counted(counts, jnp.where(is_kept, code + 1, 0), counted)
        return out, rest, counts, skipped

    def skip(j, carry):
        out, rest, counts, skipped = carry
        return out, rest, counts, skipped + 1

    def block(j, carry):
        is_needed = jnp.sum(jnp.where(place_of_block == j, keeps, 0)) > 0
        return jax.lax.cond(is_needed, values, skip, j, carry)

    counts = jnp.zeros((1, 1), jnp.int32)
    if counts_ref is not None:
        counts = jnp.zeros(counts_ref.shape, jnp.int32)
    out, rest, counts, skipped = jax.lax.fori_loop(
        0,
        end,
        block,
        (
            jnp.zeros(q.shape, jnp.float32),
            jnp.zeros((block_q, 1), jnp.float32),
            counts,
            jnp.int32(0),
        ),
    )
    if renormalize:
        out = jnp.where(rest > 0, out / jnp.where(rest > 0, rest, 1), 0)
    # What is not finite among the scores is in the sum; that nothing is kept must not
    # hide it.
    out = jnp.where(jnp.isnan(total) | (largest == jnp.inf), jnp.nan, out)
    out_ref[...] = out.astype(out_ref.dtype)
    if counts_ref is not None:
        place = jax.lax.broadcasted_iota(jnp.int32, counts.shape, 1)
        counts = jnp.where(place == 0, num_seen - jnp.sum(counts), counts)
        counts = jnp.where(place == counted, end, counts)
        counts_ref[...] = jnp.where(place == counted + 1, skipped, counts)


def _dot(a: Array, b: Array, *, transposed: bool = False) -> Array:
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _counted(counts: Array, code: Array, counted: int) -> Array:
    """Counts of the codes that are not 0, added to those before."""
    code = jnp.minimum(code, counted - 1)
    place = jax.lax.broadcasted_iota(jnp.int32, counts.shape, 1)

    def add(which, counts):
        number = jnp.sum((code == which).astype(jnp.int32))
        return jnp.where(place == which, counts + number, counts)

    return jax.lax.fori_loop(1, counted, add, counts)


def _power(number: int) -> int:
    """The smallest power of two that is no smaller; arrays on a GPU have such sizes."""
    return 1 << (number - 1).bit_length()
