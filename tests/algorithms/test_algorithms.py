"""Algorithms on problems whose answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_tp import algorithms, tree
from fedjax_tp.algorithms import REGISTRY, ClientOptimizer, Message, Setting, Update
from fedjax_tp.algorithms.fedtp import fedtp, step_rows, step_table
from fedjax_tp.hypernetwork import HypernetworkConfig, emit_rows
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.cnn import LeNet
from fedjax_tp.models.task import Metrics, Task, classification
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import init_state, make_advance
from fedjax_tp.types import Batch, InputError
from tests.conftest import federate_sizes

KEY = jax.random.key(0)
SMALL = HypernetworkConfig(embedding_dim=3, hidden=5, layers=1, start="model")


def quadratic_task(curvatures, centres, start=0.0) -> Task:
    """Client k has loss a_k / 2 (w - c_k)^2; its label says which client it is."""
    a, c = jnp.array(curvatures), jnp.array(centres)

    def loss(params, batch: Batch, key):
        k = batch.y[0]
        return a[k] / 2 * (params["w"] - c[k]) ** 2

    def metrics(params, batch):
        return Metrics(*jnp.zeros(3))

    return Task(lambda key: {"w": jnp.array(start)}, lambda p, x: x, loss, metrics)


def clients_labelled_by_id(num_clients: int):
    """One example a client, whose label is the client's id."""
    data = federate_sizes([1] * num_clients)
    return data._replace(y=jnp.arange(num_clients))


def run_fedavg_on_quadratics(curvatures, centres, local_steps, rounds, lr=0.1):
    task = quadratic_task(curvatures, centres)
    algorithm = algorithms.fedavg(task, ClientOptimizer(lr, 0.0, 0.0))
    data = clients_labelled_by_id(len(centres))
    schedule = LocalSchedule(1, local_steps, 1, 2)
    state = init_state(algorithm, len(centres), KEY)
    advance = make_advance(algorithm, len(centres), schedule, 1)
    found = []
    for i in range(rounds):
        state, _ = advance(state, data, KEY, i, 1)
        found.append(float(state.server.shared["w"]))
    return found


@pytest.mark.parametrize(
    ("local_steps", "expected"),
    [
        (1, [0.15, 0.27, 0.366]),
        (2, [0.255, 0.42075, 0.5284875]),
        (5, [0.415965, 0.5737322, 0.6335702]),
    ],
)
def test_fedavg_on_quadratics_follows_the_closed_form(local_steps, expected):
    found = run_fedavg_on_quadratics((1.0, 3.0), (0.0, 1.0), local_steps, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("local_steps", "fixed_point"), [(1, 0.75), (5, 0.67013307), (20, 0.53216263)]
)
def test_fedavg_on_quadratics_ends_at_its_fixed_point(local_steps, fixed_point):
    found = run_fedavg_on_quadratics((1.0, 3.0), (0.0, 1.0), local_steps, 60)
    np.testing.assert_allclose(found[-1], fixed_point, atol=1e-4)


def test_local_training_brings_every_client_to_its_own_optimum():
    task = quadratic_task((1.0, 3.0), (0.0, 1.0), start=5.0)
    algorithm = algorithms.local(task, ClientOptimizer(0.1, 0.0, 0.0))
    state = init_state(algorithm, 2, KEY)
    data, schedule = clients_labelled_by_id(2), LocalSchedule(1, 40, 1, 2)
    state, _ = make_advance(algorithm, 2, schedule, 5)(state, data, KEY, 0, 5)
    np.testing.assert_allclose(state.kept["w"], [0.0, 1.0], atol=1e-4)


def test_a_client_step_is_sgd_with_momentum_and_l2_as_torch_has_it():
    lr, momentum, decay = 0.1, 0.9, 0.01
    optimizer = algorithms.sgd(lr, momentum, decay)
    params, gradient = jnp.array(2.0), lambda w: 3 * w
    state = optimizer.init(params)
    w, velocity = 2.0, 0.0
    for _ in range(4):
        updates, state = optimizer.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
        velocity = momentum * velocity + 3 * w + decay * w
        w -= lr * velocity
    np.testing.assert_allclose(params, w, rtol=1e-6)


