"""How far apart are training and test accuracy, and who pays for which parameters?

    python -m experiments.generalization --dataset fashion_mnist

trains FedTP, vanilla personalization and FedAvg with more and more clients, with more
and more examples a client, and FedTP with larger and larger embeddings, every time with
as many local steps; it holds the gaps against a bound with measured constants. The
bound is of Baxter's kind and ours, not the FedTP paper's; see `analysis.generalization`
for what it says, and the report for how much too large it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial as bind
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import cli, lab, setup
from experiments.flags import LabFlags, ModelFlags, SourceFlags
from experiments.lab import Arrays, Figures, Lab, Trainer
from experiments.trained import params_of
from fedjax_tp import tree
from fedjax_tp.algorithms import (
    REGISTRY,
    Algorithm,
    ClientOptimizer,
    Setting,
    check_setting,
)
from fedjax_tp.algorithms.base import client_shapes, is_nothing
from fedjax_tp.analysis import generalization
from fedjax_tp.analysis.generalization import Block
from fedjax_tp.data import catalog, partition
from fedjax_tp.data.federated import FederatedDataset, gather
from fedjax_tp.hypernetwork import HypernetworkConfig
from fedjax_tp.io import plots, report
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.task import is_statistic
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import SimulationState
from fedjax_tp.types import InputError, Params, Tree

EXPERIMENT = "generalization"
_ungrouped = tyro.conf.arg(name="")
_LOOKS = 3
# Examples of each client, on which gradients are measured.
_PROBES = 32
_AT_A_TIME = 16
# Clients for which the hypernetwork's derivatives are measured: what they depend on is
# nearly the same for all.
_PROBED_CLIENTS = 4
_POWERS = range(1, 10)
_CROWDS = tuple(10.0**power for power in _POWERS)

OWNED: dict[str, tree.PathPredicate] = {
    "fedtp": is_attention_projection,
    "fedtp_vanilla": is_attention_projection,
    "fedavg": is_nothing,
    "local": lambda path: True,
}
"""Which parameters each client has its own of, for the algorithms the bound is for."""


@dataclass(frozen=True)
class Flags:
    """Flags of the experiment."""

    source: Annotated[SourceFlags, _ungrouped] = SourceFlags()
    model: Annotated[ModelFlags, _ungrouped] = ModelFlags(
        dim=32, depth=1, heads=2, mlp_dim=64
    )
    lab: Annotated[LabFlags, _ungrouped] = LabFlags()
    algorithms: str = "fedtp,fedtp_vanilla,fedavg"
    """Some of fedtp, fedtp_vanilla, fedavg, local."""
    clients: str = "4,16,64"
    """Numbers of clients, each with --at-samples examples."""
    samples: str = "10,20,40,80"
    """Training examples a client, with --at-clients clients."""
    embedding_dims: str = "2,16,128"
    """Embedding sizes of FedTP, with --at-clients and --at-samples."""
    at_clients: int = 16
    """Clients where examples or embeddings are varied."""
    at_samples: int = 20
    """Training examples a client where clients or embeddings are varied."""
    shards: int = 2
    """Shards a client, of the examples sorted by class: about as many classes."""
    seeds: int = 2
    """Repetitions, from seed on, each with its own dealing and initial values."""
    rounds: int = 100
    """Rounds of every training; all clients take part in each."""
    local_steps: int = 8
    """Steps of a client in a round, however many examples it has."""
    batch_size: int = 10
    """Examples a step."""
    client_lr: float = 0.02
    """Step size of the clients' SGD."""
    client_momentum: float = 0.9
    """Momentum of the clients' SGD; starts afresh every round."""
    gap: float = 0.1
    """Difference of training and true error for which the bound's sample sizes are
    given."""
    delta: float = 0.05
    """The probability with which the bound may fail."""
    hypernetwork: HypernetworkConfig = field(
        default=HypernetworkConfig(), metadata={"prefix": True}
    )


class Point(NamedTuple):
    """One training but for the seed. `embedding_dim` is 0 where there is none."""

    algorithm: str
    clients: int
    samples: int
    embedding_dim: int = 0

    @property
    def kind(self) -> "Point":
        """What programs are compiled for."""
        return self._replace(clients=0, samples=0)

    @property
    def name(self) -> str:
        """For files."""
        found = f"{self.algorithm}-n{self.clients}-m{self.samples}"
        return f"{found}-z{self.embedding_dim}" if self.embedding_dim else found


