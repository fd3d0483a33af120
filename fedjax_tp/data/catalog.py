"""Data sets by name: a name in, NumPy arrays and what is known about them out.

Nothing is downloaded here. A set that is not at hand raises `InputError`, and the
message says how to get it.
"""

import gzip
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num, Shaped

from fedjax_tp.data import text
from fedjax_tp.types import InputError, NumpyInts

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

# Per-channel mean and standard deviation of the training images, pixels in [0, 1].
# CIFAR: the constants of FedTP's code. Other sets compute theirs from their pixels.
_NORMALIZATION = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
}

Images = Num[np.ndarray, "_ height width channels"]
Examples = Num[np.ndarray, "_ *example"]


class Owners(NamedTuple):
    """Who holds which examples by nature: the place of each one's owner in `names`."""

    names: tuple[str, ...]
    train: NumpyInts
    test: NumpyInts


class Dataset(NamedTuple):
    """Labelled images, or texts, and what a model needs to know about them.

    Attributes:
      name: the name it was asked for by.
      x_train, x_test: images, uint8 where the source is; of text, the place of each
        character in `class_names`.
      y_train, y_test: labels 0..num_classes-1; of text, the character that follows.
      class_names: one name for each label; for an .npz the label found in the file.
      mean, std: per channel, in the units of the stored pixels; 0 and 1 of text.
      superclass: coarse class of each class, or None.
      notices: what the loader left out or changed, to be shown to the user.
      owners: who holds which examples by nature, or None.
    """

    name: str
    x_train: Examples
    y_train: Int[np.ndarray, " train"]
    x_test: Examples
    y_test: Int[np.ndarray, " test"]
    class_names: tuple[str, ...]
    mean: Float[np.ndarray, " channels"]
    std: Float[np.ndarray, " channels"]
    superclass: NumpyInts | None = None
    notices: tuple[str, ...] = ()
    owners: Owners | None = None

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def is_text(self) -> bool:
        return self.x_train.ndim == 2


def load(
    name: str,
    data_dir: str | None = None,
    *,
    sequence_length: int = 80,
    stride: int | None = None,
) -> Dataset:
    """Loads a data set by name.

    Args:
      name: `digits`, `fashion_mnist`, `cifar10`, `cifar100`, `shakespeare`,
        `npz:PATH`, `folder:PATH`, `tfds:NAME` or `leaf:PATH`.
      data_dir: where prepared TFDS sets (or Fashion-MNIST's IDX files) lie.
      sequence_length: of Shakespeare's examples, in characters.
      stride: characters between two of them; None for `sequence_length`.

    Raises:
      InputError: unknown name, a set that is not there, or content that cannot be
        used; the message says what is allowed or how to get the set.
    """
    kind, _, argument = name.partition(":")
    if kind in _WITH_ARGUMENT and argument:
        return _WITH_ARGUMENT[kind](name, argument, data_dir)
    if name == "shakespeare":
        return _shakespeare(name, sequence_length, stride)
    if name in _NAMED:
        return _NAMED[name](name, data_dir)
    known = ", ".join([*_NAMED, "shakespeare", *(f"{k}:PATH" for k in _WITH_ARGUMENT)])
    raise InputError(f"unknown dataset {name!r}; known are {known}")


