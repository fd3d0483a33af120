"""How few bits may clients send, and what does that cost in accuracy?

    python -m experiments.communication --dataset fashion_mnist

trains each algorithm as it is, and with its updates quantized (stochastically, and
after a random rotation), reduced to signs, and to their largest entries, all with the
same clients, batches and seed; it ends with bytes against accuracy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments import cli, driver, launch, results, setup
from experiments.driver import Outcome, mean_rows
from experiments.flags import (
    DataFlags,
    ModelFlags,
    RunFlags,
    TrainingFlags,
    TrainingRunFlags,
)
from experiments.setup import Setup
from fedjax_tp import algorithms
from fedjax_tp.io import folder, metrics, plots, report
from fedjax_tp.types import InputError

EXPERIMENT = "communication"
CODECS = ("uniform", "rotated", "sign", "topk")


@dataclass(frozen=True)
class Flags(TrainingRunFlags):
    """Flags of the experiment; --algorithms are those that are compressed."""

    codecs: str = ",".join(CODECS)
    """Some of uniform, rotated, sign, topk; see --method.codec-bits and
    --method.topk-share."""


DEFAULTS = Flags(
    data=DataFlags(num_clients=20),
    model=ModelFlags(dim=32, depth=1, heads=2, mlp_dim=64),
    training=TrainingFlags(
        algorithms="fedavg,fedtp", rounds=100, local_epochs=1, sample_fraction=0.25
    ),
    run=RunFlags(eval_every=5),
)


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; what was done is saved.
    """
    codecs = [codec.strip() for codec in flags.codecs.split(",")]
    if not set(codecs) <= set(CODECS) or len(set(codecs)) < len(codecs):
        raise InputError(
            f"codecs is {flags.codecs!r}; allowed are some of {', '.join(CODECS)}, "
            "each once"
        )
    algorithms.resolve(flags.training.algorithms)
    setup.check_flags(flags.data, flags.training, flags.run)
    mesh = launch.make_mesh(flags.device)
    launch.check_one_process()
    console = launch.make_console()
    prepared = setup.make_setup(
        flags.data, flags.model, flags.training, flags.run, mesh
    )
    setting = setup.make_setting(flags, prepared)
    found, notes = algorithms.build_all(flags.training.algorithms, setting)
    prepared = prepared._replace(notices=prepared.notices + notes)
    plain = [algorithm.name for algorithm in found]
    names = [name for p in plain for name in (p, *(f"{p}_{c}" for c in codecs))]
    built = [algorithms.build(name, setting) for name in names]
    prepared, plans, out = results.begin(
        EXPERIMENT, flags, prepared, built, mesh, console
    )
    outcomes = driver.train_all(built, prepared, plans, flags.training, flags.run, out)
    results.write_results(
        out, EXPERIMENT, flags, prepared, outcomes, flags.run, console
    )
    write(out, flags, prepared, plain, codecs, outcomes, console)


def write(
    out: Path,
    flags: Flags,
    prepared: Setup,
    plain: Sequence[str],
    codecs: Sequence[str],
    outcomes: Sequence[Outcome],
    console: Console,
) -> None:
    """Bytes against accuracy: a table, a picture, a page."""
    rows = metrics.read_rows(out / "metrics.jsonl")
    by_name = {outcome.algorithm: outcome for outcome in outcomes}
    curves: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for name in plain:
        curves[name] = {}
        compressed = [(codec, f"{name}_{codec}") for codec in codecs]
        for label, full in (("all numbers", name), *compressed):
            own = [row for row in rows if row["algorithm"] == full]
            seen = [row for row in mean_rows(own) if "accuracy" in row]
            sent = by_name[full].plan.bytes_up * prepared.cohort / 1e6
            curves[name][label] = (
                [sent * row["round"] for row in seen],
                [100 * row["accuracy"]["pooled"] for row in seen],
            )
    picture = out / "bytes.png"
    plots.lines(
        picture,
        curves,
        x="sent by all clients so far, MB",
        y="test accuracy, %",
        log_x=True,
    )
    table = bytes_table(plain, codecs, by_name, curves)
    folder.write_csv(
        out / "bytes.csv",
        [dict(zip(table.header, row, strict=True)) for row in table.rows],
    )
    page = out / "communication.html"
    report.write_report(
        page,
        title=f"Bytes against accuracy, on {prepared.dataset.name}",
        summary=f"{prepared.num_clients} clients, {prepared.cohort} a round, "
        f"{flags.training.rounds} rounds. Bits are exact: codes as packed, with what "
        "is needed to decode them. Only what clients send is compressed.",
        tables=[table],
        pictures={"Accuracy against what clients sent": picture},
        notices=prepared.notices,
        command=setup.command_line(EXPERIMENT),
        settings=cli.to_flat(flags),
    )
    results.show(console, table)
    console.print(f"communication: {page}", soft_wrap=True)


def bytes_table(
    plain: Sequence[str],
    codecs: Sequence[str],
    by_name: Mapping[str, Outcome],
    curves: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
) -> report.Table:
    """What a client sends, what is lost by it, and what it takes to come near the
    uncompressed accuracy."""
    rows: list[list[Any]] = []
    for name in plain:
        full = by_name[name]
        target = 0.95 * curves[name]["all numbers"][1][-1]
        for label, algorithm in (("", name), *((c, f"{name}_{c}") for c in codecs)):
            outcome = by_name[algorithm]
            pooled = float(np.mean([s.pooled for s in outcome.summaries]))
            sent, accuracy = curves[name][label or "all numbers"]
            pairs = zip(sent, accuracy, strict=True)
            reached = next((f"{s:.3g}" for s, a in pairs if a >= target), "not reached")
            ratio = outcome.plan.bytes_up / max(full.plan.bytes_up, 1)
            rows.append(
                [
                    algorithm,
                    results.human(outcome.plan.bytes_up),
                    f"{32 * ratio:.2f}",
                    f"{100 * pooled:.1f}",
                    reached,
                ]
            )
    header = ["algorithm", "sent a client and round", "bits a number", "accuracy, %"]
    header += ["MB to 95% of the uncompressed"]
    return report.Table("Bytes and accuracy", header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.experiment_main(
        run,
        DEFAULTS,
        argv,
        name=EXPERIMENT,
        description=__doc__,
        normalize=setup.with_absolute_paths,
    )


if __name__ == "__main__":
    raise SystemExit(main())
