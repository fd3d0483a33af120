"""The baselines against closed forms on quadratics, and where they meet one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_tp import algorithms
from fedjax_tp.algorithms import (
    REGISTRY,
    ClientOptimizer,
    Message,
    MethodConfig,
    Setting,
    Update,
    check_setting,
    client_update,
)
from fedjax_tp.algorithms.fedopt import AdaptiveState
from fedjax_tp.types import Batch, InputError
from tests.algorithms.test_algorithms import quadratic_task

KEY = jax.random.key(0)
CURVATURES, CENTRES = (1.0, 3.0), (0.0, 1.0)
LR = 0.1
SGD = ClientOptimizer(LR, 0.0, 0.0)
CLIENTS = tuple(zip(CURVATURES, CENTRES, strict=True))
TASK3 = quadratic_task((1.0, 3.0, 2.0), (0.0, 1.0, -1.0), start=2.0)
TASK = quadratic_task(CURVATURES, CENTRES, start=2.0)


def train(algorithm, client, steps, state=None, kept=None):
    """The update of one client; its loss is a / 2 (w - c)^2."""
    state = algorithm.init(KEY) if state is None else state
    kept = algorithm.init_kept(state) if kept is None else kept
    message = algorithm.broadcast(state, jnp.array([client]))
    labels = jnp.full((steps, 1), client)
    batches = Batch(jnp.zeros((steps, 1)), labels, jnp.ones((steps, 1), bool))
    return client_update(algorithm, message, kept, batches, KEY)


def rounds(algorithm, steps, count):
    """Rounds of both clients, equally weighted."""
    ids, weights = jnp.arange(2), jnp.array([0.5, 0.5])

    @jax.jit
    def one_round(state, kept):
        updates = [train(algorithm, k, steps, state, kept[k]) for k in range(2)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *(u.mean for u in updates))
        update = Update(mean, None, None, {})
        state = algorithm.server_update(state, ids, update, weights)
        return state, [u.kept for u in updates]

    state = algorithm.init(KEY)
    kept = [algorithm.init_kept(state)] * 2
    for _ in range(count):
        state, kept = one_round(state, kept)
    return state, kept


def descend(a, c, w, steps, pull=0.0, towards=0.0, lr=LR):
    """Gradient descent on a / 2 (w - c)^2 + pull / 2 (w - towards)^2."""
    for _ in range(steps):
        w -= lr * (a * (w - c) + pull * (w - towards))
    return w


def test_fedprox_descends_the_loss_and_the_distance():
    found = train(algorithms.fedprox(TASK, SGD, mu=0.7), 1, 5).mean["w"]
    expected = descend(3.0, 1.0, 2.0, 5, pull=0.7, towards=2.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_fedprox_without_a_pull_is_fedavg():
    momentum = ClientOptimizer(LR, 0.9, 0.01)
    prox = train(algorithms.fedprox(TASK, momentum, mu=0.0), 0, 4)
    assert prox.mean["w"] == train(algorithms.fedavg(TASK, momentum), 0, 4).mean["w"]


def test_fedavgm_is_momentum_on_what_fedavg_would_change():
    found, _ = rounds(algorithms.fedavgm(TASK, SGD, lr=0.5, momentum=0.9), 2, 3)
    w, velocity = 2.0, 0.0
    for _ in range(3):
        mean = np.mean([descend(*k, w, 2) for k in CLIENTS])
        velocity = 0.9 * velocity + (w - mean)
        w -= 0.5 * velocity
    np.testing.assert_allclose(found.shared["w"], w, rtol=1e-6)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_adaptive_servers_follow_the_paper(name):
    tau, lr = 0.05, 0.3
    build = getattr(algorithms, name)
    found, _ = rounds(build(TASK, SGD, lr=lr, tau=tau), 2, 4)
    w, m, v = 2.0, 0.0, tau**2
    for _ in range(4):
        d = np.mean([descend(*k, w, 2) for k in CLIENTS]) - w
        m = 0.9 * m + 0.1 * d
        if name == "fedadam":
            v = 0.99 * v + 0.01 * d**2
        else:
            v -= 0.01 * d**2 * np.sign(v - d**2)
        w += lr * m / (np.sqrt(v) + tau)
    np.testing.assert_allclose(found.shared["w"], w, rtol=1e-5)
    assert isinstance(found.opt_state, AdaptiveState)
    np.testing.assert_allclose(found.opt_state.second["w"], v, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_scaffold_ends_at_the_optimum_however_many_local_steps(steps):
    # FedAvg ends at 0.75, 0.670 and 0.532 instead.
    method = algorithms.scaffold(TASK, 2, SGD, server_lr=1.0)
    state, kept = rounds(method, steps, 80)
    np.testing.assert_allclose(state.shared["w"], 0.75, atol=1e-4)
    # There, the controls are the clients' gradients.
    np.testing.assert_allclose([k["w"] for k in kept], [0.75, -0.75], atol=1e-3)


def test_scaffold_begins_as_fedavg_and_keeps_what_option_two_says():
    method = algorithms.scaffold(TASK, 4, SGD, server_lr=0.5)
    first = train(method, 1, 3)
    w = descend(3.0, 1.0, 2.0, 3)
    np.testing.assert_allclose(first.mean.params["w"], w, rtol=1e-6)
    np.testing.assert_allclose(first.kept["w"], (2.0 - w) / (3 * LR), rtol=1e-5)
    state = method.init(KEY)
    state = method.server_update(
        state, jnp.array([1]), Update(first.mean, None, None, {}), jnp.ones(1)
    )
    np.testing.assert_allclose(state.shared["w"], 2.0 + 0.5 * (w - 2.0), rtol=1e-6)
    np.testing.assert_allclose(state.control["w"], first.kept["w"] / 4, rtol=1e-6)
    # Second round: steps along g - c_i + c, and option II's control again.
    c, c_i, x = (float(t["w"]) for t in (state.control, first.kept, state.shared))
    second = train(method, 1, 2, state, first.kept)
    y = x
    for _ in range(2):
        y -= LR * (3 * (y - 1) - c_i + c)
    np.testing.assert_allclose(second.mean.params["w"], y, rtol=1e-5)
    np.testing.assert_allclose(
        second.kept["w"], c_i - c + (x - y) / (2 * LR), rtol=1e-4
    )


def test_scaffolds_control_is_the_mean_of_the_clients_controls():
    # Whoever is sampled, and however unequal: a client's examples are its steps.
    method = algorithms.scaffold(TASK3, 3, SGD, server_lr=1.0)
    sizes = np.array([1, 3, 5])
    step = [
        jax.jit(lambda state, kept, k=k: train(method, k, sizes[k], state, kept))
        for k in range(3)
    ]

    def weighted(weights, updates):
        return jax.tree.map(
            lambda *m: jnp.stack(m) @ weights, *(update.mean for update in updates)
        )

    state = method.init(KEY)
    kept = [method.init_kept(state)] * 3
    for sampled in ([0, 1], [1, 2], [0, 2], [2, 1], [0, 1]):
        updates = [step[k](state, kept[k]) for k in sampled]
        weights = jnp.asarray(sizes[sampled] / sizes[sampled].sum(), jnp.float32)
        # The third of the cohort was left out: an id past the end, weight 0.
        state = method.server_update(
            state,
            jnp.array([*sampled, 3]),
            Update(weighted(weights, updates), None, None, {}),
            jnp.append(weights, 0.0),
        )
        for k, update in zip(sampled, updates, strict=True):
            kept[k] = update.kept
        expected = np.mean([c["w"] for c in kept])
        np.testing.assert_allclose(state.control["w"], expected, rtol=1e-4)


def two_part_task():
    """Loss (head + body - 1)^2 / 2 of a body and a head, each a number."""

    def loss(params, batch, key):
        return (params["head"]["bias"] + params["body"] - 1) ** 2 / 2

    def init(key):
        return {"head": {"bias": jnp.array(0.0)}, "body": jnp.array(0.5)}

    return TASK._replace(init=init, loss=loss)


@pytest.mark.parametrize(
    ("share", "steps", "head_steps"),
    [(0.0, 3, 0), (0.5, 3, 2), (1.0, 3, 3), (0.5, 1, 0), (0.9, 3, 2)],
)
def test_fedrep_trains_the_head_and_then_the_body(share, steps, head_steps):
    optimizer = ClientOptimizer(LR, 0.9, 0.01)
    method = algorithms.fedrep(two_part_task(), optimizer, head_share=share)
    found = train(method, 0, steps)
    values, velocities = [0.0, 0.5], [0.0, 0.0]
    for step in range(steps):
        part = 0 if step < head_steps else 1
        gradient = sum(values) - 1 + 0.01 * values[part]
        velocities[part] = 0.9 * velocities[part] + gradient
        values[part] -= LR * velocities[part]
    np.testing.assert_allclose(found.kept["head"]["bias"], values[0], atol=1e-6)
    np.testing.assert_allclose(found.mean["body"], values[1], atol=1e-6)


def test_ditto_is_fedavg_and_a_model_pulled_to_it():
    method = algorithms.ditto(TASK, SGD, strength=0.7)
    state = method.init(KEY)._replace(shared={"w": jnp.array(-1.0)})
    found = train(method, 1, 5, state)
    np.testing.assert_allclose(found.mean["w"], descend(3, 1, -1, 5), rtol=1e-5)
    expected = descend(3, 1, 2, 5, pull=0.7, towards=-1)
    np.testing.assert_allclose(found.kept["w"], expected, rtol=1e-5)


def test_ditto_without_a_pull_is_local_training():
    _, kept = rounds(algorithms.ditto(TASK, SGD, strength=0.0), 3, 2)
    _, local = rounds(algorithms.local(TASK, SGD), 3, 2)
    np.testing.assert_allclose([k["w"] for k in kept], [k["w"] for k in local])


def apfl_models(alpha):
    method = algorithms.apfl(TASK, SGD, alpha=alpha, adaptive=False)
    state, kept = rounds(method, 3, 2)
    message = Message(state.shared, None)
    return [method.client_params(message, k)["w"] for k in kept]


def test_apfl_lies_between_fedavg_and_local_training():
    fedavg, _ = rounds(algorithms.fedavg(TASK, SGD), 3, 2)
    np.testing.assert_allclose(apfl_models(0.0), [fedavg.shared["w"]] * 2, rtol=1e-6)
    _, local = rounds(algorithms.local(TASK, SGD), 3, 2)
    np.testing.assert_allclose(apfl_models(1.0), [k["w"] for k in local], rtol=1e-6)


def test_apfl_learns_the_share_on_the_first_step_of_a_round():
    method = algorithms.apfl(TASK, SGD, alpha=0.4, adaptive=True)
    state = method.init(KEY)._replace(shared={"w": jnp.array(-1.0)})
    found = train(method, 1, 2, state)
    v, w, alpha = 2.0, -1.0, 0.4
    for step in range(2):
        gradient = 3 * (alpha * v + (1 - alpha) * w - 1)
        if step == 0:
            alpha = np.clip(alpha - LR * (v - w) * gradient, 0, 1)
        v, w = v - LR * alpha * gradient, w - LR * 3 * (w - 1)
    np.testing.assert_allclose(found.kept.alpha, alpha, rtol=1e-6)
    np.testing.assert_allclose(found.kept.params["w"], v, rtol=1e-6)
    np.testing.assert_allclose(found.mean["w"], w, rtol=1e-6)


def test_pfedme_moves_to_the_proximal_point():
    strength, steps = 2.0, 200
    optimizer = ClientOptimizer(LR, 0.9, 0.0)
    method = algorithms.pfedme(
        TASK, optimizer, strength=strength, inner_steps=steps, beta=0.5
    )
    found = train(method, 1, 2)
    w = 2.0
    for _ in range(2):
        theta = (3 * 1 + strength * w) / (3 + strength)
        w -= LR * strength * (w - theta)
    np.testing.assert_allclose(found.kept["w"], theta, rtol=1e-5)
    np.testing.assert_allclose(found.mean["w"], w, rtol=1e-5)
    state = method.init(KEY)
    state = method.server_update(
        state, jnp.array([1]), Update(found.mean, None, None, {}), jnp.ones(1)
    )
    np.testing.assert_allclose(state.shared["w"], (2.0 + w) / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prox_mu": -1.0}, "prox mu is -1.0; allowed is 0 or more"),
        ({"prox_mu": float("nan")}, "prox mu is nan"),
        ({"avgm_momentum": 1.0}, "avgm momentum is 1.0"),
        ({"rep_head_share": 1.5}, "rep head share is 1.5; allowed is 0 to 1"),
        ({"apfl_alpha": -0.1}, "apfl alpha is -0.1"),
        ({"pfedme_steps": 0}, "pfedme steps is 0; allowed is 1 or more"),
        ({"adaptive_tau": 0.0}, "adaptive tau is 0.0; allowed is above 0"),
    ],
)
def test_bad_coefficients_are_refused(change, said):
    with pytest.raises(InputError, match=said):
        check_setting(Setting(TASK, 2, method=MethodConfig(**change)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fedprox", {"prox_mu": 0.7}),
        ("fedavgm", {"avgm_lr": 0.7}),
        ("fedavgm", {"avgm_momentum": 0.3}),
        ("fedadam", {"adaptive_lr": 0.3}),
        ("fedyogi", {"adaptive_tau": 0.3}),
        ("scaffold", {"scaffold_lr": 0.3}),
        ("fedrep", {"rep_head_share": 0.2}),
        ("ditto", {"ditto_lambda": 3.0}),
        ("apfl", {"apfl_alpha": 0.9}),
        ("apfl", {"apfl_adaptive": False}),
        ("pfedme", {"pfedme_lambda": 3.0}),
        ("pfedme", {"pfedme_steps": 2}),
        ("pfedme", {"pfedme_beta": 0.5}),
    ],
)
def test_coefficients_reach_their_methods(name, change):
    def result(method):
        built = REGISTRY[name](Setting(two_part_task(), 2, SGD, method=method))
        return jax.tree.leaves(rounds(built, 3, 2))

    usual, changed = result(MethodConfig()), result(MethodConfig(**change))
    assert any(not np.allclose(a, b) for a, b in zip(usual, changed, strict=True))
