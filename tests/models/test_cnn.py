"""LeNet against the paper's counts and XLA's own convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_tp import tree
from fedjax_tp.models import task as tasks
from fedjax_tp.models.cnn import LeNet, _max_of_quads, windows


@pytest.mark.parametrize(("classes", "expected"), [(10, 121_182), (100, 128_832)])
def test_parameter_counts_are_the_papers(classes, expected):
    task = tasks.classification(LeNet(classes), (32, 32, 3))
    assert tree.num_elements(jax.eval_shape(task.init, jax.random.key(0))) == expected


@pytest.mark.parametrize(("classes", "expected"), [(10, 121_686), (100, 129_336)])
def test_counts_with_batch_normalization_are_the_papers(classes, expected):
    task = tasks.classification(LeNet(classes, batch_norm=True), (32, 32, 3))
    params = jax.eval_shape(task.init, jax.random.key(0))
    statistics, weights = tree.split(params, tasks.is_statistic)
    assert tree.num_elements(weights) == expected
    assert tree.num_elements(statistics) == 2 * (16 + 32 + 120 + 84)


def test_training_normalizes_over_the_batch_and_use_over_running_statistics():
    task = tasks.classification(LeNet(3, batch_norm=True), (8, 8, 1))
    params = task.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 8, 8, 1))
    mask = jnp.array([True, True, True, False, False])
    padded, alone = (
        task.forward(params, images, jax.random.key(2), rows)
        for images, rows in ((x.at[3:].set(9.0), mask), (x[:3], None))
    )
    np.testing.assert_allclose(padded.logits[:3], alone.logits, atol=1e-5)
    for a, b in zip(
        *map(jax.tree.leaves, (padded.statistics, alone.statistics)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # In use an example's logits do not depend on the others.
    np.testing.assert_allclose(
        task.apply(params, x)[:1], task.apply(params, x[:1]), atol=1e-6
    )


def test_pooling_is_a_maximum_with_its_gradient():
    x = jax.random.normal(jax.random.key(0), (2, 3, 2, 4, 2, 5))
    # Two entries that are the maximum share its gradient.
    x = x.at[0, 0, 0, 0, 0, 0].set(9.0).at[0, 0, 1, 0, 1, 0].set(9.0)
    cotangent = jax.random.normal(jax.random.key(1), (2, 3, 4, 5))
    pairs = [jax.vjp(pool, x) for pool in (_max_of_quads, lambda q: q.max(axis=(2, 4)))]
    (value, vjp), (expected, expected_vjp) = pairs
    assert np.array_equal(value, expected)
    np.testing.assert_allclose(vjp(cotangent)[0], expected_vjp(cotangent)[0], rtol=1e-6)


def test_windows_times_a_kernel_are_a_convolution():
    images = jax.random.normal(jax.random.key(0), (2, 9, 7, 3))
    kernel = jax.random.normal(jax.random.key(1), (5, 5, 3, 4))
    expected = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    ours = windows(images, 5) @ kernel.reshape(-1, 4)
    np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (32, 32, 3)])
def test_it_fits_the_images_at_hand(shape):
    task = tasks.classification(LeNet(10), shape)
    params = task.init(jax.random.key(0))
    assert task.apply(params, jnp.zeros((2, *shape))).shape == (2, 10)
