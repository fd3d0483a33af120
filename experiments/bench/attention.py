"""What does quantized attention cost, against full softmax attention?

    python -m experiments.bench.attention

times `jax.nn.dot_product_attention`, the materialized reference, blocks of queries, the
same blocks with plain softmax, and on GPU and TPU the kernel, in turns, over sequence
lengths; and says what temporary memory XLA plans for each. The process is left as a
user's would be (buffers in huge pages, as training has them, make full attention on CPU
nearly twice as fast and the blocks little). The last line is JSON.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import timing
from fedjax_tp.inference import attention
from fedjax_tp.inference.kernels import quantized_attention as kernel
from fedjax_tp.types import InputError


@dataclass(frozen=True)
class Flags:
    """Flags of the attention benchmark."""

    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 8192)
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences."""
    heads: int = 8
    """Attention heads."""
    head_dim: int = 64
    """Width of a head."""
    bits: int = 3
    """Bits of a code."""
    threshold: float = 1e-3
    """Attention values at or below it are 0."""
    spread: float = 1.5
    """Standard deviation of queries and keys: how sharp attention is."""
    repeats: int = 5
    """Times each is timed; medians count."""
    longest_materialized: int = 4096
    """The reference is left out for longer sequences: it needs gigabytes."""
    dtype: str = "float32"
    """Of queries, keys and values: float32 or bfloat16."""


Attend = Callable[..., Any]


def blocks_of_softmax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Full attention in the blocks of `blockwise`: what its codes cost is the rest."""
    batch, length, heads, head_dim = q.shape
    block = min(length, attention.QUERIES)
    q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q * head_dim**-0.5, k, v))
    together = attention.heads_together(heads, length)
    shape = (batch * heads // together, together)
    q = q.reshape(*shape, length // block, block, head_dim)
    k, v = (x.reshape(*shape, length, head_dim) for x in (k, v))

    def one_group(inputs: tuple) -> jax.Array:
        q, k, v = inputs

        def one_block(q: jax.Array) -> jax.Array:
            scores = jnp.matmul(q, k.mT, preferred_element_type=jnp.float32)
            e = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
            out = jnp.matmul(e.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return out / jnp.sum(e, axis=-1, keepdims=True)

        return jax.lax.map(one_block, jnp.moveaxis(q, 1, 0))

    out = jax.lax.map(one_group, (q, k, v))
    out = jnp.moveaxis(out, 1, 2).reshape(batch, heads, length, head_dim)
    return jnp.moveaxis(out, 1, 2).astype(v.dtype)


def contenders(flags: Flags, length: int) -> dict[str, Attend]:
    """What is timed at this length, by name."""
    quantized = partial(
        attention.quantized_attention, bits=flags.bits, threshold=flags.threshold
    )
    found: dict[str, Attend] = {
        "full": jax.nn.dot_product_attention,
        "blocks of softmax": blocks_of_softmax,
        "blockwise": partial(quantized, implementation="blockwise"),
    }
    if length <= flags.longest_materialized:
        found["reference"] = partial(quantized, implementation="reference")
    if jax.default_backend() in kernel.PLATFORMS:
        found["pallas"] = partial(quantized, implementation="pallas")
    return found


def skipped_blocks(q: jax.Array, k: jax.Array, threshold: float, block: int) -> float:
    """The share of blocks of attention values that are all pruned."""
    batch, length, heads, head_dim = q.shape
    fill = ((0, 0), (0, -length % block), (0, 0), (0, 0))
    blocks = -(-length // block)
    by_block = jnp.pad(q, fill).reshape(batch, blocks, block, heads, head_dim)

    def one_block(q: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        a = jax.nn.softmax(scores * head_dim**-0.5)
        a = jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, -length % block)))
        largest = a.reshape(batch, heads, block, blocks, block).max(axis=(2, 4))
        return jnp.mean(largest <= threshold)

    return float(jnp.mean(jax.lax.map(one_block, jnp.moveaxis(by_block, 1, 0))))


def measure(flags: Flags, length: int) -> dict[str, Any]:
    """Milliseconds and temporary megabytes of each, and the share of blocks skipped."""
    rng = np.random.default_rng(0)
    shape = (3, flags.batch, length, flags.heads, flags.head_dim)
    drawn = rng.normal(size=shape) * np.reshape([flags.spread] * 2 + [1], (3, *[1] * 4))
    q, k, v = (jnp.asarray(x, flags.dtype) for x in drawn)
    compiled = {}
    for name, attend in contenders(flags, length).items():
        compiled[name] = jax.jit(attend).lower(q, k, v).compile()
        jax.block_until_ready(compiled[name](q, k, v))
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(flags.repeats):
        for name, call in compiled.items():
            times[name].append(timing.seconds(partial(call, q, k, v)))
    megabytes = {}
    for name, call in compiled.items():
        analysis = call.memory_analysis()
        if analysis is not None:
            megabytes[name] = round(analysis.temp_size_in_bytes / 1e6, 1)
    found: dict[str, Any] = {
        "length": length,
        "ms": {n: round(1e3 * statistics.median(t), 2) for n, t in times.items()},
        "temporary_mb": megabytes,
        "blocks_skipped": round(skipped_blocks(q, k, flags.threshold, 64), 3),
    }
    found["to_full"] = round(found["ms"]["blockwise"] / found["ms"]["full"], 3)
    ours, plain = found["ms"]["blockwise"], found["ms"]["blocks of softmax"]
    found["to_blocks_of_softmax"] = round(ours / plain, 3)
    return found


def run(flags: Flags) -> dict[str, Any]:
    """Measures every length and prints a line for each; returns all figures."""
    if flags.dtype not in ("float32", "bfloat16"):
        raise InputError(f"dtype is {flags.dtype!r}; allowed is float32 or bfloat16")
    for length in flags.lengths:
        if length > attention.QUERIES and length % attention.QUERIES:
            raise InputError(
                f"length is {length}; allowed is up to {attention.QUERIES}, or a "
                f"multiple of it"
            )
    if flags.spread <= 0:
        raise InputError(f"spread is {flags.spread}; allowed is above 0")
    rows = []
    for length in flags.lengths:
        found = measure(flags, length)
        rows.append(found)
        cells = [
            f"{name} {ms:g} ms"
            + (f", {found['temporary_mb'][name]:g} MB" if found["temporary_mb"] else "")
            for name, ms in found["ms"].items()
        ]
        print(f"N = {length}: " + "; ".join(cells), flush=True)
        print(
            f"  blockwise takes {found['to_full']:.2f} of full attention's time, "
            f"{found['to_blocks_of_softmax']:.2f} of the same blocks with softmax; "
            f"{100 * found['blocks_skipped']:.0f}% of blocks are pruned whole"
        )
    figures = {
        "benchmark": "attention",
        "device": jax.devices()[0].device_kind,
        "heads": flags.heads,
        "head_dim": flags.head_dim,
        "bits": flags.bits,
        "threshold": flags.threshold,
        "dtype": flags.dtype,
        "lengths": rows,
    }
    timing.report(**figures)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return timing.run_main(
        run, Flags(), argv, __doc__ or "", "experiments.bench.attention", tuned=False
    )


if __name__ == "__main__":
    raise SystemExit(main())
