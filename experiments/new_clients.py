"""What do clients gain that join when the others are trained?

    python -m experiments.new_clients --dataset fashion_mnist

holds a fifth of the clients out, trains on the rest, and then lets each new client fit
what its method allows: with FedTP its embedding alone, which an encoder may also read
off its examples; with FedAvg the whole model; or a model of its own. It draws accuracy
on the new clients' test examples over steps, for several numbers of their examples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments import cli, driver, launch, results, setup
from experiments.flags import DataFlags, RunFlags, TrainingFlags, TrainingRunFlags
from experiments.setup import Setup
from fedjax_tp import algorithms
from fedjax_tp.algorithms.fedtp import FedTPState
from fedjax_tp.data.partition import Partition
from fedjax_tp.io import folder, plots, report
from fedjax_tp.simulation import onboarding
from fedjax_tp.simulation.onboarding import EncoderConfig, Joining
from fedjax_tp.simulation.rounds import SimulationState
from fedjax_tp.types import InputError

EXPERIMENT = "new_clients"
_ALL = "all"
_MOST = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Flags(TrainingRunFlags):
    """Flags of the experiment; --algorithms are those that train on the rest."""

    held_out: float = 0.2
    """Share of the clients that join later."""
    samples: str = "8,32,128,all"
    """Training examples of a new client that it may use."""
    fit_steps: str = "0,1,2,5,10,20,50,100"
    """After how many steps new clients are measured."""
    embedding_lr: float = 1.0
    """Step size of an embedding; what else is fitted takes --client-lr."""
    encoder_steps: int = 500
    """Steps that train the encoder on the trained clients; 0 leaves it out."""


DEFAULTS = Flags(
    data=DataFlags(num_clients=50),
    training=TrainingFlags(algorithms="fedtp,fedavg", rounds=100, local_epochs=1),
    run=RunFlags(eval_every=25),
)


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; what was done is saved.
    """
    algorithms.resolve(flags.training.algorithms)
    setup.check_flags(flags.data, flags.training, flags.run)
    check_flags(flags)
    mesh = launch.make_mesh(flags.device)
    launch.check_one_process()
    console = launch.make_console()

    def part(is_new: bool) -> Setup:
        def select(parts: Partition) -> Partition:
            return split_clients(parts, flags.held_out, flags.run.seed, is_new=is_new)

        return setup.make_setup(
            flags.data, flags.model, flags.training, flags.run, mesh, select=select
        )

    old, new = part(False), part(True)
    setting = setup.make_setting(flags, old)
    built, notes = algorithms.build_all(flags.training.algorithms, setting)
    for algorithm in built:
        onboarding.check_joins(algorithm)
    old = old._replace(notices=old.notices + notes)
    old, plans, out = results.begin(EXPERIMENT, flags, old, built, mesh, console)
    console.print(f"{new.num_clients} more clients join when these are trained")
    methods: list[Joining] = []

    def use(algorithm: algorithms.Algorithm, state: SimulationState) -> None:
        methods.extend(joinings(algorithm, state, flags, setting, old))

    outcomes = driver.train_all(
        built, old, plans, flags.training, flags.run, out, use=use
    )
    results.write_results(out, EXPERIMENT, flags, old, outcomes, flags.run, console)
    key = jax.random.key(flags.run.seed)
    optimizer = algorithms.client_sgd(setting.client)
    methods.append(onboarding.local_joining(old.task, key, optimizer))
    rows = measure(methods, flags, new, console)
    write_curves(out, flags, new, rows, console)


def check_flags(flags: Flags) -> None:
    """Raises InputError for values that no data could make valid."""
    if not 0 < flags.held_out < 1:
        raise InputError(f"held out is {flags.held_out}; allowed is 0 < held out < 1")
    if not 0 < flags.embedding_lr < math.inf:
        raise InputError(f"embedding lr is {flags.embedding_lr}; allowed is above 0")
    if flags.encoder_steps < 0:
        raise InputError(
            f"encoder steps is {flags.encoder_steps}; allowed is 0 or more"
        )
    setup.check_one_seed(flags.run)
    parse_steps(flags.fit_steps)
    parse_samples(flags.samples)


def parse_steps(text: str) -> tuple[int, ...]:
    """Ascending numbers of steps from a list.

    Raises:
      InputError: anything but whole numbers of 0 or more, each larger than the last.
    """
    steps = tuple(_whole_number(part) for part in text.split(","))
    is_ascending = sorted(set(steps)) == list(steps)
    if not is_ascending or steps[0] < 0 or steps[-1] > _MOST:
        raise InputError(
            f"fit steps is {text!r}; allowed are ascending whole numbers, such as "
            "0,1,10"
        )
    return steps


def parse_samples(text: str) -> tuple[tuple[str, int], ...]:
    """Names and numbers of examples from a list; `all` is more than anyone has.

    Raises:
      InputError: anything but `all` and whole numbers above 0.
    """
    found = []
    for part in map(str.strip, text.split(",")):
        number = _MOST if part == _ALL else min(_whole_number(part), _MOST)
        if number < 1:
            raise InputError(
                f"samples is {text!r}; allowed are whole numbers above 0, and all"
            )
        found.append((part, number))
    return tuple(found)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return -1


