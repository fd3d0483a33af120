"""Experiments of many short trainings: parts that are saved, and their ending."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from experiments import cli, launch, results, setup
from experiments.flags import DeviceFlags, LabFlags, SourceFlags
from fedjax_tp.algorithms import Algorithm, ClientOptimizer, fedavg
from fedjax_tp.data import catalog
from fedjax_tp.data.federated import FederatedDataset, Split, federate
from fedjax_tp.io import folder, report
from fedjax_tp.io.signals import SignalReceived, stop_signals
from fedjax_tp.models.task import Metrics, Task
from fedjax_tp.simulation import evaluation
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import (
    SimulationState,
    init_state,
    make_advance,
    state_sharding,
)
from fedjax_tp.types import InputError, Params, PRNGKey

Figures = dict[str, Any]
Arrays = dict[str, np.ndarray]


class Lab(NamedTuple):
    """Where an experiment works, and whether it was told to stop."""

    out: Path
    mesh: Mesh
    console: Console
    stop_signal: SignalReceived

    def check_stop(self) -> None:
        """Raises Interrupted once SIGTERM or Ctrl-C has come."""
        signal_number = self.stop_signal()
        if signal_number:
            raise cli.Interrupted(
                signal_number,
                "stopped; the finished parts are saved; to go on: "
                f"{setup.resume_command(self.out)}",
            )


@contextmanager
def open_lab(
    experiment: str,
    flags: Any,
    lab_flags: LabFlags,
    dataset: catalog.Dataset,
    mesh: Mesh,
) -> Iterator[Lab]:
    """Opens the run folder, or reopens it; see `setup.open_run`.

    Args:
      experiment: its name.
      flags: all of the experiment's, for `config.json`.
      lab_flags: those among them.
      dataset: names a folder that is not given; a run that goes on needs the same.
      mesh: the devices.

    Raises:
      InputError: the folder cannot be used, or the data is another by now.
    """
    given = lab_flags.out
    out = setup.new_folder(dataset.name) if given is None else Path(given)
    is_there = folder.open_folder(out, resume=lab_flags.resume)
    if not is_there:
        setup.write_config(out, experiment, flags)
    data = {"dataset": dataset.name, "checksum": setup.checksum(dataset)}
    saved = out / "data.json"
    if not saved.is_file():
        folder.write_json(saved, data)
    elif folder.read_json(saved) != data:
        raise InputError(f"the data is no longer that of {saved}")
    rounds = cli.to_flat(flags).get("rounds")
    if is_there and rounds is not None:
        before = folder.read_json(out / "config.json")["flags"]["rounds"]
        if rounds < before:
            raise InputError(
                f"rounds is {rounds}, but the run in {out} has {before}; allowed is "
                f"{before} or more"
            )
        setup.note_rounds(out, rounds)
    console = launch.make_console()
    console.print(f"run folder: {out}", soft_wrap=True)
    with stop_signals() as stop_signal:
        yield Lab(out, mesh, console, stop_signal)


def make_mesh(flags: LabFlags) -> Mesh:
    """The devices; raises InputError for a number that is not there, or several
    processes."""
    mesh = launch.make_mesh(DeviceFlags(devices=flags.devices))
    launch.check_one_process()
    return mesh


def check_seed(flags: LabFlags) -> None:
    """Raises InputError for a seed that no generator takes."""
    if not 0 <= flags.seed < 2**32:
        raise InputError(f"seed is {flags.seed}; allowed is 0 to {2**32 - 1}")


def load_images(flags: SourceFlags, experiment: str) -> catalog.Dataset:
    """The data set.

    Raises:
      InputError: it is not there, or it is text.
    """
    dataset = catalog.load(flags.dataset, flags.data_dir)
    if dataset.is_text:
        raise InputError(
            f"dataset is {flags.dataset}, which is text; {experiment} needs images"
        )
    return dataset


def with_absolute_paths(flags: Any) -> Any:
    """An experiment's flags with absolute paths: a run resumes from anywhere."""
    return replace(flags, source=setup.absolute_source(flags.source))


