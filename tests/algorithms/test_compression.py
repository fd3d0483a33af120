"""Codecs: known values, unbiasedness, exact bits, error feedback step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp import algorithms
from fedjax_tp.algorithms import (
    ClientOptimizer,
    MethodConfig,
    Setting,
    client_update,
    compression,
)
from fedjax_tp.algorithms.compression import (
    mean_sign,
    rotated,
    sign,
    topk,
    transmit,
    uniform,
    weight_from_mean_sign,
)
from fedjax_tp.models.task import Metrics, Task
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.plan import make_plan
from fedjax_tp.simulation.rounds import init_state, make_advance
from fedjax_tp.types import Batch, InputError
from tests.conftest import federate_sizes

KEY = jax.random.key(0)
VALUES = jnp.array([0.5, -1.0, 0.25, 2.0, 0.0, -0.125, 1.0])


def arrived(codec, values, key=KEY):
    return jax.jit(lambda k, v: transmit(codec, k, v))(key, values)


def test_the_signs_have_the_mean_amount():
    scale = float(jnp.abs(VALUES).mean())
    expected = [scale, -scale, scale, scale, scale, -scale, scale]
    np.testing.assert_allclose(arrived(sign(), VALUES), expected, rtol=1e-6)


def test_the_largest_entries_arrive_as_they_are():
    found = arrived(topk(0.4), VALUES)
    np.testing.assert_array_equal(found, [0, -1.0, 0, 2.0, 0, 0, 1.0])
    np.testing.assert_array_equal(arrived(topk(1.0), VALUES), VALUES)


@pytest.mark.parametrize("codec", [uniform(1), uniform(4), rotated(3)])
def test_the_mean_over_draws_is_the_value(codec):
    draws = jax.jit(jax.vmap(lambda key: transmit(codec, key, VALUES)))(
        jax.random.split(KEY, 4000)
    )
    deviation = np.asarray(draws).std(axis=0) / np.sqrt(4000)
    error = np.abs(np.asarray(draws).mean(axis=0) - np.asarray(VALUES))
    assert (error <= 5 * deviation + 1e-5).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.floats(-100, 100, width=32, allow_subnormal=False), min_size=1, max_size=9
    ),
    st.integers(1, 16),
)
def test_uniform_is_within_a_step_and_exact_at_the_ends(values, bits):
    v = jnp.asarray(np.array(values, np.float32))
    found = np.asarray(transmit(uniform(bits), KEY, v))
    step = float(v.max() - v.min()) / (2**bits - 1)
    assert np.abs(found - np.asarray(v)).max() <= step * (1 + 1e-4) + 1e-4
    assert np.isfinite(found).all()


def test_the_transform_is_scipys_and_its_own_inverse():
    values = np.random.default_rng(0).normal(size=16).astype(np.float32)
    matrix = scipy.linalg.hadamard(16) / 4
    found = jax.jit(compression.hadamard)(jnp.asarray(values))
    np.testing.assert_allclose(found, matrix @ values, atol=1e-5)
    again = jax.jit(compression.hadamard)(found)
    np.testing.assert_allclose(again, values, atol=1e-5)


def test_a_rotation_helps_where_one_value_is_large():
    values = jax.random.normal(KEY, (64,)).at[5].set(20.0)
    keys = jax.random.split(KEY, 200)

    def error(codec):
        found = jax.jit(jax.vmap(lambda key: transmit(codec, key, values)))(keys)
        return float(jnp.mean(jnp.sum((found - values) ** 2, axis=1)))

    assert error(rotated(2)) < 0.8 * error(uniform(2))


@pytest.mark.parametrize(
    ("codec", "size", "bits"),
    [
        (uniform(4), 100, 4 * 100 + 64),
        (uniform(1), 1, 65),
        (rotated(4), 100, 4 * 128 + 64 + 64),
        (sign(), 100, 132),
        (topk(0.05), 100, 5 * (32 + 7)),
        (topk(0.05), 10, 32 + 4),
        (topk(0.07), 100, 7 * (32 + 7)),
        (topk(1e-12), 100, 32 + 7),
        (topk(1.0), 1, 33),
    ],
)
def test_bits_are_counted_exactly(codec, size, bits):
    assert codec.bits(size) == bits


def test_equal_values_arrive_as_they_are():
    for codec in (uniform(3), sign(), rotated(8)):
        found = arrived(codec, jnp.full(8, 0.75))
        np.testing.assert_allclose(found, 0.75, atol=0.02)
    np.testing.assert_array_equal(arrived(uniform(3), jnp.zeros(4)), np.zeros(4))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: uniform(0), "codec bits is 0; allowed is 1 to 16"),
        (lambda: rotated(17), "codec bits is 17"),
        (lambda: topk(0.0), "topk share is 0.0; allowed is 0 < share <= 1"),
    ],
)
def test_codecs_that_are_none(make, said):
    with pytest.raises(InputError, match=said):
        make()


@pytest.mark.parametrize(
    ("theta", "sigma", "expected"),
    [(0.5, 1.0, 0.38292492), (1.0, 1.0, 0.68268949), (0.2, 0.5, 0.31084348)],
)
def test_the_mean_of_signs(theta, sigma, expected):
    found = mean_sign(np.array(theta), sigma)
    assert float(found) == pytest.approx(expected, abs=1e-6)
    assert float(weight_from_mean_sign(found, sigma)) == pytest.approx(theta, abs=1e-5)


SCHEDULE = LocalSchedule(4, 1, 12, 1)


def losses(name, task, rounds, method=None):
    data = federate_sizes([9, 10, 12])
    method = method or MethodConfig()
    algorithm = algorithms.build(name, Setting(task, 3, method=method))
    state = init_state(algorithm, 3, KEY)
    advance = make_advance(algorithm, 3, SCHEDULE, rounds)
    _, records = advance(state, data, KEY, 0, rounds)
    return np.asarray(records.metrics["loss"])


def test_what_is_lost_comes_later():
    """One step of size 1 on the loss g . w, of which one entry of two is sent."""
    slope = jnp.array([3.0, 2.0])
    task = Task(
        lambda key: {"w": jnp.zeros(2)},
        lambda params, x: x,
        lambda params, batch, key: slope @ params["w"],
        lambda params, batch: Metrics(*jnp.zeros(3)),
    )
    method = MethodConfig(topk_share=0.5)
    setting = Setting(task, 1, ClientOptimizer(1.0, 0.0, 0.0), method=method)
    algorithm = algorithms.build("fedavg_topk", setting)
    batches = Batch(jnp.zeros((1, 1)), jnp.zeros((1, 1), int), jnp.ones((1, 1), bool))
    state = algorithm.init(KEY)
    kept = algorithm.init_kept(state)
    # In turn: -3 of (-3, -2); then -4 of (-3, -4), which has the 2 of before; then
    # -6 of (-6, -2).
    for w, lost in (
        ([-3.0, 0.0], [0.0, -2.0]),
        ([-3.0, -4.0], [-3.0, 0.0]),
        ([-9.0, -4.0], [0.0, -2.0]),
    ):
        message = algorithm.broadcast(state, jnp.array([0]))
        update = client_update(algorithm, message, kept, batches, KEY)
        kept = update.kept
        np.testing.assert_allclose(update.mean["w"], w)
        np.testing.assert_allclose(kept.lost[0]["w"], lost)
        state = algorithm.server_update(
            state, jnp.array([0]), update._replace(kept=None), jnp.ones(1)
        )


def test_all_entries_change_nothing(small_task):
    method = MethodConfig(topk_share=1.0)
    for name in ("fedavg", "fedtp"):
        np.testing.assert_allclose(
            losses(f"{name}_topk", small_task, 2, method),
            losses(name, small_task, 2),
            rtol=1e-4,
        )


def test_a_plan_counts_what_is_sent(small_task):
    data = federate_sizes([9, 10, 12])
    sizes = [leaf.size for leaf in jax.tree.leaves(small_task.init(KEY))]
    plans = {}
    for name in ("fedavg", "fedavg_sign", "fedavg_uniform", "fedavg_sign_ema"):
        algorithm = algorithms.build(name, Setting(small_task, 3))
        plans[name] = make_plan(algorithm, small_task, data, 2, SCHEDULE)
    assert plans["fedavg"].bytes_up == 4 * sum(sizes)
    bits = sum(size + 32 for size in sizes)
    assert plans["fedavg_sign"].bytes_up == -(-bits // 8)
    assert plans["fedavg_sign_ema"].bytes_up == plans["fedavg_sign"].bytes_up
    bits = sum(4 * size + 64 for size in sizes)
    assert plans["fedavg_uniform"].bytes_up == -(-bits // 8)
    assert plans["fedavg_sign"].bytes_down == plans["fedavg"].bytes_down


def test_once_is_enough(small_task):
    with pytest.raises(InputError, match="fedavg_sign is compressed already"):
        algorithms.build("fedavg_sign_topk", Setting(small_task, 3))


def test_what_is_stacked_for_a_median_is_compressed_before(small_task):
    setting = Setting(small_task, 3)
    assert algorithms.build("fedavg_sign_median", setting).bits_up is not None
    with pytest.raises(InputError, match="cannot be compressed"):
        algorithms.build("fedavg_median_sign", setting)
