"""The vmapped cohort against a plain Python loop over clients and batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from fedjax_tp import algorithms, tree
from fedjax_tp.algorithms import REGISTRY, ClientOptimizer, Message, Setting
from fedjax_tp.data.federated import shuffled
from fedjax_tp.models.task import Metrics, Task
from fedjax_tp.simulation.cohort import (
    MESH_AXIS,
    LocalSchedule,
    _first_turn,
    _timeline,
    _turn,
    num_local_steps,
    run_cohort,
)
from fedjax_tp.types import Batch
from tests.conftest import federate_sizes

KEY = jax.random.key(5)
SIZES = [5, 12, 1, 8, 3]


def run(algorithm, data, ids, schedule, key=KEY):
    state = algorithm.init(jax.random.key(0))

    @jax.jit
    def compiled(data, ids, key):
        kept = tree.stack_copies(algorithm.init_kept(state), len(ids))
        message = algorithm.broadcast(state, ids)
        return run_cohort(algorithm, data, message, kept, ids, key, schedule)

    return compiled(data, jnp.array(ids), key)


def loop_over_clients(task, params_of, data, ids, batch_size, epochs, lr):
    """FedAvg's local training as one would write it by hand, without padding."""
    grad = jax.jit(jax.grad(task.loss))
    trained = []
    for client in ids:
        start, size = int(data.start[client]), int(data.size[client])
        order_key, step_key = jax.random.split(jax.random.fold_in(KEY, client))
        params, velocity, step = params_of(client), None, 0
        for epoch in range(epochs):
            epoch_key = jax.random.fold_in(order_key, epoch)
            order = np.asarray(shuffled(epoch_key, jnp.array(size), size))
            for first in range(0, size, batch_size):
                rows = start + order[first : first + batch_size]
                x = (np.asarray(data.x)[rows].astype(np.float32) - 60) / 70
                batch = Batch(
                    jnp.asarray(x), data.y[rows], jnp.ones(len(rows), dtype=bool)
                )
                key = jax.random.fold_in(step_key, step)
                grads = grad(params, batch, key)
                velocity = (
                    grads
                    if velocity is None
                    else jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
                )
                params = jax.tree.map(lambda p, v: p - lr * v, params, velocity)
                step += 1
        trained.append(params)
    return trained


