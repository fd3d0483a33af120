"""Averages over rounds and robust aggregates, against what NumPy makes of the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp import algorithms
from fedjax_tp.algorithms import ClientOptimizer, MethodConfig, Setting, Update
from fedjax_tp.algorithms.base import message_for_use
from fedjax_tp.algorithms.robust import (
    coordinate_median,
    geometric_median,
    trimmed_mean,
)
from fedjax_tp.types import InputError
from tests.algorithms.test_baselines import TASK

KEY = jax.random.key(0)
AGGREGATES = [2.0, 6.0, 1.0, 5.0, 4.0]


def after_each(name, method):
    """What is trained from and what is used after each round of these aggregates."""
    setting = Setting(TASK, 2, ClientOptimizer(0.1, 0.0, 0.0), method=method)
    algorithm = algorithms.build(name, setting)
    state = algorithm.init(KEY)
    found = []
    for value in AGGREGATES:
        update = Update({"w": jnp.array(value)}, None, None, {})
        state = algorithm.server_update(
            state, jnp.arange(2), update, jnp.array([0.5, 0.5])
        )
        ids = jnp.array([0])
        trained = algorithm.broadcast(state, ids).shared["w"]
        used = message_for_use(algorithm, state, ids).shared["w"]
        found.append((float(trained), float(used)))
    return [pair[0] for pair in found], [pair[1] for pair in found]


def test_moving_average_of_aggregates():
    method = MethodConfig(ima_window=3, ima_start=3)
    trained, used = after_each("fedavg_ima", method)
    # From round 3 on the mean of the last three aggregates, not of adopted means.
    expected = [2.0, 6.0, 3.0, 4.0, 10 / 3]
    assert trained == pytest.approx(expected)
    assert used == trained


def test_moving_average_that_starts_before_its_window_is_full():
    method = MethodConfig(ima_window=5, ima_start=1)
    trained, _ = after_each("fedavg_ima", method)
    expected = [np.mean(AGGREGATES[: i + 1]) for i in range(5)]
    assert trained == pytest.approx(expected)


def test_the_mean_of_the_last_states_is_only_used():
    trained, used = after_each("fedavg_last", MethodConfig(last_window=2))
    assert trained == AGGREGATES
    assert used == pytest.approx([2.0, 4.0, 3.5, 3.0, 4.5])


def test_the_exponential_mean_has_weights_that_sum_to_one():
    trained, used = after_each("fedavg_ema", MethodConfig(ema_decay=0.5))
    assert trained == AGGREGATES
    for count, found in enumerate(used, 1):
        weights = 0.5 ** np.arange(count)[::-1]
        expected = np.average(AGGREGATES[:count], weights=weights)
        assert found == pytest.approx(expected, rel=1e-5)
    assert after_each("fedavg_ema", MethodConfig(ema_decay=0.0))[1] == AGGREGATES


def test_before_any_round_the_initial_model_is_used():
    for name in ("fedavg_last", "fedavg_ema"):
        algorithm = algorithms.build(name, Setting(TASK, 2))
        state = algorithm.init(KEY)
        used = message_for_use(algorithm, state, jnp.array([0])).shared["w"]
        assert float(used) == 2.0


def test_averages_stand_behind_one_another():
    method = MethodConfig(ima_window=5, ima_start=1, last_window=2)
    trained, used = after_each("fedavg_ima_last", method)
    means = [np.mean(AGGREGATES[: i + 1]) for i in range(5)]
    assert trained == pytest.approx(means)
    pairs = [means[0], *(np.mean(means[i - 1 : i + 1]) for i in range(1, 5))]
    assert used == pytest.approx(pairs)


ROWS = {"a": jnp.array([1.0, 2.0, 3.0, 4.0, 100.0])}
EQUAL = jnp.full(5, 0.2)


def test_robust_aggregates_of_the_table():
    assert float(coordinate_median(ROWS, EQUAL)["a"]) == 3
    assert float(trimmed_mean(ROWS, EQUAL, share=0.2)["a"]) == 3
    assert float(trimmed_mean(ROWS, EQUAL, share=0.0)["a"]) == pytest.approx(22)
    # In one dimension the geometric median is the median.
    assert float(geometric_median(ROWS, EQUAL)["a"]) == pytest.approx(3, abs=1e-2)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(
            st.floats(-50, 50, width=32, allow_subnormal=False), min_size=2, max_size=2
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(0, 3),
    st.floats(0, 0.49),
)
def test_clients_that_do_not_count_change_nothing(rows, extra, share):
    values = np.array(rows, np.float32)
    count = len(values)
    stacked = {
        "w": jnp.asarray(np.concatenate([values, np.zeros((extra, 2), np.float32)]))
    }
    weights = jnp.asarray(
        np.concatenate([np.full(count, 1 / count), np.zeros(extra)]), jnp.float32
    )
    np.testing.assert_allclose(
        coordinate_median(stacked, weights)["w"],
        np.median(values, axis=0),
        rtol=1e-5,
        atol=1e-5,
    )
    cut = int(np.floor(share * count + 1e-4))
    kept = np.sort(values, axis=0)[cut : count - cut]
    np.testing.assert_allclose(
        trimmed_mean(stacked, weights, share=share)["w"],
        kept.mean(axis=0),
        rtol=1e-4,
        atol=1e-4,
    )


def test_the_geometric_median_has_the_least_sum_of_distances():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(6, 3)).astype(np.float32)
    points[0] += 40
    weights = rng.uniform(0.5, 1.5, 6).astype(np.float32)
    weights /= weights.sum()
    stacked = {"a": jnp.asarray(points[:, :1]), "b": jnp.asarray(points[:, 1:])}
    found = geometric_median(stacked, jnp.asarray(weights))
    center = np.concatenate([found["a"], found["b"]])

    def total(c):
        return float(weights @ np.linalg.norm(points - c, axis=1))

    for direction in np.concatenate([np.eye(3), -np.eye(3)]):
        assert total(center) <= total(center + 0.02 * direction)
    assert total(center) < total(weights @ points)


def test_one_bad_client_moves_the_mean_alone(small_task):
    setting = Setting(small_task, 5)
    good = small_task.init(KEY)
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4 + [leaf + 1e6]), good)
    for name in ("fedavg_median", "fedavg_trimmed", "fedavg_geometric"):
        algorithm = algorithms.build(name, setting)
        state = algorithm.server_update(
            algorithm.init(KEY),
            jnp.arange(5),
            Update(None, (rows, None), None, {}),
            EQUAL,
        )
        for a, b in zip(*map(jax.tree.leaves, (state.shared, good)), strict=True):
            np.testing.assert_allclose(a, b, atol=0.05)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedavg_median_ima", "_ima comes first"),
        ("local_ima", "local averages nothing"),
        ("hierarchical_median", "hierarchical averages nothing on the server"),
        ("decentralized_trimmed", "averages nothing"),
        ("local_ema", "clients of local are sent nothing"),
        ("local_last", "clients of local are sent nothing"),
        ("scaffold_ima", "more than a model"),
        ("scaffold_median_sign", "cannot be compressed"),
    ],
)
def test_what_would_change_nothing_is_refused(small_task, name, said):
    with pytest.raises(InputError, match=said):
        algorithms.build(name, Setting(small_task, 3))


def test_a_moving_average_of_medians():
    algorithm = algorithms.build(
        "fedavg_ima_median",
        Setting(TASK, 3, method=MethodConfig(ima_window=2, ima_start=1)),
    )
    state = algorithm.init(KEY)
    for rows in ([1.0, 2.0, 50.0], [4.0, 3.0, 90.0]):
        update = Update(None, ({"w": jnp.array(rows)}, None), None, {})
        weights = jnp.full(3, 1 / 3)
        state = algorithm.server_update(state, jnp.arange(3), update, weights)
    sent = algorithm.broadcast(state, jnp.array([0])).shared["w"]
    assert float(sent) == pytest.approx((2 + 4) / 2)


def test_somebody_is_left_when_all_but_half_are_cut():
    rows = {"a": jnp.arange(10.0)}
    found = trimmed_mean(rows, jnp.full(10, 0.1), share=0.49999)
    assert float(found["a"]) == pytest.approx(4.5)


def test_a_decay_near_one_still_has_weights_that_sum_to_one():
    _, used = after_each("fedavg_ema", MethodConfig(ema_decay=0.9999999))
    means = [np.mean(AGGREGATES[: i + 1]) for i in range(5)]
    assert used == pytest.approx(means, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedavg_what", "unknown algorithm 'fedavg_what'; allowed are"),
        ("ema", "unknown algorithm 'ema'"),
        ("fedavg_ema, fedavg_ema", "each once"),
    ],
)
def test_names_that_are_none(name, said):
    with pytest.raises(InputError, match=said):
        algorithms.resolve(name)


def test_names_with_underscores_keep_their_meaning(small_task):
    setting = Setting(small_task, 3)
    for name in ("fedtp_vanilla_ema", "lg_fedavg_median", "fedavg_ft_knn_last"):
        assert algorithms.build(name, setting).name == name
