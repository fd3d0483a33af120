"""How much faster is a round on two or four devices than on one?

    python -m experiments.bench.devices

times the same cohort on 1, 2, 4, ... devices; on CPU they are as many threads as there
are cores, at most. The last line is JSON: `ratio` is the images a second of the most
devices over those of one.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import tyro
from jax.sharding import Mesh

from experiments.bench import timing
from experiments.bench.timing import Sizes
from experiments.flags import DeviceFlags
from experiments.launch import make_mesh
from fedjax_tp.simulation.cohort import MESH_AXIS, LocalSchedule


@dataclass(frozen=True)
class Flags:
    """Flags of the device benchmark."""

    sizes: Annotated[Sizes, tyro.conf.arg(name="")] = Sizes()
    device: Annotated[DeviceFlags, tyro.conf.arg(name="")] = DeviceFlags()
    clients: int = 8
    """Clients in a round."""
    steps: int = 2
    """Steps of each."""
    batch_size: int = 64
    """Examples a step."""
    lanes: int = 1
    """Clients at a time on one device."""
    rounds: int = 3
    """Rounds timed; medians count."""


def run(flags: Flags) -> dict[str, Any]:
    """Times the rounds and prints them; returns the figures."""
    every = make_mesh(flags.device).devices.reshape(-1)
    task = timing.vit_task(flags.sizes, 4, (32, 32, 3))
    size = flags.steps * flags.batch_size
    data = timing.federation([size] * flags.clients, (32, 32, 3))
    rates = {}
    counts = [2**i for i in range(len(every).bit_length()) if 2**i <= len(every)]
    for count in counts:
        mesh = Mesh(np.array(every[:count]), (MESH_AXIS,))
        schedule = LocalSchedule(flags.batch_size, 1, size, flags.lanes, mesh)
        timed = timing.round_timer(
            timing.fedavg_of(task, flags.clients), data, flags.clients, schedule
        )
        seconds = statistics.median(timed() for _ in range(flags.rounds))
        rates[count] = flags.clients * size / seconds
        print(f"{count} devices: {rates[count]:.1f} images/s", flush=True)
    figures = {
        "benchmark": "devices",
        "device": every[0].device_kind,
        "images_per_second": {str(n): round(rate, 1) for n, rate in rates.items()},
        "ratio": round(rates[counts[-1]] / rates[1], 3),
    }
    timing.report(**figures)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return timing.run_main(
        run, Flags(), argv, __doc__ or "", "experiments.bench.devices"
    )


if __name__ == "__main__":
    raise SystemExit(main())
