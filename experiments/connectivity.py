"""Where in a network does averaging hurt: in single layers, or in all together?

    python -m experiments.connectivity --dataset fashion_mnist

trains, and at every evaluation looks at what clients make of the model in one more
round of local training: barriers between two clients' models, and from a client's to
the average, of all layers, of each alone, and of more and more of them; how far every
layer has turned from its initial value; at the end also random directions against that
of averaging, and what each block is worth. `--run DIR` looks once at the newest
checkpoint of a run that is there, with that run's data and model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from experiments import cli, driver, lab, launch, looks, results, setup, trained
from experiments.flags import (
    DataFlags,
    DeviceFlags,
    ModelFlags,
    RunFlags,
    TrainingFlags,
    TrainingRunFlags,
)
from experiments.setup import Setup
from fedjax_tp import algorithms
from fedjax_tp.algorithms import Algorithm
from fedjax_tp.io import folder, plots, report
from fedjax_tp.types import InputError

EXPERIMENT = "connectivity"


@dataclass(frozen=True)
class Flags(TrainingRunFlags):
    """Flags of the experiment; a look is taken at every evaluation."""

    looking: Annotated[looks.LookFlags, tyro.conf.arg(name="")] = looks.LookFlags()


DEFAULTS = Flags(
    data=DataFlags(num_clients=10, partition="dirichlet"),
    model=ModelFlags(dim=32, depth=3, heads=2, mlp_dim=64),
    training=TrainingFlags(
        algorithms="local,fedavg,fedtp", rounds=30, local_epochs=1, sample_fraction=1.0
    ),
    run=RunFlags(eval_every=15),
)


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; what was done is saved.
    """
    look = flags.looking
    cli.check_counts(look, "look_clients", "look_examples", "directions")
    if look.look_clients % 2:
        raise InputError(
            f"look clients is {look.look_clients}; allowed is an even number, for pairs"
        )
    names = algorithms.resolve(flags.training.algorithms)
    if look.run is not None:
        _look_at_run(flags, names)
        return
    setup.check_flags(flags.data, flags.training, flags.run)
    setup.check_one_seed(flags.run)
    if flags.device.kept_on_host == "yes":
        raise InputError("this experiment needs what clients keep on the device")
    flags = replace(flags, device=replace(flags.device, kept_on_host="no"))
    mesh = launch.make_mesh(flags.device)
    launch.check_one_process()
    console = launch.make_console()
    prepared = setup.make_setup(
        flags.data, flags.model, flags.training, flags.run, mesh
    )
    setting = setup.make_setting(flags, prepared)
    built, notes = algorithms.build_all(flags.training.algorithms, setting)
    prepared = prepared._replace(notices=prepared.notices + notes)
    built, more = with_one_model(built, flags.training.algorithms)
    prepared = prepared._replace(notices=prepared.notices + more)
    check_clients(prepared, look.look_clients)
    prepared, plans, out = results.begin(
        EXPERIMENT, flags, prepared, built, mesh, console
    )
    scene = looks.make_scene(prepared, look, flags.run.seed)
    local_training = {
        a.name: looks.make_local_training(a, prepared, look.look_clients) for a in built
    }
    outcomes = driver.train_all(
        built,
        prepared,
        plans,
        flags.training,
        flags.run,
        out,
        look=partial(looks.take_look, scene, prepared, look, out, local_training),
    )
    results.write_results(
        out, EXPERIMENT, flags, prepared, outcomes, flags.run, console
    )
    every, rounds = flags.run.eval_every, flags.training.rounds
    # The last look of a shorter run was out of turn.
    due = sorted({*range(0, rounds + 1, every), rounds})
    found = {a.name: [looks.read_look(out, a.name, r) for r in due] for a in built}
    last = {
        a.name: looks.end_look(scene, prepared, look, flags.run.seed, out, a, usable)
        for a in built
        if (usable := looks.usable(found[a.name]))
    }
    write(out, flags, prepared, scene, found, last, console, page="connectivity.html")


