"""The non-IID experiment as a user runs it: files, resumption, bad flags."""

import json
import shlex
import signal

import pytest

from experiments import lab
from experiments import noniid as experiment

TINY = shlex.split(
    "--num-clients 5 --classes 2,iid --settings 10x1 --examples 40 --rounds 2 "
    "--eval-every 1 --betas 0.1 --alphas 1 --shared-classes 2 --warmup-rounds 1 "
    "--dim 8 --depth 1 --heads 2 --head-dim 4 --mlp-dim 8 --patch-size 4 "
    "--hypernetwork.hidden 8 --hypernetwork.embedding-dim 4 --devices 1 "
    "--no-tune-process"
)


def test_a_run_and_what_is_done_again(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    assert experiment.main(["--out", str(out), *TINY]) == 0
    printed = capsys.readouterr().out
    assert "EMD 1.60, accuracy" in printed
    for name in ("accuracy", "divergence", "layers", "shared"):
        assert (out / f"{name}.png").stat().st_size > 0
    assert "Proposition 3.1" in (out / "report.html").read_text()
    summary = (out / "summary.json").read_bytes()
    content = json.loads(summary)
    grid = content["grid"]["10x1"]
    assert set(grid) == {"central", "2 classes", "iid"}
    assert grid["iid"]["rounds"] == [1, 2]
    assert all(0 < value < 5 for value in grid["iid"]["divergence"])
    assert len(grid["iid"]["by_layer"][0]) == len(content["layers"])
    # A bound that its own measurement passes would be none.
    for name in ("2 classes", "iid"):
        for bound, distance in zip(
            grid[name]["log10_bound"], grid[name]["distance"], strict=True
        ):
            assert 10**bound > distance
    shared = {(s["algorithm"], s["beta"]): s for s in content["shared"]}
    assert set(shared) == {(a, b) for a in ("fedavg", "fedtp") for b in (0.0, 0.1)}
    # n / (n + m) of the distance, m being a tenth of five clients' n.
    ratio = shared["fedavg", 0.1]["emd"] / shared["fedavg", 0.0]["emd"]
    assert ratio == pytest.approx(1 / 1.5, abs=0.02)

    # Killed between parts: one is not there, the others are not done again.
    parts = out / "parts"
    (parts / "fedavg-b10-e1-iid.json").unlink()
    kept = (parts / "central-b10-e1.json").stat().st_mtime_ns
    (out / "summary.json").unlink()
    assert experiment.main(["--out", str(out), "--resume"]) == 0
    assert (out / "summary.json").read_bytes() == summary
    assert (parts / "central-b10-e1.json").stat().st_mtime_ns == kept

    # Told to stop: what is finished stays, and how to go on is said.
    (parts / "fedavg-b10-e1-iid.json").unlink()
    check = lab.Lab.check_stop

    def stopped(self):
        check(self._replace(stop_signal=lambda: signal.SIGTERM))

    monkeypatch.setattr(lab.Lab, "check_stop", stopped)
    capsys.readouterr()
    assert experiment.main(["--out", str(out), "--resume"]) == 128 + signal.SIGTERM
    assert "--resume" in capsys.readouterr().err

    assert experiment.main(["--out", str(out), *TINY]) == 2
    assert "is not empty" in capsys.readouterr().err
    fewer = ["--out", str(out), "--resume", "--rounds", "1"]
    assert experiment.main(fewer) == 2
    assert "allowed is 2 or more" in capsys.readouterr().err
    changed = ["--out", str(out), "--resume", "--client-lr", "0.3"]
    assert experiment.main(changed) == 2
    assert "--client-lr is 0.3, but the run" in capsys.readouterr().err


def test_a_step_size_that_is_too_large_still_ends(tmp_path, capsys):
    out = tmp_path / "run"
    flags = ["--client-lr", "1e30", "--classes", "2", "--model", "cnn"]
    assert experiment.main(["--out", str(out), *TINY, *flags]) == 0
    assert "was not finite" in capsys.readouterr().out
    grid = json.loads((out / "summary.json").read_text())["grid"]["10x1"]
    assert grid["2 classes"]["left_out"] == 10


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--classes 2,many", "classes is '2,many'; allowed are different values"),
        ("--classes 2,2", "allowed are different values"),
        ("--classes 11", "classes per client is 11"),
        ("--settings 10", "settings is '10'"),
        ("--settings 0x1", "settings is '0x1'"),
        ("--shared-setting 10x1,5x1", "allowed is one, such as 10x1"),
        ("--betas 0.5", "betas is 0.5; allowed is 0 < beta <= 0.25"),
        ("--alphas 0", "alphas is 0; allowed is 0 < alpha <= 1"),
        ("--rounds 0", "rounds is 0; allowed is 1 or more"),
        ("--warmup-rounds -1", "warmup rounds is -1; allowed is 0 or more"),
        ("--seed -1", "seed is -1; allowed is 0 to"),
        ("--client-lr nan", "learning rate is nan"),
        ("--dataset nowhere", "nowhere"),
        ("--resume", "--resume needs --out"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiment.main([*TINY, *shlex.split(flags)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()
