"""The structure of weights as a user runs it; a language model is named or left out."""

import csv
import json
import shlex

import pytest

from experiments import weight_structure as experiment
from fedjax_tp.types import InputError

TINY = shlex.split(
    "--dim 8 --depth 1 --heads 2 --head-dim 4 --mlp-dim 8 --patch-size 4 --devices 1 "
    "--rounds 1 --samples 12 --examples 200 --most 4 --minilm none --no-tune-process"
)


def test_kernels_of_a_vit(tmp_path, capsys):
    out = tmp_path / "run"
    assert experiment.main(["--out", str(out), *TINY]) == 0
    rows = list(csv.DictReader((out / "structure.csv").open()))
    assert {row["kind"] for row in rows} == {"q", "k", "v", "out", "up", "down"}
    for row in rows:
        # `[dim 8 -> 4, heads 2, head_dim 4]` and the output likewise; MLPs 4 x 4.
        assert int(row["entries"]) == (32 if row["head"] else 16)
        errors = [float(row[name]) for name in ("diagonal", "input", "output")]
        assert all(0 <= error <= errors[0] + 1e-9 <= 1 for error in errors)
        if row["head"]:
            # A head has whole outputs of queries, or whole inputs of the output.
            within = "input" if row["kind"] == "out" else "output"
            assert float(row["head"]) <= float(row[within])
    for name in ("concentration.png", "errors.png", "report.html"):
        assert (out / name).stat().st_size > 0
    summary = (out / "summary.json").read_bytes()
    assert len(json.loads(summary)["kernels"]) == 6
    assert "relative Frobenius error" in capsys.readouterr().out
    # Its part is there: nothing is done again, and the same comes out.
    assert experiment.main(["--out", str(out), "--resume"]) == 0
    assert (out / "summary.json").read_bytes() == summary


def test_sentences(tmp_path):
    found = experiment.read_sentences(None)
    assert len(found) > 50
    assert any("iris" in sentence.lower() for sentence in found)
    file = tmp_path / "texts"
    file.write_text("one two three four five six\nshort\n")
    assert experiment.read_sentences(str(file)) == ["one two three four five six"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--most 1", "most is 1; allowed is 2 to 32"),
        ("--samples 0", "samples is 0"),
        ("--model cnn", "needs a transformer"),
        ("--minilm nowhere", "nowhere is not there"),
        ("--client-lr 0", "learning rate is 0"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiment.main([*TINY, *shlex.split(flags)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_texts_that_cannot_be_read(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("")
    for path, said in ((empty, "has no sentence"), (tmp_path / "no", "cannot read")):
        with pytest.raises(InputError, match=said):
            experiment.read_sentences(str(path))


def test_training_that_runs_away_is_refused(tmp_path, capsys):
    flags = ["--client-lr", "1e30", "--minilm", "none"]
    assert experiment.main(["--out", str(tmp_path / "run"), *TINY, *flags]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "central training was not finite in" in said