def part(
    lab: Lab,
    name: str,
    settings: Mapping[str, Any],
    compute: Callable[[], tuple[Figures, Arrays]],
) -> tuple[Figures, Arrays]:
    """What a part of an experiment found: read, or computed and saved.

    Args:
      lab: where; a part that is there, with the same settings, is not done again.
      name: of the part, and its files.
      settings: what the part depends on beside the flags that a run cannot change.
      compute: gives figures, which JSON can hold, and arrays.
    """
    place = lab.out / "parts"
    place.mkdir(exist_ok=True)
    saved, arrays_file = place / f"{name}.json", place / f"{name}.npz"
    if saved.is_file():
        content = folder.read_json(saved)
        if content["settings"] == settings:
            with np.load(arrays_file) as arrays:
                return content["found"], dict(arrays)
    lab.check_stop()
    found, arrays = compute()
    partial = arrays_file.with_name(f"{name}.partial.npz")
    np.savez(partial, **arrays)  # type: ignore[arg-type]
    partial.replace(arrays_file)
    # Last: where it is, the arrays are too.
    folder.write_json(saved, {"settings": settings, "found": found})
    return found, arrays


class Trainer(NamedTuple):
    """An algorithm with its compiled programs, for data of any dealing."""

    algorithm: Algorithm
    init: Any
    advance: Any
    evaluate: evaluation.Evaluate
    mesh: Mesh


def make_trainer(
    algorithm: Algorithm,
    task: Task,
    num_clients: int,
    *,
    cohort: int,
    schedule: LocalSchedule,
    test_capacity: int,
    max_rounds: int,
) -> Trainer:
    """Programs that compile when they first run, and once.

    Args:
      algorithm, task, cohort, schedule: as for `make_advance`.
      num_clients: of the population.
      test_capacity: test examples of the largest client.
      max_rounds: between two observations.
    """
    assert schedule.mesh is not None

    def init(key: jax.Array) -> SimulationState:
        return init_state(algorithm, num_clients, key)

    sharding = state_sharding(jax.eval_shape(init, jax.random.key(0)), schedule.mesh)
    return Trainer(
        algorithm,
        jax.jit(init, out_shardings=sharding),
        make_advance(algorithm, cohort, schedule, max_rounds),
        evaluation.make_evaluate(
            algorithm,
            task,
            capacity=test_capacity,
            chunk_size=schedule.lanes,
            schedule=schedule,
        ),
        schedule.mesh,
    )


def initial_key(seed: int) -> PRNGKey:
    """Draws the state before the first round."""
    return jax.random.split(jax.random.key(seed))[0]


def start(trainer: Trainer, seed: int) -> SimulationState:
    """The state before the first round."""
    return trainer.init(launch.replicate(initial_key(seed), trainer.mesh))


def on_device(
    lab: Lab,
    dataset: catalog.Dataset,
    split: Split,
    parts: Sequence[np.ndarray],
    held: int,
    *,
    like: FederatedDataset | None = None,
) -> FederatedDataset:
    """A split that is dealt to clients, on all devices.

    Args:
      lab: where.
      dataset: gives the examples.
      split: which of them.
      parts: row numbers of each client's examples.
      held: the row numbers are padded to so many, so that programs need not be
        compiled for each dealing.
      like: the same split dealt in another way; its examples are not copied again.
    """
    data = federate(dataset, split, [tuple(parts)])
    data = data._replace(rows=jnp.pad(data.rows, (0, held - len(data.rows))))
    if like is not None:
        data = data._replace(x=like.x, y=like.y)
    return launch.replicate(data, lab.mesh)


def train(
    lab: Lab,
    trainer: Trainer,
    state: SimulationState,
    data: FederatedDataset,
    *,
    seed: int,
    rounds: int,
    every: int,
    observe: Callable[[SimulationState, int], None],
    first_round: int = 0,
) -> tuple[SimulationState, int]:
    """Runs rounds, and shows the state to `observe` every so many, and at the end.

    Returns the state, and how often a client was left out since it was not finite.

    Raises:
      Interrupted: told to stop.
    """
    key = launch.replicate(jax.random.split(jax.random.key(seed))[1], trainer.mesh)
    done = left_out = 0
    while done < rounds:
        lab.check_stop()
        count = min(every - done % every, rounds - done)
        state, records = trainer.advance(state, data, key, first_round + done, count)
        left_out += int((~np.asarray(records.is_finite[:count])).sum())
        done += count
        observe(state, first_round + done)
    return state, left_out


class Central(NamedTuple):
    """A model that one client trained which had all examples.

    Attributes:
      params: of the model.
      accuracy: on all test examples.
    """

    params: Params
    accuracy: float