def _look_at_run(flags: Flags, names: Sequence[str]) -> None:
    """One look at each algorithm of a run that is there."""
    assert flags.looking.run is not None
    # One device, where checkpoints are restored to.
    mesh = launch.make_mesh(DeviceFlags(devices=1))
    launch.check_one_process()
    run_folder = Path(flags.looking.run)
    models = {name: trained.load(run_folder, name, mesh) for name in names}
    first = models[names[0]]
    for model in models.values():
        looks.check_one_model(model.algorithm)
    check_clients(first.setup, flags.looking.look_clients)
    seed = first.flags.run.seed
    of_run = replace(
        flags,
        data=first.flags.data,
        model=first.flags.model,
        training=replace(first.flags.training, algorithms=",".join(names)),
        run=replace(flags.run, seed=seed),
    )
    out = (
        setup.new_folder(first.setup.dataset.name)
        if flags.run.out is None
        else Path(flags.run.out)
    )
    if not folder.open_folder(out, resume=flags.run.resume):
        setup.write_config(out, EXPERIMENT, of_run)
    console = launch.make_console()
    console.print(f"run folder: {out}", soft_wrap=True)
    scene = looks.make_scene(first.setup, flags.looking, seed)
    found, last = {}, {}
    for name, model in models.items():
        rounds = model.round
        algorithm = model.algorithm
        once = looks.make_local_training(
            algorithm, model.setup, flags.looking.look_clients
        )
        looks.take_look(
            scene,
            model.setup,
            flags.looking,
            out,
            {name: once},
            algorithm,
            model.state,
            rounds,
        )
        found[name] = [looks.read_look(out, name, rounds)]
        if looks.usable(found[name]):
            last[name] = looks.end_look(
                scene, model.setup, flags.looking, seed, out, algorithm, [rounds]
            )
        console.print(f"{name}: looked at round {rounds} of {run_folder}")
    folder.write_json(
        out / "summary.json",
        {"experiment": EXPERIMENT, "run": str(run_folder), "looks": found},
    )
    write(out, of_run, first.setup, scene, found, last, console, page="report.html")


def with_one_model(
    built: Sequence[Algorithm], names: str
) -> tuple[tuple[Algorithm, ...], tuple[str, ...]]:
    """The algorithms, and a note on each that is left out of `all`.

    Raises:
      InputError: see `looks.check_one_model`, for an algorithm that is named.
    """
    kept, notes = [], []
    for algorithm in built:
        try:
            looks.check_one_model(algorithm)
            kept.append(algorithm)
        except InputError as error:
            if names != "all":
                raise
            notes.append(f"{algorithm.name} is left out: {error}")
    return tuple(kept), tuple(notes)


def check_clients(prepared: Setup, wanted: int) -> None:
    """Raises InputError unless there are as many clients."""
    if wanted > prepared.num_clients:
        raise InputError(
            f"look clients is {wanted}; allowed is 2 to {prepared.num_clients}, the "
            "clients"
        )


