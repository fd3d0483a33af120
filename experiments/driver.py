"""Trains algorithms one after another: rounds, evaluations, metrics, checkpoints.

All of it is wiring and files; the work is in the library.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import host_kept, launch
from experiments.cli import Interrupted
from experiments.flags import RunFlags, TrainingFlags
from experiments.setup import Setup, resume_command
from fedjax_tp.algorithms import Algorithm
from fedjax_tp.io import checkpoints, metrics
from fedjax_tp.io.progress import rounds_progress
from fedjax_tp.io.signals import SignalReceived, stop_signals
from fedjax_tp.models import task as tasks
from fedjax_tp.simulation import evaluation
from fedjax_tp.simulation.plan import Plan
from fedjax_tp.simulation.rounds import (
    RoundRecord,
    SimulationState,
    init_state,
    make_advance,
    state_sharding,
)
from fedjax_tp.types import InputError

_SECONDS_A_CALL = 2.0


class Outcome(NamedTuple):
    """What one algorithm achieved, a row or entry a seed."""

    algorithm: str
    plan: Plan
    by_client: list[tasks.Metrics]
    summaries: list[evaluation.Summary]
    participations: np.ndarray
    seconds: float


Look = Callable[[Algorithm, SimulationState, int], None]
"""Is shown an algorithm, its state, and how many rounds are done."""


def train_all(
    algorithms: Sequence[Algorithm],
    setup: Setup,
    plans: dict[str, Plan],
    training: TrainingFlags,
    run: RunFlags,
    out: Path,
    *,
    use: Callable[[Algorithm, SimulationState], None] = lambda algorithm, state: None,
    look: Look | None = None,
) -> list[Outcome]:
    """Trains each algorithm in turn from the same seed; see `train`.

    Args:
      algorithms, setup, plans, training, run, out: as for `train`.
      use: is called with each algorithm and the state it ended with.
      look: as for `train`.
    """
    outcomes = []
    with stop_signals() as stop_signal:
        for algorithm in algorithms:
            plan = plans[algorithm.name]
            outcome, state = train(
                algorithm, setup, plan, training, run, out, stop_signal, look=look
            )
            use(algorithm, state)
            outcomes.append(outcome)
    return outcomes


def train(
    algorithm: Algorithm,
    setup: Setup,
    plan: Plan,
    training: TrainingFlags,
    run: RunFlags,
    out: Path,
    stop_signal: SignalReceived,
    *,
    look: Look | None = None,
) -> tuple[Outcome, SimulationState]:
    """Trains one algorithm, from its newest checkpoint if there is one.

    `look` is shown the state and the rounds done: at the start, and at every evaluation
    before the state is saved, so that a run that goes on has missed none.

    Returns what it achieved, and the state it ended with.

    Raises:
      Interrupted: on SIGTERM or Ctrl-C, after the state has been saved.
      OSError: a file could not be written.
    """
    name, seeds, mesh = algorithm.name, setup.seeds, setup.schedule.mesh
    assert mesh is not None
    checkpoint_folder = out / "checkpoints" / name
    checkpoint_every = run.checkpoint_every or run.eval_every

    def notify(text: str) -> None:
        print(f"{name}: {text}", flush=True)

    state, key, done = _start(algorithm, setup, run, checkpoint_folder, notify)
    metrics_file, timing_file = out / "metrics.jsonl", out / "timing.jsonl"
    if launch.is_first_process():
        _rewind_rows(metrics_file, name, done, seeds, training, run)
    # A line that a kill cut short must not run into the next.
    metrics.rewrite_rows(timing_file, lambda rows: rows)

    def log_time(event: str, round_index: int, started: float, **more: Any) -> float:
        seconds = time.perf_counter() - started
        row = {"algorithm": name, "event": event, "round": round_index}
        metrics.append_rows(timing_file, [row | {"seconds": round(seconds, 4)} | more])
        return seconds

    started = time.perf_counter()
    max_rounds = min(run.eval_every, training.rounds)
    chunk_size = training.chunk_size or setup.schedule.lanes
    if setup.kept_on_host:
        engine = host_kept.open_run(
            algorithm, setup, state, out / "clients" / name, chunk_size
        )
    else:
        engine = _on_device(algorithm, setup, state, key, max_rounds, chunk_size)
    if done:
        engine.load(checkpoint_folder, done)
    log_time("compile", done, started)

    def evaluate(state: SimulationState) -> list[tasks.Metrics]:
        return _by_seed(
            jax.device_get(engine.evaluate(state, setup.test, setup.train)), seeds
        )

    if look is not None and done == 0:
        look(algorithm, state, 0)
    rounds_a_call, is_first_call = 1, True
    shown = ""
    with (
        metrics.tensorboard(out / "tensorboard" / name, done + 1) as log_tensorboard,
        rounds_progress(name, done, training.rounds, run.eval_every) as show,
    ):
        while done < training.rounds:
            boundary = min(
                training.rounds,
                *(
                    every * (done // every + 1)
                    for every in (run.eval_every, checkpoint_every)
                ),
            )
            count = launch.agree(min(rounds_a_call, boundary - done, max_rounds))
            started = time.perf_counter()
            state, records = engine.advance(state, setup.train, key, done, count)
            records = _by_seed(jax.device_get(records), seeds, axis=1)
            rows = round_rows(name, records, seeds, done, count)
            done += count
            seconds = log_time("rounds", done, started, count=count)
            if is_first_call:
                is_first_call = False
                _predict(notify, seconds / count, training.rounds - done)
            # Few rounds a call keep the progress shown and Ctrl-C answered.
            rounds_a_call = max(1, int(_SECONDS_A_CALL * count / max(seconds, 1e-6)))
            if done % run.eval_every == 0 or done == training.rounds:
                started = time.perf_counter()
                summaries = [evaluation.summarize(found) for found in evaluate(state)]
                log_time("evaluation", done, started)
                if look is not None:
                    look(algorithm, state, done)
                for row, summary in zip(rows[-len(seeds) :], summaries, strict=True):
                    row |= evaluation_row(summary)
                pooled = np.mean([summary.pooled for summary in summaries])
                shown = f"accuracy {100 * pooled:.1f}%"
            metrics.append_rows(metrics_file, rows)
            log_tensorboard(mean_rows(rows))
            show(done, shown)
            stop = launch.largest(stop_signal() or 0)
            is_last = done == training.rounds
            if done % checkpoint_every == 0 or is_last or stop:
                started = time.perf_counter()
                # First: a checkpoint means that the clients' rows are there.
                engine.save(checkpoint_folder, done)
                whole = launch.to_host(state, mesh)
                if launch.is_first_process():
                    checkpoints.save(checkpoint_folder, whole, done)
                log_time("checkpoint", done, started)
            if stop:
                raise Interrupted(
                    stop,
                    f"stopped after round {done} of {name}, all saved; to go on: "
                    f"{resume_command(out)}",
                )
    by_client = evaluate(state)
    outcome = Outcome(
        name,
        plan,
        by_client,
        [evaluation.summarize(found) for found in by_client],
        np.asarray(state.participations).reshape(len(seeds), -1),
        sum(
            row["seconds"]
            for row in metrics.read_rows(timing_file)
            if row["algorithm"] == name
        ),
    )
    return outcome, state


def _start(
    algorithm: Algorithm,
    setup: Setup,
    run: RunFlags,
    checkpoint_folder: Path,
    notify: Callable[[str], None],
) -> tuple[SimulationState, jax.Array, int]:
    """State, key and rounds done: from the newest checkpoint, if there is one."""
    mesh, over_seeds = setup.schedule.mesh, len(setup.seeds) > 1
    assert mesh is not None
    seed_keys = jnp.stack([jax.random.key(seed) for seed in setup.seeds])
    keys = jax.vmap(jax.random.split)(seed_keys)
    init_key, key = (keys[:, 0], keys[:, 1]) if over_seeds else keys[0]

    def of_seed(key: jax.Array) -> SimulationState:
        return init_state(
            algorithm, setup.num_clients, key, with_kept=not setup.kept_on_host
        )

    init = jax.vmap(of_seed) if over_seeds else of_seed
    shapes = jax.eval_shape(init, init_key)
    sharding = state_sharding(shapes, mesh)
    restored = None
    if launch.is_first_process():
        restored = checkpoints.restore(checkpoint_folder, shapes, notify)
    done = launch.agree(-1 if restored is None else restored.round)
    key = launch.replicate(key, mesh)
    if done < 0:
        if run.resume:
            notify("no checkpoint yet, starting from the first round")
        start = jax.jit(init, out_shardings=sharding)
        return start(launch.replicate(init_key, mesh)), key, 0
    found = restored.state if restored is not None else None
    state = launch.place(launch.from_first_process(found, shapes), sharding)
    notify(f"going on after round {done}, from {checkpoint_folder / str(done)}")
    return state, key, done


def _on_device(
    algorithm: Algorithm,
    setup: Setup,
    state: SimulationState,
    key: jax.Array,
    max_rounds: int,
    chunk_size: int,
) -> host_kept.Engine:
    """Many rounds in one program; a checkpoint of the state has all there is."""
    over_seeds = len(setup.seeds) > 1
    advance = make_advance(
        algorithm, setup.cohort, setup.schedule, max_rounds, over_seeds=over_seeds
    )
    return host_kept.Engine(
        advance.lower(state, setup.train, key, 0, 1).compile(),
        evaluation.make_evaluate(
            algorithm,
            setup.task,
            capacity=setup.test_capacity,
            chunk_size=chunk_size,
            schedule=setup.schedule,
            over_seeds=over_seeds,
        ),
        lambda folder, round_index: None,
        lambda folder, round_index: None,
    )


def _by_seed(stacked: Any, seeds: Sequence[int], axis: int = 0) -> list[Any]:
    """One tree a seed; there is no axis of seeds where there is one seed."""
    if len(seeds) == 1:
        return [stacked]
    leading = jax.tree.map(lambda leaf: np.moveaxis(leaf, axis, 0), stacked)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], leading) for i in range(len(seeds))]


def _predict(notify: Callable[[str], None], seconds: float, rounds: int) -> None:
    """Says how long the rounds still to come will take, after the first."""
    if rounds > 0:
        notify(
            f"the first round took {seconds:.2g} s; about "
            f"{seconds * rounds / 60:.1f} minutes for the other {rounds}, evaluations "
            "apart"
        )


def _rewind_rows(
    path: Path,
    name: str,
    done: int,
    seeds: Sequence[int],
    training: TrainingFlags,
    run: RunFlags,
) -> None:
    """Leaves of an algorithm's rows those of the first `done` rounds, as they would be
    had the run had its present number of rounds from the start.

    Raises:
      InputError: a row is missing or damaged.
    """

    def rewind(rows: list[metrics.Row]) -> list[metrics.Row]:
        kept = []
        for row in rows:
            if row["algorithm"] != name:
                kept.append(row)
            elif row["round"] <= done:
                # The last round of a shorter run was evaluated out of turn.
                is_due = row["round"] % run.eval_every == 0
                is_due |= row["round"] == training.rounds
                figures = () if is_due else ("accuracy", "loss")
                kept.append({k: v for k, v in row.items() if k not in figures})
        return kept

    metrics.rewrite_rows(path, rewind)
    own = [r["round"] for r in metrics.read_rows(path) if r["algorithm"] == name]
    if own != [i for i in range(1, done + 1) for _ in seeds]:
        raise InputError(
            f"{path} lacks rounds of {name}, of which {done} are done; the run cannot "
            "go on without them"
        )


def round_rows(
    name: str,
    records: Sequence[RoundRecord],
    seeds: Sequence[int],
    done: int,
    count: int,
) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl` for `count` rounds after the first `done`, seed by seed.

    Args:
      name: of the algorithm.
      records: of each seed, stacked over rounds.
      seeds: as many.
      done, count: see above.
    """
    rows = []
    for i in range(count):
        for seed, record in zip(seeds, records, strict=True):
            clients, is_finite = record.clients[i], record.is_finite[i]
            counted = bool(is_finite.any())
            rows.append(
                {
                    "algorithm": name,
                    "seed": seed,
                    "round": done + i + 1,
                    "training": {
                        metric: _number(values[i]) if counted else None
                        for metric, values in record.metrics.items()
                    },
                    "clients": clients.tolist(),
                    "left_out": clients[~is_finite].tolist(),
                }
            )
    return rows


def mean_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the same rounds with the means over seeds of all their figures."""
    means = []
    for number in dict.fromkeys(row["round"] for row in rows):
        same = [row for row in rows if row["round"] == number]
        mean = {"algorithm": same[0]["algorithm"], "round": number}
        for figure in ("training", "accuracy", "loss"):
            if figure in same[0]:
                mean[figure] = _mean([row[figure] for row in same])
        means.append(mean)
    return means


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _mean([value[name] for value in values]) for name in values[0]}
    return None if None in values else sum(values) / len(values)


def evaluation_row(summary: evaluation.Summary) -> dict[str, Any]:
    """An evaluation in the form of `metrics.jsonl` and `summary.json`."""
    figures = {
        name: _number(value)
        for name, value in summary._asdict().items()
        if value is not None
    }
    loss = figures.pop("loss")
    return {"accuracy": figures, "loss": loss}


def _number(value: Any) -> float | None:
    """A float that JSON can hold; None for what is not finite."""
    return float(value) if np.isfinite(value) else None