def stratified_split(
    labels: NumpyInts, test_fraction: float, seed: int
) -> tuple[NumpyInts, NumpyInts]:
    """Splits examples into (train, test) indices, class by class, seeded.

    A class with one example stays in train.
    """
    rng = np.random.default_rng(seed)
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == label))
        wanted = max(1, int(len(examples) * test_fraction))
        is_test[examples[: min(wanted, len(examples) - 1)]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def hold_out(dataset: Dataset) -> Dataset:
    """A fifth of the training examples in the place of the test split.

    Of each class a random fifth; where examples have owners, the last of each owner's:
    what follows in a text is no fair test of a gap in it.
    """
    owners = dataset.owners
    if owners is None:
        train, validation = stratified_split(dataset.y_train, test_fraction=0.2, seed=1)
    else:
        held = [np.flatnonzero(owners.train == i) for i in range(len(owners.names))]
        train, validation = (
            np.concatenate(parts)
            for parts in zip(
                *(np.split(part, [len(part) - len(part) // 5]) for part in held),
                strict=True,
            )
        )
        owners = owners._replace(
            train=owners.train[train], test=owners.train[validation]
        )
    if len(validation) == 0:
        raise InputError(f"dataset {dataset.name} is too small to hold a fifth out")
    return dataset._replace(
        owners=owners,
        x_train=dataset.x_train[train],
        y_train=dataset.y_train[train],
        x_test=dataset.x_train[validation],
        y_test=dataset.y_train[validation],
        notices=(*dataset.notices, "measured on held-out training examples"),
    )


def _channel_statistics(
    name: str, x_train: Images
) -> tuple[Float[np.ndarray, " channels"], Float[np.ndarray, " channels"]]:
    if name in _NORMALIZATION and x_train.dtype == np.uint8:
        mean, std = (np.array(v) * 255 for v in _NORMALIZATION[name])
    else:
        pixels = x_train.reshape(-1, x_train.shape[-1])
        mean = pixels.mean(axis=0, dtype=np.float64)
        std = pixels.std(axis=0, dtype=np.float64)
    # A channel that never changes carries nothing; it must not divide by zero.
    return mean.astype(np.float32), np.where(std > 0, std, 1.0).astype(np.float32)


def _dataset(
    name: str,
    x_train: Images,
    y_train: NumpyInts,
    x_test: Images,
    y_test: NumpyInts,
    class_names: Iterable[str],
    **rest: Any,
) -> Dataset:
    for split, labels in (("training", y_train), ("test", y_test)):
        if len(labels) == 0:
            raise InputError(f"dataset {name} has no {split} examples")
    class_names = tuple(class_names)
    if len(class_names) < 2:
        raise InputError(f"dataset {name} has one class; at least two are needed")
    # The name without its kind: `tfds:cifar10` is normalized as `cifar10` is.
    mean, std = _channel_statistics(name.removeprefix("tfds:"), x_train)
    return Dataset(
        name,
        np.ascontiguousarray(x_train),
        y_train.astype(np.int32),
        np.ascontiguousarray(x_test),
        y_test.astype(np.int32),
        class_names,
        mean,
        std,
        **rest,
    )


def _split_dataset(
    name: str, x: Images, y: NumpyInts, class_names: Iterable[str], **rest: Any
) -> Dataset:
    """One array of examples: a fifth of each class becomes the test split."""
    train, test = stratified_split(y, test_fraction=0.2, seed=0)
    return _dataset(name, x[train], y[train], x[test], y[test], class_names, **rest)


def _digits(name: str, data_dir: str | None) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[..., None]
    return _split_dataset(name, images, bunch.target, map(str, range(10)))


def _fashion_mnist(name: str, data_dir: str | None) -> Dataset:
    folders = [Path(data_dir)] if data_dir else []
    for folder in [*folders, DEBIAN_FASHION_MNIST]:
        if (folder / "train-images-idx3-ubyte.gz").is_file():
            return _dataset(
                name,
                _read_idx(folder / "train-images-idx3-ubyte.gz")[..., None],
                _read_idx(folder / "train-labels-idx1-ubyte.gz"),
                _read_idx(folder / "t10k-images-idx3-ubyte.gz")[..., None],
                _read_idx(folder / "t10k-labels-idx1-ubyte.gz"),
                [
                    "top",
                    "trouser",
                    "pullover",
                    "dress",
                    "coat",
                    "sandal",
                    "shirt",
                    "sneaker",
                    "bag",
                    "boot",
                ],
            )
    return _tfds(
        name, name, data_dir, hint="or `apt-get install dataset-fashion-mnist`"
    )


def _read_idx(path: Path) -> Shaped[np.ndarray, "..."]:
    try:
        content = gzip.decompress(path.read_bytes())
        rank = content[3]
        shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
        return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError, struct.error, zlib.error) as e:
        raise InputError(f"{path} is not a complete IDX file: {e}") from None


def _tfds_by_own_name(name: str, data_dir: str | None) -> Dataset:
    return _tfds(name, name, data_dir)


def _tfds(
    name: str, builder_name: str, data_dir: str | None, hint: str = ""
) -> Dataset:
    command = f"python -m experiments.prepare_data --dataset {builder_name}"
    if data_dir is None:
        raise InputError(
            f"dataset {name} needs --data-dir, the folder of its array_record files; "
            f"`{command} --data-dir DIR` makes them {hint}".rstrip()
        )
    if not Path(data_dir).is_dir():
        raise InputError(f"data dir {data_dir} is not a folder; run `{command}` first")
    folder = _newest_version(Path(data_dir) / builder_name)
    if folder is None:
        raise InputError(
            f"dataset {name} is not in {data_dir}; "
            f"`{command} --data-dir {data_dir}` makes it {hint}".rstrip()
        )
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(str(folder))
    except Exception as error:
        raise InputError(
            f"cannot read {folder} as a TFDS set: {first_line(error)}"
        ) from None
    if not {"train", "test"} <= set(builder.info.splits):
        raise InputError(
            f"dataset {name} has splits {sorted(builder.info.splits)}; "
            "train and test are needed"
        )
    features = builder.info.features
    if not {"image", "label"} <= features.keys() or not hasattr(
        features["label"], "names"
    ):
        raise InputError(
            f"dataset {name} has features {sorted(features)}; an image, and a label "
            "that is a ClassLabel, are needed"
        )
    read = {}
    for split in ("train", "test"):
        try:
            read[split] = _columns(builder.as_data_source(split))
        except NotImplementedError:
            raise InputError(
                f"dataset {name} in {data_dir} is not array_record; "
                f"`{command} --data-dir DIR` prepares it so"
            ) from None
        except Exception as error:
            raise InputError(
                f"cannot read {split} of {folder}: {first_line(error)}"
            ) from None
    superclass = None
    if "coarse_label" in features:
        superclass = np.zeros(features["label"].num_classes, np.int32)
        superclass[read["train"]["label"]] = read["train"]["coarse_label"]
    return _dataset(
        name,
        read["train"]["image"],
        read["train"]["label"],
        read["test"]["image"],
        read["test"]["label"],
        features["label"].names,
        superclass=superclass,
    )


def _newest_version(folder: Path) -> Path | None:
    """The folder of the newest version of a prepared TFDS set, in any configuration."""
    versions = [
        info.parent
        for info in folder.rglob("dataset_info.json")
        if re.fullmatch(r"\d+\.\d+\.\d+", info.parent.name)
    ]
    return max(
        versions, key=lambda v: [int(n) for n in v.name.split(".")], default=None
    )


def _columns(source: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    wanted = ("image", "label", "coarse_label")
    rows = [source[i] for i in range(len(source))]
    return {
        key: np.stack([row[key] for row in rows])
        for key in wanted
        if rows and key in rows[0]
    }


def _npz(name: str, path: str, data_dir: str | None) -> Dataset:
    arrays = _read_npz(path)
    names = set(arrays)
    if {"x_train", "y_train", "x_test", "y_test"} <= names:
        splits = [("x_train", "y_train"), ("x_test", "y_test")]
    elif {"x", "y"} <= names:
        splits = [("x", "y")]
    else:
        raise InputError(
            f"{path} holds {sorted(names)}; allowed are x, y or "
            "x_train, y_train, x_test, y_test"
        )
    images = [_check_images(arrays[x], f"{path}: {x}") for x, _ in splits]
    labels = [_check_labels(arrays[y], f"{path}: {y}") for _, y in splits]
    for (x_name, y_name), x, y in zip(splits, images, labels, strict=True):
        if len(x) != len(y):
            raise InputError(
                f"{path}: {x_name} has {len(x)} examples and {y_name} has {len(y)}; "
                "they must be equal"
            )
    if len({x.shape[1:] for x in images}) > 1:
        raise InputError(
            f"{path}: x_train has images {images[0].shape[1:]} and x_test "
            f"{images[1].shape[1:]}; they must be equal"
        )
    values = np.unique(np.concatenate(labels))
    classes = [np.searchsorted(values, y) for y in labels]
    superclass = arrays.get("superclass")
    if superclass is not None:
        superclass = _check_labels(superclass, f"{path}: superclass")
        if len(superclass) != len(values):
            raise InputError(
                f"{path}: superclass has {len(superclass)} entries; the labels have "
                f"{len(values)} classes"
            )
    rest: dict[str, Any] = {
        "class_names": map(str, values),
        "superclass": superclass,
    }
    if len(splits) == 1:
        return _split_dataset(name, images[0], classes[0], **rest)
    return _dataset(name, images[0], classes[0], images[1], classes[1], **rest)


_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its kind if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _read_npz(path: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except FileNotFoundError:
        raise InputError(f"dataset file {path} does not exist") from None
    except _UNREADABLE as error:
        raise InputError(
            f"cannot read {path} as an .npz of plain number arrays: {first_line(error)}"
        ) from None


def _check_images(x: np.ndarray, place: str) -> Images:
    if x.dtype.kind not in "uif" or x.ndim not in (3, 4) or 0 in x.shape[1:]:
        raise InputError(
            f"{place} is {x.dtype} with shape {x.shape}; allowed are numbers "
            "[examples, height, width] or [examples, height, width, channels]"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
        if not finite.all():
            raise InputError(
                f"{place} has pixels that are NaN, infinite or beyond float32 "
                f"(example {np.argmin(finite)})"
            )
    return x if x.ndim == 4 else x[..., None]


def _check_labels(y: np.ndarray, place: str) -> Int[np.ndarray, " examples"]:
    if y.dtype.kind not in "uifb" or y.ndim not in (1, 2):
        raise InputError(
            f"{place} is {y.dtype} with shape {y.shape}; allowed are integers "
            "[examples], [examples, 1] or one-hot [examples, classes]"
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 2:
        if not (np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()):
            raise InputError(
                f"{place} has shape {y.shape} but is not one-hot; allowed are integers "
                "[examples], [examples, 1] or one-hot [examples, classes]"
            )
        return y.argmax(axis=1)
    if y.dtype.kind == "f" and not (np.isfinite(y).all() and (y == np.rint(y)).all()):
        bad = y[~(np.isfinite(y) & (y == np.rint(y)))][0]
        raise InputError(f"{place} holds {bad}; labels must be integers")
    if len(y) and y.min() < 0:
        raise InputError(f"{place} holds {y.min()}; labels must be 0 or more")
    return y.astype(np.int64)


_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}


_IMAGE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def _folder(name: str, path: str, data_dir: str | None) -> Dataset:
    root = Path(path)
    if not root.is_dir():
        raise InputError(f"dataset folder {path} does not exist")
    splits = [root / "train", root / "test"]
    has_splits = all(split.is_dir() for split in splits)
    files = [_class_files(split) for split in (splits if has_splits else [root])]
    class_names = sorted({label for split in files for label in split if split[label]})
    empty = sorted({label for s in files for label in s} - set(class_names))
    notices = tuple(f"{path}: class folder {c} has no image, left out" for c in empty)
    listed = [
        [(file, k) for k, c in enumerate(class_names) for file in split.get(c, [])]
        for split in files
    ]
    if not all(listed):
        raise InputError(
            f"dataset folder {path} needs images in one folder a class, with or "
            f"without train/ and test/ above; allowed are {sorted(_IMAGE_SUFFIXES)}"
        )
    images, more = _read_images([file for split in listed for file, _ in split])
    labels = [np.array([k for _, k in split]) for split in listed]
    rest: dict[str, Any] = {"class_names": class_names, "notices": notices + more}
    if not has_splits:
        return _split_dataset(name, images, labels[0], **rest)
    train, test = np.split(images, [len(labels[0])])
    return _dataset(name, train, labels[0], test, labels[1], **rest)


def _class_files(root: Path) -> dict[str, list[Path]]:
    """Image files by class folder, in name order, without what desktops leave."""

    def is_leftover(path: Path) -> bool:
        return path.name.startswith(".") or path.name == "__MACOSX"

    return {
        folder.name: sorted(
            file
            for file in folder.iterdir()
            if file.suffix.lower() in _IMAGE_SUFFIXES and not is_leftover(file)
        )
        for folder in sorted(root.iterdir())
        if folder.is_dir() and not is_leftover(folder)
    }


def _read_images(files: list[Path]) -> tuple[Images, tuple[str, ...]]:
    """Decodes images to one shape: grey only if all are grey, the commonest size.

    Palettes are read as their colours. Transparency is dropped, not blended: a
    transparent pixel keeps the colour stored under it.
    """
    from PIL import Image, UnidentifiedImageError

    def decode(file: Path) -> np.ndarray:
        try:
            with Image.open(file) as image:
                if image.mode not in _IMAGE_MODES:
                    raise InputError(
                        f"image {file} has mode {image.mode}; allowed are "
                        f"{', '.join(_IMAGE_MODES)} (8 bits a channel)"
                    )
                grey = image.mode in ("1", "L", "LA")
                # By way of RGBA, so that a palette with transparency is read right.
                if grey:
                    return np.asarray(image.convert("L"))
                return np.asarray(image.convert("RGBA"))[..., :3]
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise InputError(f"cannot read image {file}: {error}") from None

    with ThreadPoolExecutor() as pool:
        arrays = list(pool.map(decode, files, chunksize=64))
    if any(array.ndim == 3 for array in arrays):
        arrays = [a if a.ndim == 3 else np.stack([a] * 3, axis=-1) for a in arrays]
    else:
        arrays = [array[..., None] for array in arrays]
    sizes = Counter(array.shape[:2] for array in arrays)
    height, width = max(sizes, key=lambda size: (sizes[size], size))
    others = len(arrays) - sizes[height, width]
    notices: tuple[str, ...] = ()
    if others:
        notices = (f"{others} images resized to {height}x{width}, the commonest size",)
    return np.stack([_resize(array, height, width) for array in arrays]), notices


def _resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    if image.shape[:2] == (height, width):
        return image
    from PIL import Image

    resized = Image.fromarray(image.squeeze())
    resized = resized.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized).reshape(height, width, -1)


def _shakespeare(name: str, length: int, stride: int | None) -> Dataset:
    stride = length if stride is None else stride
    for what, value in (("sequence length", length), ("stride", stride)):
        if value < 1:
            raise InputError(f"{what} is {value}; allowed is 1 or more")
    roles = {
        role: text.split_lines(lines) for role, lines in text.shakespeare().items()
    }
    characters = text.alphabet(part for parts in roles.values() for part in parts)
    examples = {
        role: [
            text.windows(text.encode(part, characters), length, stride)
            for part in parts
        ]
        for role, parts in roles.items()
    }
    return _by_owner(name, examples, characters)


def _leaf(name: str, folder: str, data_dir: str | None) -> Dataset:
    splits = [text.read_leaf(folder, split) for split in ("train", "test")]
    users = sorted(set(splits[0].x) & set(splits[1].x))
    values = [v for s in splits for u in s.x for v in (*s.x[u], *s.y[u])]
    kinds = sorted({type(value).__name__ for value in values})
    if kinds != ["str"]:
        raise InputError(
            f"{folder}: x must be texts of one length and y the character after each, "
            f"as in LEAF's Shakespeare; found {', '.join(kinds) or 'nothing'}"
        )
    lengths = {len(value) for s in splits for x in s.x.values() for value in x}
    if len(lengths) != 1 or 0 in lengths:
        raise InputError(
            f"{folder}: x must be texts of one length; found {sorted(lengths)[:5]}"
        )
    (length,) = lengths
    if not all(len(v) == 1 for s in splits for y in s.y.values() for v in y):
        raise InputError(f"{folder}: y must be single characters")
    characters = text.alphabet(values)

    def of_user(split: text.LeafSplit, user: str) -> text.TextExamples:
        x = text.encode("".join(split.x[user]), characters)
        y = text.encode("".join(split.y[user]), characters)
        return text.TextExamples(x.reshape(len(y), length), y.astype(np.int32))

    examples = {u: [of_user(split, u) for split in splits] for u in users}
    found = _by_owner(name, examples, characters)
    missing = len({*splits[0].x, *splits[1].x}) - len(users)
    more = (f"{missing} users are in one split alone, left out",) if missing else ()
    return found._replace(notices=found.notices + more)


def _by_owner(
    name: str, examples: dict[str, list[text.TextExamples]], characters: str
) -> Dataset:
    """A data set of texts; who lacks a training or a test example is left out."""
    named = {k: v for k, v in examples.items() if all(len(part.y) for part in v)}
    if not named:
        raise InputError(
            f"dataset {name}: no client has both a training and a test example; a "
            "smaller --sequence-length needs less text"
        )
    short = len(examples) - len(named)
    notices = (f"{short} clients have too little text, left out",) if short else ()
    owners = [
        np.repeat(np.arange(len(named)), [len(parts[i].y) for parts in named.values()])
        for i in range(2)
    ]
    x, y = (
        [np.concatenate([getattr(p[i], f) for p in named.values()]) for i in range(2)]
        for f in ("x", "y")
    )
    return Dataset(
        name,
        x[0],
        y[0],
        x[1],
        y[1],
        tuple(characters),
        np.zeros(1, np.float32),
        np.ones(1, np.float32),
        notices=notices,
        owners=Owners(tuple(named), *owners),
    )


_NAMED: dict[str, Callable[[str, str | None], Dataset]] = {
    "digits": _digits,
    "fashion_mnist": _fashion_mnist,
    "cifar10": _tfds_by_own_name,
    "cifar100": _tfds_by_own_name,
}

_WITH_ARGUMENT: dict[str, Callable[[str, str, str | None], Dataset]] = {
    "npz": _npz,
    "folder": _folder,
    "tfds": _tfds,
    "leaf": _leaf,
}