def split_clients(
    parts: Partition, share: float, seed: int, *, is_new: bool
) -> Partition:
    """The clients that join later, drawn by the seed, or all others.

    Raises:
      InputError: one of the two would have no client.
    """
    total = parts.num_clients
    count = round(share * total)
    if not 1 <= count < total:
        raise InputError(
            f"held out is {share:g} of {total} clients, which is {count}; allowed is "
            f"1 to {total - 1} clients"
        )
    order = np.random.default_rng([seed, 1]).permutation(total)
    chosen = np.sort(order[:count] if is_new else order[count:])
    return Partition(*(tuple(split[i] for i in chosen) for split in parts))


def joinings(
    algorithm: algorithms.Algorithm,
    state: SimulationState,
    flags: Flags,
    setting: algorithms.Setting,
    old: Setup,
) -> list[Joining]:
    """The ways to join that a trained algorithm allows."""
    if not isinstance(state.server, FedTPState):
        optimizer = algorithms.client_sgd(setting.client)
        return [onboarding.joining(algorithm, state.server, optimizer)]
    optimizer = algorithms.sgd(flags.embedding_lr, setting.client.momentum, 0.0)
    inputs = (setting.task, state.server, setting.hypernetwork)
    found = [onboarding.embedding_joining(*inputs, optimizer)]
    if flags.encoder_steps:
        key = jax.random.fold_in(jax.random.key(flags.run.seed), 1)
        encoder = EncoderConfig(steps=flags.encoder_steps)
        found.append(
            onboarding.encoder_joining(*inputs, old.train, key, optimizer, encoder)
        )
    return found


def measure(
    methods: Sequence[Joining], flags: Flags, new: Setup, console: Console
) -> list[dict[str, Any]]:
    """A row a method, number of examples and number of steps."""
    steps = parse_steps(flags.fit_steps)
    rows = []
    for method in methods:
        curve = onboarding.make_joining_curve(
            new.task,
            method,
            steps,
            batch_size=new.schedule.batch_size,
            examples=min(new.schedule.capacity, EncoderConfig().examples),
            capacity=new.schedule.capacity,
            test_capacity=new.test_capacity,
        )
        for name, samples in parse_samples(flags.samples):
            key = jax.random.key(flags.run.seed)
            found = curve(new.train, new.test, jnp.int32(samples), key)
            accuracy = np.asarray(onboarding.pooled_accuracy(found), np.float64)
            rows += [
                {
                    "method": method.name,
                    "samples": name,
                    "steps": s,
                    "accuracy": float(a),
                }
                for s, a in zip(steps, accuracy, strict=True)
            ]
        console.print(f"{method.name}: measured")
    return rows


def write_curves(
    out: Path,
    flags: Flags,
    new: Setup,
    rows: Sequence[dict[str, Any]],
    console: Console,
) -> None:
    """Writes rows, plot, report and summary, and prints the table."""
    folder.write_csv(out / "new_clients.csv", rows)
    names = [name for name, _ in parse_samples(flags.samples)]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    steps = list(parse_steps(flags.fit_steps))
    accuracy = {
        (row["method"], row["samples"], row["steps"]): row["accuracy"] for row in rows
    }
    titles = {
        name: "all examples" if name == _ALL else f"{name} examples" for name in names
    }
    curves = {
        titles[name]: {
            method: (steps, [accuracy[method, name, s] for s in steps])
            for method in methods
        }
        for name in names
    }
    picture = out / "new_clients.png"
    plots.joining_curves(picture, curves)
    tables = [
        report.Table(
            f"Accuracy of the new clients, %, after so many steps: {titles[name]}",
            ["what is fitted", *map(str, steps)],
            [
                [method, *(f"{100 * accuracy[method, name, s]:.1f}" for s in steps)]
                for method in methods
            ],
        )
        for name in names
    ]
    folder.write_json(
        out / "new_clients.json",
        {"experiment": EXPERIMENT, "clients": new.num_clients, "rows": list(rows)},
    )
    report.write_report(
        out / "new_clients.html",
        title=f"New clients on {new.dataset.name}",
        summary=f"{new.num_clients} clients join after {flags.training.rounds} rounds "
        "of the others. Accuracy is over all their test examples; at 0 steps nothing "
        "is fitted.",
        tables=tables,
        pictures={"Accuracy of the new clients over steps": picture},
        notices=new.notices,
        command=setup.command_line(EXPERIMENT),
        settings=cli.to_flat(flags),
    )
    for table in tables:
        results.show(console, table)
    console.print(f"new clients: {out / 'new_clients.html'}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.experiment_main(
        run,
        DEFAULTS,
        argv,
        name=EXPERIMENT,
        description=__doc__,
        normalize=setup.with_absolute_paths,
    )


if __name__ == "__main__":
    raise SystemExit(main())
