"""What several tests need: P1003 (a set of awkward size) and a small federated task."""

import itertools
import os
import tempfile

# Before JAX starts: meshes of up to four devices on any machine. Compilation is most of
# the suite's time: it does without optimization of machine code, which takes a third
# of it, and keeps what it compiled, since many tests compile the same programs.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory(prefix="compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_tp.data import federated
from fedjax_tp.data.catalog import Dataset
from fedjax_tp.models import task as tasks
from fedjax_tp.models.vit import ViT

# The same examples every time: what passed once does not fail elsewhere by chance.
# Others are searched with --hypothesis-profile=default.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# One algorithm of each kind: what is sent to clients, what is kept, what is averaged.
# Tests that hold whatever the algorithm run on these; tests/algorithms has them all.
KINDS = ("fedtp", "fedtp_vanilla", "fedavg", "local", "scaffold")

CLASS_SIZES_1003 = [101] * 3 + [100] * 7


def make_blobs(
    rng: np.random.Generator, class_sizes: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """8x8x1 uint8 noise with a bright patch whose place depends on the class."""
    labels = rng.permutation(np.repeat(np.arange(len(class_sizes)), class_sizes))
    images = rng.integers(0, 80, (len(labels), 8, 8, 1), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = 2 * (label % 4), 2 * (label // 4)
        image[row : row + 2, column : column + 2] = 220
    return images, labels.astype(np.int64)


@pytest.fixture(scope="session")
def p1003() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1003)
    x_train, y_train = make_blobs(rng, CLASS_SIZES_1003)
    x_test, y_test = make_blobs(rng, [20] * 10)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


@pytest.fixture(scope="session")
def p1003_file(p1003, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "p1003.npz"
    np.savez(path, **p1003)
    return str(path)


def _small_init(key):
    qkv = 0.1 * jax.random.normal(key, (64, 3))
    head = {"kernel": jnp.eye(3), "bias": jnp.zeros(3)}
    return {"attention": {"qkv": qkv}, "norm": {"scale": jnp.ones(3)}, "head": head}


def _small_forward(params, x, key=None, mask=None):
    if key is not None:
        x = x + 0.1 * jax.random.normal(key, x.shape)
    features = x.reshape(len(x), 64) @ params["attention"]["qkv"]
    features = features * params["norm"]["scale"]
    return tasks.Forward(tasks.apply_head(params, features), features)


@pytest.fixture(scope="session")
def small_task() -> tasks.Task:
    """Two linear layers on noisy pixels: compiles at once, and uses its keys.

    The first has the name of an attention projection, and there is a scale between them
    of the name of a norm: every algorithm has something personal and something shared.
    """
    plain = tasks.from_apply(
        _small_init, lambda params, x, key: _small_forward(params, x, key).logits
    )
    return plain._replace(forward=_small_forward)


@pytest.fixture(scope="session")
def vit_task() -> tasks.Task:
    module = ViT(
        3, patch_size=4, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8, dropout=0.2
    )
    return tasks.classification(module, (8, 8, 1))


def federate_sizes(sizes: list[int], seed: int = 0) -> federated.FederatedDataset:
    """Three classes of blobs, dealt in order to clients of the given sizes."""
    total = max(sum(sizes), 3)
    class_sizes = [total // 3, total // 3, total - 2 * (total // 3)]
    images, labels = make_blobs(np.random.default_rng(seed), class_sizes)
    bounds = np.cumsum([0, *sizes])
    parts = tuple(np.arange(a, b) for a, b in itertools.pairwise(bounds))
    dataset = Dataset(
        "blobs",
        images,
        labels.astype(np.int32),
        images,
        labels.astype(np.int32),
        ("a", "b", "c"),
        np.array([60.0], np.float32),
        np.array([70.0], np.float32),
    )
    return federated.federate(dataset, "train", [parts])
