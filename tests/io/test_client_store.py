"""The store of what clients keep against a plain dictionary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp.io import client_store

INITIAL = {
    "float32": np.array([[1.0, 2.0, 3.0]], np.float32),
    "uint32": np.array([[7]], np.uint32),
}


def rows_of(ids, seed):
    rng = np.random.default_rng(seed)
    return {
        "float32": rng.normal(size=(len(ids), 3)).astype(np.float32),
        "uint32": rng.integers(0, 100, (len(ids), 1)).astype(np.uint32),
    }


def check(store, held, num_clients):
    ids = np.arange(num_clients + 1)
    found = client_store.read_rows(store, ids)
    for i in ids:
        for name, initial in INITIAL.items():
            expected = held.get(i, {}).get(name, initial[0])
            assert np.array_equal(found[name][i], expected)


@settings(max_examples=20, deadline=None)
@given(writes=st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=4), max_size=5))
def test_a_store_holds_what_was_written_last(writes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    num_clients = 8
    store = client_store.open_store(folder / "rows", INITIAL, num_clients)
    held = {}
    for seed, chosen in enumerate(writes):
        ids = np.array(sorted(chosen))
        rows = rows_of(ids, seed)
        client_store.write_rows(store, ids, rows)
        for place, i in enumerate(ids):
            if i < num_clients:
                held[i] = {name: matrix[place] for name, matrix in rows.items()}
    check(store, held, num_clients)
    client_store.save(store, folder, 3)
    again = client_store.open_store(folder / "rows", INITIAL, num_clients)
    check(again, {}, num_clients)
    client_store.load(again, folder, 3)
    check(again, held, num_clients)


def test_a_million_clients_cost_the_disk_what_those_cost_who_took_part(tmp_path):
    initial = {"float32": np.zeros((1, 10_000), np.float32)}
    store = client_store.open_store(tmp_path / "rows", initial, 1_000_000)
    ids = np.array([3, 999_999])
    rows = {"float32": np.ones((2, 10_000), np.float32)}
    client_store.write_rows(store, ids, rows)
    blocks = (tmp_path / "rows" / "float32.rows").stat().st_blocks
    assert 512 * blocks < 1_000_000
    client_store.save(store, tmp_path, 1)
    assert (tmp_path / "1.kept").stat().st_size < 100_000
    assert client_store.read_rows(store, ids)["float32"].sum() == 20_000


def test_the_last_few_saves_are_kept(tmp_path):
    store = client_store.open_store(tmp_path / "rows", INITIAL, 4)
    for i in range(9, 14):
        client_store.save(store, tmp_path, i)
    saved = sorted(int(path.stem) for path in tmp_path.glob("*.kept"))
    assert saved == [11, 12, 13]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content[:-3], "incomplete"),
        (lambda content: b"", "incomplete"),
        (lambda content: content[:9] + b"\xff" + content[10:], "checksum"),
    ],
)
def test_a_damaged_save_is_noticed(tmp_path, damage, said):
    store = client_store.open_store(tmp_path / "rows", INITIAL, 4)
    client_store.write_rows(store, np.array([1, 2]), rows_of([1, 2], 0))
    client_store.save(store, tmp_path, 1)
    path = tmp_path / "1.kept"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(OSError, match=said):
        client_store.load(store, tmp_path, 1)


def test_rows_of_rounds_that_are_run_again_do_not_count_as_the_last(tmp_path):
    store = client_store.open_store(tmp_path / "rows", INITIAL, 4)
    assert not client_store.has_saved(tmp_path)
    for i in (10, 15, 20):
        client_store.save(store, tmp_path, i)
    client_store.load(store, tmp_path, 10)
    for i in (11, 12):
        client_store.save(store, tmp_path, i)
    saved = sorted(int(path.stem) for path in tmp_path.glob("*.kept"))
    assert saved == [10, 11, 12]
    assert client_store.has_saved(tmp_path)
