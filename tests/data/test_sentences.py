"""Sentences in tab-separated files."""

import gzip

import pytest

from fedjax_tp.data.sentences import read_sentences
from fedjax_tp.types import InputError


def test_files_are_read_one_after_another(tmp_path):
    (tmp_path / "a.tsv").write_text('sentence\tlabel\na "bad film\t0\n', "utf-8")
    (tmp_path / "b.tsv.gz").write_bytes(
        gzip.compress("index\tlabel\tsentence\n5\t1\tgood  café \n".encode())
    )
    found = read_sentences([tmp_path / "a.tsv", tmp_path / "b.tsv.gz"])
    assert found.texts == ('a "bad film', "good  café")
    assert found.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has columns \[\]; sentence and label are needed"),
        ("text\tlabel\nx\t1\n", "has columns"),
        ("sentence\tlabel\nx\n", "line 2 of .* has 1 columns, not 2"),
        ("sentence\tlabel\nx\t1\ny\t-1\n", "label in line 3 of .* is '-1'; allowed"),
        ("sentence\tlabel\nx\tgood\n", "is 'good'; allowed is a whole number"),
        ("sentence\tlabel\n", "there is no sentence"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(InputError, match=message):
        read_sentences([tmp_path / "a.tsv"])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_sentences([tmp_path / "nowhere.tsv"])
    (tmp_path / "a.tsv.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match="cannot read"):
        read_sentences([tmp_path / "a.tsv.gz"])
