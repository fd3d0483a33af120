"""The sweep over thresholds and bits that the experiments on quantized attention share.

A rule says what becomes of attention values; the sweep has full precision, pruning
alone, the wanted bits at each threshold, and all bits with log and linear codes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments import results
from fedjax_tp.inference.attention import quantized_attention
from fedjax_tp.inference.quantizers import check_bits, check_threshold
from fedjax_tp.io import folder, plots, report
from fedjax_tp.models.attention import AttentionFunction, sown_by_layer
from fedjax_tp.types import InputError

THRESHOLDS = "1e-4,3e-4,1e-3,3e-3,1e-2,3e-2,1e-1"
BITS = (2, 3, 4, 5, 6, 7, 8)
PAPER_THRESHOLD = 1e-3
ALLOWED_LOSS = 0.01
"""Of the score at full precision: what quantization may lose."""


class Rule(NamedTuple):
    """What becomes of attention values; the first has full precision."""

    bits: int | None
    threshold: float
    is_log: bool = True

    @property
    def label(self) -> str:
        """For tables."""
        if self == ALL_PRUNED:
            return "all pruned"
        if self.bits is None:
            return f"pruned at {self.threshold:g}" if self.threshold else "full"
        kind = "log" if self.is_log else "linear"
        pruned = f"pruned at {self.threshold:g}" if self.threshold else "not pruned"
        bits = f"{self.bits} bit{'s' if self.bits > 1 else ''}"
        return f"{bits} {kind}, {pruned}"


FULL = Rule(None, 0.0)
ALL_PRUNED = Rule(None, 1 - 2**-20)
"""A control: how much of the score needs attention at all? Only values of 1 are left,
where a query sees one key."""


class Found(NamedTuple):
    """What a rule costs and saves.

    Attributes:
      score: such as accuracy, 0 to 1.
      share_pruned: of attention values that are seen, `[layers, heads]`.
    """

    rule: Rule
    score: float
    share_pruned: np.ndarray


def parse_thresholds(text: str) -> tuple[float, ...]:
    """The thresholds of a flag, ascending.

    Raises:
      InputError: one of them is no number in (0, 1), or comes twice.
    """
    try:
        thresholds = sorted(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"thresholds is {text!r}; allowed are numbers such as {THRESHOLDS}"
        ) from None
    for threshold in thresholds:
        check_threshold(threshold)
    if 0 in thresholds or len(set(thresholds)) < len(thresholds):
        raise InputError(
            f"thresholds is {text!r}; allowed are different ones above 0 (full "
            "precision is always there)"
        )
    return tuple(thresholds)


def rules(bits: int, thresholds: Sequence[float]) -> list[Rule]:
    """The rules of a sweep.

    Args:
      bits: those that are tried at every threshold.
      thresholds: ascending, above 0.

    Raises:
      InputError: bits is out of range.
    """
    check_bits(bits)
    found = [FULL]
    found += [Rule(None, threshold) for threshold in thresholds]
    found += [Rule(bits, threshold) for threshold in (0.0, *thresholds)]
    for is_log in (True, False):
        found += [Rule(b, PAPER_THRESHOLD, is_log) for b in (bits, *BITS)]
    return [*dict.fromkeys(found), ALL_PRUNED]


def attention_of(
    has_bits: bool, is_log: bool
) -> Callable[[Any, Any], AttentionFunction]:
    """`(bits, threshold) -> attention function` with statistics; both may be traced."""

    def of(bits: Any, threshold: Any) -> AttentionFunction:
        return partial(
            quantized_attention,
            bits=bits if has_bits else None,
            threshold=threshold,
            is_log=is_log,
            return_statistics=True,
        )

    return of


def by_kind(make: Callable[[Callable[[Any, Any], AttentionFunction]], Callable]) -> Any:
    """A function of a rule, compiled once for each kind of rule.

    Args:
      make: of `attention_of(...)`, makes a function `(bits, threshold, *rest)`.

    Returns:
      `(rule, *rest)`, jitted.
    """
    compiled: dict[tuple[bool, bool], Callable] = {}

    def call(rule: Rule, *rest: Any) -> Any:
        kind = (rule.bits is not None, rule.is_log)
        if kind not in compiled:
            compiled[kind] = jax.jit(make(attention_of(*kind)))
        return compiled[kind](
            np.int32(rule.bits or 1), np.float32(rule.threshold), *rest
        )

    return call


def pruned_and_seen(sown: Any, is_real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention values that are 0, and all, `[layers, heads]`, over the real examples.

    Args:
      sown: the collection `ATTENDED` of a model with the attention of a rule.
      is_real: `[batch]`.
    """
    statistics = sown_by_layer(sown, "statistics")
    counts = jnp.stack([layer.histogram for layer in statistics])
    counts = jnp.where(is_real[:, None, None], counts, 0)
    return jnp.sum(counts[..., 0], axis=1), jnp.sum(counts, axis=(1, 3))


