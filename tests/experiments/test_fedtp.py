"""The main experiment as a user runs it: results, bad input, resume, kill."""

import csv
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from experiments import fedtp, setup
from experiments.__main__ import describe
from experiments.flags import DataFlags, ModelFlags, RunFlags, TrainingFlags
from fedjax_tp.data import catalog
from fedjax_tp.simulation.cohort import MESH_AXIS
from tests.data.test_catalog import leaf_folder

ROOT = Path(__file__).parent.parent.parent
TINY = shlex.split(
    "--algorithms fedtp,local --num-clients 6 --sample-fraction 0.5 --rounds 6 "
    "--eval-every 2 --local-epochs 1 --dim 8 --depth 1 --heads 2 --head-dim 4 "
    "--mlp-dim 8 --patch-size 4 --checkpoint-every 1 --hypernetwork.hidden 8 "
    "--hypernetwork.embedding-dim 4 --devices 1 --no-tune-process"
)


def run(out, *flags, env=None, prefix=()):
    return subprocess.run(
        [*prefix, sys.executable, "-m", "experiments.fedtp", "--out", str(out), *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def checkpoint_bytes(out):
    """The arrays of the newest checkpoints, as orbax reads them."""
    import orbax.checkpoint as ocp

    found = {}
    for folder in sorted((out / "checkpoints").iterdir()):
        newest = max((e for e in folder.iterdir() if e.name.isdigit()), key=_number)
        tree = ocp.StandardCheckpointer().restore((newest / "state").resolve())
        for path, leaf in tree.items():
            found[folder.name, newest.name, path] = np.asarray(leaf).tobytes()
    return found


def _number(entry):
    return int(entry.name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert fedtp.main(["--out", str(out), *TINY]) == 0
    return out


@pytest.mark.smoke
def test_a_run_leaves_everything_it_should(finished):
    for name in (
        "config.json",
        "metrics.jsonl",
        "timing.jsonl",
        "clients.csv",
        "partition.json",
        "summary.json",
        "report.html",
        "accuracy.png",
        "clients.png",
        "labels.png",
    ):
        assert (finished / name).stat().st_size > 0, name
    summary = json.loads((finished / "summary.json").read_text())["algorithms"]
    assert list(summary) == ["fedtp", "local"]
    for entry in summary.values():
        assert entry["accuracy"].keys() == {"pooled", "mean", "std", "worst_decile"}
        assert entry["rounds"] == 6
        assert entry["seed"] == 0
        assert entry["parameters"]["client"] > 0
    assert summary["fedtp"]["parameters"]["hypernetwork"] > 0
    assert summary["local"]["parameters"]["hypernetwork"] == 0
    assert summary["local"]["bytes_down"] == summary["local"]["bytes_up"] == 0
    for name in summary:
        assert list((finished / "tensorboard" / name).iterdir())
        kept = [e.name for e in (finished / "checkpoints" / name).iterdir()]
        assert sorted(kept) == ["4", "5", "6"]


def test_the_other_algorithms_run(tmp_path):
    flags = [*_without(TINY, "--algorithms", "--rounds"), "--rounds", "1"]
    # `finished` has fedtp and local; one more of each kind of state is enough.
    others = "scaffold,fedbabu"
    out = tmp_path / "others"
    assert fedtp.main(["--out", str(out), "--algorithms", others, *flags]) == 0
    summary = json.loads((out / "summary.json").read_text())["algorithms"]
    assert ",".join(summary) == others


def test_the_files_agree_with_one_another(finished):
    summary = json.loads((finished / "summary.json").read_text())["algorithms"]
    table = list(csv.DictReader((finished / "clients.csv").open()))
    assert len(table) == 2 * 6
    for name, entry in summary.items():
        own = [row for row in rows(finished) if row["algorithm"] == name]
        assert [row["round"] for row in own] == [1, 2, 3, 4, 5, 6]
        assert [row["round"] for row in own if "accuracy" in row] == [2, 4, 6]
        assert own[-1]["accuracy"] == entry["accuracy"]
        clients = [row for row in table if row["algorithm"] == name]
        tests = np.array([int(row["test_examples"]) for row in clients])
        accuracy = np.array([float(row["accuracy"]) for row in clients])
        pooled = (tests * accuracy).sum() / tests.sum()
        assert pooled == pytest.approx(entry["accuracy"]["pooled"], abs=1e-6)
        took_part = np.bincount([c for row in own for c in row["clients"]], minlength=6)
        assert [int(row["rounds"]) for row in clients] == took_part.tolist()
    by_round = {}
    for row in rows(finished):
        by_round.setdefault(row["round"], set()).add(tuple(row["clients"]))
    assert all(len(cohorts) == 1 for cohorts in by_round.values())


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(
    finished, tmp_path
):
    assert run(tmp_path / "b", *TINY, env={"PYTHONHASHSEED": "1"}).returncode == 0
    for name in ("metrics.jsonl", "partition.json", "summary.json", "clients.csv"):
        assert (finished / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert checkpoint_bytes(finished) == checkpoint_bytes(tmp_path / "b")
    other = ["--seed", "1", *_without(TINY, "--algorithms"), "--algorithms", "local"]
    assert fedtp.main(["--out", str(tmp_path / "c"), *other]) == 0
    for name in ("metrics.jsonl", "partition.json"):
        assert (finished / name).read_bytes() != (tmp_path / "c" / name).read_bytes()


def test_the_partition_of_a_run_can_be_used_again(finished, tmp_path):
    flags = ["--partition", f"file:{finished / 'partition.json'}"]
    flags += [*_without(TINY, "--algorithms"), "--algorithms", "fedtp"]
    assert fedtp.main(["--out", str(tmp_path / "a"), *flags]) == 0
    own = [row for row in rows(finished) if row["algorithm"] == "fedtp"]
    assert rows(tmp_path / "a") == own


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_goes_on_to_the_same_bits(finished, tmp_path, kills):
    out = tmp_path / "killed"
    seconds = random.Random(0)
    command = [sys.executable, "-m", "experiments.fedtp"]
    for _ in range(kills):
        process = subprocess.Popen(
            [*command, "--out", str(out), "--resume", *TINY],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        metrics = out / "metrics.jsonl"
        before = metrics.stat().st_size if metrics.exists() else 0
        while process.poll() is None and (
            not metrics.exists() or metrics.stat().st_size <= before
        ):
            time.sleep(0.01)
        time.sleep(seconds.uniform(0, 0.6))
        process.kill()
        process.communicate()
    done = run(out, "--resume", *TINY)
    assert done.returncode == 0, done.stderr
    assert "going on after round" in done.stdout
    for name in ("metrics.jsonl", "summary.json", "clients.csv"):
        assert (finished / name).read_bytes() == (out / name).read_bytes(), name
    assert checkpoint_bytes(finished) == checkpoint_bytes(out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_saves_and_says_how_to_go_on(
    finished, tmp_path, number
):
    out = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.fedtp", "--out", str(out), *TINY],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "--resume" in said
    assert list((out / "checkpoints").glob("*/[0-9]*"))
    if number == signal.SIGINT:
        return
    # The flags come from the run itself.
    assert run(out, "--resume").returncode == 0
    assert (finished / "summary.json").read_bytes() == (
        out / "summary.json"
    ).read_bytes()


def shortened(finished, tmp_path, round_index):
    """A copy of a finished run of FedTP whose newest checkpoint is an older one."""
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    for entry in (out / "checkpoints" / "fedtp").iterdir():
        if int(entry.name) > round_index:
            shutil.rmtree(entry)
    return out


def test_a_damaged_newest_checkpoint_gives_way_and_says_so(finished, tmp_path, capsys):
    out = shortened(finished, tmp_path, 5)
    newest = out / "checkpoints" / "fedtp" / "5"
    largest = max(newest.rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    (out / "checkpoints" / "fedtp" / "9").mkdir()
    for name in ("metrics.jsonl", "timing.jsonl"):
        with (out / name).open("a") as file:
            file.write('{"algorithm": "fed')
    assert fedtp.main(["--out", str(out), "--resume"]) == 0
    said = capsys.readouterr().out
    assert "5 is incomplete or damaged" in said
    assert "going on after round 4" in said
    for name in ("metrics.jsonl", "summary.json"):
        assert (finished / name).read_bytes() == (out / name).read_bytes()


def test_a_finished_run_goes_on_for_more_rounds_as_if_it_had_had_them(
    finished, tmp_path
):
    out = tmp_path / "short"
    flags = [*_without(TINY, "--rounds", "--algorithms"), "--algorithms", "local"]
    assert fedtp.main(["--out", str(out), *flags, "--rounds", "3"]) == 0
    assert fedtp.main(["--out", str(out), "--resume", "--rounds", "6"]) == 0
    assert rows(out) == [row for row in rows(finished) if row["algorithm"] == "local"]
    assert fedtp.main(["--out", str(out), "--resume"]) == 0


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("metrics.jsonl", lambda text: text[5:], "line 1, is damaged"),
        ("metrics.jsonl", lambda text: "", "lacks rounds of fedtp"),
        ("config.json", lambda text: text.replace("0.5", "null"), "sample_fraction"),
        ("config.json", lambda text: text[:40], "cannot read"),
        ("partition.json", lambda text: text.replace("1,", "2,", 1), "no longer"),
    ],
)
def test_a_damaged_run_folder_is_refused(
    finished, tmp_path, capsys, name, change, said
):
    out = tmp_path / "damaged"
    shutil.copytree(finished, out)
    (out / name).write_text(change((out / name).read_text()))
    assert fedtp.main(["--out", str(out), "--resume"]) == 2
    assert said in capsys.readouterr().err


def test_data_that_changed_is_noticed_on_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_npz(tmp_path)
    flags = _without(TINY, "--rounds", "--algorithms")
    flags += ["--algorithms", "local", "--rounds", "1", "--dataset", "npz:a.npz"]
    assert fedtp.main(["--out", "out", *flags]) == 0
    assert fedtp.main(["--out", "out", *flags, "--resume"]) == 0
    small_npz(tmp_path, x_train=np.ones((40, 8, 8, 1), np.uint8))
    assert fedtp.main(["--out", "out", *flags, "--resume"]) == 2
    assert "the data or its partition" in capsys.readouterr().err


def test_text_is_learnt_by_role(tmp_path, capsys):
    text = "the quality of mercy is not strained, it droppeth as the gentle rain. "
    users = {f"user{i}": text[i:] + text for i in range(4)}
    files = {split: {"a.json": users} for split in ("train", "test")}
    name = leaf_folder(tmp_path / "leaf", files)
    flags = _without(TINY, "--rounds", "--num-clients", "--patch-size", "--eval-every")
    flags += ["--dataset", name, "--rounds", "2", "--eval-every", "2"]
    assert fedtp.main(["--out", str(tmp_path / "out"), *flags]) == 0
    shown = capsys.readouterr().out
    assert "texts of 4 characters" in shown
    assert "4 clients" in shown
    assert "at all positions" in shown
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for entry in summary["algorithms"].values():
        accuracy = entry["accuracy"]
        assert 0 <= accuracy["positions"] <= 1
        assert accuracy["positions"] != accuracy["pooled"]
    # A model of images, and sizes that text does not have.
    for more, said in (
        (["--model", "vit"], "the data is text; allowed is char_transformer or lstm"),
        (["--shift", "noise:1"], "the data is text"),
        (["--num-clients", "5"], "this data has 1 to 4 by nature"),
    ):
        assert fedtp.main(["--out", str(tmp_path / "no"), *flags, *more]) == 2
        assert said in capsys.readouterr().err


def test_shifted_images_are_each_seeds_own():
    flags = DataFlags(num_clients=5, shift="noise:0.2")
    mesh = Mesh(np.array(jax.devices()[:1]), (MESH_AXIS,))

    def prepare(**run):
        return setup.make_setup(
            flags, ModelFlags(), TrainingFlags(), RunFlags(**run), mesh
        )

    both = prepare(seeds=2)
    for i, seed in enumerate((0, 1)):
        alone = prepare(seed=seed)
        for split in ("train", "test"):
            together, own = getattr(both, split), getattr(alone, split)
            assert np.array_equal(together.size[i], own.size)
            held = together.rows[i][: own.size.sum()]
            assert np.array_equal(together.x[held], own.x[own.rows])
            assert np.array_equal(together.y[held], own.y[own.rows])
        plain = catalog.load("digits")
        changed = np.asarray(alone.train.x)[np.asarray(alone.train.rows)]
        before = plain.x_train[np.asarray(alone.train.rows)]
        first = int(alone.train.size[0])
        assert np.array_equal(changed[:first], before[:first])
        assert not np.array_equal(changed[first:], before[first:])


def test_a_clients_shifted_images_do_not_depend_on_who_else_takes_part():
    flags = DataFlags(num_clients=5, shift="noise:0.2")
    mesh = Mesh(np.array(jax.devices()[:1]), (MESH_AXIS,))
    others = (ModelFlags(), TrainingFlags(), RunFlags(), mesh)
    whole = setup.make_setup(flags, *others)
    last = setup.make_setup(
        flags, *others, select=lambda parts: type(parts)(*(s[3:] for s in parts))
    )
    assert last.num_clients == 2
    held = np.asarray(whole.train.rows)[int(whole.train.start[3]) :]
    mine = np.asarray(last.train.x)[np.asarray(last.train.rows)]
    assert np.array_equal(mine, np.asarray(whole.train.x)[held])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--client-lr", "0.5"], "--client-lr is 0.5, but the run"),
        (["--dataset", "npz:x.npz"], "--dataset is npz:"),
        (["--rounds", "3"], "allowed is 6 or more"),
        (["--preset", "paper"], "--preset is paper"),
    ],
)
def test_flags_that_contradict_the_run_are_refused(finished, capsys, flags, said):
    before = (finished / "metrics.jsonl").read_bytes()
    assert fedtp.main(["--out", str(finished), "--resume", *flags]) == 2
    assert said in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_bytes() == before


def small_npz(tmp_path, **changes):
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 4
    arrays = {
        "x_train": rng.integers(0, 255, (40, 8, 8, 1), dtype=np.uint8),
        "y_train": labels,
        "x_test": rng.integers(0, 255, (40, 8, 8, 1), dtype=np.uint8),
        "y_test": labels,
    }
    np.savez(tmp_path / "a.npz", **(arrays | changes))
    return f"npz:{tmp_path / 'a.npz'}"


BAD_FLAGS = [
    ("--dataset imagenet", "unknown dataset 'imagenet'"),
    ("--dataset cifar10", "needs --data-dir"),
    ("--dataset npz:missing.npz", "does not exist"),
    ("--algorithms fedsgd", "unknown algorithm 'fedsgd'"),
    ("--algorithms scaffold,fedrod_knn", "does not go with fedrod"),
    ("--partition natural", "partition natural needs data that says who holds what"),
    ("--model lstm", "model is lstm, and the data is images; allowed is vit or cnn"),
    ("--shift blur:1", "shift is 'blur:1'; allowed are noise:X"),
    ("--shift noise:-1", "shift is 'noise:-1'"),
    ("--method.moon-temperature 0", "moon temperature is 0.0; allowed is above 0"),
    ("--partition dirichlett", "unknown partition 'dirichlett'"),
    ("--partition dirichlet --alpha 0", "alpha is 0.0"),
    ("--partition dirichlet --alpha -1", "alpha is -1.0"),
    ("--partition dirichlet --alpha nan", "alpha is nan"),
    ("--classes-per-client 11", "classes per client is 11"),
    ("--num-clients 5000", "5000 clients"),
    ("--num-clients 0", "number of clients is 0"),
    ("--partition dirichlet --num-clients 200", "needs 2000 examples"),
    ("--sample-fraction 0", "sample fraction is 0.0"),
    ("--sample-fraction 1.5", "sample fraction is 1.5"),
    ("--rounds 0", "rounds is 0"),
    ("--local-epochs 0", "local epochs is 0"),
    ("--batch-size 0", "batch size is 0"),
    ("--eval-every 0", "eval every is 0"),
    ("--client-lr 0", "learning rate is 0.0"),
    ("--method.prox-mu -1", "prox mu is -1.0"),
    ("--client-momentum 1", "momentum is 1.0"),
    ("--dropout 1", "dropout is 1.0"),
    ("--depth 0", "depth is 0"),
    ("--patch-size 3", "patch size is 3"),
    ("--model cnn", "fedtp needs a model with attention"),
    ("--hypernetwork.hidden 0", "hidden is 0"),
    ("--server.lr -1", "learning rate is -1.0"),
    ("--seed -1", "seed is -1"),
    ("--metric-from 100", "metric from is 100"),
    ("--resume", "--resume needs --out"),
    ("--rounds abc", "abc"),
    ("--bogus 1", "--bogus"),
    ("--model foo", "'foo'"),
    ("--algorithms local --server.lr nan", "learning rate is nan"),
    ("--algorithms local --hypernetwork.hidden -3", "hidden is -3"),
    ("--model cnn --algorithms local --dropout nan", "dropout is nan"),
    ("--out {file}", "is a file"),
    ("--out {file}/run", "cannot write in out"),
    ("--out {full}", "not empty"),
    ("--out {full} --resume", "no run to resume"),
]


@pytest.mark.parametrize(("flags", "said"), BAD_FLAGS, ids=[f for f, _ in BAD_FLAGS])
def test_bad_flags_are_refused_before_anything_runs(
    tmp_path, capsys, monkeypatch, flags, said
):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    monkeypatch.chdir(tmp_path)

    def never(*args, **kwargs):
        raise AssertionError("something was trained")

    monkeypatch.setattr("experiments.driver.train", never)
    filled = flags.format(file=tmp_path / "file", full=tmp_path / "full")
    assert fedtp.main(filled.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) <= 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y_train": np.arange(40) % 4 + 0.5}, "labels must be integers"),
        ({"y_train": np.arange(39) % 4}, "must be equal"),
        ({"x_train": np.full((40, 8, 8, 1), np.nan)}, "pixels that are NaN"),
        ({"y_train": np.array([None] * 40)}, "plain number arrays"),
    ],
)
def test_a_bad_npz_is_refused_before_anything_runs(tmp_path, capsys, change, said):
    dataset = small_npz(tmp_path, **change)
    out = str(tmp_path / "out")
    assert fedtp.main(["--dataset", dataset, "--out", out]) == 2
    assert said in capsys.readouterr().err


def test_a_client_that_diverges_is_named_and_the_run_goes_on(
    tmp_path, capsys, monkeypatch
):
    raw = np.zeros(1, np.float32), np.ones(1, np.float32)
    monkeypatch.setattr(catalog, "_channel_statistics", lambda name, x: raw)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 8, 8, 1)).astype(np.float32)
    x[:2] = 1e30
    labels = np.arange(40) % 4
    dataset = small_npz(tmp_path, x_train=x, x_test=x, y_train=labels, y_test=labels)
    parts = {
        "train": [list(range(2)), list(range(2, 20)), list(range(20, 40))],
        "test": [[2], list(range(3, 20)), list(range(20, 40))],
    }
    (tmp_path / "p.json").write_text(json.dumps(parts))
    out = tmp_path / "out"
    flags = ["--dataset", dataset, "--partition", f"file:{tmp_path / 'p.json'}"]
    flags += _without(
        TINY, "--algorithms", "--num-clients", "--rounds", "--sample-fraction"
    )
    flags += ["--rounds", "2", "--sample-fraction", "1", "--algorithms", "fedavg"]
    assert fedtp.main(["--out", str(out), *flags]) == 0
    assert [row["left_out"] for row in rows(out)] == [[0], [0]]
    losses = [row["training"]["loss"] for row in rows(out)]
    assert all(0 < loss < 100 for loss in losses)
    assert "were left out of the average" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert "were left out of the average" in page
    assert "NaN" not in (out / "metrics.jsonl").read_text()


