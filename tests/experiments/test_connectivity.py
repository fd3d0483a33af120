"""Connectivity as a user runs it: looks along a run, at a run there is, resumed."""

import csv
import json
import shlex
import shutil

import numpy as np
import pytest

from experiments import connectivity as experiment
from experiments import fedtp
from experiments.looks import ORDERS

MODEL = shlex.split(
    "--num-clients 6 --dim 8 --depth 1 --heads 2 --head-dim 4 --mlp-dim 8 "
    "--patch-size 4 --devices 1 --no-tune-process"
)
TINY = [
    *MODEL,
    *shlex.split(
        "--algorithms fedavg --rounds 2 --eval-every 1 --look-clients 2 "
        "--look-examples 32 --directions 2"
    ),
]
PICTURES = (
    "layerwise",
    "cumulative_forth",
    "cumulative_back",
    "cumulative",
    "path",
    "kinds",
    "rotation",
    "directions",
    "subspace",
)


def test_looks_along_a_run(tmp_path, capsys):
    out = tmp_path / "run"
    assert experiment.main(["--out", str(out), *TINY]) == 0
    for name in PICTURES:
        assert (out / f"{name}.png").stat().st_size > 0
    for name in ("summary.json", "report.html", "connectivity.html"):
        assert (out / name).stat().st_size > 0
    looks = [
        json.loads((out / "looks" / f"fedavg-{i}.json").read_text()) for i in range(3)
    ]
    for look in looks:
        assert set(look["pairs"]) == {"0 and 1", "0 and average"}
        own = look["pairs"]["0 and 1"]["test"]["loss"]
        # All layers, in whatever order: the whole barrier, and from both sides.
        for order in ORDERS:
            for name in (order, f"{order}, second"):
                assert own[name][-1] == pytest.approx(own["full"], abs=1e-5)
        assert own["path"][2] - np.mean([own["path"][0], own["path"][-1]]) == (
            pytest.approx(own["full"], abs=1e-6)
        )
        # The first layer alone is where more and more layers begin.
        assert own["layers"][0] == pytest.approx(own["shallow to deep"][0], abs=1e-6)
        assert own["layers"][-1] == pytest.approx(own["deep to shallow"][0], abs=1e-6)
    ended = json.loads((out / "connectivity.json").read_text())
    ended = ended["algorithms"]["fedavg"]
    assert ended["rounds"] == [0, 1, 2]
    turned = np.array(ended["at_the_end"]["rotations"])
    # One local training turns little, three more.
    assert turned.shape == (13, 3)
    assert 0 < turned[:, 0].mean() < turned[:, 2].mean() < 0.5
    rows = list(csv.DictReader((out / "barriers.csv").open()))
    assert len(rows) == 3 * 2 * 2 * 2 * 13
    printed = capsys.readouterr().out
    assert "Barriers between two clients" in printed

    # The last look again, as after a kill: the same bits.
    again = tmp_path / "again"
    shutil.copytree(out, again)
    shutil.rmtree(again / "checkpoints" / "fedavg" / "2")
    for suffix in ("json", "npz"):
        (again / "looks" / f"fedavg-2.{suffix}").unlink()
    assert experiment.main(["--out", str(again), "--resume"]) == 0
    name = "looks/fedavg-2.json"
    assert (again / name).read_bytes() == (out / name).read_bytes()
    assert (again / "barriers.csv").read_bytes() == (out / "barriers.csv").read_bytes()


def test_batch_normalization_and_personal_starts(tmp_path):
    out = tmp_path / "cnn"
    cnn = ["--model", "cnn_bn", "--rounds", "1"]
    assert experiment.main(["--out", str(out), *TINY, *cnn]) == 0
    ended = json.loads((out / "connectivity.json").read_text())["algorithms"]["fedavg"]
    for values in ended["at_the_end"]["subspace"].values():
        assert None not in values
    assert ended["at_the_end"]["without"] == []

    out = tmp_path / "fedtp"
    fedtp_flags = "--algorithms fedtp --rounds 1 --hypernetwork.hidden 8"
    assert experiment.main(["--out", str(out), *TINY, *shlex.split(fedtp_flags)]) == 0
    ended = json.loads((out / "connectivity.json").read_text())["algorithms"]["fedtp"]
    # From what the hypernetwork emitted at first: one local training turns little.
    assert max(row[0] for row in ended["at_the_end"]["rotations"]) < 0.3


def test_clients_that_diverge_are_named(tmp_path, capsys):
    out = tmp_path / "run"
    flags = ["--client-lr", "1e30", "--model", "cnn", "--rounds", "1"]
    assert experiment.main(["--out", str(out), *TINY, *flags]) == 2
    error = capsys.readouterr().err
    assert "no look has finite losses" in error
    assert (out / "report.html").is_file()


def test_a_look_at_a_run_that_is_there(tmp_path, capsys):
    trained, out = tmp_path / "trained", tmp_path / "look"
    few = shlex.split("--algorithms fedavg --rounds 2 --eval-every 2")
    assert fedtp.main(["--out", str(trained), *MODEL, *few]) == 0
    look = ["--run", str(trained), "--algorithms", "fedavg", "--look-clients", "2"]
    look += shlex.split("--look-examples 32 --directions 2")
    assert experiment.main(["--out", str(out), *look]) == 0
    content = json.loads((out / "summary.json").read_text())
    assert content["looks"]["fedavg"][0]["round"] == 2
    for name in ("report.html", "layerwise.png"):
        assert (out / name).stat().st_size > 0
    capsys.readouterr()
    look[3] = "fedtp"
    assert experiment.main(["--out", str(tmp_path / "no"), *look]) == 2
    assert "algorithm is 'fedtp', of which run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--look-clients 3", "look clients is 3; allowed is an even number"),
        ("--look-clients 8", "look clients is 8; allowed is 2 to 6"),
        ("--look-examples 0", "look examples is 0"),
        ("--seeds 2", "seeds is 2; allowed is 1"),
        ("--algorithms ditto", "'ditto', whose clients do not train one model"),
        ("--algorithms scaffold", "'scaffold', whose clients do not train one"),
        ("--kept-on-host yes", "needs what clients keep on the device"),
        ("--run nowhere", "nowhere is no run folder (no config.json)"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiment.main([*TINY, *shlex.split(flags)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
