"""What the benchmarks share: timing, the matmul peak, a federation of given sizes."""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli
from experiments.launch import place, process_notes, replicate, start_tuned
from fedjax_tp import algorithms
from fedjax_tp.algorithms import Algorithm, ClientOptimizer, Setting
from fedjax_tp.data.federated import FederatedDataset
from fedjax_tp.hypernetwork import PAPER, HypernetworkConfig
from fedjax_tp.models import task as tasks
from fedjax_tp.models.vit import ViT
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import init_state, make_advance, state_sharding
from fedjax_tp.types import InputError


@dataclass(frozen=True)
class Sizes:
    """The ViT that is trained; unless told, the paper's."""

    dim: int = 128
    depth: int = 6
    heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 256
    dropout: float = 0.1


SMALL = Sizes(dim=64, depth=2, heads=4, head_dim=16, mlp_dim=128, dropout=0.0)
"""The default ViT of `experiments.fedtp`."""


def vit_task(sizes: Sizes, patch_size: int, image: tuple[int, int, int]) -> tasks.Task:
    """The task of classifying images into ten classes with a ViT."""
    model = ViT(10, patch_size=patch_size, **asdict(sizes))
    return tasks.classification(model, image)


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes until its result is there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def matmul_peak(size: int = 4096, repeats: int = 3) -> float:
    """FLOP/s of the best of JAX's and (on CPU) NumPy's float32 product of two matrices.

    Args:
      size: rows and columns.
      repeats: the fastest counts.
    """
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, size, size)).astype(np.float32)
    on_device = jax.device_put((a, b), jax.local_devices()[0])
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    jax.block_until_ready(multiply(*on_device))
    times = [seconds(lambda: multiply(*on_device)) for _ in range(repeats)]
    if jax.default_backend() == "cpu":
        times += [seconds(lambda: a @ b) for _ in range(repeats)]
    return 2 * size**3 / min(times)


def federation(
    sizes: Sequence[int],
    image: tuple[int, int, int],
    *,
    classes: int = 10,
    examples: int | None = None,
) -> FederatedDataset:
    """Noise images held by clients of the given sizes.

    Args:
      sizes: examples of each client.
      image: height, width and channels.
      classes: labels.
      examples: images in all; clients share them if they are fewer than the sizes.
    """
    rng = np.random.default_rng(0)
    held = int(np.sum(sizes))
    examples = held if examples is None else examples
    counts = np.asarray(sizes, np.int32)
    return FederatedDataset(
        jnp.asarray(rng.integers(0, 256, (examples, *image), dtype=np.uint8)),
        jnp.asarray(rng.integers(0, classes, examples), jnp.int32),
        jnp.arange(held, dtype=jnp.int32) % examples,
        jnp.asarray(np.cumsum(counts) - counts, jnp.int32),
        jnp.asarray(counts),
        jnp.full(image[-1], 120.0),
        jnp.full(image[-1], 60.0),
    )


def fedtp_of(
    task: tasks.Task, num_clients: int, hypernetwork: HypernetworkConfig = PAPER
) -> Algorithm:
    """FedTP with the optimizers of the paper's code."""
    server = algorithms.HypernetworkOptimizer(weight_decay=1e-3)
    client = ClientOptimizer(0.01, 0.9, 1e-5)
    return algorithms.REGISTRY["fedtp"](
        Setting(task, num_clients, client, hypernetwork, server)
    )


def fedavg_of(task: tasks.Task, num_clients: int) -> Algorithm:
    """FedAvg with the client optimizer of the paper's code."""
    client = ClientOptimizer(0.01, 0.9, 1e-5)
    return algorithms.REGISTRY["fedavg"](Setting(task, num_clients, client))


def round_timer(
    algorithm: Algorithm,
    data: FederatedDataset,
    cohort: int,
    schedule: LocalSchedule,
    *,
    warm_up: int = 1,
) -> Callable[[], float]:
    """Compiles rounds, and gives a function that runs and times the next one.

    Args:
      algorithm, data, cohort, schedule: as for `make_advance`.
      warm_up: rounds that are run first and not timed.
    """
    key = jax.random.key(0)
    state = jax.jit(lambda key: init_state(algorithm, data.num_clients, key))(key)
    if schedule.mesh is not None:
        state = place(state, state_sharding(state, schedule.mesh))
        data, key = replicate((data, key), schedule.mesh)
    # Compiled ahead: a result that lies elsewhere than its input is an error then, and
    # not another compilation inside a timed round.
    advance = make_advance(algorithm, cohort, schedule, 1)
    compiled = advance.lower(state, data, key, 0, 1).compile()
    carried, rounds = [state], itertools.count()

    def timed() -> float:
        start = time.perf_counter()
        carried[0], _ = compiled(carried[0], data, key, next(rounds), 1)
        jax.block_until_ready(carried[0])
        return time.perf_counter() - start

    for _ in range(warm_up):
        timed()
    return timed


def run_main(
    run: Callable[[Any], Any],
    defaults: Any,
    argv: Sequence[str] | None,
    description: str,
    module: str,
    *,
    tuned: bool = True,
) -> int:
    """The command line of a benchmark; returns the exit code.

    Args:
      run: the benchmark, a function of its flags.
      defaults: the flags when nothing is given.
      argv: the arguments; None for those of the process.
      description, module: for `--help`.
      tuned: start the process anew where that makes training faster.
    """
    if argv is None and tuned:
        start_tuned()

    def checked() -> None:
        flags = cli.tyro_cli(type(defaults), argv, description, module, defaults)
        check_positive(flags)
        for note in process_notes():
            print(f"note: {note}")
        run(flags)

    return cli.run_main(checked)


def check_positive(flags: Any) -> None:
    """Raises InputError if a count among the flags is below 1."""
    for name, value in cli.to_flat(flags).items():
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            is_count = isinstance(number, int) and not isinstance(number, bool)
            if is_count and number < 1 and name != "process_id":
                raise InputError(
                    f"{name.replace('_', ' ')} is {number}; allowed is 1 or more"
                )


def report(**figures: Any) -> None:
    """The last line of a benchmark: its figures as JSON."""
    print(json.dumps(figures), flush=True)
