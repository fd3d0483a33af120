"""Masked losses and metrics."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp.models import task as tasks
from fedjax_tp.types import Batch


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_masked_mean_is_the_mean_of_what_is_left(mask):
    values = np.array([1.0, -2.0, 4.0, 0.5], np.float32)
    found = tasks.masked_mean(jnp.asarray(values), jnp.array(mask))
    expected = values[np.array(mask)].mean() if any(mask) else 0.0
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_padding_changes_neither_loss_nor_gradient_nor_metrics(small_task):
    params = small_task.init(jax.random.key(0))
    key = jax.random.key(1)
    x = jax.random.normal(key, (3, 8, 8, 1))
    y = jnp.array([0, 2, 1])
    plain = Batch(x, y, jnp.ones(3, bool))
    padded = Batch(
        jnp.concatenate([x, 7 * x[:2]]),
        jnp.concatenate([y, y[:2]]),
        jnp.array([True] * 3 + [False] * 2),
    )
    loss_and_grads = jax.jit(jax.value_and_grad(small_task.loss))
    loss, grads = loss_and_grads(params, plain, key)
    padded_loss, padded_grads = loss_and_grads(params, padded, key)
    np.testing.assert_allclose(loss, padded_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(padded_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for a, b in zip(
        small_task.metrics(params, plain),
        small_task.metrics(params, padded),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_model_that_is_not_finite_is_never_right(small_task):
    params = small_task.init(jax.random.key(0))
    params["head"]["bias"] = jnp.full(3, jnp.nan)
    batch = Batch(jnp.ones((4, 8, 8, 1)), jnp.zeros(4, int), jnp.ones(4, bool))
    assert small_task.metrics(params, batch).correct == 0