@pytest.mark.smoke
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_cohort_is_a_loop_over_clients(vit_task, lanes):
    data = federate_sizes(SIZES)
    ids = [0, 1, 2, 4]
    algorithm = REGISTRY["fedtp"](Setting(vit_task, 5, ClientOptimizer(0.1, 0.9)))
    result = run(algorithm, data, ids, LocalSchedule(4, 2, 12, lanes))
    state = algorithm.init(jax.random.key(0))

    def params_of(client):
        message = algorithm.broadcast(state, jnp.array([client]))
        own = jax.tree.map(lambda leaf: leaf[0], message.personal)
        return algorithm.client_params(
            Message(message.shared, own), algorithm.init_kept(state)
        )

    trained = loop_over_clients(vit_task, params_of, data, ids, 4, 2, 0.1)
    sizes = np.array([SIZES[i] for i in ids])
    weights = sizes / sizes.sum()
    np.testing.assert_allclose(result.weights, weights, rtol=1e-6)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *trained)
    personal = jax.tree.leaves(result.update.personal)
    shared = jax.tree.leaves(result.update.mean)
    assert len(personal) + len(shared) == len(jax.tree.leaves(stacked))
    for found, expected in zip(
        jax.tree.leaves(tree.merge(result.update.personal, result.update.mean)),
        jax.tree.leaves(stacked),
        strict=True,
    ):
        if found.shape != expected.shape:
            expected = np.tensordot(weights, expected, axes=1)
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("order", "lanes", "capacity", "padding"),
    [
        ([3, 1, 0, 2], 1, 20, True),
        ([1, 0, 3, 2], 3, 12, True),
        ([2, 3, 1, 0], 4, 20, False),
    ],
)
def test_order_chunks_and_padding_change_nothing(
    small_task, order, lanes, capacity, padding
):
    data = federate_sizes(SIZES)
    algorithm = REGISTRY["fedtp_vanilla"](Setting(small_task, 5))
    expected = run(algorithm, data, [0, 1, 2, 3], LocalSchedule(4, 1, 12, 2))
    ids = [*order, 5] if padding else order
    found = run(algorithm, data, ids, LocalSchedule(4, 1, capacity, lanes))
    for a, b in zip(
        jax.tree.leaves(found.update.mean),
        jax.tree.leaves(expected.update.mean),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for a, b in zip(
        jax.tree.leaves(found.update.kept),
        jax.tree.leaves(expected.update.kept),
        strict=True,
    ):
        np.testing.assert_allclose(a[: len(order)], b[jnp.array(order)], atol=1e-6)
    if padding:
        assert found.weights[-1] == 0


def test_the_same_inputs_give_the_same_bits(small_task):
    data = federate_sizes(SIZES)
    algorithm = REGISTRY["fedavg"](Setting(small_task, 5))
    schedule = LocalSchedule(4, 1, 12, 2)
    # Each call compiles anew: neither the program nor its arithmetic may vary.
    first, second = (run(algorithm, data, [0, 1, 3], schedule) for _ in range(2))
    assert all(
        map(
            np.array_equal,
            jax.tree.leaves(first.update),
            jax.tree.leaves(second.update),
        )
    )


def line_task() -> Task:
    """y = w x + b, mean squared error; x is the pixel, y the label."""

    def loss(params, batch, key):
        x = batch.x[:, 0, 0, 0]
        error = (params["w"] * x + params["b"] - batch.y) ** 2
        return jnp.sum(jnp.where(batch.mask, error, 0)) / jnp.maximum(
            jnp.sum(batch.mask), 1
        )

    return Task(
        lambda key: {"w": jnp.zeros(()), "b": jnp.zeros(())},
        lambda params, x: x,
        loss,
        lambda params, batch: Metrics(*jnp.zeros(3)),
    )


def test_a_client_with_less_than_a_batch_trains_on_what_it_has():
    data = federate_sizes([5])
    x = jnp.arange(5.0).reshape(5, 1, 1, 1) * jnp.ones((5, 8, 8, 1))
    data = data._replace(
        x=x, y=2 * jnp.arange(5) + 1, mean=jnp.zeros(1), std=jnp.ones(1)
    )
    algorithm = algorithms.fedavg(line_task(), ClientOptimizer(0.1, 0.0))
    result = run(algorithm, data, [0], LocalSchedule(64, 1, 5, 1))
    np.testing.assert_allclose(result.update.mean["w"], 2.8, rtol=1e-6)
    np.testing.assert_allclose(result.update.mean["b"], 1.0, rtol=1e-6)


def test_steps_count_the_last_partial_batch():
    schedule = LocalSchedule(64, 1, 130, 1)
    sizes = jnp.array([0, 5, 7, 64, 65, 130])
    assert num_local_steps(sizes, schedule).tolist() == [0, 1, 1, 1, 2, 3]
    assert num_local_steps(sizes, schedule._replace(local_epochs=3)).tolist() == [
        0,
        3,
        3,
        3,
        6,
        9,
    ]


def test_every_client_moves_however_small(small_task):
    data = federate_sizes([5, 7, 64, 130])
    algorithm = REGISTRY["local"](Setting(small_task, 4))
    start = small_task.init(jax.random.key(0))
    result = run(algorithm, data, [0, 1, 2, 3], LocalSchedule(64, 1, 130, 2))
    moved = jax.tree.map(
        lambda new, old: jnp.abs(new - old).reshape(4, -1).max(axis=1),
        result.update.kept,
        start,
    )
    assert np.min(sum(jax.tree.leaves(moved))) > 1e-3


def test_a_client_that_diverges_is_left_out(small_task):
    data = federate_sizes([6, 6, 6])
    # Client 1's pixels overflow float32 in the first layer.
    x = data.x.astype(jnp.float32).at[6:12].set(1e38)
    data = data._replace(x=x)
    algorithm = REGISTRY["fedtp"](Setting(small_task, 3))
    result = run(algorithm, data, [0, 1, 2], LocalSchedule(3, 1, 6, 3))
    assert result.is_finite.tolist() == [True, False, True]
    np.testing.assert_allclose(result.weights, [0.5, 0.0, 0.5])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.update.mean))
    alone = run(algorithm, data, [0, 2], LocalSchedule(3, 1, 6, 2))
    for a, b in zip(
        jax.tree.leaves(result.update.mean),
        jax.tree.leaves(alone.update.mean),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_client_update_is_what_the_simulation_runs(small_task):
    data = federate_sizes([6])
    algorithm = REGISTRY["fedtp_vanilla"](Setting(small_task, 1))
    result = run(algorithm, data, [0], LocalSchedule(3, 1, 6, 1))
    state = algorithm.init(jax.random.key(0))
    order_key, step_key = jax.random.split(jax.random.fold_in(KEY, 0))
    order = shuffled(jax.random.fold_in(order_key, 0), jnp.array(6), 6).reshape(2, 3)
    batches = Batch(
        (data.x[order].astype(jnp.float32) - 60) / 70,
        data.y[order],
        jnp.ones((2, 3), bool),
    )
    message = algorithm.broadcast(state, jnp.array([0]))
    update = algorithms.client_update(
        algorithm, message, algorithm.init_kept(state), batches, step_key
    )
    for a, b in zip(
        jax.tree.leaves(update.mean), jax.tree.leaves(result.update.mean), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(
        update.metrics["loss"], result.update.metrics["loss"][0], rtol=1e-5
    )


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), (MESH_AXIS,))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("lanes", "devices"), [(2, 1), (8, 1), (1, 2), (1, 4), (2, 2), (3, 4)]
)
def test_lanes_and_devices_change_nothing(small_task, lanes, devices):
    data = federate_sizes(SIZES)
    algorithm = REGISTRY["fedtp"](Setting(small_task, 5))
    ids = [0, 1, 2, 3, 4]
    schedule = LocalSchedule(4, 2, 12, 1)
    expected = run(algorithm, data, ids, schedule)
    schedule = schedule._replace(lanes=lanes, mesh=mesh_of(devices))
    found = run(algorithm, data, ids, schedule)
    # Sums are added up in another order: a few units in the last place.
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    again = run(algorithm, data, ids, schedule)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(again)))


