"""Writes a data set once as array_record files, to be read with tfds:NAME --data-dir.

    python -m experiments.prepare_data --dataset cifar10 --data-dir DIR
    python -m experiments.prepare_data --dataset folder:PATH --data-dir DIR

The first downloads a set of TFDS (it needs the extra `prepare`, which brings
TensorFlow); the second turns a folder or an .npz into array_record without TensorFlow,
so that images are decoded once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments import cli
from fedjax_tp.data import catalog
from fedjax_tp.io import prepare
from fedjax_tp.types import InputError

_IN_MEMORY = ("npz", "folder", "digits")


@dataclass(frozen=True)
class Flags:
    """Flags of prepare_data."""

    dataset: str
    """A set of TFDS (cifar10, fashion_mnist, ...), npz:PATH or folder:PATH."""
    data_dir: Path
    """Where prepared sets lie; made if it is not there."""
    name: str | None = None
    """What an npz or folder is called; unset: the name of the file or folder."""


def run(flags: Flags) -> None:
    """Prepares the set and says how to use it.

    Raises:
      InputError: the set cannot be read, or is there already.
    """
    kind, _, argument = flags.dataset.partition(":")
    if kind not in _IN_MEMORY:
        name = argument if kind == "tfds" else kind
        prepared = prepare.prepare_tfds(name, flags.data_dir)
    else:
        name = flags.name or re.sub(r"\W+", "_", Path(argument).stem or kind).lower()
        if not re.fullmatch(r"[a-z]\w*", name):
            raise InputError(
                f"name is {name!r}; allowed are letters, digits and _, a letter first"
            )
        dataset = catalog.load(flags.dataset)
        for notice in dataset.notices:
            print(f"note: {notice}")
        prepared = prepare.prepare_arrays(dataset, name, flags.data_dir)
    print(f"prepared {prepared}")
    print(f"use it with --dataset tfds:{name} --data-dir {flags.data_dir}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.run_main(
        lambda: run(
            cli.tyro_cli(
                Flags, argv, __doc__ or "", "experiments.prepare_data", tyro.MISSING
            )
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
