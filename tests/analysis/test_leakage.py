"""What gradients tell: the exact leak of the table, and a search that comes nearer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_tp.analysis import leakage
from fedjax_tp.models import task as tasks
from fedjax_tp.types import Batch, InputError

KEY = jax.random.key(0)
X = jnp.array([0.2, -1.0, 0.7])
WEIGHTS = {
    "kernel": jnp.array([[0.1, -0.3], [0.2, 0.1], [0.3, 0.4]]),
    "bias": jnp.array([0.05, -0.1]),
}


def loss(params, x):
    logits = x @ params["kernel"] + params["bias"]
    return tasks.cross_entropy(logits, jnp.array(0))


def test_the_leak_of_the_table():
    value, found = jax.value_and_grad(loss)(WEIGHTS, X)
    assert float(value) == pytest.approx(0.66359711, abs=1e-6)
    np.testing.assert_allclose(found["bias"], [-0.4850045, 0.4850045], atol=1e-6)
    recovered = leakage.input_of_linear(found["kernel"], found["bias"])
    np.testing.assert_allclose(recovered, X, rtol=3e-7)


def test_an_image_before_a_linear_layer_is_read_off_to_float_precision():
    image = jax.random.normal(KEY, (8, 8, 1))
    params = {"kernel": 0.1 * jax.random.normal(KEY, (64, 5)), "bias": jnp.zeros(5)}

    def image_loss(params):
        logits = image.reshape(-1) @ params["kernel"] + params["bias"]
        return tasks.cross_entropy(logits, jnp.array(3))

    found = jax.grad(image_loss)(params)
    recovered = leakage.input_of_linear(found["kernel"], found["bias"])
    np.testing.assert_allclose(recovered.reshape(8, 8, 1), image, rtol=1e-6)
    assert float(leakage.psnr(recovered, image.reshape(-1), 6.0)) > 120


def test_without_a_gradient_there_is_nothing():
    with pytest.raises(InputError, match="nothing of the input can be read off"):
        leakage.input_of_linear(jnp.zeros((3, 2)), jnp.zeros(2))


def test_measures():
    a = {"w": jnp.array([1.0, 0.0]), "b": jnp.array([0.0])}
    b = {"w": jnp.array([0.0, 2.0]), "b": jnp.array([0.0])}
    assert float(leakage.gradient_distance(a, a)) == pytest.approx(0)
    assert float(leakage.gradient_distance(a, b)) == pytest.approx(1)
    zero = jax.tree.map(jnp.zeros_like, a)
    assert float(leakage.gradient_distance(a, zero)) == 1
    image = jnp.array([[0.0, 1.0], [3.0, 3.0]]).reshape(1, 2, 2, 1)
    assert float(leakage.total_variation(image)) == pytest.approx(2.5 + 0.5)
    found = leakage.psnr(jnp.zeros(4), jnp.full(4, 0.1), 1.0)
    assert float(found) == pytest.approx(20, abs=1e-4)


def test_a_search_comes_nearer(small_task):
    params = small_task.init(KEY)
    rows = jnp.linspace(-1, 1, 8)
    image = (rows[:, None] + rows[None, :]).reshape(1, 8, 8, 1)
    labels = jnp.array([1])
    batch = Batch(image, labels, jnp.ones(1, bool))
    target = jax.grad(lambda p: small_task.loss_of(small_task.apply(p, image), batch))(
        params
    )
    attack = leakage.Attack(steps=150, smoothness=0.01)

    @jax.jit
    def search(key):
        return leakage.reconstruct(
            small_task, params, target, labels, (8, 8, 1), key, attack
        )

    found = search(KEY)
    start = jax.random.normal(KEY, image.shape)
    better = leakage.psnr(found.images, image, 4.0)
    assert float(better) > float(leakage.psnr(start, image, 4.0)) + 5
    assert float(found.distance) < 0.02
    assert float(jnp.abs(found.images).max()) <= 3
