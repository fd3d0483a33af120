"""What clients keep, on disk: one row a client, memory-mapped, written where touched.

For populations whose rows do not fit on a device. A client that never took part has no
row: it holds the initial one, so a store for a million clients costs what those cost
who took part.
"""

import mmap
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_tp.types import NumpyInts

Rows = dict[str, np.ndarray]
"""Matrices `[clients, numbers]` by dtype name, as `tree.flatten_rows` makes them."""


class ClientStore(NamedTuple):
    """An open store.

    Attributes:
      rows: of all clients, memory-mapped; valid where `has_row`.
      initial: of a client without a row; matrices of one row.
      has_row: in memory, one byte a client.
    """

    rows: Rows
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
    rows: Rows = {
        # The file has holes where nothing was written.
        name: np.memmap(
            folder / f"{name}.rows", row.dtype, "w+", shape=(num_clients, row.shape[1])
        )
        for name, row in initial.items()
        if row.shape[1]
    }
    return ClientStore(rows, initial, np.zeros(num_clients, bool))


def read_rows(store: ClientStore, ids: NumpyInts) -> Rows:
    """Rows of clients; an id past the end gives the initial one."""
    num_clients = len(store.has_row)
    inside = np.minimum(ids, num_clients - 1)
    has_row = store.has_row[inside] & (ids < num_clients)
    found = {}
    for name, initial in store.initial.items():
        found[name] = np.repeat(initial, len(ids), axis=0)
        if name in store.rows:
            found[name][has_row] = store.rows[name][inside[has_row]]
    _forget(store)
    return found


def write_rows(store: ClientStore, ids: NumpyInts, rows: Rows) -> None:
    """Writes rows of clients; those with an id past the end are dropped."""
    inside = ids < len(store.has_row)
    for name, matrix in store.rows.items():
        matrix[ids[inside]] = rows[name][inside]
    store.has_row[ids[inside]] = True
    _forget(store)


def _forget(store: ClientStore) -> None:
    """Lets go of the pages that were touched: the file has them, memory need not."""
    if hasattr(mmap, "MADV_DONTNEED"):
        for matrix in store.rows.values():
            matrix._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


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
    for name in sorted(store.rows):
        for chunk in np.array_split(ids, -(-len(ids) // 256) or 1):
            yield store.rows[name][chunk].tobytes()
        _forget(store)


def load(store: ClientStore, folder: Path, round_index: int) -> None:
    """Fills a new store with the rows saved after a round; later ones are removed.

    Raises:
      OSError: they are not there, or damaged.
    """
    path = _path(folder, round_index)
    content = path.read_bytes()
    tail = np.frombuffer(content[-16:], np.int64)
    widths = {name: store.rows[name].shape[1] for name in sorted(store.rows)}
    count = int(tail[0]) if len(tail) == 2 else -1
    row_bytes = sum(w * store.rows[n].dtype.itemsize for n, w in widths.items())
    if count < 0 or len(content) != 16 + count * (8 + row_bytes):
        raise OSError(f"{path} is incomplete")
    if zlib.crc32(content[:-16]) != tail[1]:
        raise OSError(f"{path} is damaged: its checksum differs")
    ids = np.frombuffer(content, np.int64, count)
    offset, rows = 8 * count, {}
    for name, width in widths.items():
        dtype = store.rows[name].dtype
        flat = np.frombuffer(content, dtype, count * width, offset)
        rows[name] = flat.reshape(count, width)
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
