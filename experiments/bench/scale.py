"""Does a round cost more when there are a million clients and not a hundred?

    python -m experiments.bench.scale

times rounds with the same cohort out of 10^2 to 10^6 clients: of FedTP, whose server
has an embedding a client, and of vanilla personalization, whose clients keep their
attention in a memory-mapped file. It also watches the process's memory over 200 rounds
more at the largest number. The last line is JSON: `ratio` is the larger of the two
ratios of round times at the largest and the smallest number.
"""

import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import cli
from experiments.bench import timing
from experiments.flags import DeviceFlags
from experiments.launch import make_mesh, place, replicate, start_tuned
from fedjax_tp import algorithms, tree
from fedjax_tp.algorithms import Algorithm, Setting
from fedjax_tp.data.federated import FederatedDataset
from fedjax_tp.hypernetwork import HypernetworkConfig
from fedjax_tp.io import client_store
from fedjax_tp.models import task as tasks
from fedjax_tp.models.vit import ViT
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import init_state, make_round_of, state_sharding

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
    times: dict[str, dict[str, float]] = {"fedtp": {}, "fedtp_vanilla": {}}
    growth: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for clients in flags.clients:
            data = timing.federation([size] * clients, _IMAGE, examples=10_000)
            cohort = min(flags.cohort, clients)
            fedtp = timing.fedtp_of(task, clients, HypernetworkConfig())
            vanilla = algorithms.REGISTRY["fedtp_vanilla"](Setting(task, clients))
            for algorithm, timed in (
                (fedtp, timing.round_timer(fedtp, data, cohort, schedule)),
                (vanilla, _host_timer(vanilla, data, cohort, schedule, Path(folder))),
            ):
                name = algorithm.name
                found = statistics.median(timed() for _ in range(flags.rounds))
                times[name][str(clients)] = round(found, 5)
                print(
                    f"{clients:>9,} clients: {name} {1000 * found:.1f} ms a round",
                    flush=True,
                )
                if clients == flags.clients[-1]:
                    growth[name] = _growth(timed, flags.more_rounds)
                    print(
                        f"{flags.more_rounds} rounds more: memory "
                        f"{resident_bytes() / 1e9:.2f} GB, {100 * growth[name]:+.1f}%",
                        flush=True,
                    )
    first, last = str(flags.clients[0]), str(flags.clients[-1])
    ratios = {name: found[last] / found[first] for name, found in times.items()}
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
    """As `timing.round_timer`, with what clients keep in a memory-mapped file."""
    assert schedule.mesh is not None
    key = jax.random.key(0)
    state = jax.jit(
        lambda key: init_state(algorithm, data.num_clients, key, with_kept=False)
    )(key)
    initial = jax.device_get(
        tree.flatten_rows(tree.stack_copies(algorithm.init_kept(state.server), 1))
    )
    store = client_store.open_store(folder / "kept", initial, data.num_clients)
    state = place(state, state_sharding(state, schedule.mesh))
    data, key = replicate((data, key), schedule.mesh)
    sample, round_of = make_round_of(algorithm, cohort, schedule)
    carried, rounds, mesh = [state], itertools.count(), schedule.mesh

    def timed() -> float:
        start = time.perf_counter()
        index = jnp.int32(next(rounds))
        ids = np.asarray(sample(data, key, index))
        rows = replicate(client_store.read_rows(store, ids), mesh)
        carried[0], rows, used_ids, _ = round_of(carried[0], rows, data, key, index)
        client_store.write_rows(store, *jax.device_get((used_ids, rows)))
        jax.block_until_ready(carried[0])
        return time.perf_counter() - start

    timed()
    return timed


def _growth(timed: Callable[[], float], rounds: int) -> float:
    """By what share the process's memory grows over so many rounds."""
    before = resident_bytes()
    for _ in range(rounds):
        timed()
    return (resident_bytes() - before) / before


def resident_bytes() -> int:
    """Memory of this process now (Linux), or the most it has had (elsewhere)."""
    status = Path("/proc/self/statm")
    if status.exists():
        pages = int(status.read_text(encoding="utf-8").split()[1])
        return pages * resource.getpagesize()
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
