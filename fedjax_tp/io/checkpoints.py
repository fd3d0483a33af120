"""Checkpoints of a simulation by round (orbax): atomic, verified, the last few kept.

A checkpoint holds the leaves of the state by path, and a checksum of each; one that
does not restore to the same sums is set aside and the one before is used.
"""

import itertools
import logging
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_tp import tree
from fedjax_tp.data.catalog import first_line
from fedjax_tp.types import Tree

DAMAGED = ".damaged"


class Restored(NamedTuple):
    """The newest complete checkpoint: state after `round` rounds."""

    state: Tree
    round: int


def _by_path(state: Tree) -> dict[str, Any]:
    """Leaves (arrays or shape structs) by path; None is no leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _checksum(leaf: jax.Array | np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    # Orbax reports its housekeeping as warnings, and failures that it raises as well.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    # One process of a run saves; orbax must not wait for the others.
    alone = jax.process_index()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=False,
        create=jax.process_count() == 1,
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=alone, active_processes={alone}
        )
        if jax.process_count() > 1
        else ocp.options.MultiprocessingOptions(),
    )
    return ocp.CheckpointManager(folder.resolve(), options=options)


def save(folder: Path, state: Tree, round_index: int, *, keep: int = 3) -> None:
    """Saves the state after `round_index` rounds; returns when the disk has it.

    Raises:
      OSError: it could not be saved; earlier checkpoints are as they were.
    """
    leaves = _by_path(state)
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = tree.num_bytes(state), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"cannot save round {round_index} in {folder}: it needs {needed:,} bytes, "
            f"the disk has {free:,} left"
        )
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
        raise OSError(
            f"cannot save round {round_index} in {folder}: {first_line(error)}"
        ) from error


def restore(
    folder: Path,
    shapes: Tree,
    notify: Callable[[str], None],
    *,
    set_aside: bool = True,
) -> Restored | None:
    """Restores the newest complete checkpoint, or None where there is none.

    Newer folders that do not restore are renamed with the ending `.damaged`, so that
    those rounds can be saved again.

    Args:
      folder: the checkpoints of one algorithm.
      shapes: the state as shape structs.
      notify: told of each checkpoint that could not be used.
      set_aside: rename those; False for who reads another's run.

    Raises:
      OSError: there are checkpoints, and none of them restores.
    """
    if not folder.is_dir():
        return None
    rounds = [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()]
    failures: list[tuple[Path, str]] = []
    for round_index in sorted(rounds, reverse=True):
        step = folder / str(round_index)
        try:
            state = _restore_round(folder, shapes, round_index)
        except Exception as error:
            failures.append((step, first_line(error)))
            continue
        for damaged, reason in failures:
            renamed = f"it is now {_set_aside(damaged).name}, and " if set_aside else ""
            notify(
                f"checkpoint {damaged} is incomplete or damaged ({reason}); {renamed}"
                f"round {round_index} is used"
            )
        return Restored(state, round_index)
    if failures:
        step, reason = failures[0]
        raise OSError(
            f"none of {len(failures)} checkpoints in {folder} can be restored "
            f"(round {step.name}: {reason}); to start anew, remove the folder"
        )
    return None


def _set_aside(step: Path) -> Path:
    names = (f"{step.name}{DAMAGED}{number or ''}" for number in itertools.count())
    aside = next(p for p in map(step.with_name, names) if not p.exists())
    return step.rename(aside)


def _restore_round(folder: Path, shapes: Tree, round_index: int) -> Tree:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
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