def _without(flags, *names):
    kept, skip = [], False
    for flag in flags:
        if skip:
            skip = False
        elif flag in names:
            skip = True
        else:
            kept.append(flag)
    return kept


def test_a_disk_that_refuses_is_no_success(finished, tmp_path):
    out = shortened(finished, tmp_path, 4)
    limit = ["bash", "-c", 'ulimit -f 8; exec "$@"', "-"]
    done = run(out, "--resume", prefix=limit)
    assert done.returncode == 1
    assert "cannot save round 5" in done.stderr
    assert str(out) in done.stderr
    assert run(out, "--resume").returncode == 0
    assert (finished / "summary.json").read_bytes() == (
        out / "summary.json"
    ).read_bytes()


def test_a_relative_folder_with_a_blank_resumes_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = _without(TINY, "--algorithms", "--rounds")
    flags += ["--algorithms", "local", "--rounds", "2"]
    data = small_npz(tmp_path)
    flags += ["--dataset", "npz:a.npz", "--classes-per-client", "2"]
    assert data == f"npz:{tmp_path / 'a.npz'}"
    assert fedtp.main(["--out", "results/run é 1", *flags]) == 0
    monkeypatch.chdir(ROOT)
    out = tmp_path / "results" / "run é 1"
    assert fedtp.main(["--out", str(out), "--resume", "--rounds", "3"]) == 0
    assert [row["round"] for row in rows(out)] == [1, 2, 3]


