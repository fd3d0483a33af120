"""Heterogeneity, weight divergence and its bound: tables, closed forms, quadratics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp.algorithms import ClientOptimizer, fedavg
from fedjax_tp.analysis import noniid
from fedjax_tp.analysis.layers import layers_of
from fedjax_tp.models import task as tasks
from fedjax_tp.models.cnn import LeNet
from fedjax_tp.types import Batch, InputError
from tests.algorithms.test_algorithms import quadratic_task
from tests.algorithms.test_baselines import rounds


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([0, 1, 0, 0], [0.25] * 4, 1.5),
        ([1, 0, 0, 0], [0.25] * 4, 1.5),
        ([0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], 2.0),
        ([0.2, 0.3, 0.5, 0], [0.2, 0.3, 0.5, 0], 0.0),
    ],
)
def test_the_distance_is_the_whole_of_the_differences(p, q, expected):
    p, q = np.array(p, float), np.array(q, float)
    assert noniid.earth_movers_distance(p, q) == pytest.approx(expected)
    # Classes have no order.
    order = np.array([2, 0, 3, 1])
    renumbered = noniid.earth_movers_distance(p[order], q[order])
    assert renumbered == pytest.approx(expected)


def test_what_is_no_distribution_is_refused():
    with pytest.raises(InputError, match="p is no distribution"):
        noniid.earth_movers_distance(np.array([3.0, 1.0]), np.array([0.5, 0.5]))
    with pytest.raises(InputError, match="q is no distribution"):
        noniid.earth_movers_distance(np.array([0.5, 0.5]), np.array([1.5, -0.5]))


@pytest.mark.parametrize(
    ("classes", "expected"), [(1, 1.8), (2, 1.6), (3, 1.4), (5, 1), (10, 0)]
)
def test_clients_with_some_classes_of_ten(classes, expected):
    counts = np.array(
        [[100 * ((j - i) % 10 < classes) for j in range(10)] for i in range(10)]
    )
    found = noniid.heterogeneity(counts)
    np.testing.assert_allclose(found.emd, expected, atol=1e-12)
    assert found.mean_emd == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(found.classes, classes)
    assert (found.population_classes, found.size_gini) == pytest.approx((10, 0))


@pytest.mark.parametrize(
    ("beta", "alpha", "expected"),
    [
        (0.025, 1, 1.44),
        (0.05, 1, 1.2),
        (0.1, 1, 0.9),
        (0.1, 0.5, 1.2),
        (0.25, 1, 0.514286),
    ],
)
def test_shared_samples_bring_a_client_nearer(beta, alpha, expected):
    own = np.zeros(10)
    own[3] = 4000
    mixed = own + alpha * beta * 40000 / 10
    found = noniid.earth_movers_distance(mixed / mixed.sum(), np.full(10, 0.1))
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_client_without_examples_is_named_and_left_out():
    found = noniid.heterogeneity(np.array([[5, 5], [0, 0], [10, 0]]))
    assert found.empty == (1,)
    assert np.isnan(found.emd).tolist() == [False, True, False]
    assert found.mean_emd == pytest.approx((10 * 0.5 + 10 * 0.5) / 20)
    with pytest.raises(InputError, match="no client has an example"):
        noniid.heterogeneity(np.zeros((2, 3), int))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any))
def test_gini_is_the_mean_difference_of_two_clients(sizes):
    values = np.array(sizes, float)
    differences = np.abs(values[:, None] - values).mean()
    expected = differences / (2 * values.mean())
    assert noniid.gini(values) == pytest.approx(expected, abs=1e-12)


def trajectory(curvatures, centres, steps, count, start=0.0, lr=0.1):
    """FedAvg's parameters after each round, central SGD's likewise, step by step."""
    task = quadratic_task(curvatures, centres, start)
    algorithm = fedavg(task, ClientOptimizer(lr, 0.0, 0.0))
    found = [rounds(algorithm, steps, n)[0].shared for n in range(1, count + 1)]
    w, central = start, []
    for _ in range(count):
        passed = []
        for _ in range(steps):
            passed.append(w)
            w -= lr * np.mean(
                [a * (w - c) for a, c in zip(curvatures, centres, strict=True)]
            )
        central.append((passed, w))
    return found, central


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1, [(0.15, 0.15, 0), (0.27, 0.27, 0), (0.366, 0.366, 0)]),
        (
            2,
            [
                (0.255, 0.27, 0.0555556),
                (0.42075, 0.4428, 0.0497967),
                (0.5284875, 0.553392, 0.0450034),
            ],
        ),
        (
            5,
            [
                (0.415965, 0.50424, 0.1750654),
                (0.5737322, 0.6694694, 0.1430045),
                (0.6335702, 0.7236117, 0.1244335),
            ],
        ),
    ],
)
def test_divergence_on_quadratics(steps, expected):
    found, central = trajectory((1.0, 3.0), (0.0, 1.0), steps, 3)
    for params, (_, w), (fed, cent, divergence) in zip(
        found, central, expected, strict=True
    ):
        value = jax.tree.leaves(params)[0]
        assert float(jnp.ravel(value)[0]) == pytest.approx(fed, abs=2e-6)
        assert w == pytest.approx(cent, abs=1e-6)
        like = jax.tree.map(lambda leaf, w=w: jnp.full_like(leaf, w), params)
        measured = float(noniid.weight_divergence(params, like))
        assert measured == pytest.approx(divergence, abs=2e-6)


def test_equal_curvatures_do_not_diverge():
    found, central = trajectory((2.0, 2.0), (0.0, 1.0), 5, 2)
    for params, (_, w) in zip(found, central, strict=True):
        like = jax.tree.map(lambda leaf, w=w: jnp.full_like(leaf, w), params)
        assert float(noniid.weight_divergence(params, like)) == pytest.approx(
            0, abs=1e-6
        )


@pytest.mark.parametrize(
    ("steps", "fixed"), [(1, 0.75), (5, 0.67013307), (20, 0.53216263)]
)
def test_fixed_points_of_averaging(steps, fixed):
    algorithm = fedavg(
        quadratic_task((1.0, 3.0), (0.0, 1.0), fixed), ClientOptimizer(0.1, 0.0, 0.0)
    )
    after = jax.tree.leaves(rounds(algorithm, steps, 1)[0].shared)[0]
    assert float(jnp.ravel(after)[0]) == pytest.approx(fixed, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.floats(0.1, 4), st.floats(0.1, 4)),
    st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.integers(1, 6),
    st.floats(0.01, 0.3),
)
def test_the_bound_holds_on_quadratics(curvatures, centres, shares, steps, lr):
    """Two classes with losses a_i / 2 (w - c_i)^2, two clients that mix them."""
    a, c = np.array(curvatures), np.array(centres)
    p = np.stack([np.array([s, 1 - s]) for s in shares])
    weights = np.array([0.5, 0.5])
    population = weights @ p
    emd = noniid.earth_movers_distance(p, population)
    fed = central = 1.0
    bound = 0.0
    for _ in range(4):
        local = np.full(2, fed)
        passed = []
        for _ in range(steps):
            local = local - lr * (p * a * (local[:, None] - c)).sum(axis=1)
            passed.append(np.abs(a * (central - c)).max())
            central -= lr * population @ (a * (central - c))
        fed = weights @ local
        bound = noniid.divergence_bound(bound, weights, emd, p, a, np.array(passed), lr)
        assert abs(fed - central) <= bound * (1 + 1e-9) + 1e-9


def test_the_bound_in_numbers():
    # One client of class 0 and one of class 1, lr 0.1: a_k is 1.1 and 1.3, EMD 1 each.
    arguments = (np.array([0.5, 0.5]), np.ones(2), np.eye(2), np.array([1.0, 3.0]))
    first = noniid.divergence_bound(0.0, *arguments, np.array([3.0, 2.0]), 0.1)
    # lr * mean over clients of (g(w_1) + a_k g(w_0)).
    assert first == pytest.approx(0.1 * ((2 + 1.1 * 3) + (2 + 1.3 * 3)) / 2)
    second = noniid.divergence_bound(first, *arguments, np.array([1.0]), 0.1)
    assert second == pytest.approx(first * (1.1 + 1.3) / 2 + 0.1)
    past = noniid.divergence_bound(1.0, *arguments, np.ones(9000), 10.0)
    assert past == float("inf")


def test_divergence_by_layer(vit_task):
    layers = layers_of(vit_task.init)
    params = jax.jit(vit_task.init)(jax.random.key(0))
    moved = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 1.5 if "patch_embedding" in str(path) else leaf,
        params,
    )
    found = np.asarray(noniid.weight_divergence_by_layer(moved, params, layers))
    place = layers.names.index("patch_embedding")
    assert found[place] == pytest.approx(0.5, abs=1e-6)
    assert np.delete(found, place).max() == 0


def test_running_statistics_are_no_weights():
    task = tasks.classification(LeNet(3, batch_norm=True), (8, 8, 1))
    params = jax.jit(task.init)(jax.random.key(0))
    moved = {
        **params,
        "batch_stats": jax.tree.map(lambda leaf: leaf + 9.0, params["batch_stats"]),
    }
    assert float(noniid.weight_divergence(moved, params)) == 0
    weights = sum(
        leaf.size
        for name, part in params.items()
        if name != "batch_stats"
        for leaf in jax.tree.leaves(part)
    )
    batch = Batch(jnp.ones((3, 8, 8, 1)), jnp.arange(3), jnp.ones(3, bool))
    found = jax.jit(lambda p: noniid.class_gradients(task, p, batch, 3))(params)
    assert found.shape == (3, weights)


def test_gradients_class_by_class(small_task):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(6, 8, 8, 1)), jnp.float32)
    y = jnp.array([0, 0, 1, 1, 1, 0])
    mask = jnp.array([True] * 5 + [False])
    params = small_task.init(jax.random.key(0))
    found = noniid.class_gradients(small_task, params, Batch(x, y, mask), 3)
    assert found.shape[0] == 3
    for label, rows in ((0, [0, 1]), (1, [2, 3, 4])):
        own = Batch(x[jnp.array(rows)], y[jnp.array(rows)], jnp.ones(len(rows), bool))
        gradient = jax.grad(
            lambda p, b=own: small_task.loss_of(small_task.apply(p, b.x), b)
        )(params)
        flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(gradient)])
        np.testing.assert_allclose(found[label], flat, atol=1e-6)
    assert not np.asarray(found[2]).any()
