"""The plan before a run; table, summary, plots and report after it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from experiments import launch
from experiments.cli import to_flat
from experiments.driver import Outcome, evaluation_row, mean_rows
from experiments.flags import (
    DeviceFlags,
    RunFlags,
    TrainingFlags,
    TrainingRunFlags,
)
from experiments.setup import Setup, command_line, open_run
from fedjax_tp import tree
from fedjax_tp.algorithms import Algorithm
from fedjax_tp.analysis import noniid
from fedjax_tp.analysis.noniid import Heterogeneity
from fedjax_tp.data import partition
from fedjax_tp.io import client_store, folder, metrics, plots, report
from fedjax_tp.simulation import evaluation
from fedjax_tp.simulation.plan import Plan, fitting_lanes, make_plan
from fedjax_tp.types import InputError


def print_plan(
    console: Console, setup: Setup, training: TrainingFlags, plans: dict[str, Plan]
) -> None:
    """Says what will run, before it runs."""
    # Of the first seed; those of the others are much the same.
    sizes = np.array([len(part) for part in setup.partitions[0].train])
    num_test = sum(len(part) for part in setup.partitions[0].test)
    steps = setup.schedule.local_epochs * -(-sizes // setup.schedule.batch_size)
    console.print(
        f"{setup.dataset.name}: {sizes.sum()} training and "
        f"{num_test} test {_examples(setup)}; {len(sizes)} clients with "
        f"{sizes.min()} / {sizes.mean():.0f} / {sizes.max()} examples (min/mean/max)",
    )
    console.print(
        f"{training.rounds} rounds, {setup.cohort} clients a round, "
        f"{steps.min()} to {steps.max()} steps of {setup.schedule.batch_size} each "
        f"(about {setup.cohort * steps.mean():.0f} steps a round), "
        f"{setup.schedule.lanes} at a time on each of "
        f"{setup.schedule.mesh.size if setup.schedule.mesh else 1} devices "
        f"({jax.devices()[0].device_kind})"
        + (f", {len(setup.seeds)} seeds at once" if len(setup.seeds) > 1 else ""),
    )
    console.print(heterogeneity_line(heterogeneity_of(setup)))
    show(console, plan_table(plans))
    resident = launch.resident_bytes()
    if jax.default_backend() == "cpu" and resident is not None:
        needed = resident + process_bytes(setup, plans)
        console.print(
            f"about {human(needed)} of this machine's memory in all, with what "
            "compilation and checkpoints take"
        )
    for notice in setup.notices:
        console.print(f"note: {notice}")


def heterogeneity_of(setup: Setup, number: int = 0) -> Heterogeneity:
    """How unequal the clients are, of one seed's partition."""
    counts = partition.label_counts(
        setup.partitions[number].train, setup.dataset.y_train, setup.dataset.num_classes
    )
    return noniid.heterogeneity(counts)


def heterogeneity_line(found: Heterogeneity) -> str:
    """The same, in a sentence."""
    empty = f"; {len(found.empty)} clients have no example" if found.empty else ""
    return (
        f"labels: earth mover's distance {found.mean_emd:.2f} on average (0 equal, 2 "
        f"disjoint), {found.mean_classes:.1f} effective classes a client of "
        f"{found.population_classes:.1f}; sizes vary by "
        f"{100 * found.size_variation:.0f}% (Gini {found.size_gini:.2f}){empty}"
    )


def heterogeneity_table(found: Heterogeneity) -> report.Table:
    """The same, as the report has it."""

    def row(name: str, values: np.ndarray, digits: int) -> list[str]:
        shown = values[~np.isnan(values)]
        figures = (shown.min(), np.median(shown), shown.max())
        return [name, *(f"{figure:.{digits}f}" for figure in figures)]

    rows = [
        row("earth mover's distance to all labels", found.emd, 2),
        row("effective classes", found.classes, 1),
        row("training examples", found.sizes.astype(float), 0),
    ]
    return report.Table("Clients", ["", "least", "median", "most"], rows)


