"""Checkpoints: exact, atomic, and what is damaged is never used."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_tp.io import checkpoints


def a_state(value: float):
    params = {"w": jnp.full((40, 50), value), "hole": None, "n": jnp.arange(3)}
    return {"params": params, "opt": optax.adam(0.1).init(params["w"])}


SHAPES = jax.eval_shape(lambda: a_state(0.0))


def restore(folder):
    notices = []
    return checkpoints.restore(folder, SHAPES, notices.append), notices


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "results é 1" / "fedtp"
    for round_index in (1, 2, 3, 4):
        checkpoints.save(folder, a_state(round_index / 3), round_index)
    return folder


def assert_is_round(restored, round_index):
    assert restored is not None
    assert restored.round == round_index
    expected = a_state(round_index / 3)
    assert jax.tree.structure(restored.state) == jax.tree.structure(expected)
    assert all(
        map(np.array_equal, jax.tree.leaves(restored.state), jax.tree.leaves(expected))
    )


def test_the_newest_state_comes_back_bit_for_bit_and_three_are_kept(folder):
    restored, notices = restore(folder)
    assert notices == []
    assert_is_round(restored, 4)
    assert sorted(entry.name for entry in folder.iterdir()) == ["2", "3", "4"]


def test_there_may_be_none(tmp_path):
    assert restore(tmp_path / "missing") == (None, [])
    assert restore(tmp_path) == (None, [])


def test_folders_that_were_never_finished_are_set_aside(folder):
    (folder / "9").mkdir()
    stray = folder / "5.orbax-checkpoint-tmp"
    stray.mkdir()
    (stray / "x").write_text("stray")
    restored, notices = restore(folder)
    assert_is_round(restored, 4)
    assert len(notices) == 1
    assert "9 is incomplete or damaged" in notices[0]
    for round_index in (5, 6):
        checkpoints.save(folder, a_state(round_index / 3), round_index)
    assert_is_round(restore(folder)[0], 6)


def largest_file(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def halve(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [halve, flip_a_byte])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, damage):
    damage(largest_file(folder / "4"))
    restored, notices = restore(folder)
    assert_is_round(restored, 3)
    assert "4 is incomplete or damaged" in notices[0]
    assert (folder / "4.damaged").is_dir()
    checkpoints.save(folder, a_state(4 / 3), 4)
    assert_is_round(restore(folder)[0], 4)


def test_a_state_of_another_shape_is_not_taken(folder):
    other = {**SHAPES, "params": {**SHAPES["params"], "n": jnp.arange(4)}}
    with pytest.raises(OSError, match=r"none of 3 checkpoints in .*fedtp can be"):
        checkpoints.restore(folder, other, print)
    assert_is_round(restore(folder)[0], 4)


def test_a_failed_save_raises_and_leaves_the_others(folder, monkeypatch):
    shutil.rmtree(folder / "4")
    monkeypatch.setattr(
        checkpoints.ocp.CheckpointManager,
        "save",
        lambda *args, **kwargs: (_ for _ in ()).throw(ValueError("disk full")),
    )
    with pytest.raises(OSError, match=r"cannot save round 4 in .*fedtp: disk full"):
        checkpoints.save(folder, a_state(4 / 3), 4)
    monkeypatch.undo()
    assert_is_round(restore(folder)[0], 3)
