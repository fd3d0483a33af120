"""Does FedTP beat FedAvg, local training and vanilla personalization on non-IID images?

    python -m experiments.fedtp

deals the digits to 20 clients with 2 classes each and trains the four of them on the
same clients, batches and seed. It prints a plan, then a table, and leaves a run folder
with plots and report.html.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.sharding import Mesh
from rich.console import Console

from experiments import cli, driver, launch, results, setup
from experiments.flags import TrainingRunFlags
from fedjax_tp import algorithms
from fedjax_tp.hypernetwork import PAPER

EXPERIMENT = "fedtp"


@dataclass(frozen=True)
class Flags(TrainingRunFlags):
    """Flags of the main experiment."""

    preset: Literal["default", "paper", "paper100"] = "default"
    """Values of all flags not given: paper and paper100 are FedTP's protocol with 50
    and 100 clients on CIFAR-10."""


_PAPER: dict[str, Any] = {
    "dataset": "cifar10",
    "num_clients": 50,
    "patch_size": 4,
    "dim": 128,
    "depth": 6,
    "heads": 8,
    "head_dim": 64,
    "mlp_dim": 256,
    "dropout": 0.1,
    "rounds": 1500,
    "sample_fraction": 0.1,
    "local_epochs": 5,
    "batch_size": 64,
    "client_lr": 0.01,
    "client_momentum": 0.9,
    "client_weight_decay": 1e-5,
    "eval_every": 5,
    "metric_from": 1300,
    "checkpoint_every": 50,
    "server.weight_decay": 1e-3,
} | {f"hypernetwork.{k}": v for k, v in dataclasses.asdict(PAPER).items()}

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": _PAPER | {"preset": "paper"},
    "paper100": _PAPER
    | {"preset": "paper100", "num_clients": 100, "sample_fraction": 0.05},
}


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; what was done is saved.
    """
    algorithms.resolve(flags.training.algorithms)
    setup.check_flags(flags.data, flags.training, flags.run)
    mesh = launch.make_mesh(flags.device)
    with launch.one_process_speaks(flags.run) as (run_flags, console):
        _run_on(mesh, replace(flags, run=run_flags), console)


def _run_on(mesh: Mesh, flags: Flags, console: Console) -> None:
    prepared = setup.make_setup(
        flags.data, flags.model, flags.training, flags.run, mesh
    )
    setting = setup.make_setting(flags, prepared)
    built, notes = algorithms.build_all(flags.training.algorithms, setting)
    prepared = prepared._replace(notices=prepared.notices + notes)
    prepared, plans, out = results.begin(
        EXPERIMENT, flags, prepared, built, mesh, console
    )
    outcomes = driver.train_all(built, prepared, plans, flags.training, flags.run, out)
    if not launch.is_first_process():
        return
    results.write_results(
        out, EXPERIMENT, flags, prepared, outcomes, flags.run, console
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.experiment_main(
        run,
        Flags(),
        argv,
        name=EXPERIMENT,
        description=__doc__,
        presets=PRESETS,
        normalize=setup.with_absolute_paths,
    )


if __name__ == "__main__":
    raise SystemExit(main())
