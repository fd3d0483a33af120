"""Looks at a model along its training: barriers, rotation, directions, blocks.

Plumbing of `experiments.connectivity`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import lab
from experiments.setup import Setup
from experiments.trained import params_of
from fedjax_tp.algorithms import Algorithm, Update
from fedjax_tp.algorithms.base import LocalCarry, client_shapes, training_metrics
from fedjax_tp.analysis import blocks, connectivity
from fedjax_tp.analysis.layers import Layers, layers_of, rotation
from fedjax_tp.data.federated import FederatedDataset, normalized
from fedjax_tp.io import folder
from fedjax_tp.simulation.cohort import run_cohort
from fedjax_tp.simulation.rounds import SimulationState, init_state
from fedjax_tp.types import Batch, InputError, Params

SPLITS = ("train", "test")
FIGURES = ("loss", "error")
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
SIGMAS = (0.1, 0.3, 1.0, 3.0)
_BATCHES, _BATCH = 4, 64

ORDERS = ("shallow to deep", "deep to shallow", "random", "outside in")
"""In which layers are averaged one after another."""

PARTS = ("full", "layers", "kinds", *ORDERS)


@dataclass(frozen=True)
class LookFlags:
    """What is looked at."""

    run: str | None = None
    """Look at the newest checkpoint of this run's --algorithms, and train nothing;
    data, model and training are that run's, whatever else is given."""
    look_clients: int = 4
    """Clients that train on from the model, two by two; an even number."""
    look_examples: int = 256
    """Examples of all clients, of training and of test, that models are measured on."""
    directions: int = 5
    """Random directions, of which means are taken."""


LocalTraining = Callable[[SimulationState, FederatedDataset], tuple[Params, Any]]


class Scene(NamedTuple):
    """What looks have in common.

    Attributes:
      layers: of the model.
      points: between a first model and a second, `[points, layers]`.
      spans: which rows of `points` are what, by name.
      evaluate: see `connectivity.make_evaluate_points`.
      batches: of each split.
      recalibrate_with: see `connectivity.make_evaluate_points`.
    """

    layers: Layers
    points: np.ndarray
    spans: dict[str, slice]
    evaluate: Callable[..., connectivity.Found]
    batches: dict[str, Batch]
    recalibrate_with: Batch | None


def check_one_model(algorithm: Algorithm) -> None:
    """Raises InputError for an algorithm whose clients train another thing than one
    whole model, which could be averaged."""
    shapes = client_shapes(algorithm)
    is_whole = isinstance(shapes.carry, LocalCarry) and (
        jax.tree.map(jnp.shape, shapes.carry.params)
        == jax.tree.map(jnp.shape, shapes.params)
    )
    if not is_whole:
        raise InputError(
            f"algorithm is {algorithm.name!r}, whose clients do not train one model "
            "and nothing else; allowed are those that do, such as fedavg or fedtp"
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
        "path": connectivity.full_path(ALPHAS, layers),
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
        for split in SPLITS
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
        recalibrate_with,
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
    # On one device, whatever those of the data.
    x, y = jax.device_get((normalized(data.x[rows], data), data.y[rows]))
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(rows), bool))


def make_local_training(
    algorithm: Algorithm, prepared: Setup, clients: int
) -> LocalTraining:
    """A jitted function of a state and training data: what the first clients have after
    one more round of local training, stacked, and whether it is finite."""

    def finish(message: Any, carry: LocalCarry) -> Update:
        return Update(None, carry.params, None, training_metrics(carry))

    to_model = algorithm._replace(client_finish=finish)
    schedule = prepared.schedule._replace(lanes=1)

    @jax.jit
    def local_training(
        state: SimulationState, data: FederatedDataset
    ) -> tuple[Params, Any]:
        ids = jnp.arange(clients)
        message = algorithm.broadcast(state.server, ids)
        kept = jax.tree.map(lambda leaf: leaf[:clients], state.kept)
        found = run_cohort(
            to_model, data, message, kept, ids, jax.random.key(0), schedule
        )
        return found.update.personal, found.is_finite

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
    look: LookFlags,
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
    clients = look.look_clients
    models, is_finite = jax.device_get(
        local_training[algorithm.name](state, prepared.train)
    )
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
    for name, (first, second) in pairs.items() if is_finite.all() else ():
        found["pairs"][name] = {
            split: _barriers(scene, first, second, split) for split in SPLITS
        }
    if not _all_finite(found["pairs"]):
        found["pairs"] = {}
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
    for figure in FIGURES:
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


