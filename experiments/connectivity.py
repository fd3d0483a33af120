"""Where in a network does averaging hurt: in single layers, or in all together?

    python -m experiments.connectivity --dataset fashion_mnist

trains, and at every evaluation looks at what clients make of the model in one more
round of local training: barriers between two clients' models, and from a client's to
the average, of all layers, of each alone, and of more and more of them; how far every
layer has turned from its initial value; at the end also random directions against that
of averaging, and what each block is worth. `--run DIR` looks once at the newest
checkpoint of a run that is there, with that run's data and model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from experiments import cli, driver, lab, launch, results, setup, trained
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
from fedjax_tp.algorithms import Algorithm, Update
from fedjax_tp.algorithms.base import LocalCarry, training_metrics
from fedjax_tp.analysis import blocks, connectivity
from fedjax_tp.analysis.layers import Layers, layers_of, rotation
from fedjax_tp.data.federated import FederatedDataset
from fedjax_tp.io import folder, plots, report
from fedjax_tp.simulation.cohort import run_cohort
from fedjax_tp.simulation.rounds import SimulationState
from fedjax_tp.types import Batch, InputError, Params

EXPERIMENT = "connectivity"
_SPLITS = ("train", "test")
_FIGURES = ("loss", "error")
_ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SIGMAS = (0.1, 0.3, 1.0, 3.0)
_BATCHES, _BATCH = 4, 64

ORDERS = ("shallow to deep", "deep to shallow", "random", "outside in")
"""In which layers are averaged one after another."""


@dataclass(frozen=True)
class LookFlags:
    """What is looked at."""

    run: str | None = None
    """Look at the newest checkpoint of this run's --algorithms, and train nothing."""
    look_clients: int = 4
    """Clients that train on from the model, two by two; an even number."""
    look_examples: int = 256
    """Examples of all clients, of training and of test, that models are measured on."""
    directions: int = 5
    """Random directions, of which means are taken."""


@dataclass(frozen=True)
class Flags(TrainingRunFlags):
    """Flags of the experiment; a look is taken at every evaluation."""

    looks: Annotated[LookFlags, tyro.conf.arg(name="")] = LookFlags()


DEFAULTS = Flags(
    data=DataFlags(num_clients=10, partition="dirichlet"),
    model=ModelFlags(dim=32, depth=3, heads=2, mlp_dim=64),
    training=TrainingFlags(
        algorithms="local,fedavg,fedtp", rounds=30, local_epochs=1, sample_fraction=1.0
    ),
    run=RunFlags(eval_every=10),
)


LocalTraining = Callable[[SimulationState, FederatedDataset], Params]


