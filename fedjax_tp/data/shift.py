"""Feature shift: images that differ from client to client beside their labels.

Training and test images of a client are changed alike, and for all algorithms alike.
"""

import math
from collections.abc import Callable

import numpy as np

from fedjax_tp.data.catalog import Dataset, Images
from fedjax_tp.data.partition import Partition
from fedjax_tp.types import InputError, NumpyInts


def noise(
    images: Images, labels: NumpyInts, share: float, size: float, seed: list[int]
) -> Images:
    """Gaussian noise of standard deviation `share * size`.

    FedTP's "increasing" noise, but added to the pixels and before clipping: its code
    clips normalized images, which changes even those without noise.
    """
    rng = np.random.default_rng(seed)
    return images + share * size * rng.standard_normal(images.shape, np.float32)


def rotation(
    images: Images, labels: NumpyInts, share: float, size: float, seed: list[int]
) -> Images:
    """Turns by `share * size` degrees about the middle, edges repeated."""
    from scipy import ndimage

    if share * size == 0 or not len(images):
        return images.astype(np.float32)
    return ndimage.rotate(
        images.astype(np.float32),
        share * size,
        axes=(2, 1),
        reshape=False,
        order=1,
        mode="nearest",
    )


def brightness(
    images: Images, labels: NumpyInts, share: float, size: float, seed: list[int]
) -> Images:
    """Adds to all of a class what the client drew for it from U(-size, size).

    Of a client the draw is the same for training and test.
    """
    rng = np.random.default_rng(seed[:2])
    offsets = rng.uniform(-size, size, int(labels.max(initial=0)) + 1)
    return images + offsets[labels].astype(np.float32)[:, None, None, None]


KINDS: dict[str, Callable[..., Images]] = {
    "noise": noise,
    "rotation": rotation,
    "brightness": brightness,
}
_OF_RANGE = {"noise", "brightness"}


def parse(shift: str) -> tuple[str, float]:
    """Kind and size of a shift written as `kind:size`.

    Raises:
      InputError: an unknown kind, or a size that is no finite number of 0 or more.
    """
    kind, _, number = shift.partition(":")
    try:
        size = float(number)
    except ValueError:
        size = math.nan
    if kind not in KINDS or not 0 <= size < math.inf:
        raise InputError(
            f"shift is {shift!r}; allowed are {', '.join(f'{k}:X' for k in KINDS)} "
            "with X 0 or more"
        )
    return kind, size


def apply(dataset: Dataset, partition: Partition, shift: str, *, seed: int) -> Dataset:
    """The data set with the images of client i of N shifted by a share i / (N - 1).

    Values stay in the range that the training images have, and of their type.

    Args:
      dataset: of images.
      partition: who holds which of them; what nobody holds stays as it is.
      shift: see `parse`; sizes of noise and brightness are shares of the range.
      seed: of the random numbers.

    Raises:
      InputError: see `parse`, or data that is not of images.
    """
    kind, size = parse(shift)
    if dataset.x_train.ndim != 4:
        raise InputError(f"shift is {shift!r}; allowed is none, the data is text")
    low, high = float(dataset.x_train.min()), float(dataset.x_train.max())
    if kind in _OF_RANGE:
        size *= high - low
    last = max(1, partition.num_clients - 1)
    shifted = []
    for split, (x, y, parts) in enumerate(
        (
            (dataset.x_train, dataset.y_train, partition.train),
            (dataset.x_test, dataset.y_test, partition.test),
        )
    ):
        new = x.copy()
        for client, part in enumerate(parts):
            found = KINDS[kind](
                x[part], y[part], client / last, size, [seed, client, split]
            )
            found = np.clip(found, low, high)
            if np.issubdtype(x.dtype, np.integer):
                found = np.rint(found)
            new[part] = found.astype(x.dtype)
        shifted.append(new)
    return dataset._replace(x_train=shifted[0], x_test=shifted[1])
