"""The run folder: where it is, and its JSON and CSV files, each written whole or not.

`config.json` is written first, so that whatever happens later can be resumed.
"""

import csv
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedjax_tp.types import InputError

_PARTIAL = ".partial"


def write_text(path: Path, text: str) -> None:
    """Writes a file so that it is there whole, or as it was before."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file so that it is there whole, or as it was before."""
    partial = path.with_name(path.name + _PARTIAL)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON, indented, keys as given; NaN is refused."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
      InputError: the file cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def is_empty(folder: Path) -> bool:
    """Is there nothing in the folder (or no folder) but a write cut short?"""
    if not folder.exists():
        return True
    return all(entry.name.endswith(_PARTIAL) for entry in folder.iterdir())


def open_folder(folder: Path, *, resume: bool, can_resume: bool = True) -> bool:
    """Makes the run folder, or finds a run in it; True if there is one to go on with.

    Raises:
      InputError: not a folder or not writable; not empty without `resume`; `resume`
        of a folder that holds something else than a run.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out is {folder}, which is a file; a folder is needed")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe{_PARTIAL}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write in out {folder}: {error.strerror}") from None
    if is_empty(folder):
        return False
    if not resume:
        raise InputError(
            f"out {folder} is not empty; give another folder"
            + (", or --resume to go on with the run in it" if can_resume else "")
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"out {folder} holds no run to resume (no config.json)")
    return True


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows with equal keys as CSV, the first row's keys as header."""
    rows = list(rows)
    partial = path.with_name(path.name + _PARTIAL)
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)
