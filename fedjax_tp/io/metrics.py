"""Metrics of a run: rows of JSON, one a round, and TensorBoard events.

`metrics.jsonl` holds no clock times, so equal runs write equal bytes; times go to
`timing.jsonl`.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedjax_tp.io.folder import write_text
from fedjax_tp.types import InputError

Row = dict[str, Any]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Appends rows and waits until the disk has them."""
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """All complete rows; a last line that was cut short is left out.

    Raises:
      InputError: any other line is not a row of a round of an algorithm.
    """
    if not path.exists():
        return []
    rows = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            if not (
                isinstance(row["algorithm"], str) and isinstance(row["round"], int)
            ):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path}, line {number}, is damaged") from None
        rows.append(row)
    return rows


def rewrite_rows(path: Path, change: Callable[[list[Row]], list[Row]]) -> None:
    """Replaces the rows of the file by what `change` makes of them, all or none."""
    rows = change(read_rows(path))
    write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a nested row, named `a/b`."""
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}/")
        elif isinstance(value, int | float):
            yield name, value


@contextmanager
def tensorboard(
    folder: Path, first_round: int
) -> Iterator[Callable[[Iterable[Row]], None]]:
    """A function that writes rows as TensorBoard scalars.

    Args:
      folder: where the event file goes.
      first_round: events of an earlier run from this round on are void.
    """
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=first_round)

    def write(rows: Iterable[Row]) -> None:
        for row in rows:
            for name, value in flatten(row):
                if name != "round":
                    writer.add_scalar(name, value, row["round"])
        writer.flush()

    try:
        yield write
    finally:
        writer.close()
