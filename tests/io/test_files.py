"""Run folder, rows, report, prepared sets."""

import base64
import os
import re
import struct

import numpy as np
import pytest

from fedjax_tp.data import catalog
from fedjax_tp.io import folder, metrics, plots, prepare, report
from fedjax_tp.types import InputError


def test_rows_come_back_and_a_line_cut_short_is_left_out(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [{"algorithm": "x", "round": i} for i in (1, 2, 3)]
    metrics.append_rows(path, rows[:2])
    metrics.append_rows(path, rows[2:])
    with path.open("a") as file:
        file.write('{"round": 4, "accu')
    assert metrics.read_rows(path) == rows
    metrics.rewrite_rows(path, lambda rows: rows[:1])
    assert path.read_text() == '{"algorithm": "x", "round": 1}\n'


@pytest.mark.parametrize("line", [b"cut {\n", b'{"round": 1}\n', b"\xff\n", b"[]\n"])
def test_a_damaged_row_is_named_and_nothing_is_lost(tmp_path, line):
    path = tmp_path / "m.jsonl"
    good = b'{"algorithm": "x", "round": 2}\n'
    path.write_bytes(line + good)
    with pytest.raises(InputError, match="line 1, is damaged"):
        metrics.rewrite_rows(path, lambda rows: rows)
    assert path.read_bytes() == line + good


def test_nan_never_reaches_a_file(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        metrics.append_rows(tmp_path / "m.jsonl", [{"loss": float("nan")}])
    with pytest.raises(ValueError, match="JSON"):
        folder.write_json(tmp_path / "s.json", {"loss": float("nan")})


def test_nested_rows_are_flattened_for_tensorboard():
    row = {"round": 3, "accuracy": {"pooled": 0.5}, "clients": [1], "algorithm": "x"}
    assert dict(metrics.flatten(row)) == {"round": 3, "accuracy/pooled": 0.5}


def test_tensorboard_events_hold_the_rows(tmp_path):
    with metrics.tensorboard(tmp_path, 1) as write:
        write([{"round": 1, "accuracy": {"pooled": 0.5}}])
    (events,) = tmp_path.iterdir()
    assert b"accuracy/pooled" in events.read_bytes()


def test_a_folder_is_opened_once(tmp_path):
    out = tmp_path / "a" / "b"
    assert folder.open_folder(out, resume=False) is False
    (out / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"not empty.*--resume"):
        folder.open_folder(out, resume=False)
    assert folder.open_folder(out, resume=True) is True


def test_a_folder_with_something_else_is_not_resumed(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="no run to resume"):
        folder.open_folder(tmp_path, resume=True)


def test_a_file_is_no_folder(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("x")
    with pytest.raises(InputError, match="is a file"):
        folder.open_folder(path, resume=False)
    with pytest.raises(InputError, match="cannot write in out"):
        folder.open_folder(path / "run", resume=False)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    folder.write_json(path, {"a": 1})

    def refuse(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="disk full"):
        folder.write_json(path, {"a": 2})
    assert folder.read_json(path) == {"a": 1}


def png_size(content: bytes) -> tuple[int, int]:
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_plots_are_pictures(tmp_path):
    plots.accuracy_over_rounds(
        tmp_path / "a.png", {"x": ([1, 2], [0.1, 0.9], [0.0, 0.8])}, "title"
    )
    plots.client_accuracies(tmp_path / "c.png", {"x": np.array([0.5, np.nan, 1.0])})
    counts = np.arange(300).reshape(30, 10)
    plots.label_distribution(tmp_path / "l.png", counts, list("abcdefghij"))
    for name in "acl":
        width, height = png_size((tmp_path / f"{name}.png").read_bytes())
        assert width > 300
        assert height > 300


def test_a_report_is_one_page_and_escapes_what_it_is_given(tmp_path):
    picture = tmp_path / "p.png"
    plots.client_accuracies(picture, {"x": np.array([0.5, 1.0])})
    report.write_report(
        tmp_path / "report.html",
        title="<script>alert(1)</script>",
        summary="a & b",
        tables=[report.Table("t", ["h"], [["<b>cell</b>"]])],
        pictures={"caption": picture},
        notices=["<i>n</i>"],
        command="python",
        settings={"k": "<v>"},
    )
    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;v&gt;" in page
    embedded = re.search(r"data:image/png;base64,([^\"]+)", page)
    assert base64.b64decode(embedded[1]) == picture.read_bytes()
    assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_prepared_arrays_read_through_tfds_as_they_were(tmp_path, p1003_file):
    dataset = catalog.load(f"npz:{p1003_file}")._replace(superclass=np.arange(10) // 2)
    prepare.prepare_arrays(dataset, "mine", tmp_path)
    read = catalog.load("tfds:mine", str(tmp_path))
    for field in ("x_train", "y_train", "x_test", "y_test", "mean", "std"):
        assert np.array_equal(getattr(dataset, field), getattr(read, field)), field
    assert read.class_names == dataset.class_names
    assert read.superclass.tolist() == dataset.superclass.tolist()
    with pytest.raises(InputError, match="exists"):
        prepare.prepare_arrays(dataset, "mine", tmp_path)


def test_cifar10_is_read_by_name_with_the_papers_constants(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (20, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(20) % 10
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(tmp_path / "c.npz", **arrays)
    dataset = catalog.load(f"npz:{tmp_path / 'c.npz'}")
    prepare.prepare_arrays(dataset, "cifar10", tmp_path)
    read = catalog.load("cifar10", str(tmp_path))
    assert np.array_equal(read.x_train, images)
    np.testing.assert_allclose(read.mean / 255, [0.4914, 0.4822, 0.4465], rtol=1e-6)
    np.testing.assert_allclose(read.std / 255, [0.2023, 0.1994, 0.2010], rtol=1e-6)


def test_more_algorithms_than_colours_are_told_apart(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    names = [f"method_{i}" for i in range(15)]
    curve = ([1, 2], [0.1, 0.5], [0.0, 0.2])
    plots.accuracy_over_rounds(
        tmp_path / "a.png", dict.fromkeys(names, curve), "digits"
    )
    lines = drawn[0].axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 15
    plots.client_accuracies(
        tmp_path / "b.png", {name: np.array([0.2, 0.9]) for name in names[:7]}
    )
    shown = [axes.get_title().split("\n")[0] for axes in drawn[1].axes if axes.lines]
    assert shown == names[:7]
