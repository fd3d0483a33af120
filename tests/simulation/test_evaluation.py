"""Evaluation against a loop over clients, and its figures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_tp.algorithms import REGISTRY, Message, Setting
from fedjax_tp.data.federated import gather
from fedjax_tp.models.task import Metrics
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.evaluation import (
    accuracies,
    make_evaluate,
    own_batches,
    summarize,
)
from fedjax_tp.simulation.rounds import init_state, make_advance
from fedjax_tp.types import Batch
from tests.conftest import KINDS, federate_sizes

KEY = jax.random.key(1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("chunk_size", [2, 4])
def test_every_client_is_measured_with_its_own_parameters(small_task, name, chunk_size):
    sizes = [7, 0, 300]
    data = federate_sizes(sizes)
    algorithm = REGISTRY[name](Setting(small_task, 3))
    state = init_state(algorithm, 3, KEY)
    train = federate_sizes([9, 9, 9], seed=1)
    schedule = LocalSchedule(3, 2, 9, 2)
    advance = make_advance(algorithm, 2, schedule, 2)
    state, _ = advance(state, train, KEY, 0, 2)
    evaluate = make_evaluate(
        algorithm,
        small_task,
        capacity=300,
        chunk_size=chunk_size,
        schedule=schedule,
    )
    found = evaluate(state, data, train)
    for client, size in enumerate(sizes):
        rows = int(data.start[client]) + np.arange(size)
        message = algorithm.broadcast(state.server, jnp.array([client]))
        own = jax.tree.map(lambda leaf: leaf[0], message.personal)
        kept = jax.tree.map(lambda leaf, c=client: leaf[c], state.kept)
        params = algorithm.client_params(Message(message.shared, own), kept)
        x = (np.asarray(data.x)[rows].astype(np.float32) - 60) / 70
        batch = Batch(jnp.asarray(x), data.y[rows], jnp.ones(size, bool))
        expected = small_task.metrics(params, batch)
        assert found.examples[client] == size
        assert found.correct[client] == expected.correct
        np.testing.assert_allclose(found.loss[client], expected.loss, rtol=1e-4)


@pytest.mark.parametrize("name", ["fedbabu", "fedtp_knn"])
def test_clients_adapt_with_their_own_training_data_first(small_task, name):
    test, train = federate_sizes([7, 0, 40]), federate_sizes([9, 5, 13], seed=1)
    algorithm = REGISTRY[name](Setting(small_task, 3))
    state = init_state(algorithm, 3, KEY)
    schedule = LocalSchedule(4, 1, 13, 1)
    evaluate = make_evaluate(
        algorithm, small_task, capacity=40, chunk_size=2, schedule=schedule
    )
    found = evaluate(state, test, train)
    predict = algorithm.predict or small_task.apply
    for client in (0, 2):
        id, size = jnp.int32(client), train.size[client]
        message = algorithm.broadcast(state.server, id[None])
        own = jax.tree.map(lambda leaf: leaf[0], message.personal)
        kept = jax.tree.map(lambda leaf, c=client: leaf[c], state.kept)
        params = algorithm.client_params(Message(message.shared, own), kept)
        order_key, key = jax.random.split(jax.random.fold_in(jax.random.key(0), client))
        batches = own_batches(order_key, train, id, size, schedule)
        adapted = algorithm.adapt(params, batches, key)
        places = jnp.arange(40)
        batch = gather(test, id, places, places < test.size[client])
        expected = small_task.score(predict(adapted, batch.x), batch)
        assert found.correct[client] == expected.correct
        np.testing.assert_allclose(found.loss[client], expected.loss, rtol=1e-4)


def test_a_clients_own_batches_are_all_its_examples_once():
    data = federate_sizes([5, 9])
    batches = own_batches(
        KEY, data, jnp.int32(1), jnp.int32(9), LocalSchedule(4, 1, 9, 1)
    )
    assert batches.mask.tolist() == [[True] * 4, [True] * 4, [True] + [False] * 3]
    rows = np.asarray(data.rows)[int(data.start[1]) + np.arange(9)]
    expected = (np.asarray(data.x)[rows].astype(np.float32) - 60) / 70
    found = np.asarray(batches.x)[np.asarray(batches.mask)]
    order = [int(np.argmin(np.abs(expected - x).sum(axis=(1, 2, 3)))) for x in found]
    assert sorted(order) == list(range(9))
    assert order != list(range(9))
    np.testing.assert_allclose(found, expected[order], atol=1e-6)


def test_sequences_have_a_figure_of_all_positions():
    metrics = Metrics(
        *(np.array([a, b]) for a, b in ((1.0, 2), (3, 4), (4, 6), (2, 3)))
    )
    assert summarize(metrics).positions == pytest.approx(0.5)
    assert summarize(metrics._replace(positions=None)).positions is None


def test_figures_leave_out_clients_without_test_examples():
    correct = np.array([1.0, 2.0, 0.0, 3.0], np.float32)
    examples = np.array([3.0, 2.0, 0.0, 5.0], np.float32)
    metrics = Metrics(correct, 2 * examples, examples)
    by_client = accuracies(metrics)
    assert np.isnan(by_client[2])
    summary = summarize(metrics)
    assert summary.pooled == pytest.approx(6 / 10)
    assert summary.mean == pytest.approx((1 / 3 + 1 + 0.6) / 3)
    assert summary.std == pytest.approx(np.std([1 / 3, 1, 0.6]))
    assert summary.worst_decile == pytest.approx(1 / 3)
    assert summary.loss == pytest.approx(2.0)


def test_the_worst_decile_is_a_tenth_of_the_clients():
    examples = np.full(30, 10.0, np.float32)
    correct = np.arange(30, dtype=np.float32) / 3
    summary = summarize(Metrics(correct, correct, examples))
    assert summary.worst_decile == pytest.approx(np.mean([0, 1 / 30, 2 / 30]))


def test_a_small_test_split_gives_thirds():
    metrics = Metrics(np.array([2.0]), np.array([1.0]), np.array([3.0]))
    assert summarize(metrics).pooled == pytest.approx(2 / 3)
