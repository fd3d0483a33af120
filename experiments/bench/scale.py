"""Does a round cost more when there are a million clients and not a hundred?

    python -m experiments.bench.scale

times rounds of FedTP (server, embeddings and all) with the same cohort out of 10^2 to
10^6 clients, and the growth of the process's memory over rounds at the largest number.
The last line is JSON: `ratio` is the round time at the largest over that at the
smallest.
"""

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from experiments import cli
from experiments.bench import timing
from experiments.flags import DeviceFlags
from experiments.launch import make_mesh, start_tuned
from fedjax_tp.hypernetwork import HypernetworkConfig
from fedjax_tp.models import task as tasks
from fedjax_tp.models.vit import ViT
from fedjax_tp.simulation.cohort import LocalSchedule

_IMAGE = (28, 28, 1)


@dataclass(frozen=True)
class Flags:
    """Flags of the scale benchmark."""

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
    model = ViT(10, patch_size=7, dim=64, depth=2, heads=4, head_dim=16, mlp_dim=128)
    task = tasks.classification(model, _IMAGE)
    size = flags.steps * flags.batch_size
    schedule = LocalSchedule(flags.batch_size, 1, size, 1, mesh)
    times: dict[int, float] = {}
    growth = 0.0
    for clients in flags.clients:
        data = timing.federation([size] * clients, _IMAGE, examples=10_000)
        algorithm = timing.fedtp_of(task, clients, HypernetworkConfig())
        timed = timing.round_timer(
            algorithm, data, min(flags.cohort, clients), schedule
        )
        times[clients] = statistics.median(timed() for _ in range(flags.rounds))
        print(
            f"{clients:>9,} clients: {1000 * times[clients]:.1f} ms a round", flush=True
        )
        if clients == flags.clients[-1]:
            before = peak_bytes()
            for _ in range(flags.more_rounds):
                timed()
            growth = (peak_bytes() - before) / before
            print(
                f"{flags.more_rounds} rounds more: peak memory {before / 1e9:.2f} GB, "
                f"{100 * growth:.1f}% more"
            )
        del timed, data
    figures = {
        "benchmark": "scale",
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "seconds": {str(n): round(t, 5) for n, t in times.items()},
        "memory_growth": round(growth, 4),
        "ratio": round(times[flags.clients[-1]] / times[flags.clients[0]], 3),
    }
    timing.report(**figures)
    return figures


def peak_bytes() -> int:
    """The most memory this process has had at a time."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    if argv is None:
        start_tuned()
    return cli.run_main(
        lambda: timing.check_positive_and_run(
            run,
            cli.tyro_cli(
                Flags, argv, __doc__ or "", "experiments.bench.scale", Flags()
            ),
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
