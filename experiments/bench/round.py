"""How fast is a round of FedTP against a plain serial PyTorch loop on this machine?

    python -m experiments.bench.round

times the same work on both sides (the paper's ViT and hypernetwork, float32, dropout),
round by round in turns, compilation apart, and needs the `torch` extra. The last line
is JSON: `ratio` is ours over PyTorch's images a second, `peak_share` the share of the
matmul peak measured in the same run that our matrix products reach.
"""

import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import jax
import tyro

from experiments import cli
from experiments.bench import timing
from experiments.flags import DeviceFlags
from experiments.launch import make_mesh, start_tuned
from fedjax_tp.models import task as tasks
from fedjax_tp.models.vit import ViT
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.types import InputError


@dataclass(frozen=True)
class Sizes:
    """The paper's ViT, for images of 32x32x3 in patches of 4."""

    dim: int = 128
    depth: int = 6
    heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 256
    dropout: float = 0.1


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


class TorchReference:
    """`experiments.bench.torch_fedtp` in a process of its own, a round when asked."""

    def __init__(self, flags: Flags, threads: int):
        values = asdict(flags.sizes) | {
            "clients": flags.clients,
            "steps": flags.steps,
            "batch_size": flags.batch_size,
            "threads": threads,
        }
        arguments = [f"--{name}={value}" for name, value in values.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "experiments.bench.torch_fedtp", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer().split()[1]

    def _answer(self) -> str:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            reason = self.process.stderr.read().strip().splitlines()[-1:]
            raise InputError(
                f"the PyTorch reference stopped ({' '.join(reason)}); install the "
                "extra `torch`, or pass --no-torch"
            )
        return line

    def round(self) -> float:
        """Seconds of one round."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """Ends the process."""
        self.process.communicate()


def run(flags: Flags) -> dict[str, float | str | int | None]:
    """Times both sides and prints the comparison; returns the figures."""
    mesh = make_mesh(flags.device)
    sizes = flags.sizes
    model = ViT(10, patch_size=4, **asdict(sizes))
    task = tasks.classification(model, (32, 32, 3))
    algorithm = timing.fedtp_of(task, flags.clients)
    examples = flags.steps * flags.batch_size
    data = timing.federation([examples] * flags.clients, (32, 32, 3))
    schedule = LocalSchedule(flags.batch_size, 1, examples, flags.lanes, mesh)
    ours = timing.round_timer(algorithm, data, flags.clients, schedule)
    theirs = None
    if flags.torch:
        threads = mesh.size if jax.default_backend() == "cpu" else 1
        theirs = TorchReference(flags, threads)
        print(f"PyTorch {theirs.version}, {threads} threads; jax {jax.__version__}")
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(flags.rounds):
        times["ours"].append(ours())
        if theirs is not None:
            times["torch"].append(theirs.round())
    if theirs is not None:
        theirs.close()
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
        "torch_images_per_second": round(rates["torch"], 2) if theirs else None,
        "ratio": round(rates["ours"] / rates["torch"], 3) if theirs else None,
        "peak_share": round(shares["ours"], 3),
        "torch_peak_share": round(shares["torch"], 3) if theirs else None,
        "matmul_peak_gflops": round(peak / 1e9, 1),
    }
    timing.report(**figures)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    if argv is None:
        start_tuned()
    return cli.run_main(
        lambda: timing.check_positive_and_run(
            run,
            cli.tyro_cli(
                Flags, argv, __doc__ or "", "experiments.bench.round", Flags()
            ),
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
