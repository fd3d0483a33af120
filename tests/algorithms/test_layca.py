"""Layca against its closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp import algorithms
from fedjax_tp.algorithms import ClientOptimizer, Setting
from fedjax_tp.algorithms.layca import layca
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import init_state, make_advance
from fedjax_tp.types import InputError
from tests.conftest import federate_sizes


def turned(weight, step, lr):
    transform = layca(lr, lambda leaf: True)
    weight, step = jnp.array(weight), jnp.array(step)
    updates, _ = transform.update(step, transform.init(weight), weight)
    return np.asarray(optax.apply_updates(weight, updates))


def test_a_step_of_the_table():
    found = turned([3.0, 4.0], [1.0, 0.0], 0.1)
    np.testing.assert_allclose(found, [2.58709669, 4.27865992], rtol=1e-6)
    assert np.linalg.norm(found) == pytest.approx(5, rel=1e-6)
    cosine = found @ np.array([3.0, 4.0]) / 25
    assert 1 - cosine == pytest.approx(1 - 1 / np.sqrt(1.01), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 2), st.floats(1e-3, 1e3))
def test_the_angle_is_that_of_the_rate_whatever_the_gradient(seed, lr, scale):
    rng = np.random.default_rng(seed)
    weight, step = rng.normal(size=(2, 3, 4)).astype(np.float32)
    found = turned(weight, scale * step, lr)
    norm = np.linalg.norm(weight)
    assert np.linalg.norm(found) == pytest.approx(norm, rel=1e-5)
    cosine = np.sum(found * weight) / norm**2
    assert cosine == pytest.approx(1 / np.sqrt(1 + lr**2), abs=1e-5)
    # Downhill, unless the gradient lies along the weights.
    assert (
        np.sum((found - weight) * (step - np.sum(step * weight) / norm**2 * weight)) < 0
    )


def test_what_cannot_be_turned_stays():
    for weight, step in (([0.0, 0.0], [1.0, 2.0]), ([1.0, 2.0], [2.0, 4.0])):
        np.testing.assert_allclose(turned(weight, step, 0.1), weight, atol=1e-6)
    assert np.isfinite(turned([1.0, 0.0], [0.0, 0.0], 0.1)).all()
    with pytest.raises(InputError, match="learning rate is 0"):
        layca(0.0)


def test_kernels_keep_their_norms_over_a_round(small_task):
    data = federate_sizes([9, 12])
    setting = Setting(small_task, 2, ClientOptimizer(0.02, 0.9, 0.0))
    algorithm = algorithms.build("fedavg_layca", setting)
    state = init_state(algorithm, 2, jax.random.key(0))
    before = jax.device_get(state.server.shared)
    # One client a round: the mean of two turned kernels is shorter.
    advance = make_advance(algorithm, 1, LocalSchedule(4, 1, 12, 1), 3)
    state, records = advance(state, data, jax.random.key(1), 0, 3)
    after = jax.device_get(state.server.shared)
    norms = [np.linalg.norm(t["head"]["kernel"]) for t in (before, after)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert np.abs(before["head"]["kernel"] - after["head"]["kernel"]).max() > 1e-3
    assert np.isfinite(records.metrics["loss"]).all()