def train_centrally(
    lab: Lab,
    task: Task,
    optimizer: ClientOptimizer,
    dataset: catalog.Dataset,
    rows: np.ndarray,
    *,
    seed: int,
    epochs: int,
    batch_size: int = 32,
) -> Central:
    """Trains a model on some training examples, an epoch a round.

    Args:
      lab: where.
      task, optimizer: of the client.
      dataset: gives training and test examples.
      rows: of the training examples that are used.
      seed: of initial values and batches.
      epochs: passes over them.
      batch_size: examples a step.

    Raises:
      InputError: the loss or the model was not finite.
      Interrupted: told to stop.
    """
    every, count = np.arange(len(dataset.y_test)), len(rows)
    train_data = on_device(lab, dataset, "train", [rows], count)
    test = on_device(lab, dataset, "test", [every], len(every))
    trainer = make_trainer(
        fedavg(task, optimizer),
        task,
        1,
        cohort=1,
        schedule=LocalSchedule(min(batch_size, count), 1, count, 1, lab.mesh),
        test_capacity=len(every),
        max_rounds=1,
    )
    state, left_out = train(
        lab,
        trainer,
        start(trainer, seed),
        train_data,
        seed=seed,
        rounds=epochs,
        every=1,
        observe=lambda state, rounds: None,
    )
    if left_out:
        raise InputError(
            f"central training was not finite in {left_out} of {epochs} epochs with a "
            f"step size of {optimizer.lr}; allowed are smaller ones (--client-lr)"
        )
    return Central(
        jax.device_get(state.server.shared),
        accuracy(trainer, state, test, train_data),
    )


def accuracy(
    trainer: Trainer,
    state: SimulationState,
    test: FederatedDataset,
    train_data: FederatedDataset,
) -> float:
    """Pooled test accuracy of all clients."""
    found: Metrics = jax.device_get(trainer.evaluate(state, test, train_data))
    return evaluation.summarize(found).pooled


def flat_params(params: Any) -> np.ndarray:
    """All numbers of a model, in one row."""
    leaves = jax.tree.leaves(jax.device_get(params))
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def unflat_params(flat: Any, like: Any) -> Any:
    """Undoes `flat_params`; `like` gives structure and shapes."""
    leaves, structure = jax.tree.flatten(like)
    bounds = np.cumsum([0, *(int(np.prod(leaf.shape)) for leaf in leaves)]).tolist()
    rows = [
        jnp.asarray(flat[a:b]).reshape(leaf.shape)
        for a, b, leaf in zip(bounds[:-1], bounds[1:], leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, rows)


def finite(value: Any) -> float | None:
    """A number that JSON can hold; None for what is not finite."""
    return float(value) if np.isfinite(value) else None


def parse_list(name: str, text: str, convert: Callable[[str], Any]) -> list[Any]:
    """Values of a comma-separated flag, each once.

    Raises:
      InputError: one cannot be read, is there twice, or there is none.
    """
    words = [word.strip() for word in text.split(",")]
    try:
        values = [convert(word) for word in words]
    except ValueError:
        values = []
    if not values or len(set(map(str, values))) < len(values):
        raise InputError(
            f"{name} is {text!r}; allowed are different values with commas between them"
        )
    return values


def left_out_notices(counts: Mapping[str, int]) -> list[str]:
    """Says in which trainings clients were left out of averages, and how often."""
    return [
        f"{name}: a client's loss or update was not finite {count} times, and left out "
        "(lower --client-lr)"
        for name, count in counts.items()
        if count
    ]


def finish(
    lab: Lab,
    experiment: str,
    flags: Any,
    *,
    title: str,
    summary: str,
    content: Mapping[str, Any],
    tables: Sequence[report.Table],
    pictures: Mapping[str, Path],
    notices: Sequence[str] = (),
) -> None:
    """Writes `summary.json` and the report, and prints tables and notices."""
    folder.write_json(lab.out / "summary.json", {"experiment": experiment, **content})
    for table in tables:
        results.show(lab.console, table)
    for notice in notices:
        lab.console.print(f"note: {notice}")
    report.write_report(
        lab.out / "report.html",
        title=title,
        summary=summary,
        tables=tables,
        pictures=pictures,
        notices=notices,
        command=setup.command_line(experiment),
        settings=cli.to_flat(flags),
    )
    lab.console.print(f"report: {lab.out / 'report.html'}", soft_wrap=True)
