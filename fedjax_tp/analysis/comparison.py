"""Are two algorithms different, measured on the same clients and seeds?"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fedjax_tp.types import InputError

Counts = Float[np.ndarray, "seeds clients"]


class Difference(NamedTuple):
    """A difference in pooled accuracy, and the ends of its interval; shares, not %."""

    mean: float
    low: float
    high: float


def paired_difference(
    correct: Counts,
    other: Counts,
    examples: Counts,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Difference:
    """Pooled accuracy of one algorithm less that of another, with a bootstrap interval.

    Both are measured on the same clients in each seed. Seeds are resampled, and in each
    the clients (Davison and Hinkley 1997, section 3.8), always in pairs; the ends are
    percentiles. The mean is over seeds.

    Args:
      correct, other: right predictions of the two.
      examples: test examples; at least one in each seed.
      confidence: share of the resampled differences between the ends.
      resamples: as many.
      seed: of the resampling.

    Raises:
      InputError: a seed without test examples.
    """
    if not (examples.sum(axis=1) > 0).all():
        raise InputError("a seed has no test examples; each must have one at least")
    rng = np.random.default_rng(seed)
    num_seeds, num_clients = correct.shape
    gained = correct - other
    found = np.empty(resamples)
    for i in range(resamples):
        seeds = rng.integers(0, num_seeds, (num_seeds, 1))
        clients = rng.integers(0, num_clients, (num_seeds, num_clients))
        totals = examples[seeds, clients].sum(axis=1)
        gains = gained[seeds, clients].sum(axis=1)
        # A draw of clients without test examples says nothing.
        found[i] = np.mean(gains / np.maximum(totals, 1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    mean = np.mean(gained.sum(axis=1) / examples.sum(axis=1))
    return Difference(float(mean), float(low), float(high))