def _examples(setup: Setup) -> str:
    shape = "x".join(map(str, setup.train.x.shape[1:]))
    if setup.dataset.is_text:
        return f"texts of {shape} characters, {setup.dataset.num_classes} different"
    return f"images of {shape}, {setup.dataset.num_classes} classes"


_COMPILATION_BYTES = 700_000_000
"""Taken by compiling, whatever the model's size, and not given back; measured."""


def process_bytes(setup: Setup, plans: dict[str, Plan]) -> int:
    """The most memory that a run will take on, where its devices are the CPU's.

    A checkpoint holds the state three times beside the devices: fetched, as the
    library's copy, and compressed. Rows on the host are saved one by one. The data is
    there already.
    """
    mesh = setup.schedule.mesh
    devices = 1 if mesh is None else len(mesh.local_devices)

    def of_run(plan: Plan) -> int:
        saved = plan.state_bytes - (plan.kept_bytes if setup.kept_on_host else 0)
        on_device = plan.memory_bytes - tree.num_bytes(setup.train)
        return devices * on_device + 3 * saved

    return _COMPILATION_BYTES + max(map(of_run, plans.values()))


def plan_table(plans: dict[str, Plan]) -> report.Table:
    """Parameters, bytes a client and round, and memory of each algorithm."""
    header = ["algorithm", "client", "hypernetwork", "down", "up", "memory"]
    cells = [
        [
            name,
            f"{plan.client_parameters:,}",
            f"{plan.hypernetwork_parameters:,}",
            human(plan.bytes_down),
            human(plan.bytes_up),
            human(plan.memory_bytes),
        ]
        for name, plan in plans.items()
    ]
    title = "Parameters, bytes a client and round, memory a device (estimated)"
    return report.Table(title, header, cells)


