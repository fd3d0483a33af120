"""What clients keep, on disk: one row a client, read and written where it is needed.

For populations whose rows do not fit on a device. A client that never took part has no
row: it holds the initial one, so a store for a million clients costs what those cost
who took part. Rows go through the system's file cache by plain reads and writes; in a
memory map, each page written for the first time is a fault of its own.
"""

import os
import shutil
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_tp.types import NumpyInts

Rows = dict[str, np.ndarray]
"""Matrices `[clients, numbers]` by dtype name, as `tree.flatten_rows` makes them."""


class ClientStore(NamedTuple):
    """An open store.

    Attributes:
      files: rows of all clients by dtype name, end to end; valid where `has_row`.
      initial: of a client without a row; matrices of one row.
      has_row: in memory, one byte a client.
    """

    files: dict[str, FileIO]
    initial: Rows
    has_row: np.ndarray


def open_store(folder: Path, initial: Rows, num_clients: int) -> ClientStore:
    """A new store without rows; what the folder held is gone.

    Raises:
      OSError: the folder cannot be written.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    files = {}
    for name, row in initial.items():
        if row.shape[1]:
            file = files[name] = FileIO(folder / f"{name}.rows", "w+")
            # Holes where nothing was written.
            file.truncate(num_clients * row.nbytes)
    return ClientStore(files, initial, np.zeros(num_clients, bool))


def read_rows(store: ClientStore, ids: NumpyInts) -> Rows:
    """Rows of clients; an id past the end gives the initial one.

    Raises:
      OSError: the file cannot be read.
    """
    found = {}
    for name, initial in store.initial.items():
        matrix = found[name] = np.repeat(initial, len(ids), axis=0)
        if name in store.files:
            for place, client in enumerate(ids):
                if client < len(store.has_row) and store.has_row[client]:
                    _read(store.files[name], int(client), matrix[place])
    return found


def write_rows(store: ClientStore, ids: NumpyInts, rows: Rows) -> None:
    """Writes rows of clients; those with an id past the end are dropped.

    Raises:
      OSError: the file cannot be written.
    """
    inside = ids < len(store.has_row)
    for name, file in store.files.items():
        matrix = np.ascontiguousarray(rows[name])
        for place in np.flatnonzero(inside):
            _write(file, int(ids[place]), matrix[place])
    store.has_row[ids[inside]] = True


def _read(file: FileIO, client: int, row: np.ndarray) -> None:
    file.seek(client * row.nbytes)
    view = row.data.cast("B")
    # A call may stop short of the end, at a signal say.
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError(f"{file.name!r} ends before the row of client {client}")
        view = view[count:]


def _write(file: FileIO, client: int, row: np.ndarray) -> None:
    file.seek(client * row.nbytes)
    view = row.data.cast("B")
    while view:
        view = view[file.write(view) :]


def save(store: ClientStore, folder: Path, round_index: int, *, keep: int = 3) -> None:
    """Saves the rows there are as they are after a round; the last few are kept.

    Raises:
      OSError: they could not be written; earlier ones are as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.flatnonzero(store.has_row).astype(np.int64)
    final = _path(folder, round_index)
    partial = final.with_suffix(".partial")
    checksum = 0
    with partial.open("wb") as file:
        for part in _parts(store, ids):
            checksum = zlib.crc32(part, checksum)
            file.write(part)
        file.write(np.array([len(ids), checksum], np.int64).tobytes())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(final)
    for old in sorted(folder.glob("*.kept"), key=lambda path: int(path.stem))[:-keep]:
        old.unlink()


def _parts(store: ClientStore, ids: NumpyInts) -> Iterator[bytes]:
    yield ids.tobytes()
    for name in sorted(store.files):
        row = np.empty_like(store.initial[name][0])
        for client in ids:
            _read(store.files[name], int(client), row)
            yield row.tobytes()


def load(store: ClientStore, folder: Path, round_index: int) -> None:
    """Fills a new store with the rows saved after a round; later ones are removed.

    Raises:
      OSError: they are not there, or damaged.
    """
    path = _path(folder, round_index)
    content = path.read_bytes()
    tail = np.frombuffer(content[-16:], np.int64)
    initial = {name: store.initial[name] for name in sorted(store.files)}
    count = int(tail[0]) if len(tail) == 2 else -1
    row_bytes = sum(row.nbytes for row in initial.values())
    if count < 0 or len(content) != 16 + count * (8 + row_bytes):
        raise OSError(f"{path} is incomplete")
    if zlib.crc32(content[:-16]) != tail[1]:
        raise OSError(f"{path} is damaged: its checksum differs")
    ids = np.frombuffer(content, np.int64, count)
    offset, rows = 8 * count, {}
    for name, row in initial.items():
        flat = np.frombuffer(content, row.dtype, count * row.size, offset)
        rows[name] = flat.reshape(count, row.size)
        offset += flat.nbytes
    write_rows(store, ids, rows)
    # Else they would count among the last few when those rounds are run again.
    for later in folder.glob("*.kept"):
        if int(later.stem) > round_index:
            later.unlink()


def has_saved(folder: Path) -> bool:
    """Are there saved rows?"""
    return any(folder.glob("*.kept"))


def _path(folder: Path, round_index: int) -> Path:
    return folder / f"{round_index}.kept"