def write(
    out: Path,
    flags: Flags,
    prepared: Setup,
    scene: looks.Scene,
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    last: Mapping[str, looks.EndLook],
    console: Console,
    *,
    page: str,
) -> None:
    """Tables, pictures and the page."""
    names = scene.layers.names
    notices = list(prepared.notices)
    for algorithm, taken in found.items():
        bad = [look["round"] for look in taken if not look["pairs"]]
        if bad:
            notices.append(
                f"{algorithm}: a client's model or a loss was not finite, and nothing "
                f"is measured, at rounds {', '.join(map(str, bad))} (lower --client-lr)"
            )
    found = {name: [look for look in f if look["pairs"]] for name, f in found.items()}
    found = {name: taken for name, taken in found.items() if taken}
    if not found:
        raise InputError(
            "no look has finite losses; nothing can be measured (lower --client-lr)"
        )
    rounds = sorted({look["round"] for taken in found.values() for look in taken})
    pictures: dict[str, Path] = {}

    def picture(caption: str, file: str) -> Path:
        pictures[caption] = out / file
        return out / file

    def by_round(part: str) -> dict[str, np.ndarray]:
        return {
            algorithm: at_rounds(
                {look["round"]: looks.mean_barrier(look, part) for look in taken}
            )
            for algorithm, taken in found.items()
        }

    def at_rounds(by_number: Mapping[int, np.ndarray]) -> np.ndarray:
        nothing = np.full_like(next(iter(by_number.values())), np.nan)
        return np.stack([by_number.get(number, nothing) for number in rounds], axis=1)

    columns = [str(number) for number in rounds]

    def barrier_heat(
        file: Path, found: Mapping[str, np.ndarray], rows: Sequence[str]
    ) -> None:
        plots.heat(
            file, found, rows, columns, x="round", label="barrier", diverging=True
        )

    file = picture("Barrier of each layer alone (test loss)", "layerwise.png")
    barrier_heat(file, by_round("layers"), names)
    for order, name in (
        ("shallow to deep", "cumulative_forth.png"),
        ("deep to shallow", "cumulative_back.png"),
    ):
        order_names = names if order == "shallow to deep" else names[::-1]
        barrier_heat(
            picture(f"Barrier of more and more layers, {order} (test loss)", name),
            by_round(order),
            [f"to {layer}" for layer in order_names],
        )
    plots.lines(
        picture("Barrier of more and more layers, at the last look", "cumulative.png"),
        {
            algorithm: {
                order: (
                    np.arange(1, len(names) + 1),
                    looks.mean_barrier(taken[-1], order),
                )
                for order in looks.ORDERS
            }
            for algorithm, taken in found.items()
        },
        x="layers averaged",
        y="barrier (test loss)",
        zero_line=True,
    )
    plots.lines(
        picture("Between two clients, at the last look", "path.png"),
        {
            algorithm: {
                pair: (looks.ALPHAS, content["test"]["loss"]["path"])
                for pair, content in taken[-1]["pairs"].items()
            }
            for algorithm, taken in found.items()
        },
        x="share of the second model",
        y="test loss",
    )
    kinds = looks.kinds_of(scene.layers)
    file = picture("Barrier of all layers of a kind (test loss)", "kinds.png")
    barrier_heat(file, by_round("kinds"), list(kinds))
    plots.heat(
        picture("How far layers have turned from their initial values", "rotation.png"),
        {
            algorithm: at_rounds(
                dict(
                    zip(looks.usable(found[algorithm]), ended.rotations.T, strict=True)
                )
            )
            for algorithm, ended in last.items()
        },
        names,
        columns,
        x="round",
        label="1 - cosine",
    )
    plots.lines(
        picture("Rise of the loss in each layer, half the way", "directions.png"),
        {
            algorithm: {
                kind: (
                    np.arange(1, len(names) + 1),
                    ended.directions[f"{kind} by layer"],
                )
                for kind in ("averaging", "random")
            }
            for algorithm, ended in last.items()
        },
        x="layer",
        y="rise of the test loss",
        zero_line=True,
    )
    plots.lines(
        picture("Rise of the loss inside and outside the trajectory", "subspace.png"),
        {
            algorithm: {
                name: (looks.SIGMAS, values) for name, values in ended.subspace.items()
            }
            for algorithm, ended in last.items()
        },
        x="length of the step",
        y="rise of the test loss",
        log_x=True,
    )
    tables = [
        barrier_table(found, names),
        kinds_table(found, list(kinds)),
        directions_table(last),
    ]
    if any(ended.without for ended in last.values()):
        tables.append(blocks_table(last))
    folder.write_csv(out / "barriers.csv", csv_rows(found, names))
    folder.write_json(out / "connectivity.json", content_of(found, last, names))
    report.write_report(
        out / page,
        title=f"What averaging does layer by layer, on {prepared.dataset.name}",
        summary=f"{flags.looking.look_clients} clients train one more round from the "
        "model of each look. Barriers are to the mean loss of the two whole models, on "
        f"{len(scene.batches['test'].y)} test examples of all clients, means over "
        "pairs of clients and over both as the base.",
        tables=tables,
        pictures=pictures,
        notices=notices,
        command=setup.command_line(EXPERIMENT),
        settings=cli.to_flat(flags),
    )
    for table in tables:
        results.show(console, table)
    console.print(f"connectivity: {out / page}", soft_wrap=True)