def show(console: Console, table: report.Table) -> None:
    """Prints a table."""
    shown = Table(title=table.title, title_justify="left")
    for column in table.header:
        shown.add_column(column, justify="left" if column == "algorithm" else "right")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def human(num_bytes: float) -> str:
    """Bytes in a unit that reads well."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def plan_all(
    algorithms: Sequence[Algorithm],
    setup: Setup,
    training: TrainingFlags,
    device: DeviceFlags,
    run: RunFlags,
    limit_bytes: int | None,
) -> tuple[Setup, dict[str, Plan]]:
    """The plan of each algorithm by name, and the setup as the memory allows it.

    Raises:
      InputError: the device's memory does not allow the run.
    """
    plans = {
        algorithm.name: make_plan(
            algorithm,
            setup.task,
            setup.train,
            setup.cohort,
            setup.schedule,
            seeds=len(setup.seeds),
        )
        for algorithm in algorithms
    }
    kept_on_host = device.kept_on_host == "yes"
    if device.kept_on_host == "auto":
        # Memory may be another by now; checkpoints hold the one or the other.
        saved = _was_kept_on_host(run)
        too_large = limit_bytes is not None and any(
            4 * plan.kept_bytes > limit_bytes for plan in plans.values()
        )
        kept_on_host = too_large if saved is None else saved
    if kept_on_host:
        if len(setup.seeds) > 1 or jax.process_count() > 1:
            raise InputError(
                "what clients keep is on the host, which allows one seed and one "
                "process; if the devices can hold it, pass --kept-on-host no"
            )
        plans = {
            name: plan._replace(fixed_bytes=plan.fixed_bytes - plan.kept_bytes)
            for name, plan in plans.items()
        }
    lanes, hungriest = fitting_lanes(
        list(plans.values()), setup.schedule.lanes, limit_bytes
    )
    if lanes < (training.lanes or 1):
        name = next(name for name, plan in plans.items() if plan == hungriest)
        mesh_size = setup.schedule.mesh.size if setup.schedule.mesh else 1
        smaller = ["--batch-size or the model"]
        if len(setup.seeds) > 1:
            smaller.insert(0, "--seeds")
        if training.lanes and training.lanes > 1 and lanes >= 1:
            smaller.insert(0, f"--lanes (to {lanes})")
        elif mesh_size > 1 and jax.default_backend() == "cpu":
            smaller.insert(0, "--devices")
        needed = hungriest._replace(lanes=training.lanes or 1).memory_bytes
        raise InputError(
            f"{name} needs about {human(needed)} on each of {mesh_size} devices; "
            f"{human(limit_bytes or 0)} are free; to make it fit, lower "
            f"{', '.join(smaller)}"
        )
    return (
        setup._replace(
            schedule=setup.schedule._replace(lanes=lanes),
            kept_on_host=kept_on_host,
        ),
        {name: plan._replace(lanes=lanes) for name, plan in plans.items()},
    )


def begin(
    experiment: str,
    flags: TrainingRunFlags,
    setup: Setup,
    algorithms: Sequence[Algorithm],
    mesh: Mesh,
    console: Console,
) -> tuple[Setup, dict[str, Plan], Path]:
    """Plans the run, opens its folder, and says what will run.

    Returns:
      The setup as the memory allows it, the plan of each algorithm, and the folder.

    Raises:
      InputError: the memory or the folder does not allow the run.
    """
    limit = launch.memory_limit(flags.device, mesh)
    setup, plans = plan_all(
        algorithms, setup, flags.training, flags.device, flags.run, limit
    )
    out = open_run(experiment, flags, setup)
    console.print(f"run folder: {out}", soft_wrap=True)
    print_plan(console, setup, flags.training, plans)
    for note in launch.process_notes():
        console.print(f"note: {note}")
    return setup, plans, out


def _was_kept_on_host(run: RunFlags) -> bool | None:
    """Where a run that goes on has what clients keep; None without a checkpoint."""
    if not run.resume or run.out is None:
        return None
    saved = [f for f in (Path(run.out) / "checkpoints").glob("*") if any(f.iterdir())]
    return any(map(client_store.has_saved, saved)) if saved else None


def write_results(
    out: Path,
    experiment: str,
    flags: Any,
    setup: Setup,
    outcomes: Sequence[Outcome],
    run: RunFlags,
    console: Console,
) -> None:
    """Writes summary, client rows, plots and report, and prints the table."""
    # A run that was resumed may have written its algorithms in another order.
    order = [outcome.algorithm for outcome in outcomes]
    metrics.rewrite_rows(
        out / "metrics.jsonl",
        lambda rows: sorted(rows, key=lambda row: order.index(row["algorithm"])),
    )
    rows = metrics.read_rows(out / "metrics.jsonl")
    summaries = {
        outcome.algorithm: _summary_entry(outcome, rows, run) for outcome in outcomes
    }
    unequal = [heterogeneity_of(setup, i) for i in range(len(setup.seeds))]
    folder.write_json(
        out / "summary.json",
        {
            "experiment": experiment,
            "dataset": setup.dataset.name,
            "seed": run.seed,
            "seeds": list(setup.seeds),
            "labels": list(setup.dataset.class_names),
            "heterogeneity": {
                name: value
                for name, value in unequal[0]._asdict().items()
                if isinstance(value, float)
            },
            "algorithms": summaries,
        },
    )
    folder.write_csv(out / "clients.csv", client_rows(setup, outcomes, unequal))
    pictures = draw(out, setup, outcomes, rows, unequal[0])
    accuracy = results_table(outcomes, summaries)
    show(console, accuracy)
    notices = [*setup.notices, *left_out_notices(rows)]
    for notice in notices[len(setup.notices) :]:
        console.print(f"note: {notice}")
    sizes = np.array([len(part) for part in setup.partitions[0].train])
    over = f"seed {run.seed}"
    if len(setup.seeds) > 1:
        over = (
            f"seeds {setup.seeds[0]} to {setup.seeds[-1]}, ± is the standard deviation "
            "over them"
        )
    report.write_report(
        out / "report.html",
        title=f"{experiment} on {setup.dataset.name}",
        summary=(
            f"{len(sizes)} clients, {setup.cohort} a round; {sizes.sum()} training "
            f"examples, {sizes.min()} to {sizes.max()} a client; "
            f"{over}; {heterogeneity_line(unequal[0])}. "
            "Pooled is over all test examples, the other figures are over clients."
        ),
        tables=[
            accuracy,
            heterogeneity_table(unequal[0]),
            plan_table({o.algorithm: o.plan for o in outcomes}),
        ],
        pictures=pictures,
        notices=notices,
        command=command_line(experiment),
        settings=to_flat(flags),
    )
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)


def _summary_entry(
    outcome: Outcome, rows: Sequence[dict[str, Any]], run: RunFlags
) -> dict[str, Any]:
    """Figures of an algorithm; of several seeds their means, deviations and each."""
    own = [row for row in rows if row["algorithm"] == outcome.algorithm]
    by_seed = []
    for seed, summary in zip(_seeds(run), outcome.summaries, strict=True):
        figures = evaluation_row(summary)
        if run.metric_from is not None:
            figures["accuracy"] |= _window(own, seed, run.metric_from)
        by_seed.append(figures)
    entry = _over(by_seed, np.mean) | {
        "rounds": own[-1]["round"],
        "parameters": {
            "client": outcome.plan.client_parameters,
            "hypernetwork": outcome.plan.hypernetwork_parameters,
        },
        "bytes_down": outcome.plan.bytes_down,
        "bytes_up": outcome.plan.bytes_up,
        "seed": run.seed,
        "left_out": sum(len(row["left_out"]) for row in own),
    }
    if len(by_seed) > 1:
        entry["std_over_seeds"] = _over(by_seed, np.std)
        entry["seeds"] = dict(zip(map(str, _seeds(run)), by_seed, strict=True))
    return entry


def _seeds(run: RunFlags) -> range:
    return range(run.seed, run.seed + run.seeds)


def _window(rows: Sequence[dict[str, Any]], seed: int, first: int) -> dict[str, float]:
    values = [
        row["accuracy"]["pooled"]
        for row in rows
        if row["seed"] == seed and "accuracy" in row and row["round"] >= first
    ]
    return {
        "window_mean": float(np.mean(values)),
        "window_std": float(np.std(values)),
        "window_evaluations": len(values),
    }


def _over(figures: Sequence[Any], statistic: Callable[[Any], Any]) -> Any:
    """A statistic over trees of figures; None where one is None."""
    first = figures[0]
    if isinstance(first, dict):
        return {name: _over([f[name] for f in figures], statistic) for name in first}
    if len(figures) == 1:
        return first
    return None if None in figures else float(statistic(figures))


def results_table(
    outcomes: Sequence[Outcome], summaries: dict[str, dict[str, Any]]
) -> report.Table:
    """The table that is printed and reported."""
    has_window = any("window_mean" in s["accuracy"] for s in summaries.values())
    figures = ["pooled", "mean", "std", "worst_decile"]
    if any("positions" in s["accuracy"] for s in summaries.values()):
        figures.insert(1, "positions")
    named = {"worst_decile": "worst decile", "positions": "all positions"}
    header = ["algorithm", *(named.get(figure, figure) for figure in figures), "loss"]
    header += ["window"] if has_window else []
    header += ["minutes"]
    cells = []
    for outcome in outcomes:
        summary = summaries[outcome.algorithm]
        accuracy, loss = summary["accuracy"], summary["loss"]
        deviations = summary.get("std_over_seeds", {}).get("accuracy", {})
        row = [outcome.algorithm]
        for figure in figures:
            deviation = deviations.get(figure)
            more = "" if deviation is None else f" ± {100 * deviation:.1f}"
            row.append(f"{100 * accuracy[figure]:.1f}{more}")
        row.append("not finite" if loss is None else f"{loss:.3f}")
        if has_window:
            mean, std = accuracy["window_mean"], accuracy["window_std"]
            row.append(f"{100 * mean:.2f} ± {100 * std:.2f}")
        cells.append([*row, f"{outcome.seconds / 60:.1f}"])
    title = "Test accuracy, %"
    if "positions" in figures:
        title += ", of the character after each text, and at all positions"
    return report.Table(title, header, cells)


def left_out_notices(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Says which clients were left out of averages, when, and by which algorithm."""
    notices = []
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == name]
        hit = [row for row in own if row["left_out"]]
        counted = [len(row["left_out"]) < len(row["clients"]) for row in own[-3:]]
        if hit and not any(counted):
            notices.append(
                f"{name}: no client counted in the last rounds; the server's state has "
                "diverged (lower --client-lr or --server.lr)"
            )
        if hit:
            clients = sorted({client for row in hit for client in row["left_out"]})
            named = ", ".join(map(str, clients[:20])) + (
                ", ..." if clients[20:] else ""
            )
            notices.append(
                f"{name}: clients whose loss or update was not finite were left out "
                f"of the average in {len(hit)} rounds (first in round "
                f"{hit[0]['round']}): {named}"
            )
    return notices


