"""How fast is a round on this accelerator, against PyTorch and for cohorts of any size?

    python -m experiments.bench.gpu

runs experiments.bench.round on the accelerator with all clients at a time, then
cohorts of 1 to 256 clients: images a second, and the share of the matmul peak. It runs
on CPU as well, where it says little. The last line is JSON: `ratio` is the largest
cohort's images a second over those of one client.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from experiments.bench import round as round_benchmark
from experiments.bench import timing
from experiments.bench.round import flops_an_image
from experiments.bench.timing import Sizes
from experiments.flags import DeviceFlags
from experiments.launch import make_mesh
from fedjax_tp.simulation.cohort import LocalSchedule


@dataclass(frozen=True)
class Flags:
    """Flags of the accelerator benchmark."""

    sizes: Annotated[Sizes, tyro.conf.arg(name="")] = Sizes()
    device: Annotated[DeviceFlags, tyro.conf.arg(name="")] = DeviceFlags()
    cohorts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Clients in a round, all at a time."""
    steps: int = 4
    """Steps of each."""
    batch_size: int = 64
    """Examples a step."""
    rounds: int = 5
    """Rounds timed; medians count."""
    torch: bool = True
    """Time PyTorch as well, on the same device."""


def run(flags: Flags) -> dict[str, Any]:
    """Times the rounds and prints them; returns the figures."""
    mesh = make_mesh(flags.device)
    against_torch = round_benchmark.run(
        round_benchmark.Flags(
            sizes=flags.sizes,
            device=flags.device,
            steps=flags.steps,
            batch_size=flags.batch_size,
            lanes=5,
            rounds=flags.rounds,
            torch=flags.torch,
        )
    )
    task = timing.vit_task(flags.sizes, 4, (32, 32, 3))
    size = flags.steps * flags.batch_size
    peak = timing.matmul_peak()
    rates, shares = {}, {}
    for cohort in flags.cohorts:
        data = timing.federation([size] * cohort, (32, 32, 3), examples=10_000)
        lanes = -(-cohort // mesh.size)
        schedule = LocalSchedule(flags.batch_size, 1, size, lanes, mesh)
        timed = timing.round_timer(
            timing.fedavg_of(task, cohort), data, cohort, schedule
        )
        seconds = statistics.median(timed() for _ in range(flags.rounds))
        rates[cohort] = cohort * size / seconds
        shares[cohort] = rates[cohort] * flops_an_image(flags.sizes) / peak / mesh.size
        print(
            f"{cohort:>4} clients: {rates[cohort]:9.1f} images/s, "
            f"{100 * shares[cohort]:.0f}% of the peak",
            flush=True,
        )
    figures = {
        "benchmark": "gpu",
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "matmul_peak_gflops": round(peak / 1e9, 1),
        "torch_ratio": against_torch["ratio"],
        "images_per_second": {str(n): round(rate, 1) for n, rate in rates.items()},
        "peak_share": {str(n): round(share, 4) for n, share in shares.items()},
        "ratio": round(rates[flags.cohorts[-1]] / rates[flags.cohorts[0]], 3),
    }
    timing.report(**figures)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return timing.run_main(run, Flags(), argv, __doc__ or "", "experiments.bench.gpu")


if __name__ == "__main__":
    raise SystemExit(main())
