"""What holds for every registered algorithm, those added later among them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_tp import tree
from fedjax_tp.algorithms import REGISTRY, ClientOptimizer, Message, Setting, build
from fedjax_tp.algorithms.base import Update, client_update
from fedjax_tp.data.federated import shuffled
from fedjax_tp.hypernetwork import HypernetworkConfig
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.plan import make_plan
from fedjax_tp.simulation.rounds import init_state, make_advance
from fedjax_tp.types import Batch
from tests.conftest import federate_sizes

KEY = jax.random.key(0)
SMALL = HypernetworkConfig(embedding_dim=3, hidden=5, layers=1, start="model")
SIZES = [9, 10, 12]
SCHEDULE = LocalSchedule(4, 1, 12, 1)


def batches_of(data, client, key):
    """The batches that the simulation draws for a client in one epoch."""
    size = SIZES[client]
    order = np.asarray(shuffled(jax.random.fold_in(key, 0), jnp.array(size), 12))
    steps = -(-size // 4)
    places = np.resize(order[:size], size).tolist() + [0] * (4 * steps - size)
    rows = np.asarray(data.rows)[int(data.start[client]) + np.array(places)]
    x = (np.asarray(data.x)[rows].astype(np.float32) - 60) / 70
    mask = np.arange(4 * steps) < size
    shape = (steps, 4)
    return Batch(
        jnp.asarray(x).reshape(*shape, *x.shape[1:]),
        data.y[rows].reshape(shape),
        jnp.asarray(mask).reshape(shape),
    )


def one_by_one(algorithm, train_client, data, state, round_key, good=(1, 1, 1)):
    """A round as a real network would run it: each client alone; some left out."""
    good = np.array(good, bool)
    ids = jnp.arange(3)
    message = algorithm.broadcast(state.server, ids)
    updates = []
    for client in range(3):
        own, kept = (
            jax.tree.map(lambda leaf, c=client: leaf[c], stacked)
            for stacked in (message.personal, state.kept)
        )
        order_key, key = jax.random.split(jax.random.fold_in(round_key, client))
        batches = batches_of(data, client, order_key)
        sent = Message(message.shared, own)
        updates.append(train_client(sent, kept, batches, key))
    weights = jnp.where(good, jnp.array(SIZES), 0)
    weights = weights / weights.sum()

    def stacked(part):
        rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *part)
        return tree.zero_rows_unless(jnp.array(good), rows)

    mean = jax.tree.map(
        lambda leaf: jnp.tensordot(weights, leaf, axes=1),
        stacked([u.mean for u in updates]),
    )
    personal = stacked([u.personal for u in updates])
    server = algorithm.server_update(
        state.server, jnp.where(good, ids, 3), Update(mean, personal, None, {}), weights
    )
    kept = stacked([u.kept for u in updates])
    kept = tree.where_rows(jnp.array(good), kept, state.kept)
    losses = stacked([u.metrics["loss"] for u in updates])
    return server, kept, losses @ weights


# Each wrapper, behind algorithms of several kinds.
WRAPPED = (
    "fedavg_ima",
    "fedtp_last",
    "fedtp_vanilla_ema",
    "fedavg_median",
    "fedtp_trimmed",
    "scaffold_geometric",
    "fedtp_topk",
    "scaffold_sign",
    "fedtp_topk_median_ema",
)


@pytest.mark.parametrize("name", [*REGISTRY, *WRAPPED])
def test_a_round_is_its_clients_one_by_one(small_task, name):
    data = federate_sizes(SIZES)
    client = ClientOptimizer(0.02, 0.9, 1e-3)
    algorithm = build(name, Setting(small_task, 3, client, SMALL))
    assert algorithm.name == name
    train_client = jax.jit(partial(client_update, algorithm))
    advance = make_advance(algorithm, 3, SCHEDULE, 1)
    state = init_state(algorithm, 3, KEY)
    # A label out of range has a loss of NaN: the last round is without client 1.
    of_client_1 = np.asarray(data.rows)[9:19]
    with_bad = data._replace(y=data.y.at[of_client_1].set(99))
    for index, (held, good) in enumerate(
        [(data, (1, 1, 1)), (data, (1, 1, 1)), (with_bad, (1, 0, 1))]
    ):
        _, round_key = jax.random.split(jax.random.fold_in(KEY, index))
        # Fetched: the round takes its state's buffers.
        server, kept, loss = jax.device_get(
            one_by_one(algorithm, train_client, held, state, round_key, good)
        )
        state, records = advance(state, held, KEY, index, 1)
        assert records.is_finite[0].tolist() == [bool(g) for g in good]
        pairs = ((server, state.server), (kept, state.kept))
        for a, b in zip(*map(jax.tree.leaves, zip(*pairs, strict=True)), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        np.testing.assert_allclose(records.metrics["loss"][0], loss, rtol=1e-4)

    # All clients diverge: the state stays as it was, to the bit.
    before = jax.device_get(state)
    broken = data._replace(mean=jnp.full_like(data.mean, jnp.nan))
    state, records = advance(state, broken, KEY, 3, 1)
    assert not records.is_finite.any()
    for a, b in zip(*map(jax.tree.leaves, (before, state)), strict=True):
        assert np.array_equal(a, b)


def test_every_algorithm_can_be_planned(small_task):
    data = federate_sizes(SIZES)
    for name in (*REGISTRY, *WRAPPED):
        algorithm = build(name, Setting(small_task, 3, hypernetwork=SMALL))
        plan = make_plan(algorithm, small_task, data, 2, SCHEDULE)
        assert plan.lane_bytes > 0, name
        assert plan.bytes_up > 0 or name == "local"


@pytest.mark.parametrize("name", [*REGISTRY, *WRAPPED])
def test_a_client_that_never_took_part_starts_as_the_others_did(small_task, name):
    algorithm = build(name, Setting(small_task, 3, hypernetwork=SMALL))
    start = algorithm.init(KEY)
    kept = algorithm.init_kept(start)
    message = algorithm.broadcast(start, jnp.array([1, 2]))
    own = Message(message.shared, jax.tree.map(lambda leaf: leaf[0], message.personal))
    used = algorithm.client_params(own, kept)
    # A head or a bias of the client's own may come to it.
    more = tree.num_elements(used) - tree.num_elements(small_task.init(KEY))
    assert more == {"fedrod": 12, "fedtp_rod": 12, "feddbe": 3}.get(name, 0)

    # What it keeps at first does not depend on what the server has learnt since.
    untrained = algorithm.client_finish(own, algorithm.client_start(own, kept, KEY))
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), untrained.personal)
    mean, personal = jax.tree.map(lambda leaf: leaf + 1, (untrained.mean, two))
    server = algorithm.server_update(
        start,
        jnp.array([1, 2]),
        Update(mean, personal, None, {}),
        jnp.array([0.5, 0.5]),
    )
    later = algorithm.init_kept(server)
    for a, b in zip(*map(jax.tree.leaves, (kept, later)), strict=True):
        assert np.array_equal(a, b)
