"""Writes data sets as array_record files, which `tfds:NAME` then reads.

Sets of TFDS go through TFDS' own builders, which need TensorFlow; arrays of our own go
through a small builder here, which does not.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_tp.data.catalog import Dataset, first_line
from fedjax_tp.types import InputError

VERSION = "1.0.0"


def prepare_tfds(name: str, data_dir: Path) -> Path:
    """Downloads and prepares a TFDS set as array_record.

    Raises:
      InputError: TensorFlow is not installed, or TFDS does not know the set.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise InputError(
            f"preparing {name} needs TensorFlow, once: pip install 'fedjax_tp[prepare]'"
            " (or make setup EXTRAS=prepare)"
        )
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(
            name, data_dir=str(data_dir), file_format=tfds.core.FileFormat.ARRAY_RECORD
        )
    except tfds.core.DatasetNotFoundError:
        raise InputError(f"TFDS knows no dataset {name!r}") from None
    try:
        builder.download_and_prepare()
    except Exception as error:
        raise OSError(f"cannot prepare {name}: {first_line(error)}") from error
    return Path(builder.data_path)


def prepare_arrays(dataset: Dataset, name: str, data_dir: Path) -> Path:
    """Writes a data set that is in memory as array_record, in its order.

    Args:
      dataset: the arrays.
      name: what it is read by, as `tfds:name`.
      data_dir: where prepared sets lie.

    Raises:
      InputError: there is such a set already.
    """
    target = data_dir / name / VERSION
    if target.exists():
        raise InputError(f"{target} exists; give another --name, or remove it")
    import tensorflow_datasets as tfds

    superclass = dataset.superclass

    def features() -> dict[str, Any]:
        columns = {
            "image": tfds.features.Tensor(
                shape=dataset.x_train.shape[1:],
                dtype=dataset.x_train.dtype,
                encoding=tfds.features.Encoding.ZLIB,
            ),
            "label": tfds.features.ClassLabel(names=list(dataset.class_names)),
        }
        if superclass is not None:
            columns["coarse_label"] = tfds.features.Scalar(dtype=np.int64)
        return columns

    def examples(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        for i, (image, label) in enumerate(zip(x, y, strict=True)):
            row = {"image": image, "label": int(label)}
            if superclass is not None:
                row["coarse_label"] = int(superclass[label])
            yield i, row

    class ArraysBuilder(  # type: ignore[call-arg]
        tfds.core.GeneratorBasedBuilder, skip_registration=True
    ):
        """The arrays that `prepare_arrays` was given."""

        VERSION = tfds.core.Version(VERSION)

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features()),
                # Keeps the order, and with it every partition.
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {
                "train": examples(dataset.x_train, dataset.y_train),
                "test": examples(dataset.x_test, dataset.y_test),
            }

        def _generate_examples(self) -> Any:
            raise NotImplementedError

    ArraysBuilder.name = name
    tfds.disable_progress_bar()
    builder = ArraysBuilder(
        data_dir=str(data_dir), file_format=tfds.core.FileFormat.ARRAY_RECORD
    )
    builder.download_and_prepare()
    return Path(builder.data_path)
