"""What a process needs before JAX starts: memory settings, devices, other processes."""

import contextlib
import dataclasses
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from experiments.flags import DeviceFlags, RunFlags
from fedjax_tp.simulation.cohort import MESH_AXIS
from fedjax_tp.types import InputError, Tree

_HUGE_PAGES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=100000000000:"
    "glibc.malloc.trim_threshold=100000000000"
)
_OFF = "--no-tune-process"
_TUNED = "FEDJAX_TP_PROCESS_TUNED"


def tuned_environment(
    environment: Mapping[str, str], arguments: list[str]
) -> dict[str, str] | None:
    """The environment this process should have been started with, None if it was.

    On Linux without an accelerator, buffers in huge pages: training reads and writes
    hundreds of megabytes a step, and small pages cost a tenth of the time.
    """
    if _TUNED in environment or _OFF in arguments or "GLIBC_TUNABLES" in environment:
        return None
    if platform.libc_ver()[0] != "glibc" or _has_accelerator(environment):
        return None
    return {**environment, "GLIBC_TUNABLES": _HUGE_PAGES, _TUNED: "1"}


def _has_accelerator(environment: Mapping[str, str]) -> bool:
    wanted = environment.get("JAX_PLATFORMS", "")
    if wanted:
        return not wanted.startswith("cpu")
    found = ("/dev/nvidia0", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
    return any(Path(device).exists() for device in found)


def start_tuned() -> None:
    """Starts this program anew with the environment it should have, if it lacks it."""
    environment = tuned_environment(os.environ, sys.argv)
    if environment is not None:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def process_notes() -> list[str]:
    """What was set before this process started, for the log."""
    if _TUNED not in os.environ:
        return []
    return [
        "this process was started anew with its buffers in huge pages "
        f"(GLIBC_TUNABLES={os.environ['GLIBC_TUNABLES']}); {_OFF} leaves it as it is"
    ]


def make_mesh(flags: DeviceFlags) -> Mesh:
    """The devices to train on, of all processes; connects the processes first.

    Raises:
      InputError: flags of several processes that do not belong together, or more
        devices than there are.
    """
    several = (flags.coordinator, flags.num_processes, flags.process_id)
    if any(value is not None for value in several):
        _connect(flags)
    elif flags.distributed and not jax.distributed.is_initialized():
        jax.distributed.initialize()
    if flags.devices is not None and flags.devices < 1:
        raise InputError(f"devices is {flags.devices}; allowed is 1 or more")
    with contextlib.suppress(RuntimeError):  # JAX has started already, in a test say.
        if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            # Affects CPU alone.
            jax.config.update("jax_num_cpu_devices", flags.devices or _num_cores())
    mine = jax.local_devices()
    wanted = len(mine) if flags.devices is None else flags.devices
    if wanted > len(mine):
        raise InputError(
            f"devices is {wanted}; this process has {len(mine)} "
            f"({mine[0].device_kind}), allowed is 1 to {len(mine)}"
        )
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    chosen = [d for process in sorted(by_process) for d in by_process[process][:wanted]]
    return Mesh(np.array(chosen), (MESH_AXIS,))


def memory_limit(flags: DeviceFlags, mesh: Mesh) -> int | None:
    """Bytes that a device may use; None if that is not known.

    Raises:
      InputError: the flag is not a positive number.
    """
    if flags.memory_gb is not None:
        if not 0 < flags.memory_gb < float("inf"):
            raise InputError(f"memory gb is {flags.memory_gb}; allowed is above 0")
        return int(1e9 * flags.memory_gb)
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform != "cpu":
        return None
    available = available_memory()
    return None if available is None else available // len(mesh.local_devices)


def resident_bytes() -> int | None:
    """Memory of this process now; None where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int | None:
    """Bytes of the machine that are free, or of the control group, if that has less."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        found.append(1024 * int(line.split()[1]))
    with contextlib.suppress(OSError, ValueError):
        limit, used = (
            int(Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="utf-8"))
            for name in ("max", "current")
        )
        found.append(limit - used)
    return min(found, default=None)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _connect(flags: DeviceFlags) -> None:
    several = {
        "--coordinator": flags.coordinator,
        "--num-processes": flags.num_processes,
        "--process-id": flags.process_id,
    }
    missing = [name for name, value in several.items() if value is None]
    if missing:
        raise InputError(
            f"{', '.join(missing)} missing; {', '.join(several)} go together"
        )
    assert flags.coordinator is not None
    assert flags.num_processes is not None
    host, _, port = flags.coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"coordinator is {flags.coordinator!r}; allowed is HOST:PORT")
    if flags.num_processes < 1:
        raise InputError(
            f"num processes is {flags.num_processes}; allowed is 1 or more"
        )
    if not 0 <= (flags.process_id or 0) < flags.num_processes:
        raise InputError(
            f"process id is {flags.process_id}; allowed is 0 to "
            f"{flags.num_processes - 1}"
        )
    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            flags.coordinator, flags.num_processes, flags.process_id
        )
    except Exception as error:
        raise InputError(
            f"cannot join the processes at {flags.coordinator}: {error}"
        ) from error


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """The same arrays on every device of the mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return place(tree, jax.tree.map(lambda leaf: everywhere, tree))


def place(tree: Tree, sharding: Tree) -> Tree:
    """Arrays that every process has, put where their shardings say."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)

    def place_leaf(leaf, sharding):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = place_leaf(jax.random.key_data(leaf), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])

    return jax.tree.map(place_leaf, tree, sharding)


def is_first_process() -> bool:
    """Does this process write the run folder?"""
    return jax.process_index() == 0


def check_one_process() -> None:
    """Raises InputError for an experiment that runs in one process, started in more."""
    if jax.process_count() > 1:
        raise InputError("this experiment runs in one process; leave --num-processes")


@contextlib.contextmanager
def one_process_speaks(run: RunFlags) -> Iterator[tuple[RunFlags, Console]]:
    """Flags and console of this process: the first has those that were given.

    The others write what they would write into a folder that is then removed, and print
    nothing, so that no other code need know of several processes.
    """
    if is_first_process():
        yield run, make_console()
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        yield dataclasses.replace(run, out=folder, resume=False), Console(file=nowhere)


def make_console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=100, highlight=False)


def to_host(tree: Tree, mesh: Mesh) -> Tree:
    """The whole of every array, on the host."""
    if jax.process_count() > 1:
        everywhere = NamedSharding(mesh, PartitionSpec())
        tree = jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)
    return jax.device_get(tree)


def from_first_process(tree: Tree | None, shapes: Tree) -> Tree:
    """The arrays that the first process has; the others give None."""
    if jax.process_count() == 1:
        return tree
    if tree is None:
        tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return multihost_utils.broadcast_one_to_all(jax.tree.map(np.asarray, tree))


def agree(value: int) -> int:
    """The value that the first process has."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))


def largest(value: int) -> int:
    """The largest value that a process has."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.process_allgather(np.int64(value)).max())