def client_rows(
    setup: Setup, outcomes: Sequence[Outcome], unequal: Sequence[Heterogeneity]
) -> list[dict[str, Any]]:
    """Rows of `clients.csv`: one an algorithm, seed and client."""
    rows = []
    for outcome in outcomes:
        for i, (seed, parts) in enumerate(
            zip(setup.seeds, setup.partitions, strict=True)
        ):
            accuracies = evaluation.accuracies(outcome.by_client[i])
            emd = unequal[i].emd
            for client in range(setup.num_clients):
                num_test = len(parts.test[client])
                loss = outcome.by_client[i].loss[client] / max(num_test, 1)
                rows.append(
                    {
                        "algorithm": outcome.algorithm,
                        "seed": seed,
                        "client": client,
                        "train_examples": len(parts.train[client]),
                        "test_examples": num_test,
                        "emd": "" if np.isnan(emd[client]) else emd[client],
                        "rounds": outcome.participations[i, client],
                        "accuracy": accuracies[client] if num_test else "",
                        "loss": loss if num_test else "",
                    }
                )
    return rows


def draw(
    out: Path,
    setup: Setup,
    outcomes: Sequence[Outcome],
    rows: Sequence[dict[str, Any]],
    unequal: Heterogeneity,
) -> dict[str, Path]:
    """Draws the plots; captions and files, for the report."""
    curves = {}
    for outcome in outcomes:
        own = [row for row in rows if row["algorithm"] == outcome.algorithm]
        evaluated = [row for row in mean_rows(own) if "accuracy" in row]
        curves[outcome.algorithm] = (
            [row["round"] for row in evaluated],
            [row["accuracy"]["pooled"] for row in evaluated],
            [row["accuracy"]["worst_decile"] for row in evaluated],
        )
    pictures = {
        "Accuracy over rounds": out / "accuracy.png",
        "Accuracy of every client": out / "clients.png",
        "Training examples by client and class": out / "labels.png",
        "How unequal the clients are": out / "heterogeneity.png",
    }
    curve_file, clients_file, labels_file, unequal_file = pictures.values()
    title = f"{setup.dataset.name}: {setup.num_clients} clients"
    plots.accuracy_over_rounds(curve_file, curves, title)
    plots.client_accuracies(
        clients_file,
        {
            o.algorithm: np.mean(
                [evaluation.accuracies(m) for m in o.by_client], axis=0
            )
            for o in outcomes
        },
    )
    counts = partition.label_counts(
        setup.partitions[0].train, setup.dataset.y_train, setup.dataset.num_classes
    )
    plots.label_distribution(labels_file, counts, setup.dataset.class_names)
    plots.heterogeneity(unequal_file, unequal.emd, unequal.classes, unequal.sizes)
    return pictures
