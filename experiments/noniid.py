"""What does skewed data cost averaging, and what does a little shared data repair?

    python -m experiments.noniid --dataset fashion_mnist

deals a data set to clients with 1, 2, 5 or all classes, trains FedAvg with the batch
sizes and local epochs of Zhao et al. 2018 beside central SGD that takes as many steps
on as many examples, and measures accuracy and weight divergence against the earth
mover's distance. Then it shares a part of held-out data with all clients, after a
warm-up on it, and asks how much of that FedAvg and FedTP need.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial as bind
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh

from experiments import cli, lab, launch, setup
from experiments.flags import LabFlags, ModelFlags, SourceFlags
from experiments.lab import Arrays, Figures, Lab, Trainer
from fedjax_tp.algorithms import REGISTRY, ClientOptimizer, Setting, check_setting
from fedjax_tp.analysis import noniid
from fedjax_tp.analysis.layers import Layers, layers_of
from fedjax_tp.data import catalog, partition
from fedjax_tp.data.federated import FederatedDataset, normalized
from fedjax_tp.hypernetwork import HypernetworkConfig
from fedjax_tp.io import plots, report
from fedjax_tp.models.task import Task
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import SimulationState
from fedjax_tp.types import Array, Batch, InputError

EXPERIMENT = "noniid"
_ungrouped = tyro.conf.arg(name="")
# Held out of every partition: what is shared comes from there.
_HELD_OUT = 5
_PROBES_A_CLASS = 20


@dataclass(frozen=True)
class Flags:
    """Flags of the experiment."""

    source: Annotated[SourceFlags, _ungrouped] = SourceFlags()
    model: Annotated[ModelFlags, _ungrouped] = ModelFlags(
        dim=32, depth=1, heads=2, mlp_dim=64
    )
    lab: Annotated[LabFlags, _ungrouped] = LabFlags()
    num_clients: int = 10
    """Clients, all of which take part in every round."""
    classes: str = "1,2,5,iid"
    """Classes a client, and iid."""
    settings: str = "10x1,10x5,100x1,100x5"
    """Batch size x local epochs."""
    examples: int = 500
    """Most training examples a client, on average."""
    rounds: int = 30
    """Rounds of every training."""
    eval_every: int = 3
    """Rounds between two measurements."""
    client_lr: float = 0.2
    """Step size of SGD, of clients and of central training."""
    client_momentum: float = 0.0
    """Momentum of SGD; starts afresh every round."""
    shared_classes: int = 1
    """Classes a client where data is shared."""
    shared_setting: str = "10x1"
    """Batch size x local epochs where data is shared."""
    betas: str = "0.025,0.05,0.1,0.25"
    """Size of the shared set, as a share of all clients' examples; also without."""
    alphas: str = "0.5,1"
    """Share of the shared set that each client gets, drawn at random."""
    warmup_rounds: int = 10
    """Rounds of warm-up on the shared set alone, before the first round."""
    hypernetwork: HypernetworkConfig = field(
        default=HypernetworkConfig(), metadata={"prefix": True}
    )


class Dealt(NamedTuple):
    """A partition by name, with the distance of each client to the population."""

    name: str
    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    emd: np.ndarray

    @property
    def mean_emd(self) -> float:
        sizes = np.array([len(part) for part in self.train])
        return float(np.sum(self.emd * sizes) / sizes.sum())


class Pool(NamedTuple):
    """The data set, what is dealt of it, and what may be shared, class by class."""

    dataset: catalog.Dataset
    dealt: np.ndarray
    shareable: np.ndarray


