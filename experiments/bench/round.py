"""How fast is a round of FedTP against a plain serial PyTorch loop on this machine?

    python -m experiments.bench.round

times the same work on both sides (the paper's ViT and hypernetwork, float32, dropout),
round by round in turns, compilation apart, and needs the `torch` extra. The last line
is JSON: `ratio` is ours over PyTorch's images a second, `peak_share` the share of the
matmul peak measured in the same run that our matrix products reach.
"""

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import jax
import tyro

from experiments.bench import timing
from experiments.bench.timing import Sizes
from experiments.flags import DeviceFlags
from experiments.launch import make_mesh
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.types import InputError


@dataclass(frozen=True)
class Flags:
    """Flags of the round benchmark."""

    sizes: Annotated[Sizes, tyro.conf.arg(name="")] = Sizes()
    device: Annotated[DeviceFlags, tyro.conf.arg(name="")] = DeviceFlags()
    clients: int = 5
    """Clients in a round."""
    steps: int = 4
    """Steps of each."""
    batch_size: int = 64
    """Examples a step."""
    lanes: int = 1
    """Clients at a time on one device."""
    rounds: int = 5
    """Rounds timed on each side; medians count."""
    torch: bool = True
    """Time PyTorch as well."""


def flops_an_image(sizes: Sizes) -> int:
    """FLOPs of the matrix products of forward and backward pass, for one image.

    A backward pass has two products for each of the forward pass.
    """
    tokens, inner = 65, sizes.heads * sizes.head_dim
    block = tokens * (4 * sizes.dim * inner + 2 * sizes.dim * sizes.mlp_dim)
    block += 2 * tokens * tokens * inner
    return 3 * 2 * (sizes.depth * block + 64 * 48 * sizes.dim + sizes.dim * 10)


@contextlib.contextmanager
def torch_reference(flags: Flags, threads: int) -> Iterator[Callable[[], float]]:
    """A function that runs a round of `torch_fedtp`, in its own process, and times it.

    Raises:
      InputError: the process ended, for want of PyTorch say.
    """
    values = asdict(flags.sizes) | {
        "clients": flags.clients,
        "steps": flags.steps,
        "batch_size": flags.batch_size,
        "threads": threads,
    }
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "experiments.bench.torch_fedtp"),
            *(f"--{name}={value}" for name, value in values.items()),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def answer() -> str:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if not line:
            reason = process.stderr.read().strip().splitlines()[-1:]
            raise InputError(
                f"the PyTorch reference stopped ({' '.join(reason)}); install the "
                "extra `torch`, or pass --no-torch"
            )
        return line

    def timed() -> float:
        print(file=process.stdin, flush=True)
        return float(answer())

    try:
        print(f"PyTorch {answer().split()[1]}, {threads} threads")
        yield timed
    finally:
        process.kill()
        process.communicate()


def run(flags: Flags) -> dict[str, float | str | int | None]:
    """Times both sides and prints the comparison; returns the figures."""
    mesh = make_mesh(flags.device)
    sizes = flags.sizes
    task = timing.vit_task(sizes, 4, (32, 32, 3))
    algorithm = timing.fedtp_of(task, flags.clients)
    examples = flags.steps * flags.batch_size
    data = timing.federation([examples] * flags.clients, (32, 32, 3))
    schedule = LocalSchedule(flags.batch_size, 1, examples, flags.lanes, mesh)
    sides = {"ours": timing.round_timer(algorithm, data, flags.clients, schedule)}
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    with contextlib.ExitStack() as stack:
        if flags.torch:
            threads = mesh.size if jax.default_backend() == "cpu" else 1
            sides["torch"] = stack.enter_context(torch_reference(flags, threads))
        for _ in range(flags.rounds):
            for name, timed in sides.items():
                times[name].append(timed())
    peak = timing.matmul_peak()
    images = flags.clients * examples
    print(
        f"{flags.clients} clients x {flags.steps} steps x {flags.batch_size} images on "
        f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {flags.lanes} clients at a "
        f"time on each; matmul peak {peak / 1e9:.0f} GFLOP/s"
    )
    rates, shares = {}, {}
    for name, found in times.items():
        if found:
            rates[name] = images / statistics.median(found)
            shares[name] = rates[name] * flops_an_image(sizes) / peak
            spread = ", ".join(f"{images / t:.1f}" for t in sorted(found, reverse=True))
            print(
                f"{name:>6}: {rates[name]:7.1f} images/s, {100 * shares[name]:.0f}% of "
                f"the peak (rounds: {spread})"
            )
    figures: dict[str, float | str | int | None] = {
        "benchmark": "round",
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "images_per_second": round(rates["ours"], 2),
        "torch_images_per_second": round(rates["torch"], 2) if flags.torch else None,
        "ratio": round(rates["ours"] / rates["torch"], 3) if flags.torch else None,
        "peak_share": round(shares["ours"], 3),
        "torch_peak_share": round(shares["torch"], 3) if flags.torch else None,
        "matmul_peak_gflops": round(peak / 1e9, 1),
    }
    timing.report(**figures)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return timing.run_main(run, Flags(), argv, __doc__ or "", "experiments.bench.round")


if __name__ == "__main__":
    raise SystemExit(main())
