"""What do unequal clients cost, against the least they can and against padding?

    python -m experiments.bench.skew

runs rounds of 64 clients whose sizes follow Zipf's law (1.2) and a Dirichlet draw (0.1)
and compares with the bound: max(total steps / L, the longest client) steps of L equal
clients, L being all lanes of all devices. The last line is JSON: `ratio` is the larger
of the two ratios of measured time and bound.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

from experiments.bench import timing
from experiments.flags import DeviceFlags
from experiments.launch import make_mesh
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.types import InputError

_IMAGE = (28, 28, 1)


@dataclass(frozen=True)
class Flags:
    """Flags of the skew benchmark."""

    sizes: Annotated[timing.Sizes, tyro.conf.arg(name="")] = timing.SMALL
    device: Annotated[DeviceFlags, tyro.conf.arg(name="")] = DeviceFlags()
    clients: int = 64
    """Clients in a round."""
    steps: int = 640
    """Steps of all of them together, about."""
    batch_size: int = 16
    """Examples a step."""
    lanes: int = 1
    """Clients at a time on one device."""
    rounds: int = 3
    """Rounds timed; the median counts."""
    padding: bool = True
    """Also time every client as long as the longest."""


def zipf_sizes(clients: int, total: int, exponent: float = 1.2) -> np.ndarray:
    """Examples of each client, in proportion to rank ** -exponent, at least one."""
    shares = np.arange(1, clients + 1) ** -exponent
    return np.maximum(1, np.round(total * shares / shares.sum())).astype(int)


def dirichlet_sizes(clients: int, total: int, alpha: float = 0.1) -> np.ndarray:
    """Examples of each client, in proportion to a Dirichlet draw, at least one."""
    shares = np.random.default_rng(0).dirichlet(np.full(clients, alpha))
    return np.maximum(1, np.round(total * shares)).astype(int)


def run(flags: Flags) -> dict[str, float | int | str]:
    """Times the rounds and prints the comparison; returns the figures."""
    mesh = make_mesh(flags.device)
    task = timing.vit_task(flags.sizes, 7, _IMAGE)
    lanes = flags.lanes * mesh.size

    def seconds(sizes: Sequence[int] | np.ndarray, rounds: int = flags.rounds) -> float:
        algorithm = timing.fedavg_of(task, len(sizes))
        data = timing.federation(list(sizes), _IMAGE, examples=10_000)
        schedule = LocalSchedule(
            flags.batch_size, 1, int(max(sizes)), flags.lanes, mesh
        )
        timed = timing.round_timer(
            algorithm, data, len(sizes), schedule, warm_up=int(rounds > 1)
        )
        return statistics.median(timed() for _ in range(rounds))

    # Two lengths, so that what a round costs beside its steps is not counted as steps.
    equal = max(2, flags.steps // lanes)
    short, long = (
        seconds([steps * flags.batch_size] * lanes) for steps in (equal // 2, equal)
    )
    step = (long - short) / (equal - equal // 2)
    if step <= 0:
        raise InputError(
            f"{equal} steps took {long:.3f} s and {equal // 2} took {short:.3f} s, too "
            f"few to time one: steps is {flags.steps}, try {10 * flags.steps}"
        )
    print(
        f"one step of {lanes} equal clients: {1000 * step:.2f} ms "
        f"({mesh.size} x {mesh.devices.flat[0].device_kind}, {flags.lanes} at a time "
        "on each)"
    )
    figures: dict[str, float | int | str] = {
        "benchmark": "skew",
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "lanes": lanes,
    }
    total = flags.steps * flags.batch_size
    for name, sizes in {
        "zipf": zipf_sizes(flags.clients, total),
        "dirichlet": dirichlet_sizes(flags.clients, total),
    }.items():
        steps = -(-sizes // flags.batch_size)
        bound = max(steps.sum() / lanes, steps.max()) * step
        measured = seconds(sizes)
        figures[f"{name}_ratio"] = round(measured / bound, 3)
        line = (
            f"{name:>9}: {steps.min()} to {steps.max()} steps a client, {steps.sum()} "
            f"in all: {measured:.2f} s, bound {bound:.2f} s, ratio "
            f"{measured / bound:.2f}"
        )
        if flags.padding:
            padded = seconds([int(sizes.max())] * flags.clients, rounds=1)
            figures[f"{name}_padding_ratio"] = round(padded / bound, 2)
            line += f"; padded to the longest {padded:.2f} s, {padded / bound:.1f}"
        print(line, flush=True)
    ratio = max(float(figures["zipf_ratio"]), float(figures["dirichlet_ratio"]))
    timing.report(**figures, ratio=ratio)
    return figures | {"ratio": ratio}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return timing.run_main(run, Flags(), argv, __doc__ or "", "experiments.bench.skew")


if __name__ == "__main__":
    raise SystemExit(main())
