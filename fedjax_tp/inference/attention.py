"""Self-attention whose values are pruned and in a few bits, at inference.

Values are those of softmax(q k^T scale); rows and columns of padding are 0 before
pruning. What is pruned, and what the rest becomes, is said in
`fedjax_tp.inference.quantizers`. Source: Ji et al. 2021 (Findings of ACL), section 3.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_tp.inference import quantizers
from fedjax_tp.inference.kernels import quantized_attention as kernel
from fedjax_tp.types import Array, Bool, Float, InputError, Int

IMPLEMENTATIONS = ("reference", "blockwise", "pallas")

QUERIES = 128
"""Queries of a block."""
_SCORES_BYTES = 4 << 20
"""About the scores that are computed at once: what stays in a CPU's caches."""


class Statistics(NamedTuple):
    """Of the attention values that are seen: of no padding, masked nor to come.

    Attributes:
      share_pruned: how many of them become 0.
      histogram: how many have each code. Without bits, or where they are traced, there
        are two: 0 and kept.
    """

    share_pruned: Float[Array, "batch heads"]
    histogram: Int[Array, "batch heads codes"]


class _Rule(NamedTuple):
    """What becomes of attention values, as numbers: other ones need no new program.

    threshold prunes alone, bits and minimum are those of the grid, if there is one.
    """

    threshold: Float[Array, ""]
    bits: Int[Array, ""] | None = None
    minimum: Float[Array, ""] | None = None


class _Inputs(NamedTuple):
    """All that is a number, as `quantized_attention` got it."""

    q: Array
    k: Array
    v: Array
    scale: Array
    rule: _Rule
    lengths: Array | None
    mask: Array | None


class _How(NamedTuple):
    """What decides which program is compiled."""

    implementation: str
    is_log: bool
    codes: int
    counted: int
    causal: bool
    renormalize: bool
    return_statistics: bool
    interpret: bool