def test_tiny_clients_train_and_are_measured(tmp_path):
    sizes = [5, 7, 64, 130]
    total = sum(sizes)
    rng = np.random.default_rng(0)
    labels = np.arange(total) % 3
    dataset = small_npz(
        tmp_path,
        x_train=rng.integers(0, 255, (total, 8, 8, 1), dtype=np.uint8),
        y_train=labels,
        x_test=rng.integers(0, 255, (30, 8, 8, 1), dtype=np.uint8),
        y_test=labels[:30],
    )
    indices = iter(range(total))
    train = [list(itertools.islice(indices, size)) for size in sizes]
    test = [[0, 1, 2], list(range(3, 10)), list(range(10, 20)), list(range(20, 30))]
    (tmp_path / "p.json").write_text(json.dumps({"train": train, "test": test}))
    out = tmp_path / "out"
    flags = f"--batch-size 64 --local-epochs 1 --rounds 2 --model cnn --out {out}"
    flags += f" --partition file:{tmp_path / 'p.json'} --dataset {dataset}"
    flags += " --algorithms local,fedavg --sample-fraction 1"
    assert fedtp.main(flags.split()) == 0
    table = list(csv.DictReader((out / "clients.csv").open()))
    first = float(table[0]["accuracy"])
    assert min(abs(first - k / 3) for k in range(4)) < 1e-6
    assert [int(row["rounds"]) for row in table[:4]] == [2, 2, 2, 2]