def a_fedtp(task, **changes):
    options = {
        "hypernetwork": SMALL,
        "phi_optimizer": algorithms.sgd(0.1, 0.9, 1e-3),
        "embedding_optimizer": algorithms.sgd(0.2, 0.9, 1e-3),
    }
    return fedtp(task, 4, ClientOptimizer(), **(options | changes))


def an_update(state, algorithm, ids, seed=0):
    message = algorithm.broadcast(state, ids)
    rng = np.random.default_rng(seed)
    trained = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
        message.personal,
    )
    return Update(message.shared, trained, None, {})


def test_a_server_step_is_an_optax_step_on_the_squared_distance(small_task):
    algorithm = a_fedtp(small_task)
    state = algorithm.init(KEY)
    ids, weights = jnp.array([3, 1]), jnp.array([0.25, 0.75])
    update = an_update(state, algorithm, ids)
    found = algorithm.server_update(state, ids, update, weights)

    template, _ = tree.split(small_task.init(KEY), is_attention_projection)

    def objective(phi, table):
        hyper = state.hypernetwork._replace(phi=phi, embeddings=table)
        emitted = emit_rows(hyper, ids, template, SMALL)
        distances = jax.tree.map(
            lambda a, b: jnp.sum((a - b) ** 2, axis=range(1, a.ndim)),
            emitted,
            update.personal,
        )
        return 0.5 * jnp.sum(weights * sum(jax.tree.leaves(distances)))

    phi, table = state.hypernetwork
    phi_grad, table_grad = jax.grad(objective, argnums=(0, 1))(phi, table)
    optimizer = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.1, 0.9))
    step, _ = optimizer.update(phi_grad, optimizer.init(phi), phi)
    for a, b in zip(
        jax.tree.leaves(found.hypernetwork.phi),
        jax.tree.leaves(optax.apply_updates(phi, step)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
    rows = np.array([3, 1])
    expected = table[rows] - 0.2 * (table_grad[rows] + 1e-3 * table[rows])
    np.testing.assert_allclose(found.hypernetwork.embeddings[rows], expected, atol=1e-5)


def test_clients_that_were_not_sampled_keep_their_embedding(small_task):
    algorithm = a_fedtp(small_task)
    state = algorithm.init(KEY)
    start = state.hypernetwork.embeddings
    for ids in ([0, 1], [1, 2]):
        ids = jnp.array(ids)
        update = an_update(state, algorithm, ids)
        state = algorithm.server_update(state, ids, update, jnp.array([0.5, 0.5]))
    end = state.hypernetwork.embeddings
    assert np.array_equal(start[3], end[3])
    assert not np.any(np.all(start[:3] == end[:3], axis=1))


def test_the_originals_drift_of_unsampled_rows_is_a_flag(small_task):
    algorithm = a_fedtp(small_task, move_unsampled=True)
    state = algorithm.init(KEY)
    start = state.hypernetwork.embeddings
    ids = jnp.array([0, 1])
    update = an_update(state, algorithm, ids)
    state = algorithm.server_update(state, ids, update, jnp.array([0.5, 0.5]))
    # Weight decay alone moves the row of a client that was not sampled.
    np.testing.assert_allclose(
        state.hypernetwork.embeddings[3], start[3] * (1 - 0.2 * 1e-3), rtol=1e-6
    )


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, 0.9), optax.adam(0.1)])
def test_stepping_all_rows_one_by_one_or_at_once_is_the_same(optimizer):
    table = jax.random.normal(KEY, (3, 2))
    grads = jax.random.normal(jax.random.key(1), (3, 2))
    ids = jnp.array([2, 0, 1])
    by_rows = step_rows(optimizer, table, optimizer.init(table), ids, grads)
    at_once = step_table(optimizer, table, optimizer.init(table), ids, grads)
    for a, b in zip(jax.tree.leaves(by_rows), jax.tree.leaves(at_once), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_each_algorithm_sends_and_keeps(small_task):
    params = small_task.init(KEY)
    personal, shared = tree.split(params, is_attention_projection)
    sizes = {
        name: tree.num_elements(part)
        for name, part in (("all", params), ("personal", personal), ("shared", shared))
    }
    whole, head = sizes["all"], tree.num_elements(params["head"])
    expected = {
        "fedtp": (sizes["shared"], sizes["personal"], 0),
        "fedtp_vanilla": (sizes["shared"], 0, sizes["personal"]),
        "local": (0, 0, whole),
        "scaffold": (2 * whole, 0, whole),
        "fedper": (whole - head, 0, head),
        "fedrep": (whole - head, 0, head),
        "lg_fedavg": (head, 0, whole - head),
        "ditto": (whole, 0, whole),
        "apfl": (whole, 0, whole + 1),
        "pfedme": (whole, 0, whole),
    }
    averaged = ("fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi")
    expected |= dict.fromkeys(averaged, (whole, 0, 0))
    for name in expected:
        algorithm = REGISTRY[name](Setting(small_task, 4))
        state = algorithm.init(KEY)
        message = algorithm.broadcast(state, jnp.array([2]))
        found = (message.shared, message.personal, algorithm.init_kept(state))
        assert tuple(map(tree.num_elements, found)) == expected[name], name


def test_all_algorithms_start_from_the_same_shared_parameters(small_task):
    params = small_task.init(KEY)
    for name, build in REGISTRY.items():
        if name == "pfedhn":
            continue  # It emits everything, a little different for each client.
        algorithm = build(Setting(small_task, 4))
        state = algorithm.init(KEY)
        kept = algorithm.init_kept(state)
        message = algorithm.broadcast(state, jnp.array([1]))
        own = jax.tree.map(lambda leaf: leaf[0], message.personal)
        used = algorithm.client_params(Message(message.shared, own), kept)
        _, shared = tree.split(used, is_attention_projection)
        _, expected = tree.split(params, is_attention_projection)
        assert all(map(np.array_equal, *map(jax.tree.leaves, (shared, expected))))


@pytest.mark.parametrize(
    "name",
    ["fedper", "fedrep", "lg_fedavg", "fedbabu", "fedrod", "moon", "feddbe", "fedala"],
)
def test_a_model_without_a_head_is_refused(name):
    with pytest.raises(InputError, match=f"{name} needs a model whose last layer"):
        REGISTRY[name](Setting(quadratic_task((1.0,), (0.0,)), 2))


def test_fedtp_without_attention_is_refused():
    task = classification(LeNet(10), (8, 8, 1))
    with pytest.raises(InputError, match="attention projections"):
        REGISTRY["fedtp"](Setting(task, 4))


@pytest.mark.parametrize(
    ("names", "said"),
    [("fedtp,fedsgd", "'fedsgd'"), ("", "got ''"), ("local,local", "each once")],
)
def test_unknown_algorithms_are_refused(names, said):
    with pytest.raises(InputError, match=said):
        algorithms.resolve(names)


def test_algorithms_are_named_one_by_one_or_all():
    assert algorithms.resolve("local, fedtp") == ("local", "fedtp")
    assert algorithms.resolve("all") == tuple(REGISTRY)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((0.0, 0.9, 0.0), "learning rate is 0.0"),
        ((float("nan"), 0.9, 0.0), "learning rate is nan"),
        ((0.1, 1.0, 0.0), "momentum is 1.0"),
        ((0.1, 0.9, -1.0), "weight decay is -1.0"),
    ],
)
def test_bad_optimizer_settings_are_refused(settings, said):
    with pytest.raises(InputError, match=said):
        algorithms.sgd(*settings)
