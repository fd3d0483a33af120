"""Rounds: sampling, one compilation, meshes, seeds, left-out clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_tp import tree
from fedjax_tp.algorithms import REGISTRY, Setting
from fedjax_tp.simulation.cohort import MESH_AXIS, LocalSchedule
from fedjax_tp.simulation.evaluation import make_evaluate, make_evaluate_rows
from fedjax_tp.simulation.rounds import (
    SimulationState,
    cohort_size,
    init_state,
    make_advance,
    make_round_of,
    sample_clients,
    state_sharding,
)
from fedjax_tp.types import InputError
from tests.conftest import KINDS, federate_sizes

KEY = jax.random.key(3)
SIZES = [5, 12, 1, 8, 3, 30]
SCHEDULE = LocalSchedule(4, 1, 30, 2)


@pytest.mark.parametrize(
    ("clients", "fraction", "expected"),
    [(50, 0.1, 5), (100, 0.05, 5), (10, 0.1, 1), (20, 0.01, 1), (100, 0.29, 29)],
)
def test_cohorts_have_the_papers_size(clients, fraction, expected):
    assert cohort_size(clients, fraction) == expected


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_a_fraction_outside_0_1_is_refused(fraction):
    with pytest.raises(InputError, match="sample fraction"):
        cohort_size(10, fraction)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**31))
def test_a_sample_is_a_set_of_clients(num_clients, size, seed):
    size = min(size, num_clients)
    chosen = sample_clients(jax.random.key(seed), num_clients, size).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert chosen[0] >= 0
    assert chosen[-1] < num_clients


def test_every_subset_is_equally_likely():
    keys = jax.random.split(jax.random.key(0), 10_000)
    subsets = jax.vmap(lambda key: sample_clients(key, 5, 2))(keys)
    _, counts = np.unique(np.asarray(subsets), axis=0, return_counts=True)
    assert len(counts) == 10
    assert np.abs(counts - 1000).max() < 120


def counting(algorithm):
    traces = []

    def client_step(carry, batch, progress):
        traces.append(1)
        return algorithm.client_step(carry, batch, progress)

    return algorithm._replace(client_step=client_step), traces


def same(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.parametrize("name", ["fedtp", "local"])
def test_one_compilation_and_the_same_bits_however_rounds_are_grouped(small_task, name):
    data = federate_sizes(SIZES)
    algorithm, traces = counting(REGISTRY[name](Setting(small_task, 6)))
    advance = make_advance(algorithm, 2, SCHEDULE, 5)
    at_once = init_state(algorithm, 6, KEY)
    at_once, records = advance(at_once, data, KEY, 0, 5)
    traced = len(traces)
    one_by_one = init_state(algorithm, 6, KEY)
    sampled = []
    for i in range(5):
        one_by_one, record = advance(one_by_one, data, KEY, i, 1)
        sampled.append(record.clients[0].tolist())
    # Cohorts of different sizes and counts of rounds: one trace, one compilation.
    assert len(traces) == traced
    assert advance._cache_size() == 1
    assert same(at_once, one_by_one)
    assert records.clients.tolist() == sampled
    assert len({tuple(ids) for ids in sampled}) > 1


def test_one_compilation_over_50_rounds_of_different_skew(small_task):
    algorithm, traces = counting(REGISTRY["fedtp"](Setting(small_task, 6)))
    data = federate_sizes(SIZES)
    advance = make_advance(algorithm, 3, LocalSchedule(4, 1, 59, 2), 1)
    state = init_state(algorithm, 6, KEY)
    rng = np.random.default_rng(0)
    longest = set()
    for i in range(50):
        sizes = np.ones(6, int) + rng.multinomial(53, rng.dirichlet(np.full(6, 0.2)))
        starts = np.cumsum(sizes) - sizes
        skewed = data._replace(
            start=jnp.array(starts, jnp.int32), size=jnp.array(sizes, jnp.int32)
        )
        state, _ = advance(state, skewed, KEY, i, 1)
        longest.add(int(sizes.max()))
        if i == 0:
            traced = len(traces)
    assert len(longest) > 10
    assert len(traces) == traced
    assert advance._cache_size() == 1


@pytest.mark.parametrize("name", KINDS)
def test_a_mesh_gives_the_result_of_one_device(small_task, name):
    data, test = federate_sizes(SIZES), federate_sizes([4, 3, 0, 2, 1, 7], seed=1)
    algorithm = REGISTRY[name](Setting(small_task, 6))
    results = []
    for devices in (1, 4):
        mesh = Mesh(np.array(jax.devices()[:devices]), (MESH_AXIS,))
        state = init_state(algorithm, 6, KEY)
        state = jax.device_put(state, state_sharding(state, mesh))
        schedule = SCHEDULE._replace(lanes=1, mesh=mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())
        inputs = jax.device_put((data, KEY), everywhere)
        state, records = make_advance(algorithm, 3, schedule, 4)(state, *inputs, 0, 4)
        evaluate = make_evaluate(
            algorithm, small_task, capacity=7, chunk_size=2, schedule=schedule
        )
        found = evaluate(state, jax.device_put(test, everywhere), inputs[0])
        results.append(jax.device_get((state, records, found)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_large_server_matrices_are_split_over_the_mesh():
    mesh = Mesh(np.array(jax.devices()[:2]), (MESH_AXIS,))
    shapes = {"wide": (16, 1 << 17), "odd": (1 << 12, 1023), "small": (4, 4)}
    server = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    found = state_sharding(SimulationState(server, None, server["small"]), mesh)
    assert found.server["wide"].spec == PartitionSpec(None, MESH_AXIS)
    assert found.server["odd"].is_fully_replicated
    assert found.server["small"].is_fully_replicated
    assert found.participations.is_fully_replicated


@pytest.mark.parametrize("name", ["fedtp_knn", "local"])
def test_seeds_at_once_are_the_seeds_one_by_one(small_task, name):
    data = federate_sizes(SIZES)
    other = federate_sizes(SIZES[::-1])
    algorithm = REGISTRY[name](Setting(small_task, 6))
    keys = jax.random.split(KEY, 2)
    stacked = data._replace(
        rows=jnp.stack([data.rows, data.rows[::-1]]),
        start=jnp.stack([data.start, other.start]),
        size=jnp.stack([data.size, other.size]),
    )
    states = jax.vmap(lambda key: init_state(algorithm, 6, key))(keys)
    together, records = make_advance(algorithm, 3, SCHEDULE, 4, over_seeds=True)(
        states, stacked, keys, 0, 4
    )
    evaluate_all = make_evaluate(
        algorithm,
        small_task,
        capacity=30,
        chunk_size=2,
        schedule=SCHEDULE,
        over_seeds=True,
    )
    evaluate = make_evaluate(
        algorithm, small_task, capacity=30, chunk_size=2, schedule=SCHEDULE
    )
    advance = make_advance(algorithm, 3, SCHEDULE, 4)
    all_found = evaluate_all(together, stacked, stacked)
    for i in range(2):
        own = data._replace(
            **{n: getattr(stacked, n)[i] for n in ("rows", "start", "size")}
        )
        alone, record = advance(init_state(algorithm, 6, keys[i]), own, keys[i], 0, 4)
        found = evaluate(alone, own, own)
        pairs = (
            jax.tree.map(lambda leaf, i=i: leaf[i], (together, all_found)),
            (alone, found),
        )
        for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)
        assert records.clients[:, i].tolist() == record.clients.tolist()


@pytest.mark.parametrize("name", KINDS)
def test_what_clients_keep_may_lie_elsewhere(small_task, name):
    data, test = federate_sizes(SIZES), federate_sizes([4, 3, 0, 2, 1, 7], seed=1)
    algorithm = REGISTRY[name](Setting(small_task, 6))
    expected, records = make_advance(algorithm, 3, SCHEDULE, 4)(
        init_state(algorithm, 6, KEY), data, KEY, 0, 4
    )
    state = init_state(algorithm, 6, KEY, with_kept=False)
    elsewhere = jax.device_get(
        tree.flatten_rows(tree.stack_copies(algorithm.init_kept(state.server), 6))
    )
    elsewhere = {dtype: matrix.copy() for dtype, matrix in elsewhere.items()}
    sample, round_of = make_round_of(algorithm, 3, SCHEDULE)
    for i in range(4):
        ids = np.asarray(sample(data, KEY, i))
        rows = {dtype: matrix[ids] for dtype, matrix in elsewhere.items()}
        state, rows, used, record = round_of(state, rows, data, KEY, i)
        assert record.clients[0].tolist() == records.clients[i].tolist()
        assert used.tolist() == ids.tolist()
        for dtype, matrix in elsewhere.items():
            matrix[ids] = rows[dtype]
    if jax.tree.leaves(expected.kept):
        for dtype, matrix in tree.flatten_rows(expected.kept).items():
            np.testing.assert_allclose(elsewhere[dtype], matrix, atol=1e-6)
    evaluate, evaluate_rows = (
        make(algorithm, small_task, capacity=7, chunk_size=2, schedule=SCHEDULE)
        for make in (make_evaluate, make_evaluate_rows)
    )
    found = evaluate_rows(state.server, elsewhere, jnp.arange(6), test, data)
    pair = (found, evaluate(expected, test, data))
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_participations_are_counted(small_task):
    algorithm = REGISTRY["fedavg"](Setting(small_task, 6))
    state = init_state(algorithm, 6, KEY)
    state, records = make_advance(algorithm, 3, SCHEDULE, 4)(
        state, federate_sizes(SIZES), KEY, 0, 4
    )
    expected = np.bincount(np.asarray(records.clients).ravel(), minlength=6)
    assert state.participations.tolist() == expected.tolist()
