"""The generalization experiment as a user runs it: files, resumption, bad flags."""

import json
import shlex

import numpy as np
import pytest

from experiments import generalization as experiment

TINY = shlex.split(
    "--algorithms fedtp,fedtp_vanilla --clients 2,3 --samples 5,12 --embedding-dims 4 "
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
    assert "in 0 of 6 cases it is below 1" in page
    assert "no certificate" in page
    summary = (out / "summary.json").read_bytes()
    content = json.loads(summary)
    points = {
        (p["algorithm"], p["clients"], p["samples"]): p for p in content["points"]
    }
    assert set(points) == {
        (name, *pair)
        for name in ("fedtp", "fedtp_vanilla")
        for pair in ((2, 5), (3, 5), (3, 12))
    }
    for point in points.values():
        (found,) = point["seeds"]
        # Clients with as many examples each: accuracies are shares of all of them.
        right = found["train_accuracy"] * point["clients"] * point["samples"]
        assert right == pytest.approx(round(right), abs=1e-4)
        assert 0 < found["train_error"] < 1
        assert found["shared_radius"] > 0
        assert found["personal_radius"] > 0
        assert found["personal_lipschitz"] > 0
        is_fedtp = point["algorithm"] == "fedtp"
        for name in ("phi_lipschitz", "z_lipschitz", "phi_radius", "z_radius"):
            assert (found[name] > 0) == is_fedtp
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
        ("--seed 4294967295 --seeds 2", "seed is 4294967296"),
        ("--at-samples 13 --samples 5", "at samples is 13; allowed are up to 12"),
        ("--model cnn_bn --algorithms fedavg", "cnn_bn, whose running statistics"),
        (
            "--hypernetwork.parameters 3000 --embedding-dims 4,4000",
            "hypernetwork parameters is 3000",
        ),
        ("--model cnn", "attention"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiment.main([*TINY, *shlex.split(flags)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_clients_that_hold_nothing_change_nothing(tmp_path):
    """Vanilla personalization of 2 clients, in programs for 2 and for 3."""
    found = {}
    for clients in ("2", "2,3"):
        out = tmp_path / clients
        flags = f"--algorithms fedtp_vanilla --clients {clients} --at-clients 2"
        more = "--samples 5 --batch-size 15 --local-steps 1 --at-samples 5"
        args = ["--out", str(out), *TINY, *shlex.split(flags), *shlex.split(more)]
        assert experiment.main(args) == 0
        content = json.loads((out / "summary.json").read_text())
        found[clients] = next(p for p in content["points"] if p["clients"] == 2)
    # One batch of all examples a round: no order of theirs that the programs draw.
    (alone,), (padded,) = found["2"]["seeds"], found["2,3"]["seeds"]
    for name, value in alone.items():
        assert padded[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
