"""Does a round cost more when there are a million clients and not a hundred?

    python -m experiments.bench.scale

times rounds with the same cohort out of 10^2 to 10^6 clients: of FedTP, whose server
has an embedding a client, and of vanilla personalization, whose clients keep their
attention in a file. It also watches the process's memory over 200 rounds
more at the largest number. The last line is JSON: `ratio` is the larger of the two
ratios of round times at the largest and the smallest number.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from experiments import host_kept
from experiments.bench import timing
from experiments.flags import DeviceFlags
from experiments.launch import make_mesh, place, replicate, resident_bytes
from fedjax_tp import algorithms
from fedjax_tp.algorithms import Algorithm, Setting
from fedjax_tp.data.federated import FederatedDataset
from fedjax_tp.hypernetwork import HypernetworkConfig
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import init_state, state_sharding

_IMAGE = (28, 28, 1)


@dataclass(frozen=True)
class Flags:
    """Flags of the scale benchmark."""

    sizes: Annotated[timing.Sizes, tyro.conf.arg(name="")] = timing.SMALL
    device: Annotated[DeviceFlags, tyro.conf.arg(name="")] = DeviceFlags()
    clients: tuple[int, ...] = (100, 1_000, 10_000, 100_000, 1_000_000)
    """Populations."""
    cohort: int = 10
    """Clients in a round."""
    steps: int = 4
    """Steps of each."""
    batch_size: int = 16
    """Examples a step."""
    rounds: int = 20
    """Rounds timed at each; medians count."""
    more_rounds: int = 200
    """Rounds over which memory is watched, at the largest."""


def run(flags: Flags) -> dict[str, Any]:
    """Times the rounds and prints them; returns the figures."""
    mesh = make_mesh(flags.device)
    task = timing.vit_task(flags.sizes, 7, _IMAGE)
    size = flags.steps * flags.batch_size
    schedule = LocalSchedule(flags.batch_size, 1, size, 1, mesh)
    timers: dict[tuple[str, int], Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for clients in flags.clients:
            data = timing.federation([size] * clients, _IMAGE, examples=10_000)
            cohort = min(flags.cohort, clients)
            fedtp = timing.fedtp_of(task, clients, HypernetworkConfig())
            timers["fedtp", clients] = timing.round_timer(fedtp, data, cohort, schedule)
            vanilla = algorithms.REGISTRY["fedtp_vanilla"](Setting(task, clients))
            timers["fedtp_vanilla", clients] = _host_timer(
                vanilla, data, cohort, schedule, Path(folder) / str(clients)
            )
        # In turns: the machine's speed changes with time.
        found: dict[tuple[str, int], list[float]] = {key: [] for key in timers}
        for _ in range(flags.rounds):
            for key, timed in timers.items():
                found[key].append(timed())
        times: dict[str, dict[str, float]] = {"fedtp": {}, "fedtp_vanilla": {}}
        for (name, clients), seconds in found.items():
            times[name][str(clients)] = round(statistics.median(seconds), 5)
            print(
                f"{clients:>9,} clients: {name} {1000 * statistics.median(seconds):.1f}"
                f" ms a round, {1000 * min(seconds):.1f} at best",
                flush=True,
            )
        growth = {}
        for name in times:
            timed = timers[name, flags.clients[-1]]
            share = _growth(timed, flags.more_rounds)
            if share is None:
                continue
            growth[name] = share
            print(
                f"{flags.more_rounds} rounds more of {name}: memory "
                f"{100 * share:+.1f}%",
                flush=True,
            )
    first, last = str(flags.clients[0]), str(flags.clients[-1])
    ratios = {name: of[last] / of[first] for name, of in times.items()}
    figures = {
        "benchmark": "scale",
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "seconds": times,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "memory_growth": {name: round(share, 4) for name, share in growth.items()},
        "ratio": round(max(ratios.values()), 3),
    }
    timing.report(**figures)
    return figures


def _host_timer(
    algorithm: Algorithm,
    data: FederatedDataset,
    cohort: int,
    schedule: LocalSchedule,
    folder: Path,
) -> Callable[[], float]:
    """As `timing.round_timer`, with what clients keep in a file."""
    assert schedule.mesh is not None
    key = jax.random.key(0)
    state = jax.jit(
        lambda key: init_state(algorithm, data.num_clients, key, with_kept=False)
    )(key)
    store = host_kept.open_store(algorithm, state, folder / "kept")
    state = place(state, state_sharding(state, schedule.mesh))
    data, key = replicate((data, key), schedule.mesh)
    one_round = host_kept.make_round(algorithm, cohort, schedule, store)
    carried, rounds = [state], itertools.count()

    def timed() -> float:
        start = time.perf_counter()
        carried[0], _ = one_round(carried[0], data, key, next(rounds))
        jax.block_until_ready(carried[0])
        return time.perf_counter() - start

    timed()
    return timed


def _growth(timed: Callable[[], float], rounds: int) -> float | None:
    """By what share the process's memory grows over so many rounds; None: unknown."""
    before = resident_bytes()
    for _ in range(rounds):
        timed()
    after = resident_bytes()
    return None if before is None or after is None else after / before - 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return timing.run_main(run, Flags(), argv, __doc__ or "", "experiments.bench.scale")


if __name__ == "__main__":
    raise SystemExit(main())