class Scene(NamedTuple):
    """What looks have in common.

    Attributes:
      layers: of the model.
      points: between a first model and a second, `[points, layers]`.
      spans: which rows of `points` are what, by name.
      evaluate: see `connectivity.make_evaluate_points`.
      batches: of each split.
    """

    layers: Layers
    points: np.ndarray
    spans: dict[str, slice]
    evaluate: Callable[..., connectivity.Found]
    batches: dict[str, Batch]


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; what was done is saved.
    """
    look = flags.looks
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
    for algorithm in built:
        check_one_model(algorithm)
    check_clients(prepared, look.look_clients)
    prepared, plans, out = results.begin(
        EXPERIMENT, flags, prepared, built, mesh, console
    )
    scene = make_scene(prepared, look, flags.run.seed)
    local_training = {
        algorithm.name: make_local_training(algorithm, prepared, look.look_clients)
        for algorithm in built
    }
    outcomes = driver.train_all(
        built,
        prepared,
        plans,
        flags.training,
        flags.run,
        out,
        look=partial(take_look, scene, prepared, flags, out, local_training),
    )
    results.write_results(
        out, EXPERIMENT, flags, prepared, outcomes, flags.run, console
    )
    every, rounds = flags.run.eval_every, flags.training.rounds
    # The last look of a shorter run was out of turn.
    due = sorted({*range(0, rounds + 1, every), rounds})
    found = {a.name: [read_look(out, a.name, r) for r in due] for a in built}
    last = {
        a.name: end_look(scene, prepared, flags, out, a.name, due, rounds)
        for a in built
    }
    write(out, flags, prepared, scene, found, last, console, page="connectivity.html")


def _look_at_run(flags: Flags, names: Sequence[str]) -> None:
    """One look at each algorithm of a run that is there."""
    assert flags.looks.run is not None
    mesh = launch.make_mesh(DeviceFlags(devices=flags.device.devices))
    launch.check_one_process()
    run_folder = Path(flags.looks.run)
    models = {name: trained.load(run_folder, name, mesh) for name in names}
    first = models[names[0]]
    for model in models.values():
        check_one_model(model.algorithm)
    check_clients(first.setup, flags.looks.look_clients)
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
        setup.write_config(out, EXPERIMENT, flags)
    console = launch.make_console()
    console.print(f"run folder: {out}", soft_wrap=True)
    scene = make_scene(first.setup, flags.looks, seed)
    found, last = {}, {}
    for name, model in models.items():
        rounds = model.round
        algorithm = model.algorithm
        once = make_local_training(algorithm, model.setup, flags.looks.look_clients)
        take_look(
            scene,
            model.setup,
            of_run,
            out,
            {name: once},
            algorithm,
            model.state,
            rounds,
        )
        found[name] = [read_look(out, name, rounds)]
        last[name] = end_look(scene, model.setup, of_run, out, name, [rounds], rounds)
        console.print(f"{name}: looked at round {rounds} of {run_folder}")
    folder.write_json(
        out / "summary.json",
        {"experiment": EXPERIMENT, "run": str(run_folder), "looks": found},
    )
    write(out, of_run, first.setup, scene, found, last, console, page="report.html")


def check_one_model(algorithm: Algorithm) -> None:
    """Raises InputError for an algorithm whose clients train another thing than one
    whole model, which could be averaged."""
    key = jax.random.key(0)

    def begin(key: jax.Array) -> Any:
        state = algorithm.init(key)
        message = algorithm.broadcast(state, jnp.zeros(1, jnp.int32))
        own = jax.tree.map(lambda leaf: leaf[0], message.personal)
        kept = algorithm.init_kept(state)
        message = message._replace(personal=own)
        return (
            algorithm.client_start(message, kept, key),
            algorithm.client_params(message, kept),
        )

    carry, params = jax.eval_shape(begin, key)
    is_whole = isinstance(carry, LocalCarry) and (
        jax.tree.map(jnp.shape, carry.params) == jax.tree.map(jnp.shape, params)
    )
    if not is_whole:
        raise InputError(
            f"algorithm is {algorithm.name!r}, whose clients train more than one "
            "model; allowed are those that train one, such as fedavg or fedtp"
        )


def check_clients(prepared: Setup, wanted: int) -> None:
    """Raises InputError unless there are as many clients."""
    if wanted > prepared.num_clients:
        raise InputError(
            f"look clients is {wanted}; allowed is 2 to {prepared.num_clients}, the "
            "clients"
        )


def make_scene(prepared: Setup, look: LookFlags, seed: int) -> Scene:
    """Points and examples of all looks."""
    layers = layers_of(prepared.task.init)
    count = len(layers.names)
    rng = np.random.default_rng(seed)
    forth = list(range(count))
    outside_in = sorted(forth, key=lambda i: min(i, count - 1 - i))
    orders = dict(
        zip(
            ORDERS,
            (forth, forth[::-1], rng.permutation(count).tolist(), outside_in),
            strict=True,
        )
    )
    kinds = kinds_of(layers)
    parts = {
        "path": connectivity.full_path(_ALPHAS, layers),
        "layers": connectivity.layer_wise(layers),
        "kinds": connectivity.chosen(list(kinds.values()), layers),
        **{
            order: connectivity.cumulative(numbers, layers)
            for order, numbers in orders.items()
        },
    }
    # Each set of layers is averaged in the first model, and in the second.
    for name in [*parts][1:]:
        parts[f"{name}, second"] = connectivity.from_second(parts[name])
    bounds = np.cumsum([0, *map(len, parts.values())])
    spans = {
        name: slice(int(a), int(b))
        for name, a, b in zip(parts, bounds[:-1], bounds[1:], strict=True)
    }
    batches = {
        split: sample(getattr(prepared, split), look.look_examples, rng)
        for split in _SPLITS
    }
    recalibrate_with = None
    if prepared.task.loss_and_statistics is not None:
        again = sample(prepared.train, _BATCHES * _BATCH, rng)
        size = len(again.y) // _BATCHES
        recalibrate_with = jax.tree.map(
            lambda leaf: leaf[: _BATCHES * size].reshape(
                _BATCHES, size, *leaf.shape[1:]
            ),
            again,
        )
    return Scene(
        layers,
        np.concatenate(list(parts.values())).astype(np.float32),
        spans,
        connectivity.make_evaluate_points(
            prepared.task, layers, recalibrate_with=recalibrate_with
        ),
        batches,
    )


def kinds_of(layers: Layers) -> dict[str, tuple[str, ...]]:
    """Layers by what they are: all queries, all MLPs, what lies outside the blocks."""
    kinds: dict[str, list[str]] = {}
    for name in layers.names:
        block, _, inside = name.partition("/")
        kind = inside if block.startswith("block_") else name
        kinds.setdefault(kind, []).append(name)
    return {kind: tuple(names) for kind, names in kinds.items()}


def sample(data: FederatedDataset, count: int, rng: np.random.Generator) -> Batch:
    """Examples of all clients, each client's as likely as it has many."""
    sizes = np.asarray(data.size)
    held = np.asarray(data.rows)[: sizes.sum()]
    rows = rng.choice(held, min(count, len(held)), replace=False)
    x = np.asarray(data.x)[rows].astype(np.float32)
    x = (x - np.asarray(data.mean)) / np.asarray(data.std)
    y = np.asarray(data.y)[rows]
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(rows), bool))


