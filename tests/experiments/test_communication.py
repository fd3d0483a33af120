"""Bytes against accuracy, as a user runs it."""

import csv
import shlex

import pytest

from experiments import communication as experiment

TINY = shlex.split(
    "--algorithms fedavg --codecs sign --num-clients 6 --rounds 2 --eval-every 1 "
    "--dim 8 --depth 1 --heads 2 --head-dim 4 --mlp-dim 8 --patch-size 4 --devices 1 "
    "--no-tune-process"
)


def test_bytes_against_accuracy(tmp_path, capsys):
    out = tmp_path / "run"
    assert experiment.main(["--out", str(out), *TINY]) == 0
    rows = list(csv.DictReader((out / "bytes.csv").open()))
    assert [row["algorithm"] for row in rows] == ["fedavg", "fedavg_sign"]
    assert float(rows[0]["bits a number"]) == 32
    # A sign a number, and a scale a tensor.
    assert 1 < float(rows[1]["bits a number"]) < 4
    for name in ("bytes.png", "communication.html", "report.html", "summary.json"):
        assert (out / name).stat().st_size > 0
    assert "Bytes and accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--codecs sign,zip", "codecs is 'sign,zip'; allowed are some of uniform"),
        ("--codecs sign,sign", "each once"),
        ("--method.codec-bits 0", "codec bits is 0; allowed is 1 to 16"),
        ("--algorithms fedavg_median", "cannot be compressed"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiment.main([*TINY, *shlex.split(flags)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