def _all_finite(content: Any) -> bool:
    if isinstance(content, dict):
        return all(map(_all_finite, content.values()))
    return bool(np.isfinite(content).all())


_HALF = ALPHAS.index(0.5)


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
    look: LookFlags,
    seed: int,
    out: Path,
    algorithm: Algorithm,
    due: Sequence[int],
) -> EndLook:
    """Measures what needs all looks; see `EndLook`."""
    flats = []
    for number in due:
        with np.load(
            look_file(out, algorithm.name, number).with_suffix(".npz")
        ) as arrays:
            flats.append(arrays["models"])
    initial = initial_models(algorithm, prepared.num_clients, look.look_clients, seed)
    turned = jax.jit(jax.vmap(lambda p, start: rotation(p, start, scene.layers)))
    rotations = np.stack(
        [
            np.asarray(
                turned(
                    jax.tree.map(
                        lambda *rows: jnp.stack(rows),
                        *(_unflat(flat, prepared) for flat in models),
                    ),
                    initial,
                )
            ).mean(axis=0)
            for models in flats
        ],
        axis=1,
    )
    first, second = (_unflat(flats[-1][i], prepared) for i in range(2))
    test = scene.batches["test"]
    without: list[float] = []
    score = jax.jit(prepared.task.metrics)(first, test)
    whole = float(score.correct / score.examples)
    if blocks.num_blocks(first):
        dropped = jax.jit(partial(blocks.accuracy_without_each, prepared.task))
        without = np.asarray(dropped(first, test)).tolist()
    return EndLook(
        rotations,
        _directions(scene, look.directions, seed, first, second),
        _subspace(
            scene, look.directions, seed, prepared, np.concatenate(flats), flats[-1][0]
        ),
        without,
        whole,
    )


def usable(taken: Sequence[Mapping[str, Any]]) -> list[int]:
    """Rounds of the looks at which everything was finite."""
    return [look["round"] for look in taken if look["pairs"]]


def initial_models(
    algorithm: Algorithm, num_clients: int, clients: int, seed: int
) -> Params:
    """What the first clients of all had before the first round, stacked."""

    @jax.jit
    def start(key: jax.Array) -> Params:
        state = init_state(algorithm, num_clients, key)
        own = jax.vmap(lambda client: params_of(algorithm, state, client))
        return own(jnp.arange(clients))

    # As the run split it off its seed.
    return start(jax.random.split(jax.random.key(seed))[0])


def _directions(
    scene: Scene, count: int, seed: int, first: Params, second: Params
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

    keys = jax.random.split(jax.random.key(seed), count)
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
    count: int,
    seed: int,
    prepared: Setup,
    trajectory: np.ndarray,
    start: np.ndarray,
) -> dict[str, list[float]]:
    """Mean rise of the test loss at each of `SIGMAS` from a model, inside the space of
    the trajectory and outside it."""
    test, task = scene.batches["test"], prepared.task

    @jax.jit
    def loss_at(flat: jax.Array) -> jax.Array:
        params = _unflat(flat, prepared)
        if scene.recalibrate_with is not None:
            params = connectivity.recalibrate(task, params, scene.recalibrate_with)
        found = task.metrics(params, test)
        return found.loss / found.examples

    # Running statistics are no direction to go along.
    is_weight = lab.flat_params(
        jax.tree.map(
            lambda index, leaf: np.broadcast_to(index >= 0, leaf.shape),
            scene.layers.index,
            jax.eval_shape(task.init, jax.random.key(0)),
        )
    )
    basis = jax.jit(connectivity.trajectory_basis)(jnp.asarray(trajectory * is_weight))
    at_start = float(loss_at(jnp.asarray(start)))
    keys = jax.random.split(jax.random.key(seed + 1), count)
    found = {}
    for name, draw in (
        ("inside", jax.jit(connectivity.direction_inside)),
        ("outside", jax.jit(connectivity.direction_outside)),
    ):
        along = [np.asarray(draw(key, basis)) * is_weight for key in keys]
        along = [direction / np.linalg.norm(direction) for direction in along]
        found[name] = [
            float(np.mean([loss_at(start + sigma * d) for d in along])) - at_start
            for sigma in SIGMAS
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