class Study(NamedTuple):
    """What all parts have in common."""

    flags: Flags
    lab: Lab
    pool: Pool
    task: Task
    layers: Layers
    capacity: int
    held: int
    test_capacity: int
    measure: Callable[..., "Measured"]


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; the finished parts are saved.
    """
    classes = lab.parse_list(
        "classes", flags.classes, lambda word: "iid" if word == "iid" else int(word)
    )
    settings = lab.parse_list("settings", flags.settings, parse_setting)
    shared_settings = lab.parse_list(
        "shared setting", flags.shared_setting, parse_setting
    )
    if len(shared_settings) > 1:
        raise InputError(
            f"shared setting is {flags.shared_setting!r}; allowed is one, such as 10x1"
        )
    shared_setting = shared_settings[0]
    betas = [0.0, *lab.parse_list("betas", flags.betas, float)]
    alphas = lab.parse_list("alphas", flags.alphas, float)
    _check(flags, betas, alphas)
    mesh = lab.make_mesh(flags.lab)
    dataset = lab.load_images(flags.source, EXPERIMENT)
    pool = make_pool(flags, dataset, max(betas))
    dealt = [deal(flags, pool, label) for label in classes]
    skewed = deal(flags, pool, flags.shared_classes)
    task = setup.make_task(flags.model, dataset.x_train.shape[1:], dataset.num_classes)
    setting = Setting(
        task,
        flags.num_clients,
        ClientOptimizer(flags.client_lr, flags.client_momentum),
        flags.hypernetwork,
    )
    check_setting(setting)
    names = ["fedavg"] if task.maps is None else ["fedavg", "fedtp"]
    layers = layers_of(task.init)
    most_shared = math.ceil(max(betas) * len(pool.dealt))
    largest = max(len(part) for d in [*dealt, skewed] for part in d.train)
    with lab.open_lab(EXPERIMENT, flags, flags.lab, dataset, mesh) as place:
        study = Study(
            flags,
            place,
            pool,
            task,
            layers,
            capacity=largest + most_shared,
            held=len(pool.dealt) + flags.num_clients * most_shared,
            test_capacity=max(len(t) for d in [*dealt, skewed] for t in d.test),
            measure=make_measure(task, layers, probes_of(pool), dataset.num_classes),
        )
        runs = len(settings) * (1 + len(dealt))
        runs += len(names) * (1 + len(alphas) * (len(betas) - 1))
        place.console.print(
            f"{dataset.name}: {len(pool.dealt)} training examples for "
            f"{flags.num_clients} clients, {len(pool.shareable)} that may be shared; "
            f"{runs} trainings of {flags.rounds} rounds"
        )
        grid = run_grid(study, setting, dealt, settings)
        shared = run_shared(
            study, setting, names, skewed, shared_setting, alphas, betas
        )
        write(study, dealt, settings, grid, shared, names, alphas, betas)


def parse_setting(word: str) -> tuple[int, int]:
    """Batch size and local epochs of a word such as 10x5."""
    batch_size, epochs = word.split("x")
    found = int(batch_size), int(epochs)
    if min(found) < 1:
        raise ValueError
    return found


def _check(flags: Flags, betas: Sequence[float], alphas: Sequence[float]) -> None:
    cli.check_counts(
        flags, "num_clients", "examples", "rounds", "eval_every", "shared_classes"
    )
    lab.check_seed(flags.lab)
    if flags.warmup_rounds < 0:
        raise InputError(
            f"warmup rounds is {flags.warmup_rounds}; allowed is 0 or more"
        )
    if not all(0 < beta <= 0.25 for beta in betas[1:]):
        raise InputError(f"betas is {flags.betas}; allowed is 0 < beta <= 0.25")
    if not all(0 < alpha <= 1 for alpha in alphas):
        raise InputError(f"alphas is {flags.alphas}; allowed is 0 < alpha <= 1")


def make_pool(flags: Flags, dataset: catalog.Dataset, most_shared: float) -> Pool:
    """Holds a fifth of the training examples out, and takes as many as are wanted.

    Raises:
      InputError: nothing could be held out.
    """
    rng = np.random.default_rng(flags.lab.seed)
    by_class = [
        rng.permutation(np.flatnonzero(dataset.y_train == label))
        for label in range(dataset.num_classes)
    ]
    held = [part[: len(part) // _HELD_OUT] for part in by_class]
    rest = [part[len(part) // _HELD_OUT :] for part in by_class]
    if not any(map(len, held)):
        raise InputError(
            f"{dataset.name} has {len(dataset.y_train)} training examples, of which "
            "none could be held out and shared; a class needs 5 or more"
        )
    # So that the largest shared set is there: a fifth is a quarter of the rest, less
    # what is rounded.
    most = int(sum(map(len, held)) / most_shared)
    wanted = min(flags.num_clients * flags.examples, most)
    share = min(1.0, wanted / sum(map(len, rest)))
    dealt = np.sort(np.concatenate([p[: int(share * len(p))] for p in rest]))
    # In turns, so that every beginning of it has as many of each class as can be.
    return Pool(dataset, dealt, _in_turns(held))


def _in_turns(parts: Sequence[np.ndarray]) -> np.ndarray:
    longest = max(map(len, parts))
    return np.array([p[i] for i in range(longest) for p in parts if i < len(p)])


def deal(flags: Flags, pool: Pool, classes: int | str) -> Dealt:
    """Deals the pool to clients with so many classes each; `iid` for all."""
    labels = pool.dataset.y_train[pool.dealt]
    request = partition.Request(
        labels,
        pool.dataset.num_classes,
        flags.num_clients,
        classes_per_client=1 if classes == "iid" else int(classes),
    )
    scheme = "iid" if classes == "iid" else "pathological"
    found = partition.make_partition(
        scheme, request, pool.dataset.y_test, seed=flags.lab.seed
    )
    name = "iid" if classes == "iid" else f"{classes} classes"
    name = "1 class" if classes == 1 else name
    train = tuple(pool.dealt[part] for part in found.train)
    return Dealt(name, train, found.test, distances(pool, train))


def distances(pool: Pool, train: Sequence[np.ndarray]) -> np.ndarray:
    """Earth mover's distance of each client's labels to those of all that is dealt."""
    labels, count = pool.dataset.y_train, pool.dataset.num_classes
    population = np.bincount(labels[pool.dealt], minlength=count) / len(pool.dealt)
    counts = partition.label_counts(tuple(train), labels, count)
    return noniid.earth_movers_distance(
        counts / counts.sum(axis=1, keepdims=True), population
    )


def probes_of(pool: Pool) -> Batch:
    """A few held-out examples of each class, for gradients class by class."""
    dataset = pool.dataset
    rows = pool.shareable[: _PROBES_A_CLASS * dataset.num_classes]
    x = normalized(dataset.x_train[rows], dataset)
    return Batch(
        jnp.asarray(x), jnp.asarray(dataset.y_train[rows]), jnp.ones(len(rows), bool)
    )


def on_device(
    study: Study, split: Any, parts: Sequence[np.ndarray], held: int
) -> FederatedDataset:
    """See `lab.on_device`."""
    return lab.on_device(study.lab, study.pool.dataset, split, parts, held)


def make_trainer(
    study: Study,
    name: str,
    setting: Setting,
    batch_size: int,
    epochs: int,
    *,
    clients: int,
    capacity: int,
    test_capacity: int,
) -> Trainer:
    """Programs of an algorithm in which all clients take part."""
    mesh: Mesh = study.lab.mesh
    return lab.make_trainer(
        REGISTRY[name](setting._replace(num_clients=clients)),
        study.task,
        clients,
        cohort=clients,
        schedule=LocalSchedule(
            min(batch_size, capacity),
            epochs,
            capacity,
            setup.default_lanes(clients, mesh),
            mesh,
        ),
        test_capacity=test_capacity,
        max_rounds=study.flags.eval_every,
    )


Grid = dict[tuple[int, int], dict[str, Figures]]


def run_grid(
    study: Study,
    setting: Setting,
    dealt: Sequence[Dealt],
    settings: Sequence[tuple[int, int]],
) -> Grid:
    """FedAvg on every partition, and central SGD, for every batch size and epochs."""
    flags, grid = study.flags, {}
    for batch_size, epochs in settings:
        label = f"b{batch_size}-e{epochs}"
        wanted = {"rounds": flags.rounds, "eval_every": flags.eval_every}
        central, arrays = lab.part(
            study.lab,
            f"central-{label}",
            wanted,
            bind(_central, study, setting, batch_size, epochs),
        )
        # One for all partitions: the same shapes compile once.
        trainer = make_trainer(
            study,
            "fedavg",
            setting,
            batch_size,
            epochs,
            clients=flags.num_clients,
            capacity=study.capacity,
            test_capacity=study.test_capacity,
        )
        found = {"central": central}
        for parts in dealt:
            found[parts.name], _ = lab.part(
                study.lab,
                f"fedavg-{label}-{parts.name.replace(' ', '-')}",
                wanted,
                bind(
                    _federated,
                    study,
                    trainer,
                    parts,
                    arrays["params"],
                    epochs * -(-_mean_size(parts) // batch_size),
                ),
            )
            last = found[parts.name]
            study.lab.console.print(
                f"batch {batch_size}, {epochs} epochs, {parts.name}: EMD "
                f"{parts.mean_emd:.2f}, accuracy {100 * last['accuracy'][-1]:.1f}% "
                f"(central {100 * central['accuracy'][-1]:.1f}%), divergence "
                f"{last['divergence'][-1] or math.nan:.3f}"
            )
        grid[batch_size, epochs] = found
    return grid


def _train(
    study: Study,
    trainer: Trainer,
    state: SimulationState,
    data: FederatedDataset,
    observe: Callable[[SimulationState, int], None],
) -> tuple[SimulationState, int]:
    """All rounds, as the flags have them; see `lab.train`."""
    flags = study.flags
    return lab.train(
        study.lab,
        trainer,
        state,
        data,
        seed=flags.lab.seed,
        rounds=flags.rounds,
        every=flags.eval_every,
        observe=observe,
    )


def _central(
    study: Study, setting: Setting, batch_size: int, epochs: int
) -> tuple[Figures, Arrays]:
    """One client with all that is dealt: as many steps a round as a client of the
    federation has, each on as many examples as all of them together."""
    flags = study.flags
    examples = len(study.pool.dealt)
    test = study.pool.dataset.y_test
    trainer = make_trainer(
        study,
        "fedavg",
        setting,
        flags.num_clients * batch_size,
        epochs,
        clients=1,
        capacity=examples,
        test_capacity=len(test),
    )
    train = on_device(study, "train", [study.pool.dealt], examples)
    tests = on_device(study, "test", [np.arange(len(test))], len(test))
    found: Figures = {"rounds": [], "accuracy": []}
    params = []

    def observe(state: SimulationState, rounds: int) -> None:
        found["rounds"].append(rounds)
        found["accuracy"].append(lab.accuracy(trainer, state, tests, train))
        params.append(lab.flat_params(state.server.shared))

    state = lab.start(trainer, flags.lab.seed)
    params.append(lab.flat_params(state.server.shared))
    _, found["left_out"] = _train(study, trainer, state, train, observe)
    return found, {"params": np.stack(params)}


class Measured(NamedTuple):
    """A federated model against the central one.

    Attributes:
      divergence: relative weight divergence.
      by_layer: of each layer.
      distance: |w_fed - w_central|.
      lipschitz: for each class, |difference of its gradients| / distance.
      largest_gradient: of any class, at the central model before.
    """

    divergence: Array
    by_layer: Array
    distance: Array
    lipschitz: Array
    largest_gradient: Array


def make_measure(
    task: Task, layers: Layers, probes: Batch, num_classes: int
) -> Callable[..., Measured]:
    """A jitted function of the federated model, the central one, and that before it."""

    @jax.jit
    def measure(mine: Any, central: Any, before: Any) -> Measured:
        def gradients(params: Any) -> Array:
            return noniid.class_gradients(task, params, probes, num_classes)

        difference = jax.tree.map(jnp.subtract, mine, central)
        distance = noniid.weight_norm(difference)
        change = jnp.linalg.norm(gradients(mine) - gradients(central), axis=1)
        return Measured(
            noniid.weight_divergence(mine, central),
            noniid.weight_divergence_by_layer(mine, central, layers),
            distance,
            change / jnp.maximum(distance, 1e-12),
            jnp.linalg.norm(gradients(before), axis=1).max(),
        )

    return measure


def _mean_size(parts: Dealt) -> int:
    return round(sum(map(len, parts.train)) / len(parts.train))


def _federated(
    study: Study, trainer: Trainer, parts: Dealt, central: np.ndarray, steps: int
) -> tuple[Figures, Arrays]:
    """FedAvg on a partition, held against central training along the way.

    Args:
      study: see there.
      trainer: of FedAvg.
      parts: the partition.
      central: flat parameters of central training, at the start and at every look.
      steps: of a client in a round, for the bound.
    """
    flags, dataset = study.flags, study.pool.dataset
    train = on_device(study, "train", parts.train, study.held)
    test = on_device(study, "test", parts.test, len(dataset.y_test))
    found: Figures = {}
    state = lab.start(trainer, flags.lab.seed)
    like = jax.device_get(state.server.shared)
    sizes = np.array([len(part) for part in parts.train])
    counts = partition.label_counts(parts.train, dataset.y_train, dataset.num_classes)
    bound, looks = 0.0, [0]

    def observe(state: SimulationState, rounds: int) -> None:
        nonlocal bound
        measured = jax.device_get(
            study.measure(
                jax.device_get(state.server.shared),
                lab.unflat_params(central[len(looks)], like),
                lab.unflat_params(central[len(looks) - 1], like),
            )
        )
        for _ in range(rounds - looks[-1]):
            # Both constants are estimates, and the same since the last look.
            bound = noniid.divergence_bound(
                bound,
                sizes / sizes.sum(),
                parts.emd,
                counts / sizes[:, None],
                measured.lipschitz,
                np.full(steps, measured.largest_gradient),
                flags.client_lr,
            )
        looks.append(rounds)
        for name, value in {
            "rounds": rounds,
            "accuracy": lab.accuracy(trainer, state, test, train),
            "divergence": lab.finite(measured.divergence),
            "by_layer": [lab.finite(value) for value in measured.by_layer],
            "distance": lab.finite(measured.distance),
            "lipschitz": lab.finite(measured.lipschitz.max()),
            "log10_bound": math.log10(bound) if 0 < bound < math.inf else None,
        }.items():
            found.setdefault(name, []).append(value)

    _, found["left_out"] = _train(study, trainer, state, train, observe)
    return found, {}


Shared = dict[tuple[str, float, float], Figures]
"""What is found by algorithm, beta and alpha."""


def run_shared(
    study: Study,
    setting: Setting,
    names: Sequence[str],
    skewed: Dealt,
    shared_setting: tuple[int, int],
    alphas: Sequence[float],
    betas: Sequence[float],
) -> Shared:
    """Each algorithm with more and more shared data; without any, alpha is 0."""
    flags = study.flags
    wanted = {"rounds": flags.rounds, "eval_every": flags.eval_every}
    pairs = [(0.0, 0.0)] + [(b, a) for b in betas if b > 0 for a in alphas]
    found = {}
    for name in names:
        trainer = make_trainer(
            study,
            name,
            setting,
            *shared_setting,
            clients=flags.num_clients,
            capacity=study.capacity,
            test_capacity=study.test_capacity,
        )
        everywhere = make_evaluate_everywhere(study, trainer)
        for beta, alpha in pairs:
            figures, _ = lab.part(
                study.lab,
                f"{name}-shared-beta{beta:g}-alpha{alpha:g}",
                wanted,
                bind(_with_shared, study, trainer, skewed, beta, alpha, everywhere),
            )
            found[name, beta, alpha] = figures
            study.lab.console.print(
                f"{name}, {100 * beta:g}% shared, {100 * alpha:g}% of it on a client: "
                f"EMD {figures['emd']:.2f}, accuracy {100 * figures['own'][-1]:.1f}% "
                f"on own classes, {100 * figures['all']:.1f}% on all"
            )
    return found


def make_evaluate_everywhere(
    study: Study, trainer: Trainer
) -> Callable[[SimulationState, FederatedDataset], float]:
    """Accuracy of every client's model on all test examples, also the others'."""
    dataset = study.pool.dataset
    count = len(dataset.y_test)
    all_test = on_device(study, "test", [np.arange(count)], count)
    clients = study.flags.num_clients
    all_test = all_test._replace(
        start=jnp.zeros(clients, jnp.int32), size=jnp.full(clients, count, jnp.int32)
    )
    all_test = launch.replicate(all_test, study.lab.mesh)
    return lambda state, train: lab.accuracy(trainer, state, all_test, train)


def _with_shared(
    study: Study,
    trainer: Trainer,
    skewed: Dealt,
    beta: float,
    alpha: float,
    everywhere: Callable[[SimulationState, FederatedDataset], float],
) -> tuple[Figures, Arrays]:
    """One algorithm from a warm-up on the shared set, of which clients have a part.

    In the warm-up the server plays all clients, each with the whole shared set: the
    same programs for every algorithm, and no client's own data is used.
    """
    flags, pool = study.flags, study.pool
    seed = flags.lab.seed
    shared = pool.shareable[: round(beta * len(pool.dealt))]
    rng = np.random.default_rng([seed, len(shared)])
    count = round(alpha * len(shared))
    mixed = [
        np.concatenate([own, rng.choice(shared, count, replace=False)])
        for own in skewed.train
    ]
    train = on_device(study, "train", mixed, study.held)
    test = on_device(study, "test", skewed.test, len(pool.dataset.y_test))
    found: Figures = {"rounds": [], "own": []}
    state = lab.start(trainer, seed)
    if len(shared) and flags.warmup_rounds:
        copies = on_device(study, "train", [shared] * flags.num_clients, study.held)
        state, _ = lab.train(
            study.lab,
            trainer,
            state,
            copies,
            seed=seed,
            rounds=flags.warmup_rounds,
            every=flags.eval_every,
            observe=lambda state, rounds: None,
            first_round=flags.rounds,
        )
        found["warmup"] = lab.accuracy(trainer, state, test, train)

    def observe(state: SimulationState, rounds: int) -> None:
        found["rounds"].append(rounds)
        found["own"].append(lab.accuracy(trainer, state, test, train))

    state, found["left_out"] = _train(study, trainer, state, train, observe)
    emd = distances(pool, mixed)
    sizes = np.array([len(part) for part in mixed])
    found["all"] = everywhere(state, train)
    found["emd"] = float(np.sum(emd * sizes) / sizes.sum())
    return found, {}


def write(
    study: Study,
    dealt: Sequence[Dealt],
    settings: Sequence[tuple[int, int]],
    grid: Grid,
    shared: Shared,
    names: Sequence[str],
    alphas: Sequence[float],
    betas: Sequence[float],
) -> None:
    """Draws the pictures of the paper from these numbers, and writes all of it."""
    pictures = {
        "Accuracy against the earth mover's distance": study.lab.out / "accuracy.png",
        "Weight divergence against the distance": study.lab.out / "divergence.png",
        "Weight divergence by layer, over rounds": study.lab.out / "layers.png",
        "Accuracy with shared data": study.lab.out / "shared.png",
    }
    accuracy_file, divergence_file, layers_file, shared_file = pictures.values()
    emds = [parts.mean_emd for parts in dealt]

    def against_emd(figure: str, scale: float) -> plots.Lines:
        return {
            f"B={b}, E={e}": (
                emds,
                [
                    scale * _or_nan(grid[b, e][parts.name][figure][-1])
                    for parts in dealt
                ],
            )
            for b, e in settings
        }

    rounds = study.flags.rounds
    accuracies = dict(against_emd("accuracy", 100))
    for b, e in settings[:1]:
        central = 100 * grid[b, e]["central"]["accuracy"][-1]
        accuracies["central SGD"] = (emds, [central] * len(emds))
    x = "mean earth mover's distance"
    plots.lines(
        accuracy_file,
        {f"FedAvg after {rounds} rounds": accuracies},
        x=x,
        y="test accuracy, %",
    )
    plots.lines(
        divergence_file,
        {f"FedAvg after {rounds} rounds": against_emd("divergence", 1.0)},
        x=x,
        y="|w_fed - w_central| / |w_central|",
    )
    first = settings[0]
    looks = grid[first][dealt[0].name]["rounds"]
    plots.heat(
        layers_file,
        {
            parts.name: np.array(
                [
                    [_or_nan(value) for value in row]
                    for row in grid[first][parts.name]["by_layer"]
                ]
            ).T
            for parts in dealt
        },
        study.layers.names,
        [str(r) for r in looks],
        x="round",
        label=f"weight divergence (B={first[0]}, E={first[1]})",
    )
    percent = [100 * beta for beta in betas]

    def over_beta(name: str, alpha: float, figure: str) -> tuple[list, list]:
        found = [shared[name, b, alpha if b else 0.0] for b in betas]
        values = [f["all"] if figure == "all" else f["own"][-1] for f in found]
        return percent, [100 * value for value in values]

    plots.lines(
        shared_file,
        {
            title: {
                f"{name}, alpha {100 * alpha:g}%": over_beta(name, alpha, figure)
                for name in names
                for alpha in alphas
            }
            for title, figure in (
                ("on clients' own classes", "own"),
                ("every model on all classes", "all"),
            )
        },
        x="shared data, % of the clients'",
        y="test accuracy, %",
    )
    flags = study.flags
    lab.finish(
        study.lab,
        EXPERIMENT,
        flags,
        title=f"Non-IID data and averaging, on {study.pool.dataset.name}",
        summary=f"{flags.num_clients} clients, {len(study.pool.dealt)} training "
        f"examples, {rounds} rounds. Shared data has as many of each class as there "
        "are, and is held out of all clients. The bound's constants are estimates: "
        "lambda is the change of each class's gradient from the central to the "
        "federated model over their distance, which is no supremum, and both constants "
        "stand still between two looks.",
        content={
            "dataset": study.pool.dataset.name,
            "emd": {parts.name: parts.mean_emd for parts in dealt},
            "labels": list(study.pool.dataset.class_names),
            "layers": list(study.layers.names),
            "grid": {f"{b}x{e}": grid[b, e] for b, e in settings},
            "shared": [
                {"algorithm": name, "beta": beta, "alpha": alpha} | found
                for (name, beta, alpha), found in shared.items()
            ],
        },
        tables=[
            grid_table(dealt, settings, grid),
            bound_table(dealt, settings, grid),
            shared_table(shared),
        ],
        pictures=pictures,
        notices=[*study.pool.dataset.notices, *left_out_notices(grid, shared)],
    )


def left_out_notices(grid: Grid, shared: Shared) -> list[str]:
    """Says in which trainings clients were left out of averages."""
    counts = {
        f"B={b}, E={e}, {name}": found["left_out"]
        for (b, e), by_name in grid.items()
        for name, found in by_name.items()
    } | {
        f"{name}, beta {beta:g}, alpha {alpha:g}": found["left_out"]
        for (name, beta, alpha), found in shared.items()
    }
    return lab.left_out_notices(counts)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def grid_table(
    dealt: Sequence[Dealt], settings: Sequence[tuple[int, int]], grid: Grid
) -> report.Table:
    """Accuracy and weight divergence by partition, for each batch size and epochs."""
    header = ["batch x epochs", "central"]
    header += [f"{parts.name}, EMD {parts.mean_emd:.2f}" for parts in dealt]
    rows = []
    for (b, e), found in grid.items():
        cells = [f"{b} x {e}", f"{100 * found['central']['accuracy'][-1]:.1f}"]
        for parts in dealt:
            last = found[parts.name]
            accuracy, divergence = last["accuracy"][-1], last["divergence"][-1]
            shown = "-" if divergence is None else f"{divergence:.3f}"
            cells.append(f"{100 * accuracy:.1f} / {shown}")
        rows.append(cells)
    return report.Table("FedAvg: accuracy, % / weight divergence", header, rows)


def bound_table(
    dealt: Sequence[Dealt], settings: Sequence[tuple[int, int]], grid: Grid
) -> report.Table:
    """log10 of the bound over the measured distance, at the first look and the last."""
    header = ["batch x epochs", *(parts.name for parts in dealt)]
    rows = []
    for (b, e), found in grid.items():
        cells = [f"{b} x {e}"]
        for parts in dealt:
            own = found[parts.name]
            ratios = [
                _looseness(own["log10_bound"][i], own["distance"][i]) for i in (0, -1)
            ]
            cells.append(" / ".join(ratios))
        rows.append(cells)
    title = "Proposition 3.1 with estimated constants: log10(bound / measured distance)"
    return report.Table(f"{title}, at the first look / at the end", header, rows)


def _looseness(log10_bound: float | None, distance: float | None) -> str:
    if not distance:
        return "-"
    if log10_bound is None:
        return "past floats"
    return f"{log10_bound - math.log10(distance):.1f}"


def shared_table(shared: Shared) -> report.Table:
    """Accuracies by what is shared."""
    header = ["algorithm", "beta", "alpha", "EMD", "warm-up", "own classes", "all"]
    rows = [
        [
            name,
            f"{100 * beta:g}%",
            f"{100 * alpha:g}%",
            f"{found['emd']:.2f}",
            f"{100 * found['warmup']:.1f}" if "warmup" in found else "",
            f"{100 * found['own'][-1]:.1f}",
            f"{100 * found['all']:.1f}",
        ]
        for (name, beta, alpha), found in shared.items()
    ]
    return report.Table("Shared data: accuracy, %", header, rows)


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
