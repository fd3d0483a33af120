"""Rounds: sampling, one compilation, left-out clients, plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp import tree
from fedjax_tp.algorithms import REGISTRY, Setting
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.plan import make_plan
from fedjax_tp.simulation.rounds import (
    cohort_size,
    init_state,
    make_advance,
    sample_clients,
)
from fedjax_tp.types import InputError
from tests.conftest import federate_sizes

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


def test_participations_are_counted(small_task):
    algorithm = REGISTRY["fedavg"](Setting(small_task, 6))
    state = init_state(algorithm, 6, KEY)
    state, records = make_advance(algorithm, 3, SCHEDULE, 4)(
        state, federate_sizes(SIZES), KEY, 0, 4
    )
    expected = np.bincount(np.asarray(records.clients).ravel(), minlength=6)
    assert state.participations.tolist() == expected.tolist()


@pytest.mark.parametrize("name", REGISTRY)
def test_when_every_client_diverges_the_server_stays_as_it_was(small_task, name):
    data = federate_sizes([6, 6])
    data = data._replace(x=jnp.full(data.x.shape, 1e38))
    algorithm = REGISTRY[name](Setting(small_task, 2))
    before = init_state(algorithm, 2, KEY)
    state, records = make_advance(algorithm, 2, LocalSchedule(3, 1, 6, 2), 1)(
        init_state(algorithm, 2, KEY), data, KEY, 0, 1
    )
    assert same(before, state)
    assert not records.is_finite.any()


def test_a_plan_counts_what_is_sent_and_held(small_task):
    data = federate_sizes(SIZES)
    params = tree.num_elements(small_task.init(KEY))
    attention = 64 * 3
    plans = {
        name: make_plan(build(Setting(small_task, 6)), small_task, data, 2, SCHEDULE)
        for name, build in REGISTRY.items()
    }
    assert {plan.client_parameters for plan in plans.values()} == {params}
    down = {name: plan.bytes_down for name, plan in plans.items()}
    assert down == {
        "fedtp": 4 * params,
        "fedtp_vanilla": 4 * (params - attention),
        "fedavg": 4 * params,
        "local": 0,
    }
    assert {n: p.bytes_up for n, p in plans.items()} == down
    trunk = 128 * 128 + 128
    heads = 129 * attention
    assert plans["fedtp"].hypernetwork_parameters == trunk + heads + 6 * 128
    assert plans["local"].state_bytes >= 6 * 4 * params