def test_a_client_that_diverges_is_left_out_on_a_mesh_as_well(small_task):
    data = federate_sizes([6, 6, 6])
    data = data._replace(x=data.x.astype(jnp.float32).at[6:12].set(1e38))
    algorithm = REGISTRY["fedtp"](Setting(small_task, 3))
    schedule = LocalSchedule(3, 1, 6, 1, mesh_of(2))
    result = run(algorithm, data, [0, 1, 2], schedule)
    assert result.is_finite.tolist() == [True, False, True]
    np.testing.assert_allclose(result.weights, [0.5, 0.0, 0.5])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.update.mean))


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.integers(0, 30), min_size=8, max_size=8),
    lanes=st.sampled_from([1, 2, 3, 6]),
)
def test_lanes_share_all_steps_and_none_has_more_than_its_piece(steps, lanes):
    timeline = _timeline(jnp.array(steps, jnp.int32), lanes)
    every_lane = jnp.arange(lanes, dtype=jnp.int32)
    first = _first_turn(timeline, every_lane)
    spans = {place: [] for place in range(len(steps))}
    load = np.zeros(lanes, int)
    for ahead in range(len(steps)):
        turn = jax.tree.map(np.asarray, _turn(timeline, every_lane, first + ahead))
        for lane in np.flatnonzero(turn.exists):
            place = int(timeline.place[first[lane] + ahead])
            spans[place].append((int(turn.first[lane]), int(turn.last[lane]), lane))
            load[lane] += turn.last[lane] - turn.first[lane]
            # A client comes from elsewhere only as the last of a lane, and goes on
            # elsewhere only as the first: one exchange is enough.
            assert not turn.leaves[lane] or ahead == 0
    for place, number in enumerate(steps):
        done = 0
        for begin, end, _ in sorted(spans[place]):
            assert begin == done
            done = end
        assert done == number
        ordered = [lane for *_, lane in sorted(spans[place])]
        assert ordered == sorted(ordered, reverse=True)
    bound = max(-(-sum(steps) // lanes), max(steps))
    assert load.max() <= max(bound, 1)


def test_cohorts_of_several_runs_are_those_of_each_run(small_task):
    data = federate_sizes(SIZES)
    algorithm = REGISTRY["fedtp"](Setting(small_task, 5))
    schedule = LocalSchedule(4, 2, 12, 2)
    keys = jax.random.split(jax.random.key(9), 3)
    ids = jnp.array([[0, 1, 5], [4, 2, 1], [3, 1, 0]])

    def of_run(key, ids):
        state = algorithm.init(key)
        message = algorithm.broadcast(state, ids)
        kept = tree.stack_copies(algorithm.init_kept(state), len(ids))
        return run_cohort(algorithm, data, message, kept, ids, key, schedule)

    together = jax.jit(jax.vmap(of_run))(keys, ids)
    for i in range(3):
        alone = jax.jit(of_run)(keys[i], ids[i])
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, atol=1e-6)


def test_several_runs_share_one_copy_of_the_examples(small_task):
    data = federate_sizes(SIZES)
    algorithm = REGISTRY["fedavg"](Setting(small_task, 5))
    copies = tree.stack_copies(data, 2)

    def of_run(data):
        state = algorithm.init(KEY)
        message = algorithm.broadcast(state, jnp.arange(5))
        schedule = LocalSchedule(4, 1, 12, 1)
        kept = tree.stack_copies(algorithm.init_kept(state), 5)
        return run_cohort(algorithm, data, message, kept, jnp.arange(5), KEY, schedule)

    with pytest.raises(NotImplementedError, match="map rows, start and size"):
        jax.vmap(of_run)(copies)
