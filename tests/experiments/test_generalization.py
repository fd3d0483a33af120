"""The generalization experiment as a user runs it: files, resumption, bad flags."""

import json
import shlex

import numpy as np
import pytest

from experiments import generalization as experiment

TINY = shlex.split(
    "--algorithms fedtp,fedtp_vanilla --clients 3 --samples 5,12 --embedding-dims 4 "
    "--at-clients 3 --at-samples 5 --seeds 1 --rounds 2 --local-steps 3 "
    "--batch-size 4 --dim 8 --depth 1 --heads 2 --head-dim 4 --mlp-dim 8 "
    "--patch-size 4 --hypernetwork.hidden 8 --hypernetwork.embedding-dim 4 "
    "--devices 1 --no-tune-process"
)


def test_a_run_and_what_is_done_again(tmp_path, capsys):
    out = tmp_path / "run"
    assert experiment.main(["--out", str(out), *TINY]) == 0
    printed = capsys.readouterr().out
    assert "The bound's terms, 3 clients with 5 examples" in printed
    for name in ("gap", "accuracy", "needed"):
        assert (out / f"{name}.png").stat().st_size > 0
    # That no gap is promised is said where the figures are.
    page = (out / "report.html").read_text()
    assert "in 0 of 4 cases it is below 1" in page
    assert "no certificate" in page
    summary = (out / "summary.json").read_bytes()
    content = json.loads(summary)
    points = {(p["algorithm"], p["samples"]): p for p in content["points"]}
    assert set(points) == {
        (name, count) for name in ("fedtp", "fedtp_vanilla") for count in (5, 12)
    }
    for point in points.values():
        (found,) = point["seeds"]
        # 3 clients with 5 or 12 examples: accuracies are shares of so many.
        right = found["train_accuracy"] * 3 * point["samples"]
        assert right == pytest.approx(round(right), abs=1e-4)
        assert 0 < found["train_error"] < 1
        # A bound that its own measurement passes would be none.
        assert point["bound"] > abs(found["train_error"] - found["test_error"])
        assert found["shared_radius"] > 0
        assert found["personal_lipschitz"] > 0
        is_fedtp = point["algorithm"] == "fedtp"
        assert (found["phi_lipschitz"] > 0) == is_fedtp
        # q, k and v: 3 kernels of 8 x 2 x 4.
        assert found["personal_size"] == 3 * 64
        assert (found["phi_size"] > 0) == is_fedtp
    needed = content["needed"]
    # Clients share the cost of all but their own numbers: 4 of FedTP's, 192 of
    # vanilla's, whose share is what stays.
    for name in ("fedtp", "fedtp_vanilla"):
        assert np.all(np.diff(needed[name]) < 0)
        assert needed[name][-1] == pytest.approx(needed[name][-2], rel=0.05)
    assert needed["fedtp"][-1] < needed["fedtp_vanilla"][-1] / 5

    part = out / "parts" / "fedtp_vanilla-n3-m12-seed0.json"
    part.unlink()
    (out / "summary.json").unlink()
    assert experiment.main(["--out", str(out), "--resume"]) == 0
    assert (out / "summary.json").read_bytes() == summary


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--algorithms fedtp,what", "algorithms is 'fedtp,what'; allowed are some of"),
        ("--samples 13", "samples is 13; allowed are up to 12 examples a client"),
        ("--clients 0,3", "clients is [0, 3]; allowed is 1 or more"),
        ("--clients 400", "samples is 5 for 400 clients; digits has 1442"),
        ("--clients 4 --clients 4,4", "clients is '4,4'; allowed are different"),
        ("--embedding-dims two", "embedding dims is 'two'"),
        ("--gap 0", "gap is 0.0; allowed are numbers between 0 and 1"),
        ("--delta 1", "delta is 1.0"),
        ("--seeds 0", "seeds is 0"),
        ("--model cnn", "attention"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiment.main([*TINY, *shlex.split(flags)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
