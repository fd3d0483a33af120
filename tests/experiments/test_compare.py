"""The comparison as a user runs it: tables, resume cell by cell, tuning, bad input."""

import csv
import json
import shlex

import numpy as np
import pytest

from experiments import compare, fedtp
from experiments.compare import Comparison

TINY = shlex.split(
    "--model cnn --num-clients 6 --sample-fraction 0.5 --rounds 2 --eval-every 2 "
    "--local-epochs 1 --batch-size 32 --devices 1 --no-tune-process"
)
ALGORITHMS = ["--algorithms", "fedavg,fedper_knn"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "run"
    flags = ["--partition", "iid,pathological", "--seeds", "2", *ALGORITHMS, *TINY]
    assert compare.main(["--out", str(out), *flags]) == 0
    return out


def test_it_leaves_tables_and_a_run_a_group(finished):
    rows = list(csv.DictReader((finished / "table.csv").open()))
    assert [(row["group"], row["algorithm"]) for row in rows] == [
        (f"digits-{partition}", name)
        for partition in ("iid", "pathological")
        for name in ("fedavg", "fedper_knn")
    ]
    markdown = (finished / "table.md").read_text()
    latex = (finished / "table.tex").read_text()
    groups = json.loads((finished / "summary.json").read_text())["groups"]
    for row in rows:
        by_seed = groups[row["group"]][row["algorithm"]]["accuracy_by_seed"]
        assert len(by_seed) == 2
        assert float(row["accuracy"]) == pytest.approx(np.mean(by_seed))
        assert float(row["std_over_seeds"]) == pytest.approx(np.std(by_seed))
        shown = f"{100 * np.mean(by_seed):.1f} ± {100 * np.std(by_seed):.1f}"
        assert shown in markdown
        assert shown.replace("±", "$\\pm$") in latex
        # As the group's own run folder says.
        summary = json.loads((finished / row["group"] / "summary.json").read_text())
        accuracy = summary["algorithms"][row["algorithm"]]["accuracy"]["pooled"]
        assert accuracy == pytest.approx(np.mean(by_seed))
    for name in ("comparison.png", "report.html", "differences.md", "differences.tex"):
        assert (finished / name).stat().st_size > 0
    # A memory of its two classes beats an untrained average.
    difference = rows[3]
    assert difference["reference"] == "fedavg"
    assert float(difference["difference_low"]) > 0


def test_it_resumes_cell_by_cell_to_the_same_bytes(finished, capsys, monkeypatch):
    results = ("table.csv", "table.md", "differences.md", "summary.json")
    before = {name: (finished / name).read_bytes() for name in results}
    lost = finished / "digits-iid" / "cells" / "fedper_knn.json"
    lost.unlink()
    trained = []
    train = compare.driver.train
    monkeypatch.setattr(
        compare.driver,
        "train",
        lambda algorithm, *rest: (
            trained.append(algorithm.name) or train(algorithm, *rest)
        ),
    )
    assert compare.main(["--out", str(finished), "--resume"]) == 0
    assert trained == ["fedper_knn"]
    # It went on from the checkpoint; all but its time is as it was.
    for name in ("differences.md", "summary.json"):
        assert (finished / name).read_bytes() == before[name]
    trained.clear()
    assert compare.main(["--out", str(finished), "--resume"]) == 0
    assert trained == []
    capsys.readouterr()
    # A group is no run to go on with by itself, and a comparison none of another.
    for out in (finished / "digits-iid", finished):
        assert fedtp.main(["--out", str(out), "--resume"]) == 2
        assert "holds a run of 'compare" in capsys.readouterr().err
    assert compare.main(["--out", str(finished / "digits-iid"), "--resume"]) == 2


@pytest.mark.slow
def test_learning_rates_are_chosen_on_held_out_examples(tmp_path):
    out = tmp_path / "tuned"
    flags = [*TINY, "--algorithms", "fedavg", "--partition", "iid", "--seeds", "1"]
    tune = ["--tune", "--tune-lrs", "1e-6,0.05"]
    assert compare.main(["--out", str(out), *flags, *tune]) == 0
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert [row["client_lr"] for row in rows] == ["0.05"]
    # More rounds go on with the rate that was chosen, and can be resumed again.
    (out / "digits-iid/tune/fedavg.json").write_text('{"client_lr": 0.03}')
    assert compare.main(["--out", str(out), "--resume", "--rounds", "3"]) == 0
    assert compare.main(["--out", str(out), "--resume"]) == 0
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert [row["client_lr"] for row in rows] == ["0.03"]
    assert json.loads((out / "summary.json").read_text())["rounds"] == 3
    tuning = json.loads((out / "digits-iid/tune/lr-0.05/config.json").read_text())
    assert tuning["flags"]["validation"] is True
    assert json.loads((out / "config.json").read_text())["flags"]["validation"] is False


def test_latex_is_escaped_and_the_best_is_bold():
    table = Comparison(["algorithm", "a_b"], [["fed_x", "5.0 ± 1.0"]], [[False, True]])
    latex = compare.to_latex(table)
    assert "algorithm & a\\_b \\\\" in latex
    assert "fed\\_x & \\textbf{5.0 $\\pm$ 1.0} \\\\" in latex
    assert compare.to_markdown(table).splitlines()[-1] == "| fed_x | **5.0 ± 1.0** |"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--reference", "ditto"], "reference is 'ditto'"),
        (["--algorithms", "all", "--reference", "fedtp"], "does not go with the model"),
        (["--dataset", "digits,npz:no.npz"], "no.npz does not exist"),
        (["--tune", "--validation"], "give one"),
        (["--tune-lrs", "0.1,-1"], "tune lrs is '0.1,-1'"),
        (["--partition", "iid,iid"], "allowed are different names"),
        (["--partition", "iid,bad"], "unknown partition 'bad'"),
        (["--algorithms", "fedavg,nobody_knn"], "unknown algorithm 'nobody_knn'"),
    ],
)
def test_bad_input_is_refused(tmp_path, capsys, flags, said):
    given = [*TINY, *([] if "--algorithms" in flags else ALGORITHMS), *flags]
    assert compare.main(["--out", str(tmp_path / "out"), *given]) == 2
    assert said in capsys.readouterr().err