def make_local_training(
    algorithm: Algorithm, prepared: Setup, clients: int
) -> LocalTraining:
    """A jitted function of a state and training data: what the first clients have after
    one more round of local training, stacked."""

    def finish(message: Any, carry: LocalCarry) -> Update:
        return Update(None, carry.params, None, training_metrics(carry))

    to_model = algorithm._replace(client_finish=finish)
    schedule = prepared.schedule._replace(lanes=1)

    @jax.jit
    def local_training(state: SimulationState, data: FederatedDataset) -> Params:
        ids = jnp.arange(clients)
        message = algorithm.broadcast(state.server, ids)
        kept = jax.tree.map(lambda leaf: leaf[:clients], state.kept)
        found = run_cohort(
            to_model, data, message, kept, ids, jax.random.key(0), schedule
        )
        return found.update.personal

    return local_training


def look_file(out: Path, name: str, rounds: int) -> Path:
    """Where a look is saved."""
    return out / "looks" / f"{name}-{rounds}.json"


def read_look(out: Path, name: str, rounds: int) -> Mapping[str, Any]:
    """A look that was taken."""
    return folder.read_json(look_file(out, name, rounds))


def take_look(
    scene: Scene,
    prepared: Setup,
    flags: Flags,
    out: Path,
    local_training: Mapping[str, LocalTraining],
    algorithm: Algorithm,
    state: SimulationState,
    rounds: int,
) -> None:
    """Measures and saves: barriers as JSON, the clients' models beside it."""
    saved = look_file(out, algorithm.name, rounds)
    if saved.is_file():
        return
    clients = flags.looks.look_clients
    models = jax.device_get(local_training[algorithm.name](state, prepared.train))
    sizes = np.asarray(prepared.train.size)[:clients].astype(np.float64)
    weights = sizes / sizes.sum()
    average = jax.tree.map(
        lambda leaf: np.tensordot(weights, leaf, axes=1).astype(leaf.dtype), models
    )

    def model(i: int) -> Params:
        return jax.tree.map(lambda leaf: leaf[i], models)

    pairs = {f"{i} and {i + 1}": (model(i), model(i + 1)) for i in range(0, clients, 2)}
    pairs["0 and average"] = (model(0), average)
    found: dict[str, Any] = {"round": rounds, "pairs": {}}
    for name, (first, second) in pairs.items():
        found["pairs"][name] = {
            split: _barriers(scene, first, second, split) for split in _SPLITS
        }
    saved.parent.mkdir(exist_ok=True)
    flat = np.stack([lab.flat_params(model(i)) for i in range(clients)])
    partial_file = saved.with_suffix(".partial.npz")
    np.savez(partial_file, models=flat)
    partial_file.replace(saved.with_suffix(".npz"))
    folder.write_json(saved, found)