class Sweeps(NamedTuple):
    """What is varied, in order."""

    clients: list[int]
    samples: list[int]
    embedding_dims: list[int]


class Study(NamedTuple):
    """What all parts have in common.

    Attributes:
      flags, lab: see there.
      dataset: with training and test examples in one, the latter behind.
      first_test: where they begin.
      setting: of every algorithm, but for clients and embedding.
      dealt: for each number of clients and seed, who holds what.
    """

    flags: Flags
    lab: Lab
    dataset: catalog.Dataset
    first_test: int
    setting: Setting
    dealt: Mapping[tuple[int, int], partition.Partition]

    @property
    def capacity(self) -> int:
        """Training examples a client is dealt, some of them several times."""
        return self.flags.local_steps * self.flags.batch_size

    @property
    def most_clients(self) -> int:
        """Of any training."""
        return max(count for count, _ in self.dealt)


class Constants(NamedTuple):
    """What the bound is made of, as measured at one state; see `Block`.

    `phi` and `z` are 0 but for FedTP.
    """

    shared_lipschitz: Any
    personal_lipschitz: Any
    phi_lipschitz: Any
    z_lipschitz: Any
    shared_radius: Any
    personal_radius: Any
    phi_radius: Any
    z_radius: Any


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; the finished parts are saved.
    """
    names = lab.parse_list("algorithms", flags.algorithms, str)
    if not set(names) <= set(OWNED):
        raise InputError(
            f"algorithms is {flags.algorithms!r}; allowed are some of "
            f"{', '.join(OWNED)}"
        )
    sweeps = Sweeps(
        _counts("clients", flags.clients),
        _counts("samples", flags.samples),
        _counts("embedding dims", flags.embedding_dims),
    )
    _check(flags, sweeps)
    mesh = lab.make_mesh(flags.lab)
    dataset = lab.load_images(flags.source, EXPERIMENT)
    task = setup.make_task(flags.model, dataset.x_train.shape[1:], dataset.num_classes)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    if jax.tree.leaves(tree.split(shapes, is_statistic)[0]):
        raise InputError(
            f"model is {flags.model.model}, whose running statistics the bound does "
            "not cover; allowed are models without batch normalization"
        )
    setting = Setting(
        task,
        flags.at_clients,
        ClientOptimizer(flags.client_lr, flags.client_momentum),
        flags.hypernetwork,
    )
    check_setting(setting)
    points = points_of(flags, names, sweeps)
    for kind in {point.kind for point in points}:
        # Refused before the run folder is there: attention is needed, say.
        build(setting, kind)
    dealt = deal_all(flags, dataset, points)
    with lab.open_lab(EXPERIMENT, flags, flags.lab, dataset, mesh) as place:
        study = Study(
            flags,
            place,
            dataset._replace(
                x_train=np.concatenate([dataset.x_train, dataset.x_test]),
                y_train=np.concatenate([dataset.y_train, dataset.y_test]),
            ),
            len(dataset.y_train),
            setting,
            dealt,
        )
        place.console.print(
            f"{dataset.name}: {len(points) * flags.seeds} trainings of {flags.rounds} "
            f"rounds, {flags.local_steps} steps each"
        )
        found = train_all(study, points)
        write(study, names, sweeps, found)


def _counts(name: str, text: str) -> list[int]:
    values = sorted(lab.parse_list(name, text, int))
    if values[0] < 1:
        raise InputError(f"{name} is {values}; allowed is 1 or more")
    return values


def _check(flags: Flags, sweeps: Sweeps) -> None:
    counts = ("at_clients", "at_samples", "shards", "seeds", "rounds", "local_steps")
    cli.check_counts(flags, *counts, "batch_size")
    lab.check_seed(flags.lab)
    last = flags.lab.seed + flags.seeds - 1
    lab.check_seed(replace(flags.lab, seed=last))
    most = flags.local_steps * flags.batch_size
    for name, value in (
        ("samples", max(sweeps.samples)),
        ("at samples", flags.at_samples),
    ):
        if value > most:
            raise InputError(
                f"{name} is {value}; allowed are up to {most} examples a "
                "client, which is what it sees in a round: --local-steps times "
                "--batch-size"
            )
    for name in ("gap", "delta"):
        value = getattr(flags, name)
        if not 0 < value < 1:
            raise InputError(f"{name} is {value}; allowed are numbers between 0 and 1")


def points_of(flags: Flags, names: Sequence[str], sweeps: Sweeps) -> list[Point]:
    """All trainings, those one after another that share compiled programs."""
    own = flags.hypernetwork.embedding_dim
    pairs = [(count, flags.at_samples) for count in sweeps.clients]
    pairs += [(flags.at_clients, count) for count in sweeps.samples]
    pairs.append((flags.at_clients, flags.at_samples))
    points = [
        Point(name, *pair, own if name == "fedtp" else 0)
        for name in names
        for pair in pairs
    ]
    if "fedtp" in names:
        points += [
            Point("fedtp", flags.at_clients, flags.at_samples, size)
            for size in sweeps.embedding_dims
        ]
    order = {name: place for place, name in enumerate(names)}
    return sorted(
        set(points),
        key=lambda p: (order[p.algorithm], p.embedding_dim, p.clients, p.samples),
    )


def deal_all(
    flags: Flags, dataset: catalog.Dataset, points: Sequence[Point]
) -> dict[tuple[int, int], partition.Partition]:
    """Shards for each number of clients and seed.

    Raises:
      InputError: a client has fewer examples than are asked for.
    """
    dealt = {}
    for count in sorted({point.clients for point in points}):
        request = partition.Request(
            dataset.y_train,
            dataset.num_classes,
            count,
            classes_per_client=flags.shards,
        )
        most = max(point.samples for point in points if point.clients == count)
        for seed in range(flags.lab.seed, flags.lab.seed + flags.seeds):
            found = partition.make_partition(
                "shards", request, dataset.y_test, seed=seed
            )
            least = min(map(len, found.train))
            if least < most:
                raise InputError(
                    f"samples is {most} for {count} clients; {dataset.name} has "
                    f"{len(dataset.y_train)} training examples, and allowed are up to "
                    f"{least}"
                )
            dealt[count, seed] = found
    return dealt


def build(setting: Setting, point: Point) -> Algorithm:
    """The algorithm of a point, with its embedding."""
    if point.embedding_dim:
        hypernetwork = replace(setting.hypernetwork, embedding_dim=point.embedding_dim)
        setting = setting._replace(hypernetwork=hypernetwork)
    return REGISTRY[point.algorithm](setting)


class Programs(NamedTuple):
    """What is compiled once for an algorithm and embedding: in trainings with fewer
    clients the others hold nothing, take no steps and count for nothing."""

    trainer: Trainer
    measure: Callable[[SimulationState, Any, FederatedDataset], Constants]


def make_programs(study: Study, point: Point) -> Programs:
    """The algorithm of a point, and its measurements."""
    flags, mesh = study.flags, study.lab.mesh
    setting = study.setting._replace(num_clients=study.most_clients)
    algorithm = build(setting, point)
    test_sizes = [len(part) for found in study.dealt.values() for part in found.test]
    trainer = lab.make_trainer(
        algorithm,
        generalization.with_expected_error(setting.task),
        study.most_clients,
        cohort=study.most_clients,
        schedule=LocalSchedule(
            flags.batch_size,
            1,
            study.capacity,
            setup.default_lanes(study.most_clients, mesh),
            mesh,
        ),
        test_capacity=max(study.capacity, *test_sizes),
        max_rounds=-(-flags.rounds // _LOOKS),
    )
    is_own = OWNED[point.algorithm]
    all_clients = jnp.arange(study.most_clients)

    def parts_of(state: SimulationState) -> tuple[Params, Tree, Tree, Tree]:
        """The models, with what is shared and own of them, and the hypernetwork."""
        models = jax.vmap(lambda client: params_of(algorithm, state, client))(
            all_clients
        )
        own, shared = tree.split(models, is_own)
        return models, shared, own, getattr(state.server, "hypernetwork", None)

    norm = generalization.euclidean_norm
    farthest = jax.vmap(norm)

    @jax.jit
    def measure(
        state: SimulationState, initial: SimulationState, data: FederatedDataset
    ) -> Constants:
        models, shared, own, hyper = parts_of(state)
        _, shared_before, own_before, hyper_before = parts_of(initial)

        def of_client(inputs: tuple[jax.Array, Params]) -> Any:
            client, model = inputs
            places = jnp.arange(_PROBES)
            batch = gather(data, client, places, places < data.size[client])
            return generalization.gradient_norms(setting.task, model, batch, is_own)

        # A few clients at a time: a gradient of each example is as large as the model.
        norms = jax.lax.map(of_client, (all_clients, models), batch_size=_AT_A_TIME)
        moved = jax.tree.map(jnp.subtract, (shared, own), (shared_before, own_before))
        zero = jnp.zeros(())
        phi_lipschitz, z_lipschitz, phi_radius, z_radius = zero, zero, zero, zero
        if hyper is not None:
            singular = generalization.operator_norms(
                hyper.phi,
                hyper.embeddings[:_PROBED_CLIENTS],
                client_shapes(algorithm).message.personal,
                # Its other settings than the embedding's size, which does not enter.
                setting.hypernetwork,
                jax.random.key(0),
            )
            takes_part = data.size[:_PROBED_CLIENTS] > 0
            phi_lipschitz = jnp.where(takes_part, singular.phi, 0.0).max()
            z_lipschitz = jnp.where(takes_part, singular.z, 0.0).max()
            phi_radius = norm(jax.tree.map(jnp.subtract, hyper.phi, hyper_before.phi))
            z_moved = hyper.embeddings - hyper_before.embeddings
            z_radius = farthest(z_moved).max()
        return Constants(
            norms.shared.max(),
            norms.personal.max(),
            phi_lipschitz,
            z_lipschitz,
            # The same for all: of the first client.
            norm(jax.tree.map(lambda leaf: leaf[0], moved[0])),
            # What is emitted for clients that hold nothing moves with phi.
            jnp.where(data.size > 0, farthest(moved[1]), 0.0).max()
            if jax.tree.leaves(moved[1])
            else zero,
            phi_radius,
            z_radius,
        )

    return Programs(trainer, measure)


def train_all(study: Study, points: Sequence[Point]) -> dict[Point, list[Figures]]:
    """Every point with every seed."""
    found = {}
    programs: dict[Point, Programs] = {}
    for point in points:
        if point.kind not in programs:
            # Only of the points at hand: what is compiled for others is let go.
            programs = {point.kind: make_programs(study, point.kind)}
        own = []
        for i in range(study.flags.seeds):
            seed = study.flags.lab.seed + i
            figures, _ = lab.part(
                study.lab,
                f"{point.name}-seed{seed}",
                {"rounds": study.flags.rounds},
                bind(train_point, study, programs[point.kind], point, seed),
            )
            own.append(figures)
        found[point] = own
        study.lab.console.print(
            f"{point.name}: training {mean_of(own, 'train_accuracy', 100)}%, test "
            f"{mean_of(own, 'test_accuracy', 100)}%"
        )
    return found


def train_point(
    study: Study, programs: Programs, point: Point, seed: int
) -> tuple[Figures, Arrays]:
    """One training: accuracies, errors, and the constants along the way."""
    flags, trainer = study.flags, programs.trainer
    dealt = study.dealt[point.clients, seed]
    rng = np.random.default_rng(seed)
    # The first of an order that does not depend on their number: more examples are
    # those of before, and others.
    chosen = [rng.permutation(part)[: point.samples] for part in dealt.train]

    tests = [study.first_test + part for part in dealt.test]
    # The same for all, so that a program is not compiled for each.
    rows = max(study.most_clients * study.capacity, sum(map(len, tests)))
    nothing = [np.zeros(0, np.int64)] * (study.most_clients - point.clients)

    def on_device(
        parts: Sequence[np.ndarray], like: FederatedDataset | None = None
    ) -> FederatedDataset:
        held = [*parts, *nothing]
        return lab.on_device(study.lab, study.dataset, "train", held, rows, like=like)

    # Again and again, so that every client takes as many steps.
    repeated = on_device([np.resize(part, study.capacity) for part in chosen])
    train, test = on_device(chosen, repeated), on_device(tests, repeated)

    state = lab.start(trainer, seed)
    initial = jax.device_get(state)
    constants: list[Constants] = []

    def observe(state: SimulationState, rounds: int) -> None:
        found = programs.measure(state, initial, repeated)
        constants.append(jax.device_get(found))

    observe(state, 0)
    state, left_out = lab.train(
        study.lab,
        trainer,
        state,
        repeated,
        seed=seed,
        rounds=flags.rounds,
        every=-(-flags.rounds // _LOOKS),
        observe=observe,
    )
    figures: Figures = {"left_out": left_out} | sizes_of(trainer.algorithm)
    for split, data in (("train", train), ("test", test)):
        found = jax.device_get(trainer.evaluate(state, data, train))
        # Means over clients, as the bound has them: each counts once that has examples.
        has_some = found.examples > 0
        correct, errors = (
            np.mean(sums[has_some] / found.examples[has_some])
            for sums in (found.correct, found.loss)
        )
        figures[f"{split}_accuracy"] = float(correct)
        figures[f"{split}_error"] = lab.finite(errors)
    for name, values in zip(
        Constants._fields, zip(*constants, strict=True), strict=True
    ):
        figures[name] = lab.finite(np.max(values))
    return figures, {}


def sizes_of(algorithm: Algorithm) -> Figures:
    """How many numbers of one client's model are shared and its own, and how many
    phi has; nothing is computed."""
    params = client_shapes(algorithm).params
    own, shared = tree.split(params, OWNED[algorithm.name])
    server = jax.eval_shape(algorithm.init, jax.random.key(0))
    hypernetwork = getattr(server, "hypernetwork", None)
    return {
        "shared_size": tree.num_elements(shared),
        "personal_size": tree.num_elements(own),
        "phi_size": 0 if hypernetwork is None else tree.num_elements(hypernetwork.phi),
    }


def blocks_of(point: Point, found: Sequence[Figures]) -> list[Block] | None:
    """The bound's blocks, each constant the largest of any seed; None where a training
    ran away, so that one is not finite."""

    def largest(name: str) -> float:
        values = [own[name] for own in found]
        return max(np.inf if value is None else value for value in values)

    w = largest("personal_lipschitz")
    blocks = [
        Block(
            "shared weights",
            found[0]["shared_size"],
            largest("shared_radius"),
            largest("shared_lipschitz"),
            False,
        )
    ]
    if point.algorithm == "fedtp":
        blocks += [
            Block(
                "hypernetwork",
                found[0]["phi_size"],
                largest("phi_radius"),
                w * largest("phi_lipschitz"),
                False,
            ),
            Block(
                "embedding",
                point.embedding_dim,
                largest("z_radius"),
                w * largest("z_lipschitz"),
                True,
            ),
        ]
    else:
        blocks.append(
            Block(
                "own weights",
                found[0]["personal_size"],
                largest("personal_radius"),
                w,
                True,
            )
        )
    blocks = [block for block in blocks if block.size]
    if not all(np.isfinite([b.radius, b.lipschitz]).all() for b in blocks):
        return None
    return blocks


def mean_of(found: Sequence[Figures], name: str, scale: float = 1.0) -> str:
    """Over seeds, with the deviation if there are several."""
    values = [np.nan if own[name] is None else scale * own[name] for own in found]
    return shown_mean(np.array(values))


def shown_mean(values: np.ndarray) -> str:
    """The mean, with the deviation if there are several values."""
    mean = f"{values.mean():.1f}"
    return f"{mean} ± {values.std():.1f}" if len(values) > 1 else mean


def gaps(found: Sequence[Figures], figure: str) -> np.ndarray:
    """Of each seed, in points: by how much training is better."""
    sign = -1 if figure == "error" else 1
    pairs = [(own[f"train_{figure}"], own[f"test_{figure}"]) for own in found]
    return np.array(
        [np.nan if None in pair else 100 * sign * (pair[0] - pair[1]) for pair in pairs]
    )


Found = Mapping[Point, Sequence[Figures]]


def curves(
    flags: Flags,
    names: Sequence[str],
    sweeps: Sweeps,
    values: Mapping[str, Mapping[Point, float]],
) -> dict[str, plots.Lines]:
    """A panel for what is varied, a line for each algorithm and kind of value."""
    n, m, z = flags.at_clients, flags.at_samples, flags.hypernetwork.embedding_dim

    def varied(name: str) -> list[tuple[str, list[int], list[Point]]]:
        own = z if name == "fedtp" else 0
        found = [
            (
                f"clients N, with {m} examples each",
                sweeps.clients,
                [Point(name, count, m, own) for count in sweeps.clients],
            ),
            (
                f"examples m of each of {n} clients",
                sweeps.samples,
                [Point(name, n, count, own) for count in sweeps.samples],
            ),
        ]
        if name == "fedtp":
            sizes = sweeps.embedding_dims
            points = [Point(name, n, m, size) for size in sizes]
            found.append((f"embedding size ({n} clients, {m} each)", sizes, points))
        return found

    panels: dict[str, plots.Lines] = {}
    for kind, by_point in values.items():
        for name in names:
            label = f"{name}, {kind}" if kind else name
            for title, places, points in varied(name):
                line = ([float(p) for p in places], [by_point[p] for p in points])
                panels.setdefault(title, {})
                panels[title] = {**panels[title], label: line}
    return panels


def write(study: Study, names: Sequence[str], sweeps: Sweeps, found: Found) -> None:
    """Pictures, tables and numbers."""
    flags, out = study.flags, study.lab.out
    blocks = {point: blocks_of(point, own) for point, own in found.items()}
    bounds = {
        point: generalization.generalization_bound(
            own, point.clients, point.samples, delta=flags.delta
        )
        for point, own in blocks.items()
        if own is not None
    }
    pictures = {
        "Training less test accuracy": out / "gap.png",
        "Training and test accuracy": out / "accuracy.png",
        "Examples a client for which the bound promises a gap, with the constants of "
        f"{flags.at_clients} clients": out / "needed.png",
    }
    gap_file, accuracy_file, needed_file = pictures.values()
    draw = bind(curves, flags, names, sweeps)
    plots.lines(
        gap_file,
        draw(
            {"": {p: float(gaps(own, "accuracy").mean()) for p, own in found.items()}}
        ),
        x="",
        y="training - test accuracy, points",
        log_x=True,
        zero_line=True,
    )
    plots.lines(
        accuracy_file,
        draw(
            {
                split: {
                    p: 100 * float(np.mean([f[f"{split}_accuracy"] for f in own]))
                    for p, own in found.items()
                }
                for split in ("test", "train")
            }
        ),
        x="",
        y="accuracy, %",
        log_x=True,
    )
    base = {
        name: Point(
            name,
            flags.at_clients,
            flags.at_samples,
            flags.hypernetwork.embedding_dim if name == "fedtp" else 0,
        )
        for name in names
    }
    needed = {
        name: [
            generalization.samples_needed(own, count, gap=flags.gap, delta=flags.delta)
            for count in _CROWDS
        ]
        for name, point in base.items()
        if (own := blocks[point]) is not None
    }
    plots.lines(
        needed_file,
        {"": {name: (list(_CROWDS), values) for name, values in needed.items()}},
        x="clients",
        y=f"examples a client, for a gap of {flags.gap:g}",
        log_x=True,
        log_y=True,
    )
    left_out = {
        point.name: sum(own["left_out"] for own in figures)
        for point, figures in found.items()
    }
    lab.finish(
        study.lab,
        EXPERIMENT,
        flags,
        title=f"Training and test error, on {study.dataset.name}",
        summary=f"Shards, {flags.shards} a client; {flags.rounds} rounds, all clients "
        f"in each, {flags.local_steps} steps of {flags.batch_size} examples; "
        f"{flags.seeds} seeds. The bound is of Baxter's kind, and ours. Its constants "
        f"are the largest of some looks at {_PROBES} examples of each client, and at "
        f"the hypernetwork for {_PROBED_CLIENTS} clients, with all seeds: the "
        "true ones, over whole balls, are larger; and radii are those of the trained "
        "models, where the proof has them fixed beforehand. So this is an estimate of "
        "the bound and no certificate. " + looseness(found, bounds),
        content={
            "dataset": study.dataset.name,
            "points": [
                point._asdict()
                | {"seeds": list(own)}
                | {"bound": bounds[point].gap if point in bounds else None}
                for point, own in found.items()
            ],
            "needed": {"gap": flags.gap, "clients": list(_CROWDS)} | needed,
        },
        tables=[
            gap_table(found, bounds),
            block_table(base, blocks, bounds),
            needed_table(flags, needed),
        ],
        pictures=pictures,
        notices=[*study.dataset.notices, *lab.left_out_notices(left_out)],
    )


Bounds = Mapping[Point, generalization.Bound]


def _times_too_large(own: Sequence[Figures], bound: generalization.Bound) -> float:
    """The bound over the largest difference of expected errors, of any seed; infinite
    where there is none, NaN where a training ran away."""
    largest = float(np.abs(gaps(own, "error")).max()) / 100
    return bound.gap / largest if largest else np.inf


def looseness(found: Found, bounds: Bounds) -> str:
    """How much is promised, and how much is true."""
    if not bounds:
        return "No training stayed finite."
    ratios = [_times_too_large(found[point], bound) for point, bound in bounds.items()]
    ratios = [ratio for ratio in ratios if np.isfinite(ratio)]
    if not ratios:
        return "No gap was measured that it could be held against."
    useful = sum(bound.gap < 1 for bound in bounds.values())
    return (
        f"It is {min(ratios):.0f} to {max(ratios):.0f} times what was measured; in "
        f"{useful} of {len(bounds)} cases it is below 1, and says anything at all. "
        f"Trainings that ran away: {len(found) - len(bounds)}."
    )


def gap_table(found: Found, bounds: Bounds) -> report.Table:
    """What was measured, and what the bound makes of it."""
    header = ["algorithm", "N", "m", "z", "training", "test", "gap"]
    header += ["gap, expected error", "bound", "times"]
    rows = []
    for point, own in found.items():
        shown = ["-", "-"]
        if point in bounds:
            bound = bounds[point]
            shown = [f"{100 * bound.gap:.0f}", f"{_times_too_large(own, bound):.0f}"]
        by_figure = [gaps(own, figure) for figure in ("accuracy", "error")]
        rows.append(
            [
                point.algorithm,
                str(point.clients),
                str(point.samples),
                str(point.embedding_dim or ""),
                mean_of(own, "train_accuracy", 100),
                mean_of(own, "test_accuracy", 100),
                *(shown_mean(values) for values in by_figure),
                *shown,
            ]
        )
    title = "N clients with m examples each, embeddings of size z: accuracy and gaps "
    title += "in points, the bound, and how many times too large it is"
    return report.Table(title, header, rows)


def block_table(
    base: Mapping[str, Point],
    blocks: Mapping[Point, Sequence[Block] | None],
    bounds: Bounds,
) -> report.Table:
    """Who pays for what."""
    rows = []
    for name, point in base.items():
        for block in blocks[point] or ():
            entropy = bounds[point].entropy
            # Nats an example: what enters the root, but for a half.
            examples = point.clients * point.samples
            rows.append(
                [
                    name,
                    block.name,
                    f"{block.size:,}",
                    "each its own" if block.is_personal else "all together",
                    f"{block.radius:.2f}",
                    f"{block.lipschitz:.2f}",
                    f"{entropy[block.name] / examples:.1f}",
                ]
            )
    header = ["algorithm", "block", "numbers", "clients pay", "radius", "Lipschitz"]
    header.append("nats an example")
    point = next(iter(base.values()))
    title = f"The bound's terms, {point.clients} clients with {point.samples} examples"
    return report.Table(title, header, rows)


def needed_table(flags: Flags, needed: Mapping[str, Sequence[float]]) -> report.Table:
    """Examples a client, by the number of clients."""
    return report.Table(
        f"Examples a client for which the bound promises a gap of {flags.gap:g}, with "
        f"the constants of {flags.at_clients} clients with {flags.at_samples}",
        ["algorithm", *(f"N=1e{power}" for power in _POWERS)],
        [[name, *(f"{v:.2g}" for v in values)] for name, values in needed.items()],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.experiment_main(
        run,
        Flags(),
        argv,
        name=EXPERIMENT,
        description=__doc__,
        normalize=lab.with_absolute_paths,
    )


if __name__ == "__main__":
    raise SystemExit(main())