def quantized_attention(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch length heads head_dim"],
    v: Float[Array, "batch length heads head_dim"],
    *,
    bits: int | Int[Array, ""] | None,
    threshold: float | Float[Array, ""],
    lengths: Int[Array, " batch"] | None = None,
    mask: Bool[Array, "#batch #heads #length length"] | None = None,
    causal: bool = False,
    scale: float | None = None,
    implementation: str | None = None,
    is_log: bool = True,
    renormalize: bool = False,
    return_statistics: bool = False,
    interpret: bool = False,
) -> (
    Float[Array, "batch length heads head_dim"]
    | tuple[Float[Array, "batch length heads head_dim"], Statistics]
):
    """Attention whose values are pruned and then coded in a few bits.

    bits and threshold may be traced: a sweep over them needs one program. Padded keys
    and values are not looked at, whatever they hold; padded queries give zeros, and so
    does a query that sees no key.

    Args:
      q, k, v: queries, keys and values, float32 or bfloat16.
      bits: of a code, 1 to 8; None prunes alone.
      threshold: values at or below it become 0, in [0, 1). It is also the minimum of
        the grid of codes; with a threshold of 0 that is 1e-10.
      lengths: of each sequence, up to `length`; the rest is padding.
      mask: where a query sees a key.
      causal: a query sees the keys up to its own place alone.
      scale: of the scores; head_dim^-1/2 by default.
      implementation: `reference` builds all values; `blockwise` those of a block of
        queries at a time, in XLA; `pallas` is a kernel for GPU and TPU (logarithmic
        codes, no mask, head_dim 16 to 128, and as long as its memory there allows).
        None chooses by platform and size: the kernel where it can be used, else blocks.
      is_log: logarithmic bins, or linear ones.
      renormalize: rows by their sum, at the end. The paper does not do so.
      return_statistics: return `Statistics` too.
      interpret: run the kernel where there is none for the platform; slow.

    Returns:
      The output; with `return_statistics` a pair of it and `Statistics`.

    Raises:
      InputError: a shape, a type, bits, threshold or the implementation is not allowed;
        or a gradient is asked for.
    """
    if bits is not None:
        quantizers.check_bits(bits)
    quantizers.check_threshold(threshold)
    _check_arrays(q, k, v, lengths, mask)
    needs = kernel.unsupported(q, is_log=is_log, has_mask=mask is not None)
    implementation = _chosen(implementation, needs, interpret)
    rule, codes, counted = _Rule(jnp.asarray(threshold, jnp.float32)), 2, 2
    if bits is not None:
        grid = quantizers.grid_above(threshold, bits, is_log=is_log)
        minimum = jnp.asarray(grid.minimum, jnp.float32)
        rule = _Rule(rule.threshold, jnp.asarray(bits), minimum)
        codes = 2**quantizers.MOST_BITS
        if not quantizers.is_traced(bits):
            codes = counted = 2 ** int(bits)
    how = _How(
        implementation,
        is_log,
        codes,
        counted,
        causal,
        renormalize,
        return_statistics,
        interpret,
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = _Inputs(q, k, v, jnp.asarray(scale), rule, lengths, mask)
    out, statistics = _attend(how, inputs)
    return (out, statistics) if return_statistics else out


def _check_arrays(
    q: Array, k: Array, v: Array, lengths: Array | None, mask: Array | None
) -> None:
    if q.ndim != 4 or not q.shape == k.shape == v.shape:
        raise InputError(
            f"shapes of q, k and v are {q.shape}, {k.shape} and {v.shape}; allowed is "
            "three times [batch, length, heads, head_dim]"
        )
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype != q.dtype or not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(
                f"{name} is of {array.dtype}; allowed is one floating type for q, k, v"
            )
    batch, length, heads, _ = q.shape
    if lengths is not None:
        if lengths.shape != (batch,):
            raise InputError(
                f"shape of lengths is {lengths.shape}; allowed is {(batch,)}"
            )
        if not quantizers.is_traced(lengths) and batch:
            least, most = int(lengths.min()), int(lengths.max())
            if least < 0 or most > length:
                raise InputError(
                    f"lengths are {least} to {most}; allowed is 0 to {length}"
                )
    if mask is not None:
        if mask.dtype != bool:
            raise InputError(
                f"mask is of {mask.dtype}; allowed is bool, True where a key is seen"
            )
        wanted = (batch, heads, length, length)
        fits = mask.ndim == 4 and all(
            size in (1, whole) for size, whole in zip(mask.shape, wanted, strict=True)
        )
        if not fits or mask.shape[-1] != length:
            raise InputError(
                f"shape of mask is {mask.shape}; allowed is {wanted}, any of the first "
                "three may be 1"
            )


def _chosen(
    implementation: str | None, kernel_needs: str | None, interpret: bool
) -> str:
    has_kernel = interpret or jax.default_backend() in kernel.PLATFORMS
    if implementation is None:
        return "pallas" if has_kernel and kernel_needs is None else "blockwise"
    if implementation not in IMPLEMENTATIONS:
        raise InputError(
            f"implementation is {implementation!r}; allowed is one of "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    if implementation == "pallas" and not has_kernel:
        kernel_needs = f"a GPU or TPU (it is {jax.default_backend()}), or interpret"
    if implementation == "pallas" and kernel_needs is not None:
        raise InputError(f"implementation is 'pallas', which needs {kernel_needs}")
    return implementation


@partial(jax.custom_jvp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=(0,))
def _attend(how: _How, inputs: _Inputs) -> tuple[Array, Statistics | None]:
    if inputs.lengths is not None:
        # Padding may hold anything, and 0 * NaN is NaN.
        is_real = jnp.arange(inputs.q.shape[1]) < inputs.lengths[:, None]
        k, v = (jnp.where(is_real[..., None, None], x, 0) for x in (inputs.k, inputs.v))
        inputs = inputs._replace(k=k, v=v)
    implement: dict[str, Callable] = {
        "reference": _reference,
        "blockwise": _blockwise,
        "pallas": _pallas,
    }
    out, histogram = implement[how.implementation](how, inputs)
    if histogram is None:
        return out, None
    total = jnp.maximum(jnp.sum(histogram, axis=-1), 1)
    return out, Statistics(histogram[..., 0] / total, histogram)


@_attend.defjvp
def _no_gradient(how: _How, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    raise InputError(
        "quantized_attention is for inference: codes have no gradient; train with full "
        "attention"
    )


def _seen(
    queries: Int[Array, " queries"],
    length: int,
    lengths: Array | None,
    mask: Array | None,
    causal: bool,
) -> Bool[Array, "#batch #heads queries keys"] | None:
    """Where a query sees a key; None if everywhere."""
    keys = jnp.arange(length)
    parts = []
    if lengths is not None:
        bounds = lengths[:, None, None, None]
        parts.append((queries[:, None] < bounds) & (keys < bounds))
    if causal:
        parts.append((keys <= queries[:, None])[None, None])
    if mask is not None:
        rows = mask if mask.shape[2] == 1 else jnp.take(mask, queries, axis=2)
        parts.append(rows)
    seen = None
    for part in parts:
        seen = part if seen is None else seen & part
    return seen


def _reference(how: _How, inputs: _Inputs) -> tuple[Array, Array | None]:
    """The formula read aloud: softmax, zeros in padding, prune, quantize, times v."""
    q, k, v, scale, rule, lengths, mask = inputs
    scores = scale * jnp.einsum(
        "bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32
    )
    seen = _seen(jnp.arange(q.shape[1]), q.shape[1], lengths, mask, how.causal)
    if seen is None:
        a = jax.nn.softmax(scores)
    else:
        # A row that sees nothing is all 0, and not NaN.
        a = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), where=seen)
        a = jnp.where(seen, a, 0)
    a = quantizers.prune(a, rule.threshold)
    codes = (a > 0).astype(jnp.uint8)
    if rule.bits is not None and rule.minimum is not None:
        grid = quantizers.Grid(rule.bits, rule.minimum, how.is_log)
        codes = quantizers.encode(a, grid)
        a = quantizers.quantize(a, grid)
    if how.renormalize:
        a = quantizers.renormalize(a)
    out = jnp.einsum(
        "bhqk,bkhd->bqhd", a.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    histogram = _count(how, codes, seen) if how.return_statistics else None
    return out.astype(q.dtype), histogram


def _count(
    how: _How, codes: Array, seen: Array | None
) -> Int[Array, "batch heads codes"]:
    """How many values have each code; the last also counts those above it."""
    codes = jnp.minimum(codes, how.counted - 1).astype(jnp.int32)
    if seen is not None:
        codes = jnp.where(seen, codes, how.counted)

    def of(code: Array) -> Array:
        return jnp.sum(codes == code, axis=(-2, -1), dtype=jnp.int32)

    by_code = jax.lax.map(of, jnp.arange(how.counted))
    return jnp.moveaxis(by_code, 0, -1)


def _blockwise(how: _How, inputs: _Inputs) -> tuple[Array, Array | None]:
    """A block of queries against all keys at a time, so that memory grows as length.

    The code is a floor of an affine function of score - logsumexp, and its level a
    product of powers of the grid's ratio, by the bits of the code: attention values
    themselves are never computed.
    """
    q, k, v, scale, rule, lengths, mask = inputs
    batch, length, heads, head_dim = q.shape
    # Of bfloat16 the product is scaled, in float32, and not the queries.
    if q.dtype == jnp.float32:
        q, scale = q * scale, jnp.ones(())
    q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q, k, v))
    if length <= QUERIES:
        seen = _seen(jnp.arange(length), length, lengths, mask, how.causal)
        out, histogram = _block(how, q, k, v, scale, seen, rule)
        return jnp.moveaxis(out, 1, 2).astype(v.dtype), histogram
    blocks = -(-length // QUERIES)
    together = heads_together(heads, length)
    groups = heads // together

    def grouped(x: Array) -> Array:
        return x.reshape(batch * groups, 1, together, length, head_dim)

    fill = ((0, 0), (0, 0), (0, 0), (0, blocks * QUERIES - length), (0, 0))
    by_block = jnp.pad(grouped(q), fill).reshape(
        batch * groups, 1, together, blocks, QUERIES, head_dim
    )

    def one_group(inputs: tuple) -> tuple[Array, Array | None]:
        index, q, k, v = inputs
        row, group = index // groups, index % groups
        own_length = None if lengths is None else lengths[row][None]
        own_mask = None if mask is None else _of_heads(mask, row, group, together)

        def one_block(inputs: tuple) -> tuple[Array, Array | None]:
            block, q = inputs
            queries = block * QUERIES + jnp.arange(QUERIES)
            seen = _seen(queries, length, own_length, own_mask, how.causal)
            if how.return_statistics:
                is_real = (queries < length)[:, None]
                seen = is_real if seen is None else seen & is_real
                seen = jnp.broadcast_to(seen, (1, together, QUERIES, length))
            return _block(how, q, k, v, scale, seen, rule)

        out, histogram = jax.lax.map(
            one_block, (jnp.arange(blocks), jnp.moveaxis(q, 2, 0))
        )
        return out, None if histogram is None else jnp.sum(histogram, axis=0)

    out, histogram = jax.lax.map(
        one_group, (jnp.arange(batch * groups), by_block, grouped(k), grouped(v))
    )
    # [batch * groups, blocks, 1, together, QUERIES, head_dim]
    out = out.reshape(batch, groups, blocks, together, QUERIES, head_dim)
    out = jnp.transpose(out, (0, 2, 4, 1, 3, 5))
    out = out.reshape(batch, blocks * QUERIES, heads, head_dim)[:, :length]
    if histogram is not None:
        histogram = histogram.reshape(batch, heads, how.counted)
    return out.astype(v.dtype), histogram


def heads_together(heads: int, length: int) -> int:
    """Heads whose scores `blockwise` has at once: a divisor of all heads."""
    most = max(1, _SCORES_BYTES // (4 * QUERIES * length))
    return next(d for d in range(min(heads, most), 0, -1) if heads % d == 0)


def _of_heads(mask: Array, row: Array, group: Array, together: int) -> Array:
    """The mask of one sequence and group of heads."""
    row = jnp.where(mask.shape[0] == 1, 0, row)
    mask = jax.lax.dynamic_slice_in_dim(mask, row, 1, axis=0)
    if mask.shape[1] == 1:
        return mask
    return jax.lax.dynamic_slice_in_dim(mask, group * together, together, axis=1)


def _block(
    how: _How,
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch heads keys head_dim"],
    v: Float[Array, "batch heads keys head_dim"],
    scale: Array,
    seen: Array | None,
    rule: _Rule,
) -> tuple[Float[Array, "batch heads queries head_dim"], Array | None]:
    scores = scale * jnp.matmul(q, k.mT, preferred_element_type=jnp.float32)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    normalizer = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # Where nothing is seen, nothing is kept.
    above = scores - jnp.where(normalizer == -jnp.inf, jnp.inf, normalizer)
    codes, values = _codes_and_values(how, above, rule)
    out = jnp.matmul(values.astype(v.dtype), v, preferred_element_type=jnp.float32)
    if how.renormalize:
        total = jnp.sum(values, axis=-1, keepdims=True)
        out = jnp.where(total > 0, out / jnp.where(total > 0, total, 1), 0)
    # A score that is not finite is no reason to keep quiet.
    is_finite = normalizer < jnp.inf
    out = jnp.where(is_finite, out, jnp.nan)
    return out, _count(how, codes, seen) if how.return_statistics else None


def _codes_and_values(
    how: _How, log_values: Float[Array, "*batch queries keys"], rule: _Rule
) -> tuple[Array, Float[Array, "*batch queries keys"]]:
    """Codes of attention values given by their logarithm, and what they stand for."""
    minimum = rule.minimum
    if rule.bits is None or minimum is None:
        values = jnp.exp(log_values)
        is_kept = values > rule.threshold
        return is_kept.astype(jnp.uint8), jnp.where(is_kept, values, 0)
    bins = 2**rule.bits - 1
    if how.is_log:
        width = -jnp.log2(minimum) / bins
        place = log_values * (math.log2(math.e) / width) + bins
        j = jnp.clip(place, 0, bins - 1).astype(jnp.int32)
        values = jnp.exp2(jnp.log2(minimum) + 0.5 * width)
        # On CPU no slower than the exponential of j * width, often a tenth faster.
        for bit in range((how.codes - 1).bit_length()):
            is_set = (j >> bit) & 1 == 1
            values = values * jnp.where(is_set, jnp.exp2(2**bit * width), 1.0)
    else:
        width = (1 - minimum) / bins
        place = (jnp.exp(log_values) - minimum) / width
        j = jnp.clip(place, 0, bins - 1).astype(jnp.int32)
        values = minimum + (j + 0.5) * width
    is_kept = place > 0
    codes = jnp.where(is_kept, j + 1, 0).astype(jnp.uint8)
    return codes, jnp.where(is_kept, values, 0)


def _pallas(how: _How, inputs: _Inputs) -> tuple[Array, Array | None]:
    """The kernel of `fedjax_tp.inference.kernels.quantized_attention`."""
    q, k, v, scale, rule, lengths, _ = inputs  # a mask is refused before
    grid = None if rule.bits is None else (2**rule.bits - 1, rule.minimum)
    found = kernel.attend(
        q,
        k,
        v,
        lengths,
        scale=scale,
        threshold=rule.threshold,
        grid=grid,
        causal=how.causal,
        renormalize=how.renormalize,
        codes=how.codes,
        counted=how.counted,
        return_statistics=how.return_statistics,
        interpret=how.interpret,
    )
    return found.out, found.histogram