def _barriers(
    scene: Scene, first: Params, second: Params, split: str
) -> dict[str, Any]:
    """Of every part of the points: barriers in loss and in error; of a path its loss
    and error themselves."""
    found = jax.device_get(
        scene.evaluate(first, second, scene.points, scene.batches[split])
    )
    content: dict[str, Any] = {}
    for figure in _FIGURES:
        values = np.asarray(getattr(found, figure), np.float64)
        path = values[scene.spans["path"]]
        above = np.asarray(
            connectivity.barriers(jnp.asarray(values), path[0], path[-1]), np.float64
        )
        content[figure] = {"path": path.tolist(), "full": float(above[_HALF])}
        for name, span in scene.spans.items():
            if name != "path":
                content[figure][name] = above[span].tolist()
    return content


_HALF = _ALPHAS.index(0.5)


def _unflat(flat: Any, prepared: Setup) -> Params:
    like = jax.eval_shape(prepared.task.init, jax.random.key(0))
    return lab.unflat_params(flat, like)


class EndLook(NamedTuple):
    """What is measured once, when all looks have been taken.

    Attributes:
      rotations: of every layer at every look, `[layers, looks]`, mean over clients.
      directions: barrier-like rise of the loss at share .5 and 1 of the way from one
        client's model to another's: along it, and along random directions of equal
        length, all layers at once and layer by layer.
      subspace: rise of the loss in random unit directions inside the space that the
        clients' models along training span, and outside it, by length.
      without: test accuracy without each block; empty of a model without blocks.
      whole: test accuracy of the whole model.
    """

    rotations: np.ndarray
    directions: dict[str, list[float]]
    subspace: dict[str, list[float]]
    without: list[float]
    whole: float


def end_look(
    scene: Scene,
    prepared: Setup,
    flags: Flags,
    out: Path,
    name: str,
    due: Sequence[int],
    rounds: int,
) -> EndLook:
    """Measures what needs all looks; see `EndLook`."""
    flats = []
    for number in due:
        with np.load(look_file(out, name, number).with_suffix(".npz")) as arrays:
            flats.append(arrays["models"])
    # Models before any round differ by one local training alone.
    initial = jax.jit(prepared.task.init)(_initial_key(flags))
    turned = jax.jit(jax.vmap(lambda p: rotation(p, initial, scene.layers)))
    rotations = np.stack(
        [
            np.asarray(
                turned(
                    jax.tree.map(
                        lambda *rows: jnp.stack(rows),
                        *(_unflat(flat, prepared) for flat in models),
                    )
                )
            ).mean(axis=0)
            for models in flats
        ],
        axis=1,
    )
    first, second = (_unflat(flats[-1][i], prepared) for i in range(2))
    test = scene.batches["test"]
    without, whole = [], float("nan")
    score = jax.jit(prepared.task.metrics)(first, test)
    whole = float(score.correct / score.examples)
    if blocks.num_blocks(first):
        dropped = jax.jit(partial(blocks.accuracy_without_each, prepared.task))
        without = np.asarray(dropped(first, test)).tolist()
    return EndLook(
        rotations,
        _directions(scene, flags, first, second),
        _subspace(scene, flags, prepared, np.concatenate(flats), flats[-1][0]),
        without,
        whole,
    )


def _initial_key(flags: Flags) -> jax.Array:
    """The key of the initial model, as the run split it off its seed."""
    return jax.random.split(jax.random.key(flags.run.seed))[0]


