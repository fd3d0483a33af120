"""Trains algorithms one after another: rounds, evaluations, metrics, checkpoints.

All of it is wiring and files; the work is in the library.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

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
)
from fedjax_tp.types import InputError

_SECONDS_A_CALL = 2.0


class Outcome(NamedTuple):
    """What one algorithm achieved."""

    algorithm: str
    plan: Plan
    by_client: tasks.Metrics
    summary: evaluation.Summary
    participations: np.ndarray
    seconds: float


def train_all(
    algorithms: Sequence[Algorithm],
    setup: Setup,
    plans: dict[str, Plan],
    training: TrainingFlags,
    run: RunFlags,
    out: Path,
) -> list[Outcome]:
    """Trains each algorithm in turn from the same seed; see `train`."""
    with stop_signals() as stop_signal:
        return [
            train(
                algorithm,
                setup,
                plans[algorithm.name],
                training,
                run,
                out,
                stop_signal,
            )
            for algorithm in algorithms
        ]


def train(
    algorithm: Algorithm,
    setup: Setup,
    plan: Plan,
    training: TrainingFlags,
    run: RunFlags,
    out: Path,
    stop_signal: SignalReceived,
) -> Outcome:
    """Trains one algorithm, from its newest checkpoint if there is one.

    Raises:
      Interrupted: on SIGTERM or Ctrl-C, after the state has been saved.
      OSError: a file could not be written.
    """
    name = algorithm.name
    init_key, key = jax.random.split(jax.random.key(run.seed))
    num_clients = setup.train.num_clients
    checkpoint_folder = out / "checkpoints" / name
    checkpoint_every = run.checkpoint_every or run.eval_every

    def init(key: jax.Array) -> SimulationState:
        return init_state(algorithm, num_clients, key)

    def notify(text: str) -> None:
        print(f"{name}: {text}", flush=True)

    restored = checkpoints.restore(checkpoint_folder, jax.eval_shape(init, key), notify)
    if restored is None:
        state, done = jax.jit(init)(init_key), 0
        if run.resume:
            notify("no checkpoint yet, starting from the first round")
    else:
        state, done = restored
        notify(f"going on after round {done}, from {checkpoint_folder / str(done)}")
    metrics_file, timing_file = out / "metrics.jsonl", out / "timing.jsonl"
    _rewind_rows(metrics_file, name, done, training, run)
    # A line that a kill cut short must not run into the next.
    metrics.rewrite_rows(timing_file, lambda rows: rows)

    def log_time(event: str, round_index: int, started: float, **more: Any) -> float:
        seconds = time.perf_counter() - started
        row = {"algorithm": name, "event": event, "round": round_index}
        metrics.append_rows(timing_file, [row | {"seconds": round(seconds, 4)} | more])
        return seconds

    started = time.perf_counter()
    max_rounds = min(run.eval_every, training.rounds)
    advance = (
        make_advance(algorithm, setup.cohort, setup.schedule, max_rounds)
        .lower(state, setup.train, key, done, 1)
        .compile()
    )
    evaluate = evaluation.make_evaluate(
        algorithm,
        setup.task,
        capacity=int(setup.test.size.max()),
        chunk_size=min(num_clients, training.chunk_size or setup.schedule.lanes),
    )
    log_time("compile", done, started)
    rounds_a_call = 1
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
            count = min(rounds_a_call, boundary - done, max_rounds)
            started = time.perf_counter()
            state, records = advance(state, setup.train, key, done, count)
            rows = round_rows(name, jax.device_get(records), done, count)
            done += count
            seconds = log_time("rounds", done, started, count=count)
            # Few rounds a call keep the progress shown and Ctrl-C answered.
            rounds_a_call = max(1, int(_SECONDS_A_CALL * count / max(seconds, 1e-6)))
            if done % run.eval_every == 0 or done == training.rounds:
                started = time.perf_counter()
                summary = evaluation.summarize(
                    jax.device_get(evaluate(state, setup.test))
                )
                log_time("evaluation", done, started)
                rows[-1] |= evaluation_row(summary)
                shown = f"accuracy {100 * summary.pooled:.1f}%"
            metrics.append_rows(metrics_file, rows)
            log_tensorboard(rows)
            show(done, shown)
            stop = stop_signal()
            is_last = done == training.rounds
            if done % checkpoint_every == 0 or is_last or stop is not None:
                started = time.perf_counter()
                checkpoints.save(checkpoint_folder, state, done)
                log_time("checkpoint", done, started)
            if stop is not None:
                raise Interrupted(
                    stop,
                    f"stopped after round {done} of {name}, all saved; to go on: "
                    f"{resume_command(out)}",
                )
    by_client = jax.device_get(evaluate(state, setup.test))
    return Outcome(
        name,
        plan,
        by_client,
        evaluation.summarize(by_client),
        np.asarray(state.participations),
        sum(
            row["seconds"]
            for row in metrics.read_rows(timing_file)
            if row["algorithm"] == name
        ),
    )


def _rewind_rows(
    path: Path, name: str, done: int, training: TrainingFlags, run: RunFlags
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
    if own != list(range(1, done + 1)):
        raise InputError(
            f"{path} lacks rounds of {name}, of which {done} are done; the run cannot "
            "go on without them"
        )


def round_rows(
    name: str, records: RoundRecord, done: int, count: int
) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl` for `count` rounds after the first `done`."""
    rows = []
    for i in range(count):
        clients, is_finite = records.clients[i], records.is_finite[i]
        counted = bool(is_finite.any())
        rows.append(
            {
                "algorithm": name,
                "round": done + i + 1,
                "training": {
                    metric: _number(values[i]) if counted else None
                    for metric, values in records.metrics.items()
                },
                "clients": clients.tolist(),
                "left_out": clients[~is_finite].tolist(),
            }
        )
    return rows


def evaluation_row(summary: evaluation.Summary) -> dict[str, Any]:
    """An evaluation in the form of `metrics.jsonl` and `summary.json`."""
    figures = {name: _number(value) for name, value in summary._asdict().items()}
    loss = figures.pop("loss")
    return {"accuracy": figures, "loss": loss}


def _number(value: Any) -> float | None:
    """A float that JSON can hold; None for what is not finite."""
    return float(value) if np.isfinite(value) else None