def test_rounds_and_evaluation_are_compiled_once_in_a_run(tmp_path):
    flags = _without(TINY, "--algorithms", "--rounds", "--checkpoint-every")
    flags += ["--algorithms", "fedtp", "--rounds", "9", "--partition", "dirichlet"]
    done = run(tmp_path / "out", *flags, env={"JAX_LOG_COMPILES": "1"})
    assert done.returncode == 0
    lines = (tmp_path / "out" / "timing.jsonl").read_text().splitlines()
    assert sum('"event": "compile"' in line for line in lines) == 1
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", done.stderr)
    assert compiled.count("advance") == 1
    assert compiled.count("evaluate") == 1


def test_experiments_are_listed_with_their_question():
    listed = dict(describe())
    assert listed["experiments.fedtp"].startswith("Does FedTP beat FedAvg")
    assert listed["experiments.prepare_data"]
    assert not any(re.search(r"\.(cli|driver|setup)$", name) for name in listed)


def test_the_paper_preset_is_the_papers_protocol(capsys):
    from experiments import cli

    flags = cli.parse(
        fedtp.Flags(), fedtp.PRESETS, ["--preset", "paper", "--rounds", "7"], "", "x"
    )
    flat = cli.to_flat(flags)
    expected = {
        "preset": "paper",
        "rounds": 7,
        "num_clients": 50,
        "sample_fraction": 0.1,
        "local_epochs": 5,
        "batch_size": 64,
        "client_lr": 0.01,
        "client_momentum": 0.9,
        "client_weight_decay": 1e-5,
        "hypernetwork.hidden": 150,
        "hypernetwork.embedding_dim": 128,
        "server.lr": 0.01,
        "server.weight_decay": 1e-3,
        "metric_from": 1300,
    }
    assert {name: flat[name] for name in expected} == expected
    assert cli.to_flat(cli.with_values(fedtp.Flags(), flat)) == flat


