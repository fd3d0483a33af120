"""The bound against its own proof, against chance, and its constants against SVDs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp import tree
from fedjax_tp.analysis import generalization
from fedjax_tp.analysis.generalization import Block
from fedjax_tp.hypernetwork import HypernetworkConfig, emit, init_hypernetwork
from fedjax_tp.models import task as tasks
from fedjax_tp.types import Batch, InputError

KEY = jax.random.key(0)


def bound(blocks, num_clients, samples, delta=0.05):
    return generalization.generalization_bound(
        blocks, num_clients, samples, delta=delta
    )


def test_the_bound_is_its_formula_at_the_best_scale():
    blocks = [Block("all", 3, 2.0, 1.5, True), Block("more", 5, 1.0, 0.5, False)]
    found = bound(blocks, 4, 100)
    eta, count = found.scale, 4 * 3 + 5
    own = 12 * np.log(1 + 2 * 2.0 * 1.5 / (12 / count * eta))
    shared = 5 * np.log(1 + 2 * 1.0 * 0.5 / (5 / count * eta))
    assert found.entropy["all"] == pytest.approx(own)
    assert found.entropy["more"] == pytest.approx(shared)
    gap = 2 * eta + np.sqrt((own + shared + np.log(2 / 0.05)) / (2 * 4 * 100))
    assert found.gap == pytest.approx(gap)


@pytest.mark.parametrize("samples", [100, 1000])
def test_the_bound_holds_for_a_family_whose_true_errors_are_known(samples):
    """Loss |x - theta| for x uniform on [0, 1]: true error (t^2 + (1 - t)^2) / 2."""
    clients, delta, draws = 3, 0.2, 100
    rng = np.random.default_rng(0)
    # Each client has a theta of its own in [0, 1]: a ball of radius 1/2.
    promised = bound([Block("theta", 1, 0.5, 1.0, True)], clients, samples, delta).gap
    grid = np.linspace(0, 1, 101)
    true = (grid**2 + (1 - grid) ** 2) / 2
    x = rng.random((draws, clients, samples))
    seen = np.abs(x[..., None] - grid).mean(axis=2)
    # The worst choice for all clients is the worst one for each, with the same sign.
    above = (true - seen).max(axis=2).mean(axis=1)
    below = (seen - true).max(axis=2).mean(axis=1)
    worst = np.maximum(above, below)
    assert np.mean(worst > promised) <= delta
    # Not for nothing: of the size of what happens.
    assert promised < 4 * worst.max()


@pytest.mark.parametrize("dimension", [1, 2])
def test_a_ball_is_covered_by_as_many_balls_as_are_counted(dimension):
    """A greedy cover, by points further apart than r, needs no more."""
    rng = np.random.default_rng(1)
    radius, small = 1.0, 0.3
    points = rng.uniform(-1, 1, (20000, dimension))
    points = points[np.linalg.norm(points, axis=1) <= radius]
    centers = np.zeros((0, dimension))
    for point in points:
        if not len(centers) or np.linalg.norm(centers - point, axis=1).min() > small:
            centers = np.vstack([centers, point])
    # One block has all of the scale: r = eta / L.
    blocks = [Block("x", dimension, radius, 2.0, False)]
    log_count = generalization.entropies(blocks, 1, np.array([small * 2.0]))[0, 0]
    assert len(centers) <= np.exp(log_count)


numbers = st.floats(0.01, 100)


@settings(max_examples=50, deadline=None)
@given(
    own=st.integers(1, 10**4),
    shared=st.integers(1, 10**6),
    radius=numbers,
    lipschitz=numbers,
    clients=st.integers(1, 10**4),
    samples=st.integers(1, 10**6),
)
def test_more_clients_or_examples_never_raise_the_bound(
    own, shared, radius, lipschitz, clients, samples
):
    blocks = [
        Block("own", own, radius, lipschitz, True),
        Block("shared", shared, radius, lipschitz, False),
    ]
    here = bound(blocks, clients, samples).gap
    assert bound(blocks, clients, 2 * samples).gap <= here
    assert bound(blocks, 2 * clients, samples).gap <= here * (1 + 1e-9)
    # What clients have for themselves costs the same but for delta, what they share
    # less than before.
    for block in blocks:
        one, two = (bound([block], c, samples).gap for c in (clients, 2 * clients))
        assert one / 1.5 < two <= one
        assert block.is_personal or two < one
    # Averaging more of the model costs each client less.
    sizes = own + shared
    averaged = [Block("all", sizes, radius, lipschitz, False)]
    apart = [Block("all", sizes, radius, lipschitz, True)]
    assert bound(averaged, clients, samples).gap <= bound(apart, clients, samples).gap


def test_only_what_is_a_clients_own_costs_it_with_many_clients():
    embedding = Block("z", 128, 1.0, 2.0, True)
    phi = Block("phi", 10**6, 1.0, 2.0, False)
    both = [embedding, phi]
    alone = generalization.samples_needed([embedding], 1e15, gap=0.1)
    # The embedding by itself: 2 / gap^2 of D log(1 + 2 R L / (gap / 4)).
    assert alone == pytest.approx(200 * 128 * np.log(1 + 4 / 0.025), rel=1e-3)
    few = generalization.samples_needed(both, 10, gap=0.1)
    many = generalization.samples_needed(both, 1e12, gap=0.1)
    assert few > 500 * alone
    assert alone < many < 1.01 * alone
    # Vanilla personalization pays for its projections whatever the crowd.
    vanilla = [Block("qkv", 10**5, 1.0, 2.0, True)]
    for count in (1, 1e12):
        needed = generalization.samples_needed(vanilla, count, gap=0.1)
        assert needed == pytest.approx(alone * 10**5 / 128, rel=1e-3)


def test_as_many_samples_as_are_needed_are_enough():
    blocks = [Block("own", 7, 1.0, 3.0, True), Block("all", 900, 0.2, 5.0, False)]
    samples = generalization.samples_needed(blocks, 20, gap=0.2)
    # The best scale is at least as good as the fixed one; the grid is fine, not exact.
    assert bound(blocks, 20, samples).gap <= 0.2 * 1.001
    assert bound(blocks, 20, samples / 4).gap > 0.2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda b: bound([b._replace(radius=np.inf)], 2, 2), "radius of x is inf"),
        (lambda b: bound([b._replace(lipschitz=-1.0)], 2, 2), "lipschitz of x is -1"),
        (lambda b: bound([b._replace(size=0)], 2, 2), "no parameters"),
        (lambda b: bound([b], 0, 2), "num clients is 0"),
        (lambda b: bound([b], 2, 0.5), "samples is 0.5"),
        (lambda b: bound([b], 2, 2, delta=1.0), "delta is 1.0"),
        (lambda b: generalization.samples_needed([b], 2, gap=0.0), "gap is 0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, said):
    with pytest.raises(InputError, match=said):
        call(Block("x", 3, 1.0, 1.0, True))


def linear_task():
    def init(key):
        return {
            "own": 0.5 * jax.random.normal(key, (3, 4)),
            "bias": jnp.zeros(4),
        }

    def apply(params, x, key):
        return x.reshape(len(x), -1) @ params["own"] + params["bias"]

    return tasks.from_apply(init, apply)


def make_batch(count=5):
    x = jax.random.normal(jax.random.key(1), (count, 3))
    return Batch(x, jnp.arange(count) % 4, jnp.arange(count) < count - 1)


def test_the_expected_error_is_how_often_a_drawn_label_is_wrong():
    logits = jnp.array([[0.3, -1.0, 0.8], [20.0, -20.0, 0.0]])
    labels = jnp.array([2, 0])
    found = generalization.expected_error(logits, labels)
    drawn = jax.random.categorical(KEY, logits, shape=(40000, 2))
    np.testing.assert_allclose(found, (drawn != labels).mean(axis=0), atol=0.01)
    # Small errors keep their digits: 1 - p would be 0 in float32.
    assert float(found[1]) == pytest.approx(np.exp(-20), rel=1e-3)


def test_a_task_scored_by_expected_error():
    task, batch = linear_task(), make_batch()
    params = task.init(KEY)
    found = generalization.with_expected_error(task).metrics(params, batch)
    expected = generalization.expected_error(task.apply(params, batch.x), batch.y)
    assert float(found.loss) == pytest.approx(float(expected[:-1].sum()), rel=1e-5)
    usual = task.metrics(params, batch)
    assert (found.correct, found.examples) == (usual.correct, usual.examples)


def test_gradient_norms_are_slopes_of_single_examples():
    task, batch = linear_task(), make_batch()
    params = task.init(KEY)
    found = generalization.gradient_norms(task, params, batch, lambda p: p == "own")
    assert float(found.shared[-1]) == float(found.personal[-1]) == 0.0
    for row in range(len(batch.y) - 1):
        x, y = np.asarray(batch.x[row], np.float64), int(batch.y[row])
        logits = x @ np.asarray(params["own"], np.float64)
        p = np.exp(logits) / np.exp(logits).sum()
        # d(1 - p_y) / d logits = p_y (p - 1_y), and the kernel's is its product with x.
        slope = np.linalg.norm(p[y] * (p - np.eye(4)[y]))
        assert float(found.shared[row]) == pytest.approx(slope, rel=1e-4)
        own = slope * np.linalg.norm(x)
        assert float(found.personal[row]) == pytest.approx(own, rel=1e-4)


def test_no_step_changes_an_error_by_more_than_its_lipschitz_constant():
    """The chain of the bound: |change of error| <= L_h (L_phi |dphi| + L_z |dz|)."""
    config = HypernetworkConfig(embedding_dim=3, hidden=4, layers=1, spread=0.5)
    task, batch = linear_task(), make_batch()
    params = task.init(KEY)
    own, shared = tree.split(params, lambda p: p == "own")
    hyper = init_hypernetwork(KEY, own, 2, config)
    norms = jax.jit(
        lambda phi, z: generalization.operator_norms(
            phi, z, own, config, KEY, iterations=100
        )
    )(hyper.phi, hyper.embeddings)

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def slopes(phi, z):
        emitted = jax.tree.map(lambda leaf: leaf[0], emit(phi, z[None], own, config))
        logits = task.apply(tree.merge(emitted, shared), batch.x[:1])
        return generalization.expected_error(logits, batch.y[:1])[0]

    emitted = jax.tree.map(
        lambda leaf: leaf[0], emit(hyper.phi, hyper.embeddings[:1], own, config)
    )
    own_norm = generalization.gradient_norms(
        task, tree.merge(emitted, shared), batch, lambda p: p == "own"
    ).personal[0]
    by_phi, by_z = slopes(hyper.phi, hyper.embeddings[0])
    slack = 1 + 1e-4
    norm = generalization.euclidean_norm
    assert 0 < float(norm(by_phi)) <= float(own_norm * norms.phi[0]) * slack
    assert 0 < float(norm(by_z)) <= float(own_norm * norms.z[0]) * slack


@pytest.mark.parametrize(("parameters", "feature_norm"), [(0.0, 0.0), (200.0, 7.0)])
def test_operator_norms_are_largest_singular_values(parameters, feature_norm):
    config = HypernetworkConfig(
        embedding_dim=3,
        hidden=4,
        layers=1,
        spread=0.5,
        feature_norm=feature_norm,
        parameters=parameters,
    )
    template = {"q": jax.random.normal(KEY, (3, 4)), "k": jnp.ones((2,))}
    hyper = init_hypernetwork(jax.random.key(3), template, 2, config)
    found = jax.jit(
        lambda phi, z: generalization.operator_norms(
            phi, z, template, config, KEY, iterations=300
        )
    )(hyper.phi, hyper.embeddings)

    @jax.jit
    @partial(jax.jacobian, argnums=(0, 1))
    def jacobians(phi, z):
        emitted = emit(phi, z[None], template, config)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(emitted)])

    for client, z in enumerate(hyper.embeddings):
        by_phi, by_z = jacobians(hyper.phi, z)
        rows = [np.asarray(leaf).reshape(14, -1) for leaf in jax.tree.leaves(by_phi)]
        expected = np.linalg.norm(np.concatenate(rows, axis=1), 2)
        assert float(found.phi[client]) == pytest.approx(expected, rel=1e-3)
        expected = np.linalg.norm(np.asarray(by_z), 2)
        assert float(found.z[client]) == pytest.approx(expected, rel=1e-3)
