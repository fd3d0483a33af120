"""Labelled sentences from tab-separated files, as GLUE has them."""

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from fedjax_tp.data.catalog import first_line
from fedjax_tp.types import InputError


class Sentences(NamedTuple):
    """Sentences and the label of each, from 0 on."""

    texts: tuple[str, ...]
    labels: Integer[np.ndarray, " sentences"]


def read_sentences(paths: Sequence[Path]) -> Sentences:
    """Sentences of files with a header that names the columns `sentence` and `label`.

    Files may be compressed by gzip; nothing in them is quoted.

    Raises:
      InputError: a file cannot be read, lacks a column, or has a label that is no
        whole number from 0 on; the line is named.
    """
    texts: list[str] = []
    labels: list[int] = []
    for path in paths:
        try:
            opened = gzip.open if path.suffix == ".gz" else open
            with opened(path, "rt", encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        except (OSError, EOFError, ValueError, csv.Error) as error:
            raise InputError(f"cannot read {path}: {first_line(error)}") from None
        header = rows[0] if rows else []
        if not {"sentence", "label"} <= set(header):
            raise InputError(
                f"{path} has columns {header}; sentence and label are needed"
            )
        sentence, label = header.index("sentence"), header.index("label")
        for number, row in enumerate(rows[1:], 2):
            if len(row) != len(header):
                raise InputError(
                    f"line {number} of {path} has {len(row)} columns, not {len(header)}"
                )
            if not row[label].isdecimal():
                raise InputError(
                    f"label in line {number} of {path} is {row[label]!r}; allowed is a "
                    "whole number from 0 on"
                )
            texts.append(row[sentence].strip())
            labels.append(int(row[label]))
    if not texts:
        raise InputError(f"{', '.join(map(str, paths))}: there is no sentence")
    return Sentences(tuple(texts), np.array(labels, np.int32))