def test_seeds_at_once_are_the_runs_of_each_seed(tmp_path):
    flags = [*_without(TINY, "--algorithms"), "--algorithms", "fedtp"]
    assert fedtp.main(["--out", str(tmp_path / "both"), "--seeds", "2", *flags]) == 0
    for seed in (0, 1):
        out = tmp_path / str(seed)
        assert fedtp.main(["--out", str(out), "--seed", str(seed), *flags]) == 0
        together = [row for row in rows(tmp_path / "both") if row["seed"] == seed]
        for a, b in zip(together, rows(out), strict=True):
            assert a["clients"] == b["clients"]
            assert a["training"]["loss"] == pytest.approx(
                b["training"]["loss"], rel=1e-3
            )
            if "accuracy" in b:
                assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    summary = json.loads((tmp_path / "both" / "summary.json").read_text())
    entry = summary["algorithms"]["fedtp"]
    pooled = [entry["seeds"][seed]["accuracy"]["pooled"] for seed in ("0", "1")]
    assert entry["accuracy"]["pooled"] == pytest.approx(np.mean(pooled))
    assert entry["std_over_seeds"]["accuracy"]["pooled"] == pytest.approx(
        np.std(pooled)
    )
    table = list(csv.DictReader((tmp_path / "both" / "clients.csv").open()))
    assert [row["seed"] for row in table] == ["0"] * 6 + ["1"] * 6
    partitions = [
        (tmp_path / "both" / name).read_text()
        for name in ("partition.json", "partition-seed1.json")
    ]
    assert partitions[0] == (tmp_path / "0" / "partition.json").read_text()
    assert partitions[1] == (tmp_path / "1" / "partition.json").read_text()


