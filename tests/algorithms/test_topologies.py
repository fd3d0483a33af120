"""Edges, graphs without a server, partial averaging, RTFA: closed forms, properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp import algorithms, tree
from fedjax_tp.algorithms import (
    ClientOptimizer,
    MethodConfig,
    Setting,
    Update,
    check_setting,
)
from fedjax_tp.algorithms.decentralized import (
    decentralized,
    is_connected,
    make_graph,
    metropolis_weights,
)
from fedjax_tp.algorithms.hierarchical import assign_edges, hierarchical
from fedjax_tp.types import Batch, InputError
from tests.algorithms.test_algorithms import quadratic_task
from tests.algorithms.test_baselines import TASK

KEY = jax.random.key(0)
SGD = ClientOptimizer(0.1, 0.0, 0.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(0, 1000))
def test_edges_balance_what_clients_cannot(num_edges, seed):
    rng = np.random.default_rng(seed)
    counts = np.zeros((12, 4), int)
    counts[np.arange(12), np.arange(12) % 4] = rng.integers(5, 30, 12)
    found = assign_edges(counts, num_edges)
    sizes = np.bincount(found, minlength=num_edges)
    assert sizes.max() - sizes.min() <= 1
    population = counts.sum(axis=0) / counts.sum()

    def distance(edge_of):
        held = np.stack([counts[edge_of == e].sum(axis=0) for e in range(num_edges)])
        return np.abs(held - held.sum(axis=1, keepdims=True) * population).sum()

    in_blocks = np.repeat(np.arange(num_edges), 12 // num_edges)
    at_random = np.mean([distance(rng.permutation(in_blocks)) for _ in range(20)])
    assert distance(found) <= at_random


def test_edges_of_two_classes_get_both():
    counts = np.array([[10, 0], [10, 0], [0, 10], [0, 10]])
    found = assign_edges(counts, 2)
    assert found[0] != found[1]
    assert found[2] != found[3]
    with pytest.raises(InputError, match="edges is 5; allowed is 1 to 4"):
        assign_edges(counts, 5)
    with pytest.raises(InputError, match="edges is 5; allowed is 1 to 2"):
        algorithms.build("hierarchical", Setting(TASK, 2, method=MethodConfig(edges=5)))


def test_edges_average_every_round_and_the_cloud_sometimes():
    edge_of = np.array([0, 0, 1, 1])
    algorithm = hierarchical(
        quadratic_task((1.0,) * 4, (0.0,) * 4),
        SGD,
        edge_of,
        np.array([30.0, 10.0]),
        cloud_every=2,
    )
    state = algorithm.init(KEY)
    weights = jnp.array([0.5, 0.25, 0.25])

    def after(state, values):
        update = Update(None, {"w": jnp.array(values)}, None, {})
        return algorithm.server_update(state, jnp.array([0, 1, 2]), update, weights)

    # Client 3 is not there; edge 0 weighs its two by 2 to 1.
    state = after(state, [3.0, 6.0, 5.0])
    np.testing.assert_allclose(state.edges["w"], [4.0, 5.0], rtol=1e-6)
    sent = algorithm.broadcast(state, jnp.array([1, 3, 9]))
    np.testing.assert_allclose(sent.personal["w"], [4.0, 5.0, 5.0], rtol=1e-6)
    assert sent.shared is None
    state = after(state, [4.0, 4.0, 8.0])
    # The cloud: edges of 30 and 10 examples.
    np.testing.assert_allclose(state.edges["w"], [5.0, 5.0], rtol=1e-6)


def test_a_state_knows_its_edges_whoever_reads_it():
    """A checkpoint of edges taken in turns, read where classes are known."""
    trained, reader = (
        hierarchical(TASK, SGD, np.array(edge_of), np.ones(2), cloud_every=9)
        for edge_of in ([0, 1], [1, 0])
    )
    state = trained.init(KEY)._replace(edges={"w": jnp.array([3.0, 7.0])})
    sent = reader.broadcast(state, jnp.array([0, 1]))
    assert sent.personal["w"].tolist() == [3.0, 7.0]


def test_an_edge_without_a_sampled_client_keeps_its_model():
    algorithm = hierarchical(TASK, SGD, np.array([0, 1]), np.ones(2), cloud_every=9)
    state = algorithm.init(KEY)
    update = Update(None, {"w": jnp.array([7.0])}, None, {})
    state = algorithm.server_update(state, jnp.array([1]), update, jnp.ones(1))
    assert state.edges["w"].tolist() == [2.0, 7.0]


@pytest.mark.parametrize(
    ("kind", "clients", "degree", "neighbours"),
    [
        ("ring", 7, 4, 2),
        ("torus", 12, 4, 4),
        ("regular", 10, 3, 3),
        ("regular", 9, 4, 4),
    ],
)
def test_graphs(kind, clients, degree, neighbours):
    graph = make_graph(kind, clients, degree, seed=1)
    assert (graph == graph.T).all()
    assert not graph.diagonal().any()
    assert (graph.sum(axis=1) == neighbours).all()
    assert is_connected(graph)
    again = make_graph(kind, clients, degree, seed=1)
    assert (graph == again).all()


def test_a_random_graph_is_random():
    graphs = [make_graph("regular", 12, 4, seed=seed) for seed in range(3)]
    ring = make_graph("ring", 12, 2)
    assert any((graphs[0] != other).any() for other in graphs[1:])
    assert any((graph & ring).sum() != 24 for graph in graphs)


@pytest.mark.parametrize(
    ("kind", "clients", "degree", "said"),
    [
        ("ring", 2, 2, "a graph of 2 clients; allowed is 3 to 4096"),
        ("torus", 7, 4, "a torus of 7 clients; allowed are numbers"),
        ("regular", 9, 3, "graph degree is 3 with 9 clients"),
        ("regular", 5, 5, "graph degree is 5 with 5 clients; allowed is 2 to 4"),
        ("star", 5, 2, "graph is 'star'; allowed is one of ring, torus, regular"),
    ],
)
def test_graphs_that_are_none(kind, clients, degree, said):
    with pytest.raises(InputError, match=said):
        make_graph(kind, clients, degree)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=10, max_size=10))
def test_mixing_is_doubly_stochastic_whoever_is_there(active):
    graph = make_graph("regular", 10, 4)
    weights = np.asarray(metropolis_weights(jnp.asarray(graph), jnp.array(active)))
    np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-6)
    np.testing.assert_allclose(weights, weights.T)
    assert weights.min() >= -1e-6
    away = ~np.array(active)
    np.testing.assert_array_equal(weights[away], np.eye(10)[away])


def test_a_ring_mixes_at_its_known_rate():
    """All weights are 1/3; eigenvalues are 1/3 + 2/3 cos(2 pi k / n)."""
    weights = metropolis_weights(
        jnp.asarray(make_graph("ring", 8, 2)), jnp.ones(8, bool)
    )
    found = np.sort(np.linalg.eigvalsh(np.asarray(weights)))
    expected = np.sort(1 / 3 + 2 / 3 * np.cos(2 * np.pi * np.arange(8) / 8))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_clients_without_a_server_take_means_with_neighbours():
    algorithm = decentralized(
        quadratic_task((1.0,) * 4, (0.0,) * 4), SGD, make_graph("ring", 4, 2)
    )
    update = Update(None, {"w": jnp.array([3.0, 6.0, 9.0])}, None, {})
    state = algorithm.init(KEY)
    # Client 3 is left out: the ring is a path of 0, 1, 2 in this round.
    state = algorithm.server_update(
        state,
        jnp.array([0, 1, 2, 4]),
        update._replace(personal={"w": jnp.array([3.0, 6.0, 9.0, 99.0])}),
        jnp.array([0.5, 0.3, 0.2, 0.0]),
    )
    np.testing.assert_allclose(state.models["w"], [4.0, 6.0, 8.0, 0.0], atol=1e-6)
    sent = algorithm.broadcast(state, jnp.array([2]))
    np.testing.assert_allclose(sent.personal["w"], [8.0], atol=1e-6)
    with pytest.raises(InputError, match="symmetric"):
        decentralized(TASK, SGD, np.triu(np.ones((3, 3), bool)))


def test_partial_averaging_keeps_the_rest(small_task):
    method = MethodConfig(partial_layers="head")
    algorithm = algorithms.build("partial", Setting(small_task, 3, method=method))
    state = algorithm.init(KEY)
    named = {
        tree.path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(state.shared)
    }
    assert named == {"head/kernel", "head/bias"}
    with pytest.raises(InputError, match="partial layers is 'nothing'"):
        algorithms.build(
            "partial",
            Setting(small_task, 3, method=MethodConfig(partial_layers="nothing")),
        )
    with pytest.raises(InputError, match="allowed is a regular expression"):
        check_setting(Setting(small_task, 3, method=MethodConfig(partial_layers="(")))
    with pytest.raises(InputError, match="graph is star; allowed is one of ring"):
        check_setting(Setting(small_task, 3, method=MethodConfig(graph="star")))


def test_rtfa_ends_between_the_average_and_the_client():
    """The minimum of a/2 (w - c)^2 + lambda (w - w0)^2 is (a c + 2 lambda w0) / (a + 2
    lambda)."""
    method = MethodConfig(tune_epochs=200, rtfa_lambda=0.5)
    algorithm = algorithms.build("rtfa", Setting(TASK, 2, SGD, method=method))
    batches = Batch(jnp.zeros((1, 1, 1)), jnp.ones((1, 1), int), jnp.ones((1, 1), bool))
    found = jax.jit(algorithm.adapt)({"w": jnp.array(2.0)}, batches, KEY)
    # Client 1 has a = 3, c = 1.
    assert float(found["w"]) == pytest.approx((3 * 1 + 2) / (3 + 1), abs=1e-5)
    free = algorithms.build(
        "rtfa", Setting(TASK, 2, SGD, method=MethodConfig(rtfa_lambda=0.0))
    )
    tuned = algorithms.build("fedavg_ft", Setting(TASK, 2, SGD))
    for adapt in (free.adapt, tuned.adapt):
        after = float(jax.jit(adapt)({"w": jnp.array(2.0)}, batches, KEY)["w"])
        assert after == pytest.approx(2 - 0.1 * 3)
