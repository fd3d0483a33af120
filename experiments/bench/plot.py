"""(tool) Draws what the benchmarks of scale, cohorts and skew printed.

python -m experiments.bench.scale | tail -n 1 > figures.jsonl
python -m experiments.bench.gpu | tail -n 1 >> figures.jsonl
python -m experiments.bench.skew | tail -n 1 >> figures.jsonl
python -m experiments.bench.plot --figures figures.jsonl --out docs/speed.png
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import cli
from fedjax_tp.io import plots
from fedjax_tp.types import InputError


@dataclass(frozen=True)
class Flags:
    """Flags of the plot."""

    figures: str
    """Last lines of the three benchmarks."""
    out: str = "speed.png"
    """The picture."""


def run(flags: Flags) -> None:
    """Reads the figures and draws them.

    Raises:
      InputError: a benchmark is missing, or a line is no figures.
    """
    found = {}
    try:
        for line in Path(flags.figures).read_text(encoding="utf-8").splitlines():
            figures = json.loads(line)
            found[figures["benchmark"]] = figures
        scale, cohorts, skew = (found[name] for name in ("scale", "gpu", "skew"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{flags.figures} must hold the last lines of the benchmarks scale, gpu "
            f"and skew ({type(error).__name__}: {error})"
        ) from None
    plots.cost_of_rounds(
        Path(flags.out),
        by_clients={
            name: {int(n): seconds for n, seconds in times.items()}
            for name, times in scale["seconds"].items()
        },
        by_cohort={int(n): rate for n, rate in cohorts["images_per_second"].items()},
        by_skew={
            "Zipf 1.2": (skew["zipf_ratio"], skew["zipf_padding_ratio"]),
            "Dirichlet 0.1": (skew["dirichlet_ratio"], skew["dirichlet_padding_ratio"]),
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.run_main(
        lambda: run(
            cli.tyro_cli(
                Flags, argv, __doc__ or "", "experiments.bench.plot", Flags("")
            )
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