def content_of(
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    last: Mapping[str, looks.EndLook],
    names: Sequence[str],
) -> dict[str, Any]:
    """What the pictures show, in numbers; None for what is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple | np.ndarray) and np.ndim(value):
            return [plain(inner) for inner in value]
        return lab.finite(value)

    return {
        "layers": list(names),
        "algorithms": {
            algorithm: {
                "rounds": [look["round"] for look in taken],
                "barrier": [
                    {
                        part: plain(looks.mean_barrier(look, part))
                        for part in looks.PARTS
                    }
                    for look in taken
                ],
                "at_the_end": {"sigmas": list(looks.SIGMAS)}
                | plain(last[algorithm]._asdict()),
            }
            for algorithm, taken in found.items()
        },
    }


def barrier_table(
    found: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str]
) -> report.Table:
    """The whole barrier against the largest of one layer, at every look."""
    rows = []
    for algorithm, taken in found.items():
        for look in taken:
            alone = looks.mean_barrier(look, "layers")
            worst = int(np.argmax(alone))
            errors = looks.mean_barrier(look, "full", "error")
            rows.append(
                [
                    algorithm,
                    str(look["round"]),
                    f"{float(looks.mean_barrier(look, 'full')):.3f}",
                    f"{100 * float(errors):.1f}",
                    f"{alone[worst]:.3f}",
                    names[worst],
                    f"{float(looks.mean_barrier(look, 'full', split='train')):.3f}",
                ]
            )
    header = ["algorithm", "round", "all layers", "error, %", "worst layer alone"]
    header += ["which", "all layers, train"]
    return report.Table("Barriers between two clients (test loss)", header, rows)


def kinds_table(
    found: Mapping[str, Sequence[Mapping[str, Any]]], kinds: Sequence[str]
) -> report.Table:
    """Barriers of all layers of a kind at the last look, by algorithm."""
    last = {n: looks.mean_barrier(taken[-1], "kinds") for n, taken in found.items()}
    rows = [
        [kind, *(f"{values[i]:.3f}" for values in last.values())]
        for i, kind in enumerate(kinds)
    ]
    title = "All layers of a kind averaged, the last look (test loss)"
    return report.Table(title, ["layers", *last], rows)


def directions_table(last: Mapping[str, looks.EndLook]) -> report.Table:
    """Towards another client's model, against random directions of equal length."""
    rows = [
        [
            algorithm,
            *(
                f"{value:.3f}"
                for kind in ("averaging", "random")
                for value in ended.directions[kind]
            ),
            *(f"{ended.subspace[name][-2]:.3f}" for name in ("inside", "outside")),
        ]
        for algorithm, ended in last.items()
    ]
    header = ["algorithm", "averaging, half", "all", "random, half", "all"]
    header += [f"{name}, length {looks.SIGMAS[-2]:g}" for name in ("inside", "outside")]
    return report.Table("Rise of the test loss", header, rows)


def blocks_table(last: Mapping[str, looks.EndLook]) -> report.Table:
    """Accuracy of one client's model on all clients' data without each block."""
    most = max(len(ended.without) for ended in last.values())
    header = ["algorithm", "whole", *(f"without {i}" for i in range(most))]
    rows = [
        [name, *(f"{100 * a:.1f}" for a in (ended.whole, *ended.without))]
        for name, ended in last.items()
    ]
    return report.Table("One client's model without a block: accuracy, %", header, rows)


def csv_rows(
    found: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """A row for each barrier of one layer, and of the first layers in order."""
    rows = []
    for algorithm, taken in found.items():
        for look in taken:
            for pair, content in look["pairs"].items():
                for split in looks.SPLITS:
                    for figure in looks.FIGURES:
                        own = content[split][figure]
                        for i, name in enumerate(names):
                            rows.append(
                                {
                                    "algorithm": algorithm,
                                    "round": look["round"],
                                    "models": pair,
                                    "split": split,
                                    "figure": figure,
                                    "layer": name,
                                    "alone_in_first": own["layers"][i],
                                    "alone_in_second": own["layers, second"][i],
                                    "up_to_it": own[looks.ORDERS[0]][i],
                                    "from_it_on": own[looks.ORDERS[1]][-1 - i],
                                    "all": own["full"],
                                }
                            )
    return rows


def _with_absolute_paths(flags: Flags) -> Flags:
    looking = flags.looking
    if looking.run is not None:
        looking = replace(looking, run=str(Path(looking.run).resolve()))
    return replace(setup.with_absolute_paths(flags), looking=looking)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.experiment_main(
        run,
        DEFAULTS,
        argv,
        name=EXPERIMENT,
        description=__doc__,
        normalize=_with_absolute_paths,
    )


if __name__ == "__main__":
    raise SystemExit(main())
