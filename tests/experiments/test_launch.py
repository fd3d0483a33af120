"""What a process is given before JAX starts, and what it refuses."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import fedtp, launch
from experiments.flags import DeviceFlags, RunFlags
from fedjax_tp.types import InputError

ROOT = Path(__file__).parent.parent.parent


def test_a_process_without_an_accelerator_is_started_with_huge_pages(monkeypatch):
    monkeypatch.setattr(launch.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(launch, "_has_accelerator", lambda environment: False)
    tuned = launch.tuned_environment({"PATH": "p"}, ["x"])
    assert tuned is not None
    assert tuned["PATH"] == "p"
    assert "hugetlb=1" in tuned["GLIBC_TUNABLES"]
    assert launch.tuned_environment(tuned, ["x"]) is None
    assert launch.tuned_environment({}, ["x", "--no-tune-process"]) is None
    assert launch.tuned_environment({"GLIBC_TUNABLES": "mine"}, ["x"]) is None
    monkeypatch.setattr(launch.platform, "libc_ver", lambda: ("", ""))
    assert launch.tuned_environment({}, ["x"]) is None


def test_the_log_says_what_was_set(monkeypatch):
    monkeypatch.delenv("FEDJAX_TP_PROCESS_TUNED", raising=False)
    assert launch.process_notes() == []
    monkeypatch.setenv("FEDJAX_TP_PROCESS_TUNED", "1")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    (note,) = launch.process_notes()
    assert "huge pages (GLIBC_TUNABLES=glibc.malloc.hugetlb=1)" in note
    assert "--no-tune-process" in note


def test_a_process_with_an_accelerator_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(launch.platform, "libc_ver", lambda: ("glibc", "2.36"))
    for platforms in ("cuda", "tpu,cpu"):
        assert launch.tuned_environment({"JAX_PLATFORMS": platforms}, []) is None
    assert launch.tuned_environment({"JAX_PLATFORMS": "cpu"}, []) is not None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (DeviceFlags(devices=0), "devices is 0; allowed is 1 or more"),
        (DeviceFlags(devices=99), "devices is 99; this process has 4"),
        (DeviceFlags(coordinator="h:1"), "--num-processes, --process-id missing"),
        (DeviceFlags(coordinator="h", num_processes=2, process_id=0), "HOST:PORT"),
        (DeviceFlags(coordinator="h:1", num_processes=0, process_id=0), "is 0"),
        (DeviceFlags(coordinator="h:1", num_processes=2, process_id=2), "0 to 1"),
    ],
)
def test_devices_that_cannot_be_had_are_refused(flags, said):
    with pytest.raises(InputError, match=said):
        launch.make_mesh(flags)


def test_a_mesh_has_the_devices_asked_for():
    mesh = launch.make_mesh(DeviceFlags(devices=3))
    assert mesh.size == 3
    assert mesh.axis_names == ("clients",)
    assert launch.make_mesh(DeviceFlags()).size == jax.local_device_count()
    placed = launch.replicate({"w": np.arange(3), "key": jax.random.key(1)}, mesh)
    assert placed["w"].sharding.is_fully_replicated
    assert len(placed["key"].devices()) == 3
    assert launch.to_host(placed, mesh)["w"].tolist() == [0, 1, 2]


def test_memory_is_the_flags_or_what_is_free():
    mesh = launch.make_mesh(DeviceFlags(devices=2))
    assert launch.memory_limit(DeviceFlags(memory_gb=1.5), mesh) == 1_500_000_000
    free = launch.memory_limit(DeviceFlags(), mesh)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free is None or 0 < free <= total / 2
    with pytest.raises(InputError, match="memory gb is -1"):
        launch.memory_limit(DeviceFlags(memory_gb=-1.0), mesh)


def test_one_process_has_the_flags_as_they_were_given():
    flags = RunFlags(out="x")
    with launch.one_process_speaks(flags) as (own, _):
        assert own is flags
    assert launch.agree(7) == launch.largest(7) == 7


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def test_two_processes_give_the_run_of_one(tmp_path):
    flags = shlex.split(
        "--algorithms fedtp --num-clients 6 --sample-fraction 0.5 --rounds 4 "
        "--eval-every 2 --local-epochs 1 --dim 8 --depth 1 --heads 2 --head-dim 4 "
        "--mlp-dim 8 --patch-size 4 --hypernetwork.hidden 8 "
        "--hypernetwork.embedding-dim 4 --devices 1 --no-tune-process"
    )
    command = [sys.executable, "-m", "experiments.fedtp", *flags]
    of_a_process = [f for f in os.environ["XLA_FLAGS"].split() if "count" not in f]
    environment = os.environ | {"XLA_FLAGS": " ".join(of_a_process)}
    several = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2"]
    out = {name: tmp_path / name for name in ("two", "one")}

    def start(*more):
        return subprocess.Popen(
            [*command, *more],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(process):
        said, complained = process.communicate(timeout=300)
        assert process.returncode == 0, complained
        return said

    def both(*more):
        processes = [
            start(*several, "--process-id", str(i), "--out", str(out["two"]), *more)
            for i in range(2)
        ]
        return [finish(process) for process in processes]

    said = both()
    assert "report:" in said[0]
    assert "report:" not in said[1]
    assert fedtp.main(["--out", str(out["one"]), *flags]) == 0
    found, expected = (
        (folder / "metrics.jsonl").read_text().splitlines() for folder in out.values()
    )
    assert len(found) == len(expected) == 4
    for a, b in zip(found, expected, strict=True):
        a, b = (numbers(line) for line in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # It goes on from the first process's checkpoint, which the other never saw.
    several[1] = f"localhost:{free_port()}"
    said = both("--resume", "--rounds", "5")
    assert "going on after round 4" in said[0]
    assert len((out["two"] / "metrics.jsonl").read_text().splitlines()) == 5


def numbers(line: str) -> list[float]:
    """All numbers of a row, in order."""

    def walk(value):
        if isinstance(value, dict):
            return [n for key in sorted(value) for n in walk(value[key])]
        if isinstance(value, list):
            return [n for item in value for n in walk(item)]
        return [float(value)] if isinstance(value, int | float) else []

    return walk(json.loads(line))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--algorithms fedtp,fedavg --rounds 4 --eval-every 2",
        "--preset paper --num-clients 20 --rounds 2 --metric-from 1 --eval-every 1 "
        "--local-epochs 1 --algorithms fedtp",
    ],
)
def test_a_process_takes_the_memory_that_the_plan_says(flags, tmp_path):
    program = (
        "from experiments import fedtp, launch; import pathlib, sys; "
        "launch.start_tuned(); code = fedtp.main(sys.argv[1:]); "
        "print(pathlib.Path('/proc/self/status').read_text()); sys.exit(code)"
    )
    arguments = [*shlex.split(flags), "--dataset", "digits", "--out", str(tmp_path)]
    of_tests = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in of_tests}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said, unit = re.search(r"about ([\d.]+) (MB|GB) of this", done.stdout).groups()
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout).group(1))
    assert float(said) * {"MB": 1e6, "GB": 1e9}[unit] == pytest.approx(peak, rel=0.25)