def relative_loss(found: Found, full: Found) -> float:
    """What is lost, as a share of the score at full precision; negative if gained. All
    where there was nothing: no rule is good enough for a model that is useless."""
    return 1 - found.score / full.score if full.score > 0 else 1.0


def best_within_loss(found: Sequence[Found], bits: int | None) -> Found | None:
    """Of the rules with these bits the one that prunes most and loses little enough."""
    full = found[0]
    allowed = [
        f
        for f in found[1:]
        if f.rule.bits == bits
        and f.rule.is_log
        and f.rule != ALL_PRUNED
        and relative_loss(f, full) < ALLOWED_LOSS
    ]
    return max(allowed, key=lambda f: f.share_pruned.mean(), default=None)


def write_sweep(
    out: Path,
    found: Sequence[Found],
    *,
    bits: int,
    score: str,
    console: Console,
) -> tuple[list[report.Table], dict[str, Path], dict[str, Any]]:
    """Writes tables and pictures of a sweep, and prints them.

    Args:
      out: the folder.
      found: by rule, full precision first.
      bits: those tried at every threshold.
      score: what the score is, such as "accuracy".
      console: prints.

    Returns:
      Tables and pictures for a report, and what belongs into `summary.json`.
    """
    full = found[0]
    rows = [
        {
            "rule": f.rule.label,
            "bits": f.rule.bits,
            "threshold": f.rule.threshold,
            "codes": ("log" if f.rule.is_log else "linear") if f.rule.bits else "",
            score: f.score,
            "relative_loss": relative_loss(f, full),
            "share_pruned": float(f.share_pruned.mean()),
        }
        for f in found
    ]
    folder.write_csv(out / "sweep.csv", rows)
    folder.write_csv(
        out / "heads.csv",
        [
            {"rule": f.rule.label, "layer": layer, "head": head, "share_pruned": share}
            for f in found
            for layer, heads in enumerate(f.share_pruned.tolist(), 1)
            for head, share in enumerate(heads, 1)
        ],
    )
    table = report.Table(
        f"{score} by what becomes of attention values",
        ["attention values", f"{score}, %", "relative loss, %", "pruned, %"],
        [
            [
                f.rule.label,
                f"{100 * f.score:.2f}",
                f"{100 * relative_loss(f, full):+.2f}",
                f"{100 * f.share_pruned.mean():.1f}",
            ]
            for f in found
        ],
    )
    results.show(console, table)
    by_bits = {
        name: {
            f.rule.bits: f.score
            for f in sorted(found, key=lambda f: f.rule.bits or 0)
            if f.rule.bits is not None
            and f.rule.is_log == (name == "log")
            and f.rule.threshold == PAPER_THRESHOLD
        }
        for name in ("log", "linear")
    }
    pictures = {
        f"{score} against bits, and against the share pruned": out / "sweep.png",
        "Share pruned by layer and head": out / "heads.png",
    }
    curves = {
        "pruned alone": _curve(found, None),
        f"{bits} bits": _curve(found, bits),
    }
    plots.quantization(out / "sweep.png", full.score, by_bits, curves, score)
    paper = next(f for f in found if f.rule == Rule(bits, PAPER_THRESHOLD))
    plots.by_head(out / "heads.png", paper.share_pruned, paper.rule.label)
    chosen = {}
    for name, of_bits in (("pruned alone", None), (f"{bits} bits", bits)):
        best = best_within_loss(found, of_bits)
        if best is None:
            console.print(f"{name}: no threshold loses less than {ALLOWED_LOSS:.0%}")
            continue
        loss, share = relative_loss(best, full), float(best.share_pruned.mean())
        chosen[name] = {
            "threshold": best.rule.threshold,
            "relative_loss": loss,
            "share_pruned": share,
        }
        console.print(
            f"{name}: pruned at {best.rule.threshold:g}, {share:.1%} of attention "
            f"values are 0 at a relative loss of {loss:+.2%} (allowed: below "
            f"{ALLOWED_LOSS:.0%}; the paper prunes about 80%)",
            soft_wrap=True,
        )
    summary = {
        "score": score,
        "full": full.score,
        "rules": {row["rule"]: row for row in rows},
        "most_pruned_within_loss": chosen,
    }
    return [table], pictures, summary


def _curve(found: Sequence[Found], bits: int | None) -> Mapping[float, float]:
    """Score by share pruned, of all thresholds with these bits."""
    return {
        float(f.share_pruned.mean()): f.score
        for f in found
        if f.rule.bits == bits and f.rule.is_log and f.rule != ALL_PRUNED
    }