def _directions(
    scene: Scene, flags: Flags, first: Params, second: Params
) -> dict[str, list[float]]:
    """Rise of the test loss at half the way and all of it, by kind of direction; layer
    by layer only at half the way."""
    layers, test = scene.layers, scene.batches["test"]
    shares = np.concatenate(
        [
            connectivity.full_path((0.0, 0.5, 1.0), layers),
            connectivity.layer_wise(layers),
        ]
    ).astype(np.float32)
    towards = np.asarray(scene.evaluate(first, second, shares, test).loss)

    @jax.jit
    def moved(key: jax.Array) -> Params:
        direction = connectivity.random_direction(key, first, second, layers)
        return jax.tree.map(jnp.add, first, direction)

    keys = jax.random.split(jax.random.key(flags.run.seed), flags.looks.directions)
    randoms = np.mean(
        [scene.evaluate(first, moved(key), shares, test).loss for key in keys], axis=0
    )
    return {
        "averaging": (towards[1:3] - towards[0]).tolist(),
        "random": (randoms[1:3] - randoms[0]).tolist(),
        "averaging by layer": (towards[3:] - towards[0]).tolist(),
        "random by layer": (randoms[3:] - randoms[0]).tolist(),
    }


def _subspace(
    scene: Scene,
    flags: Flags,
    prepared: Setup,
    trajectory: np.ndarray,
    start: np.ndarray,
) -> dict[str, list[float]]:
    """Mean rise of the test loss at each of `_SIGMAS` from a model, inside the space of
    the trajectory and outside it."""
    test, task = scene.batches["test"], prepared.task

    @jax.jit
    def loss_at(flat: jax.Array) -> jax.Array:
        found = task.metrics(_unflat(flat, prepared), test)
        return found.loss / found.examples

    subspace = jax.jit(connectivity.trajectory_subspace)(jnp.asarray(trajectory))
    at_start = float(loss_at(jnp.asarray(start)))
    keys = jax.random.split(jax.random.key(flags.run.seed + 1), flags.looks.directions)
    found = {}
    for name, draw in (
        ("inside", jax.jit(connectivity.direction_inside)),
        ("outside", jax.jit(connectivity.direction_outside)),
    ):
        along = [np.asarray(draw(key, subspace)) for key in keys]
        found[name] = [
            float(np.mean([loss_at(start + sigma * d) for d in along])) - at_start
            for sigma in _SIGMAS
        ]
    return found


def mean_barrier(
    look: Mapping[str, Any], part: str, figure: str = "loss", split: str = "test"
) -> np.ndarray:
    """A part's barriers, means over pairs of clients and both models as the base."""
    values = []
    for name, found in look["pairs"].items():
        if name.endswith("average"):
            continue
        own = found[split][figure]
        values.append(own[part])
        if part != "full":
            values.append(own[f"{part}, second"])
    return np.mean(values, axis=0)


