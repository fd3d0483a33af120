"""Checkpoints of a simulation by round (orbax): atomic, verified, the last few kept.

A checkpoint holds the leaves of the state by path, and a checksum of each; one that
does not restore to the same sums is set aside and the one before is used.
"""

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_tp.types import Tree

DAMAGED = ".damaged"


class Restored(NamedTuple):
    """The newest complete checkpoint: state after `round` rounds."""

    state: Tree
    round: int


def _by_path(state: Tree) -> dict[str, jax.Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _checksum(leaf: jax.Array) -> int:
    return zlib.crc32(np.ascontiguousarray(leaf).tobytes())


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    # Orbax reports its own housekeeping at warning level; failures raise.
    logging.getLogger("absl").setLevel(logging.ERROR)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, create=True
    )
    return ocp.CheckpointManager(folder.resolve(), options=options)


def save(folder: Path, state: Tree, round_index: int, *, keep: int = 3) -> None:
    """Saves the state after `round_index` rounds; returns when the disk has it.

    Raises:
      OSError: it could not be saved; earlier checkpoints are as they were.
    """
    leaves = _by_path(state)
    content = {
        "round": round_index,
        "checksums": {path: _checksum(leaf) for path, leaf in leaves.items()},
    }
    try:
        with _manager(folder, keep) as manager:
            manager.save(
                round_index,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(leaves),
                    content=ocp.args.JsonSave(content),
                ),
            )
            manager.wait_until_finished()
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise OSError(
            f"cannot save round {round_index} in {folder}: {reason}"
        ) from error


def restore(
    folder: Path, shapes: Tree, notify: Callable[[str], None]
) -> Restored | None:
    """Restores the newest complete checkpoint, or None where there is none.

    Folders of rounds that do not restore are renamed with the ending `.damaged`, so
    that those rounds can be saved again.

    Args:
      folder: the checkpoints of one algorithm.
      shapes: the state as shape structs.
      notify: told of each checkpoint that had to be set aside.
    """
    if not folder.is_dir():
        return None
    rounds = [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()]
    for round_index in sorted(rounds, reverse=True):
        try:
            return Restored(_restore_round(folder, shapes, round_index), round_index)
        except Exception as error:
            step = folder / str(round_index)
            aside = step.with_name(step.name + DAMAGED)
            number = 1
            while aside.exists():
                number += 1
                aside = step.with_name(f"{step.name}{DAMAGED}-{number}")
            step.rename(aside)
            reason = str(error).splitlines()[0][:120]
            notify(
                f"checkpoint {step} is incomplete or damaged ({reason}); it is now "
                f"{aside.name}, and the one before it is used"
            )
    return None


def _restore_round(folder: Path, shapes: Tree, round_index: int) -> Tree:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        for path, leaf in _by_path(shapes).items()
    }
    with _manager(folder, keep=3) as manager:
        found = manager.restore(
            round_index,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(wanted), content=ocp.args.JsonRestore()
            ),
        )
    checksums = found.content["checksums"]
    for path, leaf in found.state.items():
        if leaf.shape != wanted[path].shape or leaf.dtype != wanted[path].dtype:
            raise ValueError(f"{path} has another shape or type")
        if _checksum(leaf) != checksums[path]:
            raise ValueError(f"checksum of {path} differs")
    structure = jax.tree.structure(shapes)
    return jax.tree.unflatten(structure, [found.state[path] for path in wanted])