def test_what_clients_keep_on_the_host_gives_the_same_run_and_resumes(tmp_path):
    flags = [*_without(TINY, "--algorithms"), "--algorithms", "fedtp_vanilla"]
    outs = {where: tmp_path / where for where in ("no", "yes")}
    for where, out in outs.items():
        assert fedtp.main(["--out", str(out), "--kept-on-host", where, *flags]) == 0
    assert rows(outs["no"]) == rows(outs["yes"])
    for out in outs.values():
        assert fedtp.main(["--out", str(out), "--resume", "--rounds", "8"]) == 0
    assert len(rows(outs["no"])) == 8
    assert rows(outs["no"]) == rows(outs["yes"])
    saved = outs["yes"] / "checkpoints" / "fedtp_vanilla"
    assert sorted(path.name for path in saved.glob("*.kept")) == [
        "6.kept",
        "7.kept",
        "8.kept",
    ]


def test_a_run_goes_on_where_its_clients_rows_are_whatever_memory_is_free(tmp_path):
    # 60 models are 175 kB, everything else is about as much.
    flags = _without(TINY, "--algorithms", "--num-clients", "--sample-fraction")
    flags += shlex.split("--algorithms local --num-clients 60 --sample-fraction 0.05")
    small, large = (["--memory-gb", gb] for gb in ("0.0005", "50"))
    for name, first, then in (("a", small, large), ("b", large, small)):
        out = tmp_path / name
        assert fedtp.main(["--out", str(out), *flags, *first]) == 0
        on_host = (out / "clients").exists()
        assert on_host is (first is small)
        more = ["--resume", "--rounds", "7", *then]
        assert fedtp.main(["--out", str(out), *more]) == 0
        assert (out / "clients").exists() is on_host
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    flags = ["--out", str(tmp_path / "a"), "--resume", "--kept-on-host", "no"]
    assert fedtp.main(flags) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--memory-gb", "0.0001"], "to make it fit, lower --batch-size or the model"),
        (["--memory-gb", "0.0001", "--devices", "2"], "lower --devices, --batch-size"),
        (
            shlex.split("--memory-gb 0.0001 --seeds 2 --kept-on-host no"),
            "lower --seeds, --batch-size",
        ),
        (["--lanes", "100000", "--memory-gb", "0.05"], r"lower --lanes \(to \d+\)"),
        (["--kept-on-host", "yes", "--seeds", "2"], "allows one seed and one process"),
        (["--seeds", "0"], "seeds is 0; allowed is 1 or more"),
        (["--lanes", "0"], "lanes is 0; allowed is 1 or more"),
        (["--hypernetwork.parameters", "5"], "hypernetwork parameters is 5; allowed"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_flag_that_helps(
    tmp_path, capsys, more, said
):
    assert fedtp.main(["--out", str(tmp_path / "a"), *TINY, *more]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "a").exists()


def test_a_budgeted_hypernetwork_trains(tmp_path):
    flags = [*_without(TINY, "--algorithms"), "--algorithms", "fedtp"]
    budget = ["--hypernetwork.parameters", "1e3"]
    assert fedtp.main(["--out", str(tmp_path / "a"), *flags, *budget]) == 0
    entry = json.loads((tmp_path / "a" / "summary.json").read_text())
    found = entry["algorithms"]["fedtp"]["parameters"]["hypernetwork"]
    assert 700 < found <= 1000 + 6 * 4
