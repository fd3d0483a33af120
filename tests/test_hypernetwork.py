"""The hypernetwork: sizes and first values of the paper, and its pull-back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_tp import tree
from fedjax_tp.hypernetwork import (
    PAPER,
    HypernetworkConfig,
    emit_rows,
    head_rank,
    init_hypernetwork,
    pull_back,
)
from fedjax_tp.models import task as tasks
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.vit import ViT
from fedjax_tp.types import InputError

KEY = jax.random.key(0)
LOW_RANK = HypernetworkConfig(3, 16, 1, spread=0.5, feature_norm=2.0, parameters=600.0)
KEY_ROW = jnp.arange(6.0)
TEMPLATE = {"a": jnp.ones((2, 3)), "b": {"c": 2 * jnp.ones(4), "absent": None}}
pytestmark = pytest.mark.smoke


def test_size_is_the_papers_at_50_clients():
    task = tasks.classification(ViT(10), (32, 32, 3))
    template, _ = tree.split(jax.eval_shape(task.init, KEY), is_attention_projection)
    size = tree.num_elements(
        jax.eval_shape(
            lambda key: init_hypernetwork(
                key,
                jax.tree.map(lambda s: jnp.zeros(s.shape), template),
                50,
                PAPER,
            ),
            KEY,
        )
    )
    assert size == 178_220_548


def emitted_spread(config, template, num_clients=50):
    hyper = init_hypernetwork(KEY, template, num_clients, config)
    leaf = emit_rows(hyper, jnp.arange(num_clients), template, config)["w"]
    return float(leaf.std()), float(leaf.std(axis=0).mean()), leaf.mean(axis=0)


def test_the_paper_start_emits_what_the_papers_code_emits():
    whole, between, _ = emitted_spread(PAPER, {"w": jnp.zeros(40_000)})
    # Measured in the authors' code: 0.059 in all, 0.015 between clients.
    assert abs(whole - 0.059) < 0.002
    assert abs(between - 0.015) < 0.002


def test_the_model_start_emits_the_models_own_values_plus_the_asked_spread():
    own = 0.05 * jax.random.normal(KEY, (40_000,))
    config = HypernetworkConfig(start="model", spread=0.3)
    _, between, mean = emitted_spread(config, {"w": own})
    np.testing.assert_allclose(mean, own, atol=1e-5)
    assert abs(between - 0.3 * 0.05) < 0.001


def objective(hyper, ids, targets, weights, config):
    """1/2 sum_i w_i ||h(z_i) - target_i||^2, client by client."""
    total = 0.0
    for i, client in enumerate(ids):
        emitted = emit_rows(hyper, jnp.array([client]), TEMPLATE, config)
        for found, target in zip(
            jax.tree.leaves(emitted), jax.tree.leaves(targets), strict=True
        ):
            total += 0.5 * weights[i] * jnp.sum((found[0] - target[i]) ** 2)
    return total


@pytest.fixture(params=["paper", "model", "low rank"])
def problem(request):
    norm = 2.0 if request.param == "model" else 0.0
    if request.param == "low rank":
        config = LOW_RANK
    else:
        config = HypernetworkConfig(
            3, 16, 2, request.param, spread=0.5, feature_norm=norm
        )
    hyper = init_hypernetwork(KEY, TEMPLATE, 4, config)
    ids = [2, 0]
    rng = np.random.default_rng(0)
    targets = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=(2, *leaf.shape)), jnp.float32),
        TEMPLATE,
    )
    return config, hyper, ids, targets, jnp.array([0.3, 0.7])


def test_the_pull_back_is_the_gradient_of_the_squared_distance(problem):
    config, hyper, ids, targets, weights = problem
    grads = pull_back(hyper, jnp.array(ids), targets, weights, TEMPLATE, config)
    expected = jax.grad(objective)(hyper, ids, targets, weights, config)
    for a, b in zip(
        jax.tree.leaves(grads.phi), jax.tree.leaves(expected.phi), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(grads.z, expected.embeddings[jnp.array(ids)], atol=1e-5)


def test_the_pull_back_agrees_with_finite_differences(problem):
    config, hyper, ids, targets, weights = problem
    with jax.enable_x64(True):
        hyper, targets, weights = jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64),
            (hyper, targets, weights),
        )
        grads = pull_back(hyper, jnp.array(ids), targets, weights, TEMPLATE, config)
        rng = np.random.default_rng(1)
        direction = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), hyper
        )

        def along(step):
            moved = jax.tree.map(lambda p, d: p + step * d, hyper, direction)
            return objective(moved, ids, targets, weights, config)

        slope = (along(1e-6) - along(-1e-6)) / 2e-6
        table = jnp.zeros_like(hyper.embeddings).at[jnp.array(ids)].set(grads.z)
        products = jax.tree.map(
            lambda g, d: jnp.sum(g * d), (grads.phi, table), tuple(direction)
        )
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-6)


def test_gradients_summed_client_by_client_are_the_same(problem):
    config, hyper, ids, targets, weights = problem
    whole = pull_back(hyper, jnp.array(ids), targets, weights, TEMPLATE, config)
    summed = jax.tree.map(jnp.zeros_like, whole.phi)
    for i, client in enumerate(ids):
        target = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], targets)
        one = pull_back(
            hyper, jnp.array([client]), target, weights[i : i + 1], TEMPLATE, config
        )
        summed = jax.tree.map(jnp.add, summed, one.phi)
        np.testing.assert_allclose(one.z[0], whole.z[i], atol=1e-5)
    for a, b in zip(jax.tree.leaves(whole.phi), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_client_whose_relus_are_all_dead_has_a_finite_gradient():
    config = HypernetworkConfig(3, 2, 1, start="model", feature_norm=7.0)
    hyper = init_hypernetwork(KEY, TEMPLATE, 64, config)
    ids = jnp.arange(64)
    emitted = emit_rows(hyper, ids, TEMPLATE, config)
    dead = jnp.all(emitted["a"].reshape(64, -1) == hyper.phi["heads"]["a"]["bias"], 1)
    assert dead.any()
    targets = jax.tree.map(jnp.zeros_like, emitted)
    grads = pull_back(hyper, ids, targets, jnp.full(64, 1 / 64), TEMPLATE, config)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(("num_clients", "hidden"), [(1, 100), (5, 1)])
def test_clients_that_look_alike_start_and_step_as_others_do(num_clients, hidden):
    own = {"w": 0.05 * jax.random.normal(KEY, (500,))}
    config = HypernetworkConfig(hidden=hidden)
    hyper = init_hypernetwork(KEY, own, num_clients, config)
    ids = jnp.zeros(1, int)
    before = emit_rows(hyper, ids, own, config)
    assert abs(before["w"] - own["w"]).max() < 1.0
    target = jax.tree.map(lambda leaf: leaf + 0.01, before)
    grads = pull_back(hyper, ids, target, jnp.ones(1), own, config)
    phi = jax.tree.map(lambda p, g: p - 0.01 * g, hyper.phi, grads.phi)
    after = emit_rows(hyper._replace(phi=phi), ids, own, config)
    assert abs(after["w"] - before["w"]).max() < 0.05


def test_a_client_with_weight_zero_changes_nothing(problem):
    config, hyper, ids, targets, _ = problem
    alone = pull_back(
        hyper, jnp.array(ids), targets, jnp.array([1.0, 0.0]), TEMPLATE, config
    )
    assert np.all(alone.z[1] == 0)
    assert optax.global_norm(alone.phi) > 0


def test_a_low_rank_head_emits_base_plus_the_product_of_its_factors():
    template = {"wide": jnp.ones((2, 3, 4)), "tall": jnp.ones((5, 2)), "flat": KEY_ROW}
    config = HypernetworkConfig(3, 4, 0, feature_norm=0.0, parameters=110.0)
    hyper = init_hypernetwork(KEY, template, 3, config)
    assert head_rank(template, config) == 1
    found = emit_rows(hyper, jnp.array([1]), template, config)
    (layer,) = hyper.phi["trunk"]
    features = np.asarray(hyper.embeddings[1] @ layer["kernel"] + layer["bias"])
    for name, rows in {"wide": 2, "tall": 5, "flat": 1}.items():
        head = jax.tree.map(np.asarray, hyper.phi["heads"][name])
        coefficients = (features @ head["kernel"]).reshape(-1, 1)
        product = coefficients @ head["factor"]
        product = product.T if rows > product.shape[0] else product
        shape = template[name].shape
        expected = head["bias"].reshape(shape) + product.reshape(shape)
        np.testing.assert_allclose(found[name][0], expected, atol=1e-5)
        np.testing.assert_allclose(head["factor"] @ head["factor"].T, 1.0, rtol=1e-5)


def test_low_rank_heads_start_from_the_models_values():
    own = {"w": 0.05 * jax.random.normal(KEY, (40, 200))}
    config = HypernetworkConfig(16, 16, spread=0.3, parameters=2e4)
    hyper = init_hypernetwork(KEY, own, 50, config)
    emitted = emit_rows(hyper, jnp.arange(50), own, config)["w"]
    np.testing.assert_allclose(emitted.mean(axis=0), own["w"], atol=1e-5)
    rank = head_rank(own, config)
    assert 1 < rank < 40
    # Along each of its `rank` directions, of 200.
    expected = 0.3 * 0.05 * (rank / 200) ** 0.5
    assert float(emitted.std(axis=0).mean()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("budget", [1_500.0, 4_000.0, 1e7])
def test_a_budget_is_kept_and_used(budget, layers):
    template = {"a": jnp.ones((8, 30)), "b": jnp.ones((8, 30))}
    config = HypernetworkConfig(8, 16, layers, parameters=budget)
    phi = init_hypernetwork(KEY, template, 4, config).phi
    rank = head_rank(template, config)
    size, one_more = tree.num_elements(phi), 2 * (16 * 8 + 30)
    assert size <= budget
    assert rank == 8 or size + one_more > budget


def test_a_budget_below_rank_one_is_refused_with_the_least():
    config = HypernetworkConfig(8, 16, parameters=100.0)
    with pytest.raises(InputError, match=r"parameters is 100; .* or ([\d,]+) or more"):
        init_hypernetwork(KEY, {"a": jnp.ones((8, 30))}, 4, config)
    least = 8 * 16 + 16 + 240 + 16 * 8 + 30
    config = HypernetworkConfig(8, 16, parameters=float(least))
    assert head_rank({"a": jnp.ones((8, 30))}, config) == 1


def test_fitting_one_client_moves_its_emission_to_the_target(problem):
    config, hyper, _, targets, _ = problem
    one = jnp.array([2])
    target = jax.tree.map(lambda leaf: leaf[:1], targets)
    before = objective(hyper, [2], target, jnp.ones(1), config)
    optimizer = optax.adam(0.01)
    state = optimizer.init(hyper.phi)

    def step(hyper, state):
        grads = pull_back(hyper, one, target, jnp.ones(1), TEMPLATE, config)
        updates, state = optimizer.update(grads.phi, state)
        return hyper._replace(phi=optax.apply_updates(hyper.phi, updates)), state

    hyper, _ = jax.lax.fori_loop(0, 1500, lambda _, both: step(*both), (hyper, state))
    after = objective(hyper, [2], target, jnp.ones(1), config)
    assert after < 1e-3 * before


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (HypernetworkConfig(hidden=0), "hidden is 0"),
        (HypernetworkConfig(embedding_dim=-1), "embedding_dim is -1"),
        (HypernetworkConfig(spread=float("nan")), "spread is nan"),
        (HypernetworkConfig(parameters=-1.0), "parameters is -1"),
    ],
)
def test_bad_sizes_are_refused(config, said):
    with pytest.raises(InputError, match=said):
        init_hypernetwork(KEY, TEMPLATE, 4, config)
