"""Which algorithm is best, on which data, over seeds?

    python -m experiments.compare --dataset digits,fashion_mnist \\
        --partition pathological,dirichlet --algorithms all --seeds 3

trains every algorithm on every data set and partition, all seeds of one at once, and
ends with a table of means and standard deviations over seeds, and with paired
differences. `--dataset` and `--partition` take lists. Each data set and partition has a
run folder of its own inside --out; with `--resume` what is there is not done again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape

from experiments import cli, driver, launch, results, setup
from experiments.driver import Outcome
from experiments.flags import RunFlags, TrainingRunFlags
from fedjax_tp import algorithms
from fedjax_tp.analysis.comparison import Difference, paired_difference
from fedjax_tp.io import folder, metrics, plots, report
from fedjax_tp.io.signals import SignalReceived, stop_signals
from fedjax_tp.models.task import Metrics
from fedjax_tp.simulation import evaluation
from fedjax_tp.simulation.plan import Plan
from fedjax_tp.types import InputError

EXPERIMENT = "compare"
_GROUP = "compare/group"
"""What the folder of a group says it is: nothing to be resumed alone."""


@dataclass(frozen=True)
class Flags(TrainingRunFlags):
    """Flags of the comparison."""

    tune: bool = False
    """First choose each algorithm's --client-lr on held-out training examples, with the
    first seed, and never look at the test split for it."""
    tune_lrs: str = "0.005,0.02,0.08"
    """Client learning rates to choose from."""
    reference: str | None = None
    """Differences are to this algorithm; unset: the first."""


class Cell(NamedTuple):
    """An algorithm on a data set and partition, over seeds."""

    outcome: Outcome
    client_lr: float

    @property
    def pooled(self) -> np.ndarray:
        return np.array([summary.pooled for summary in self.outcome.summaries])


Group = dict[str, Cell]


def run(flags: Flags) -> None:
    """Runs the comparison.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; what was done is saved.
    """
    names = algorithms.resolve(flags.training.algorithms)
    if flags.reference is not None and flags.reference not in names:
        raise InputError(
            f"reference is {flags.reference!r}; allowed is one of {', '.join(names)}"
        )
    lrs = _learning_rates(flags)
    if flags.tune and flags.data.validation:
        raise InputError("tune and validation hold the same examples out; give one")
    for group_flags in _groups(flags):
        setup.check_flags(group_flags.data, group_flags.training, group_flags.run)
    mesh = launch.make_mesh(flags.device)
    launch.check_one_process()
    for group_flags in _groups(flags):
        _check_group(mesh, group_flags)
    console = launch.make_console()
    out = setup.new_folder(EXPERIMENT) if flags.run.out is None else Path(flags.run.out)
    if folder.open_folder(out, resume=flags.run.resume):
        setup.note_rounds(out, flags.training.rounds)
    else:
        setup.write_config(out, EXPERIMENT, flags)
    console.print(f"run folder: {out}", soft_wrap=True)
    found: dict[str, Group] = {}
    notices: list[str] = []
    try:
        with stop_signals() as stop_signal:
            for group_flags in _groups(flags):
                name = _group_name(group_flags)
                console.print(f"[bold]{escape(name)}[/bold]")
                group, more = _run_group(
                    mesh, group_flags, lrs, out / name, console, stop_signal
                )
                found[name] = group
                notices += [f"{name}: {notice}" for notice in more]
    except cli.Interrupted as stopped:
        raise cli.Interrupted(
            stopped.signal_number,
            f"stopped, all saved; to go on: {setup.resume_command(out)}",
        ) from None
    write_comparison(out, flags, found, notices, console)


def _learning_rates(flags: Flags) -> list[float]:
    try:
        lrs = [float(lr) for lr in flags.tune_lrs.split(",")]
    except ValueError:
        lrs = []
    if not lrs or not all(0 < lr < float("inf") for lr in lrs):
        raise InputError(
            f"tune lrs is {flags.tune_lrs!r}; allowed are numbers above 0, such as "
            "0.005,0.02"
        )
    return lrs


def _groups(flags: Flags) -> list[Flags]:
    """The flags of each data set and partition."""
    partitions: list[str | None] = [None]
    if flags.data.partition is not None:
        partitions = [name.strip() for name in flags.data.partition.split(",")]
    datasets = [name.strip() for name in flags.data.dataset.split(",")]
    for what, names in (("dataset", datasets), ("partition", partitions)):
        if "" in names or len(set(names)) < len(names):
            raise InputError(f"{what} is {names}; allowed are different names")
    return [
        replace(flags, data=replace(flags.data, dataset=dataset, partition=partition))
        for dataset in datasets
        for partition in partitions
    ]


def _group_name(flags: Flags) -> str:
    """The name of its folder: what tells it apart from the others."""
    parts = [flags.data.dataset, flags.data.partition or "default"]
    return "-".join(part.replace(":", "_").replace("/", "_") for part in parts)


def _check_group(mesh: Mesh, flags: Flags) -> None:
    """Raises InputError for a group that could not run, before any other runs."""
    datas = [flags.data]
    if flags.tune:
        datas.append(replace(flags.data, validation=True))
    for data in datas:
        prepared = setup.make_setup(data, flags.model, flags.training, flags.run, mesh)
        setting = setup.make_setting(flags, prepared)
        built, _ = algorithms.build_all(flags.training.algorithms, setting)
        names = [algorithm.name for algorithm in built]
        if flags.reference is not None and flags.reference not in names:
            raise InputError(
                f"reference is {flags.reference!r}, which does not go with the model; "
                f"allowed is one of {', '.join(names)}"
            )


def _run_group(
    mesh: Mesh,
    flags: Flags,
    lrs: Sequence[float],
    out: Path,
    console: Console,
    stop_signal: SignalReceived,
) -> tuple[Group, tuple[str, ...]]:
    """All algorithms on one data set and partition; notices on those left out."""
    flags = replace(flags, run=_run_in(out, flags.run))
    prepared = setup.make_setup(
        flags.data, flags.model, flags.training, flags.run, mesh
    )
    built, notes = algorithms.build_all(
        flags.training.algorithms, setup.make_setting(flags, prepared)
    )
    prepared = prepared._replace(notices=prepared.notices + notes)
    prepared, plans, _ = results.begin(_GROUP, flags, prepared, built, mesh, console)
    group: Group = {}
    for algorithm in built:
        name = algorithm.name
        lr = flags.training.client_lr
        if flags.tune:
            lr = _tuned(mesh, flags, name, lrs, out, console, stop_signal)
        cell_flags = _with_lr(flags, lr)
        saved = out / "cells" / f"{name}.json"
        cell = _read_cell(saved, plans[name], cell_flags)
        if cell is None:
            setting = setup.make_setting(cell_flags, prepared)
            outcome, _ = driver.train(
                algorithms.build(name, setting),
                prepared,
                plans[name],
                flags.training,
                flags.run,
                out,
                stop_signal,
            )
            cell = Cell(outcome, lr)
            saved.parent.mkdir(exist_ok=True)
            folder.write_json(saved, _cell_content(cell, flags.training.rounds))
        group[name] = cell
    outcomes = [cell.outcome for cell in group.values()]
    results.write_results(
        out, EXPERIMENT, flags, prepared, outcomes, flags.run, console
    )
    rows = metrics.read_rows(out / "metrics.jsonl")
    return group, (*prepared.notices, *results.left_out_notices(rows))


def _run_in(out: Path, run_flags: RunFlags) -> RunFlags:
    has_run = (out / "config.json").is_file()
    return replace(run_flags, out=str(out), resume=has_run)


def _with_lr(flags: Flags, lr: float) -> Flags:
    return replace(flags, training=replace(flags.training, client_lr=lr))


def _tuned(
    mesh: Mesh,
    flags: Flags,
    name: str,
    lrs: Sequence[float],
    out: Path,
    console: Console,
    stop_signal: SignalReceived,
) -> float:
    """The learning rate with the best pooled accuracy on held-out training examples.

    Once chosen it stays: a run that goes on for more rounds has been trained with it.
    """
    chosen = out / "tune" / f"{name}.json"
    if chosen.is_file():
        return folder.read_json(chosen)["client_lr"]
    scores = {}
    for lr in lrs:
        place = out / "tune" / f"lr-{lr:g}"
        saved = place / "cells" / f"{name}.json"
        run_flags = _run_in(place, replace(flags.run, seeds=1))
        held_out = replace(flags.data, validation=True)
        tuning = replace(_with_lr(flags, lr), data=held_out, run=run_flags)
        scores[lr] = _tune_score(mesh, tuning, name, saved, stop_signal)
        console.print(f"{name}: lr {lr:g}: {100 * scores[lr]:.1f}% on held-out")
    # The smaller of two that are as good.
    best = max(sorted(scores), key=lambda lr: scores[lr])
    folder.write_json(chosen, {"client_lr": best})
    return best


def _tune_score(
    mesh: Mesh, flags: Flags, name: str, saved: Path, stop_signal: SignalReceived
) -> float:
    if saved.is_file():
        content = folder.read_json(saved)
        if content["rounds"] == flags.training.rounds:
            return content["pooled"]
    assert flags.run.out is not None
    out = Path(flags.run.out)
    prepared = setup.make_setup(
        flags.data, flags.model, flags.training, flags.run, mesh
    )
    algorithm = algorithms.build(name, setup.make_setting(flags, prepared))
    limit = launch.memory_limit(flags.device, mesh)
    prepared, plans = results.plan_all(
        [algorithm], prepared, flags.training, flags.device, flags.run, limit
    )
    setup.open_run(_GROUP, flags, prepared)
    outcome, _ = driver.train(
        algorithm, prepared, plans[name], flags.training, flags.run, out, stop_signal
    )
    pooled = outcome.summaries[0].pooled
    saved.parent.mkdir(exist_ok=True)
    folder.write_json(saved, {"rounds": flags.training.rounds, "pooled": pooled})
    return pooled


def _cell_content(cell: Cell, rounds: int) -> dict[str, Any]:
    """What `_read_cell` needs to do without training again."""

    def numbers(values: Any) -> list[float | None]:
        return [float(v) if np.isfinite(v) else None for v in np.asarray(values)]

    outcome = cell.outcome
    return {
        "rounds": rounds,
        "client_lr": cell.client_lr,
        "seconds": outcome.seconds,
        "participations": outcome.participations.tolist(),
        "by_client": [
            {
                figure: numbers(values)
                for figure, values in metrics._asdict().items()
                if values is not None
            }
            for metrics in outcome.by_client
        ],
    }


def _read_cell(saved: Path, plan: Plan, flags: Flags) -> Cell | None:
    """The cell as it was; None if it is not there, or of fewer rounds."""
    if not saved.is_file():
        return None
    content = folder.read_json(saved)
    lr = flags.training.client_lr
    if (content["rounds"], content["client_lr"]) != (flags.training.rounds, lr):
        return None

    def figures(name: str, by_seed: dict[str, list[float | None]]) -> Any:
        values = by_seed.get(name)
        if values is None:
            return None
        return np.array([np.nan if v is None else v for v in values])

    by_client = [
        Metrics(*(figures(name, by_seed) for name in Metrics._fields))
        for by_seed in content["by_client"]
    ]
    outcome = Outcome(
        saved.stem,
        plan,
        by_client,
        [evaluation.summarize(metrics) for metrics in by_client],
        np.array(content["participations"]),
        content["seconds"],
    )
    return Cell(outcome, lr)


class Differences(NamedTuple):
    """Each algorithm's pooled accuracy less the reference's, on the same clients."""

    reference: str
    by_name: dict[str, Difference]


def differences(group: Group, reference: str | None) -> Differences:
    """Paired differences to the reference; None for the first algorithm."""
    reference = reference or next(iter(group))

    def correct(cell: Cell) -> np.ndarray:
        return np.stack([np.asarray(m.correct) for m in cell.outcome.by_client])

    ours = group[reference]
    examples = np.stack([np.asarray(m.examples) for m in ours.outcome.by_client])
    by_name = {
        name: paired_difference(correct(cell), correct(ours), examples)
        for name, cell in group.items()
        if name != reference
    }
    return Differences(reference, by_name)


class Comparison(NamedTuple):
    """The tables of a comparison: cells as text, and which of them are the best."""

    header: list[str]
    rows: list[list[str]]
    is_best: list[list[bool]]


def accuracy_table(found: Mapping[str, Group]) -> Comparison:
    """Mean ± standard deviation over seeds, bytes, and minutes on this machine."""
    names = list(dict.fromkeys(name for group in found.values() for name in group))
    best = {
        title: max(cell.pooled.mean() for cell in group.values())
        for title, group in found.items()
    }
    rows, is_best = [], []
    for name in names:
        row, bold = [name], [False]
        for title, group in found.items():
            if name not in group:
                row.append("")
                bold.append(False)
                continue
            pooled = group[name].pooled
            row.append(f"{100 * pooled.mean():.1f} ± {100 * pooled.std():.1f}")
            bold.append(pooled.mean() >= best[title])
        cells = [group[name] for group in found.values() if name in group]
        plans = [cell.outcome.plan for cell in cells]
        sizes = [results.human(plan.bytes_down + plan.bytes_up) for plan in plans]
        row.append(" / ".join(dict.fromkeys(sizes)))
        row.append(f"{sum(cell.outcome.seconds for cell in cells) / 60:.1f}")
        rows.append(row)
        is_best.append([*bold, False, False])
    header = ["algorithm", *found, "bytes a client and round", "minutes"]
    return Comparison(header, rows, is_best)


def difference_table(by_group: Mapping[str, Differences]) -> Comparison:
    """Differences in points to the reference, with 95% intervals."""
    columns = {
        f"{title}, to {found.reference}": found.by_name
        for title, found in by_group.items()
    }
    header = ["algorithm", *columns]
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [
        [
            name,
            *(
                f"{100 * d.mean:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"
                if (d := column.get(name)) is not None
                else ""
                for column in columns.values()
            ),
        ]
        for name in names
    ]
    is_best = [[False] * len(header) for _ in rows]
    return Comparison(header, rows, is_best)


def to_markdown(table: Comparison) -> str:
    """The table in Markdown, the best in bold."""
    lines = [table.header, ["---"] + ["---:"] * (len(table.header) - 1)]
    for row, best in zip(table.rows, table.is_best, strict=True):
        lines.append(
            [f"**{cell}**" if b else cell for cell, b in zip(row, best, strict=True)]
        )
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def to_latex(table: Comparison) -> str:
    """The table as a LaTeX tabular with booktabs rules, the best in bold."""

    def clean(text: str) -> str:
        for special in "&%_#":
            text = text.replace(special, "\\" + special)
        return text.replace("±", "$\\pm$")

    lines = [
        "\\begin{tabular}{l" + "r" * (len(table.header) - 1) + "}",
        "\\toprule",
        " & ".join(map(clean, table.header)) + " \\\\",
        "\\midrule",
    ]
    for row, best in zip(table.rows, table.is_best, strict=True):
        cells = [
            f"\\textbf{{{clean(cell)}}}" if b else clean(cell)
            for cell, b in zip(row, best, strict=True)
        ]
        lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def csv_rows(
    found: Mapping[str, Group], by_group: Mapping[str, Differences]
) -> list[dict[str, Any]]:
    """A row a data set, partition and algorithm; shares, not %."""
    rows = []
    for title, group in found.items():
        against, by_name = by_group[title]
        for name, cell in group.items():
            difference = by_name.get(name, Difference(0.0, 0.0, 0.0))
            plan = cell.outcome.plan
            rows.append(
                {
                    "group": title,
                    "algorithm": name,
                    "seeds": len(cell.pooled),
                    "accuracy": cell.pooled.mean(),
                    "std_over_seeds": cell.pooled.std(),
                    "reference": against,
                    "difference": difference.mean,
                    "difference_low": difference.low,
                    "difference_high": difference.high,
                    "client_lr": cell.client_lr,
                    "bytes_down": plan.bytes_down,
                    "bytes_up": plan.bytes_up,
                    "seconds": round(cell.outcome.seconds, 1),
                }
            )
    return rows


def write_comparison(
    out: Path,
    flags: Flags,
    found: Mapping[str, Group],
    notices: Sequence[str],
    console: Console,
) -> None:
    """Writes the tables, the plot, the summary and the report; prints the tables."""
    by_group = {
        title: differences(group, flags.reference) for title, group in found.items()
    }
    accuracy = accuracy_table(found)
    points = difference_table(by_group)
    titles = {
        "table": f"Test accuracy, %: mean ± standard deviation over {flags.run.seeds} "
        "seeds",
        "differences": "Points more than a reference, with 95% bootstrap intervals "
        "over seeds and clients",
    }
    for name, table in (("table", accuracy), ("differences", points)):
        folder.write_text(out / f"{name}.md", f"{titles[name]}\n\n{to_markdown(table)}")
        folder.write_text(out / f"{name}.tex", to_latex(table))
    rows = csv_rows(found, by_group)
    folder.write_csv(out / "table.csv", rows)
    folder.write_json(
        out / "summary.json",
        {
            "experiment": EXPERIMENT,
            "seeds": flags.run.seeds,
            "rounds": flags.training.rounds,
            "groups": {
                title: {
                    name: {
                        "accuracy_by_seed": cell.pooled.tolist(),
                        "client_lr": cell.client_lr,
                    }
                    for name, cell in group.items()
                }
                for title, group in found.items()
            },
        },
    )
    picture = out / "comparison.png"
    plots.comparison(
        picture,
        {
            title: {
                name: (cell.pooled.mean(), cell.pooled.std())
                for name, cell in group.items()
            }
            for title, group in found.items()
        },
    )
    report.write_report(
        out / "report.html",
        title="Comparison of algorithms",
        summary=f"{flags.training.rounds} rounds; the best are in bold. Each data set "
        "and partition has a report of its own in its folder.",
        tables=[
            report.Table(titles[name], table.header, _marked(table))
            for name, table in (("table", accuracy), ("differences", points))
        ],
        pictures={"Accuracy, mean and standard deviation over seeds": picture},
        notices=notices,
        command=setup.command_line(EXPERIMENT),
        settings=cli.to_flat(flags),
    )
    for name, table in (("table", accuracy), ("differences", points)):
        shown = [
            [
                f"[bold]{escape(cell)}[/bold]" if b else escape(cell)
                for cell, b in zip(row, best, strict=True)
            ]
            for row, best in zip(table.rows, table.is_best, strict=True)
        ]
        results.show(console, report.Table(titles[name], table.header, shown))
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)


def _marked(table: Comparison) -> list[list[str]]:
    return [
        [report.bold(cell) if b else cell for cell, b in zip(row, best, strict=True)]
        for row, best in zip(table.rows, table.is_best, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.experiment_main(
        run,
        Flags(run=RunFlags(seeds=3)),
        argv,
        name=EXPERIMENT,
        description=__doc__,
        normalize=_with_absolute_paths,
    )


def _with_absolute_paths(flags: Flags) -> Flags:
    """Of lists, every entry."""
    entries = [setup.absolute_paths(group.data) for group in _groups(flags)]
    datasets = ",".join(dict.fromkeys(data.dataset for data in entries))
    partitions = ",".join(dict.fromkeys(data.partition or "" for data in entries))
    data = replace(entries[0], dataset=datasets, partition=partitions or None)
    return replace(flags, data=data)


if __name__ == "__main__":
    raise SystemExit(main())