def write(
    out: Path,
    flags: Flags,
    prepared: Setup,
    scene: Scene,
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    last: Mapping[str, EndLook],
    console: Console,
    *,
    page: str,
) -> None:
    """Tables, pictures and the page."""
    names = scene.layers.names
    looks = [str(look["round"]) for look in next(iter(found.values()))]
    pictures: dict[str, Path] = {}

    def picture(caption: str, file: str) -> Path:
        pictures[caption] = out / file
        return out / file

    def by_round(part: str) -> dict[str, np.ndarray]:
        return {
            algorithm: np.stack([mean_barrier(look, part) for look in taken], axis=1)
            for algorithm, taken in found.items()
        }

    plots.heat(
        picture("Barrier of each layer alone (test loss)", "layerwise.png"),
        by_round("layers"),
        names,
        looks,
        x="round",
        label="barrier",
        diverging=True,
    )
    for order, file in (
        ("shallow to deep", "cumulative_forth.png"),
        ("deep to shallow", "cumulative_back.png"),
    ):
        number = len(names)
        order_names = names if order == "shallow to deep" else names[::-1]
        plots.heat(
            picture(f"Barrier of more and more layers, {order} (test loss)", file),
            by_round(order),
            [f"to {order_names[i]}" for i in range(number)],
            looks,
            x="round",
            label="barrier",
            diverging=True,
        )
    plots.lines(
        picture("Barrier of more and more layers, at the last look", "cumulative.png"),
        {
            algorithm: {
                order: (
                    np.arange(1, len(names) + 1),
                    mean_barrier(taken[-1], order),
                )
                for order in ORDERS
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
                pair: (_ALPHAS, content["test"]["loss"]["path"])
                for pair, content in taken[-1]["pairs"].items()
            }
            for algorithm, taken in found.items()
        },
        x="share of the second model",
        y="test loss",
    )
    kinds = kinds_of(scene.layers)
    plots.heat(
        picture("Barrier of all layers of a kind (test loss)", "kinds.png"),
        by_round("kinds"),
        list(kinds),
        looks,
        x="round",
        label="barrier",
        diverging=True,
    )
    plots.heat(
        picture("How far layers have turned from their initial values", "rotation.png"),
        {algorithm: ended.rotations for algorithm, ended in last.items()},
        names,
        looks,
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
                name: (_SIGMAS, values) for name, values in ended.subspace.items()
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
    report.write_report(
        out / page,
        title=f"What averaging does layer by layer, on {prepared.dataset.name}",
        summary=f"{flags.looks.look_clients} clients train one more round from the "
        "model of each look. Barriers are to the mean loss of the two whole models, on "
        f"{len(scene.batches['test'].y)} test examples of all clients, means over "
        "pairs of clients and over both as the base.",
        tables=tables,
        pictures=pictures,
        notices=prepared.notices,
        command=setup.command_line(EXPERIMENT),
        settings=cli.to_flat(flags),
    )
    for table in tables:
        results.show(console, table)
    console.print(f"connectivity: {out / page}", soft_wrap=True)


def barrier_table(
    found: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str]
) -> report.Table:
    """The whole barrier against the largest of one layer, at every look."""
    rows = []
    for algorithm, taken in found.items():
        for look in taken:
            alone = mean_barrier(look, "layers")
            worst = int(np.argmax(alone))
            errors = mean_barrier(look, "full", "error")
            rows.append(
                [
                    algorithm,
                    str(look["round"]),
                    f"{float(mean_barrier(look, 'full')):.3f}",
                    f"{100 * float(errors):.1f}",
                    f"{alone[worst]:.3f}",
                    names[worst],
                    f"{float(mean_barrier(look, 'full', split='train')):.3f}",
                ]
            )
    header = ["algorithm", "round", "all layers", "error, %", "worst layer alone"]
    header += ["which", "all layers, train"]
    return report.Table("Barriers between two clients (test loss)", header, rows)


def kinds_table(
    found: Mapping[str, Sequence[Mapping[str, Any]]], kinds: Sequence[str]
) -> report.Table:
    """Barriers of all layers of a kind at the last look, by algorithm."""
    last = {name: mean_barrier(taken[-1], "kinds") for name, taken in found.items()}
    rows = [
        [kind, *(f"{values[i]:.3f}" for values in last.values())]
        for i, kind in enumerate(kinds)
    ]
    title = "All layers of a kind averaged, the last look (test loss)"
    return report.Table(title, ["layers", *last], rows)


def directions_table(last: Mapping[str, EndLook]) -> report.Table:
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
    header += [f"{name}, length {_SIGMAS[-2]:g}" for name in ("inside", "outside")]
    return report.Table("Rise of the test loss", header, rows)


def blocks_table(last: Mapping[str, EndLook]) -> report.Table:
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
                for split in _SPLITS:
                    for figure in _FIGURES:
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
                                    "up_to_it": own[ORDERS[0]][i],
                                    "from_it_on": own[ORDERS[1]][-1 - i],
                                    "all": own["full"],
                                }
                            )
    return rows


def _with_absolute_paths(flags: Flags) -> Flags:
    looks = flags.looks
    if looks.run is not None:
        looks = replace(looks, run=str(Path(looks.run).resolve()))
    return replace(setup.with_absolute_paths(flags), looks=looks)


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
