"""The leakage audit as a user runs it."""

import json
import shlex

import pytest

from experiments import leakage as experiment

TINY = shlex.split(
    "--models vit --images 1 --batch-sizes 1 --local-steps 1 --attack-steps 20 "
    "--epochs 8 --examples 640 --client-lr 0.1 "
    "--dim 8 --depth 1 --heads 2 --head-dim 4 --mlp-dim 8 --patch-size 4 --devices 1 "
    "--no-tune-process"
)


def test_an_audit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(experiment, "_CODECS", {"sign": experiment.sign})
    out = tmp_path / "run"
    assert experiment.main(["--out", str(out), *TINY]) == 0
    content = json.loads((out / "summary.json").read_text())
    cases = [(c["codec"], c["part"], c["is_trained"]) for c in content["cases"]]
    assert cases == [
        ("none", "all", False),
        ("sign", "all", False),
        ("none", "qkv", False),
        ("none", "all but qkv", False),
        ("none", "all", True),
        ("none", "qkv", True),
        ("none", "all but qkv", True),
    ]
    # Twice chance and more: it was trained.
    assert content["accuracies"]["vit"] > 0.2
    assert content["cases"][4]["psnr"] != content["cases"][0]["psnr"]
    for case in content["cases"]:
        assert 0 < case["psnr"][0] < 60
        assert 0 <= case["distance"][0] <= 2
    # Softmax regression: to float precision.
    assert content["exact"]["error"][0] < 1e-5
    for name in ("images.png", "psnr.png", "report.html"):
        assert (out / name).stat().st_size > 0
    assert "What is found of an image" in capsys.readouterr().out
    summary = (out / "summary.json").read_bytes()
    assert experiment.main(["--out", str(out), "--resume"]) == 0
    assert (out / "summary.json").read_bytes() == summary


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--models vit,what", "models is 'vit,what'; allowed are some of vit, cnn"),
        ("--batch-sizes 0", "batch sizes is [0]; allowed is 1 or more"),
        ("--batch-sizes 11", "of which there are 10"),
        ("--local-steps one", "local steps is 'one'"),
        ("--client-lr 0", "client lr is 0.0; allowed"),
        ("--images 0", "images is 0"),
        ("--epochs -1", "epochs is -1; allowed is 0 or more"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiment.main([*TINY, *shlex.split(flags)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
