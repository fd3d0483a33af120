"""Algorithms that work on features, on batch statistics, or on data before use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from fedjax_tp import algorithms, tree
from fedjax_tp.algorithms import (
    REGISTRY,
    ClientOptimizer,
    Message,
    MethodConfig,
    Setting,
    Update,
    build,
    client_update,
)
from fedjax_tp.algorithms.base import fine_tuning
from fedjax_tp.algorithms.fedala import AlaKept
from fedjax_tp.algorithms.fedbn import is_norm
from fedjax_tp.algorithms.fedrod import balanced
from fedjax_tp.algorithms.knn import Memory, neighbour_probabilities
from fedjax_tp.algorithms.moon import contrastive
from fedjax_tp.hypernetwork import HypernetworkConfig
from fedjax_tp.models import task as tasks
from fedjax_tp.models.char_transformer import CharTransformer
from fedjax_tp.models.cnn import LeNet
from fedjax_tp.models.lstm import CharLSTM
from fedjax_tp.models.vit import ViT
from fedjax_tp.types import Batch, InputError
from tests.algorithms.test_algorithms import quadratic_task

KEY = jax.random.key(0)
LR = 0.1
SGD = ClientOptimizer(LR, 0.0, 0.0)
SMALL = HypernetworkConfig(embedding_dim=3, hidden=4)


def draw(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def batches_for(task, steps=3, size=4, seed=0, classes=3):
    x = draw((steps, size, 8, 8, 1), seed)
    y = np.random.default_rng(seed).integers(0, classes, (steps, size))
    mask = np.ones((steps, size), bool)
    mask[-1, -1] = False
    return Batch(x, jnp.asarray(y), jnp.asarray(mask))


def one_client(algorithm, batches, *, state=None, kept=None):
    state = algorithm.init(KEY) if state is None else state
    kept = algorithm.init_kept(state) if kept is None else kept
    message = algorithm.broadcast(state, jnp.array([0]))
    own = jax.tree.map(lambda leaf: leaf[0], message.personal)
    message = Message(message.shared, own)
    return message, client_update(algorithm, message, kept, batches, KEY)


def assert_close(a, b, **more):
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_allclose(x, y, **({"atol": 1e-6} | more))


def test_fine_tuning_descends_on_the_clients_batches_and_not_on_padding():
    task = quadratic_task((1.0, 3.0), (0.0, 1.0), start=2.0)
    batches = Batch(
        jnp.zeros((4, 1)),
        jnp.array([[1], [0], [0], [0]]),
        jnp.array([[True], [True], [False], [False]]),
    )
    found = fine_tuning(task, SGD, 2)({"w": jnp.array(2.0)}, batches, KEY)
    w = 2.0
    for a, c in ((3, 1), (1, 0)) * 2:
        w -= LR * a * (w - c)
    np.testing.assert_allclose(found["w"], w, rtol=1e-6)
    untouched = fine_tuning(task, SGD, 0)({"w": jnp.array(2.0)}, batches, KEY)
    assert untouched["w"] == 2.0


def test_fedbabu_trains_the_body_alone_and_everything_before_use(small_task):
    optimizer = ClientOptimizer(LR, 0.9, 0.1)
    algorithm = algorithms.fedbabu(small_task, optimizer, epochs=1)
    batches = batches_for(small_task)
    params = small_task.init(KEY)
    _, update = one_client(algorithm, batches)
    assert_close(update.mean["head"], params["head"], atol=0)
    assert not np.allclose(update.mean["attention"]["qkv"], params["attention"]["qkv"])
    tuned = algorithm.adapt(update.mean, batches, KEY)
    assert not np.allclose(tuned["head"]["kernel"], params["head"]["kernel"])


def test_balanced_softmax_is_that_of_the_paper_and_never_nan():
    logits, counts = draw((2, 3)), jnp.array([5.0, 0.0, 1.0])
    label = 2
    found = -jax.nn.log_softmax(balanced(logits, counts))[0, label]
    weighed = np.array(counts) * np.exp(np.array(logits[0]))
    np.testing.assert_allclose(
        found, -np.log(weighed[label] / weighed.sum()), rtol=1e-5
    )
    gradient = jax.grad(
        lambda z: jax.nn.logsumexp(balanced(z, counts)) - balanced(z, counts)[0, 0]
    )(logits)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient[:, 1], 0, atol=1e-9)


def test_fedrod_steps_both_heads(small_task):
    algorithm = algorithms.fedrod(small_task, SGD)
    batches = batches_for(small_task, steps=1)
    params = small_task.init(KEY)
    _, update = one_client(algorithm, batches)
    batch = jax.tree.map(lambda leaf: leaf[0], batches)
    counts = np.bincount(np.array(batch.y)[np.array(batch.mask)], minlength=3)
    assert update.kept.counts.tolist() == counts.tolist()

    def generic(params):
        found = small_task.forward(params, batch.x, jax.random.fold_in(KEY, 0), None)
        logits = found.logits + np.log(np.maximum(counts, 1e-12))
        return small_task.loss_of(logits, batch), found

    (loss, found), gradient = jax.value_and_grad(generic, has_aux=True)(params)
    assert_close(update.mean, jax.tree.map(lambda w, g: w - LR * g, params, gradient))
    np.testing.assert_allclose(update.metrics["loss"], loss, rtol=1e-6)
    # The personal head starts at zero: its gradient is that of the generic logits.
    error = jax.nn.softmax(found.logits) - jax.nn.one_hot(batch.y, 3)
    error = error * batch.mask[:, None] / batch.mask.sum()
    assert_close(update.kept.head["kernel"], -LR * found.features.T @ error)
    assert_close(update.kept.head["bias"], -LR * error.sum(axis=0))
    model = algorithm.client_params(Message(update.mean, None), update.kept)
    plain = small_task.forward(update.mean, batch.x, None, None)
    expected = plain.logits + tasks.apply_head(
        {"head": update.kept.head}, plain.features
    )
    assert_close(algorithm.predict(model, batch.x), expected)


def test_fedrod_counts_the_targets_of_all_positions():
    task = tasks.next_character(CharLSTM(6, hidden=4), 3)
    text = Batch(
        jnp.array([[[0.0, 1, 2], [5, 5, 5]]]),
        jnp.array([[3, 5]]),
        jnp.array([[True, False]]),
    )
    _, update = one_client(algorithms.fedrod(task, SGD), text)
    assert update.kept.counts.tolist() == [0, 1, 1, 1, 0, 0]


def test_the_contrastive_loss_is_the_formula():
    z, positive, negative = (np.array(draw((5, 4), seed)) for seed in range(3))

    def cosine(a, b):
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        return (a * b).sum(axis=1) / norms

    near, far = (np.exp(cosine(z, other) / 0.5) for other in (positive, negative))
    expected = -np.log(near / (near + far))
    found = contrastive(*map(jnp.asarray, (z, positive, negative)), 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_moon_without_contrast_is_fedavg(small_task):
    batches = batches_for(small_task)
    _, found = one_client(
        algorithms.moon(small_task, SGD, mu=0.0, temperature=0.5), batches
    )
    _, expected = one_client(algorithms.fedavg(small_task, SGD), batches)
    assert_close(found.mean, expected.mean)
    assert_close(found.kept, expected.mean)
    contrasted = algorithms.moon(small_task, SGD, mu=5.0, temperature=0.5)
    before = jax.tree.map(lambda leaf: leaf + 0.3, small_task.init(KEY))
    _, drawn = one_client(contrasted, batches, kept=before)
    assert not np.allclose(
        drawn.mean["attention"]["qkv"], found.mean["attention"]["qkv"]
    )


def test_fedala_without_learning_its_weights_is_fedavg(small_task):
    batches = batches_for(small_task)
    plain = algorithms.fedala(small_task, SGD, lr=1.0, share=0.0)
    _, found = one_client(plain, batches)
    _, expected = one_client(algorithms.fedavg(small_task, SGD), batches)
    assert_close(found.mean, expected.mean)
    assert_close(found.kept.head["head"], expected.mean["head"])


def test_fedala_learns_where_to_start_and_then_trains(small_task):
    batches = batches_for(small_task, steps=2)
    algorithm = algorithms.fedala(small_task, SGD, lr=2.0, share=0.5)
    state = algorithm.init(KEY)
    start = algorithm.init_kept(state)
    ours = jax.tree.map(lambda leaf: leaf + 0.5, start.head)
    weights = jax.tree.map(lambda leaf: 0.4 * leaf, start.weights)
    message, update = one_client(algorithm, batches, kept=AlaKept(ours, weights))
    first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], batches) for i in (0, 1))

    def mixed(w):
        head = jax.tree.map(
            lambda a, b, w: a + (b - a) * w,
            ours["head"],
            message.shared["head"],
            w["head"],
        )
        return {**message.shared, "head": head}

    gradient = jax.grad(
        lambda w: small_task.loss(mixed(w), first, jax.random.fold_in(KEY, 0))
    )(weights)
    expected = jax.tree.map(lambda w, g: jnp.clip(w - 2.0 * g, 0, 1), weights, gradient)
    assert_close(update.kept.weights, expected)
    began = mixed(expected)
    slope = jax.grad(small_task.loss)(began, second, jax.random.fold_in(KEY, 1))
    trained = jax.tree.map(lambda w, g: w - LR * g, began, slope)
    assert_close(update.mean, trained)
    assert_close(update.kept.head["head"], trained["head"])
    kept = AlaKept(ours, expected)
    assert_close(algorithm.client_params(message, kept), began)


def test_feddbe_steps_along_its_loss_and_sends_its_mean(small_task):
    algorithm = algorithms.feddbe(small_task, SGD, strength=0.7)
    batches = batches_for(small_task, steps=1)
    batch = jax.tree.map(lambda leaf: leaf[0], batches)
    bias, consensus = draw(3, 1), draw(3, 2)
    params = small_task.init(KEY)
    state = algorithm.init(KEY)._replace(consensus=consensus, is_known=jnp.ones(()))
    _, update = one_client(algorithm, batches, state=state, kept=bias)

    def objective(params, bias):
        key = jax.random.fold_in(KEY, 0)
        features = small_task.forward(params, batch.x, key, None).features
        rows = features[: int(batch.mask.sum())]
        logits = tasks.apply_head(params, features + bias)
        away = jnp.mean((rows.mean(axis=0) - consensus) ** 2)
        return small_task.loss_of(logits, batch) + 0.7 * away, rows.mean(axis=0)

    gradients, mean = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, bias)
    expected = jax.tree.map(lambda w, g: w - LR * g, (params, bias), gradients)
    assert_close((update.mean.params, update.kept), expected)
    assert_close(update.mean.consensus, mean)
    # Before there is a consensus nothing is drawn to it.
    _, first = one_client(algorithm, batches, kept=jnp.zeros(3))
    _, plain = one_client(algorithms.fedavg(small_task, SGD), batches)
    assert_close(first.mean.params, plain.mean)


@pytest.mark.parametrize("neighbours", [3, 50])
def test_the_memory_votes_as_scikit_learns_neighbours(neighbours):
    stored, asked = np.array(draw((20, 5))), np.array(draw((7, 5), 1))
    labels = np.random.default_rng(2).integers(0, 4, 20)
    padded = Memory(
        {},
        jnp.concatenate([jnp.asarray(stored), asked[:3]]),
        jnp.concatenate([jnp.asarray(labels), jnp.zeros(3, int)]),
        jnp.arange(23) < 20,
    )
    found = neighbour_probabilities(padded, jnp.asarray(asked), 4, neighbours)
    oracle = KNeighborsClassifier(
        min(neighbours, 20), weights=lambda distance: np.exp(-(distance**2) / 5)
    ).fit(stored, labels)
    np.testing.assert_allclose(found, oracle.predict_proba(asked), atol=1e-5)


def test_a_memory_is_mixed_with_the_model_and_goes_on_any_algorithm(small_task):
    batches = batches_for(small_task)
    setting = Setting(small_task, 2, method=MethodConfig(knn_share=0.25))
    algorithm = build("fedavg_knn", setting)
    params = small_task.init(KEY)
    memory = algorithm.adapt(params, batches, KEY)
    x = draw((5, 8, 8, 1), 7)
    features = small_task.forward(params, x, None, None).features
    nearest = neighbour_probabilities(memory, features, 3, 10)
    expected = 0.25 * nearest + 0.75 * jax.nn.softmax(small_task.apply(params, x))
    np.testing.assert_allclose(
        jnp.exp(algorithm.predict(memory, x)), expected, atol=1e-6
    )
    # Below it, what the algorithm itself does before use.
    tuned = build("fedbabu_knn", setting)
    assert tuned.name == "fedbabu_knn"
    below = build("fedbabu", setting).adapt(params, batches, KEY)
    assert_close(tuned.adapt(params, batches, KEY).params, below)
    with pytest.raises(InputError, match="does not go with fedrod"):
        build("fedrod_knn", setting)


def test_fedtp_per_emits_projections_and_keeps_the_head(small_task):
    algorithm = build("fedtp_per", Setting(small_task, 2, hypernetwork=SMALL))
    message, update = one_client(algorithm, batches_for(small_task))
    names = [
        {tree.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(part)}
        for part in (message.shared, message.personal, update.kept)
    ]
    assert names == [
        {"norm/scale"},
        {"attention/qkv"},
        {"head/kernel", "head/bias"},
    ]


def test_norms_are_found_by_name():
    for path in (
        "norm_0/scale",
        "batch_stats/norm_3/mean",
        "block_1/mlp_norm/bias",
        "head_norm/scale",
    ):
        assert is_norm(path)
    for path in ("block_0/attention/qkv", "head/kernel", "normal/kernel", "positions"):
        assert not is_norm(path)


def norm_task():
    return tasks.classification(LeNet(3, batch_norm=True), (8, 8, 1))


def test_running_statistics_are_those_of_the_batches_whatever_the_optimizer():
    task = norm_task()
    batches = batches_for(task, steps=2)
    params = task.init(KEY)
    decaying = ClientOptimizer(1e-9, 0.9, 100.0)
    _, update = one_client(algorithms.fedprox(task, decaying, mu=100.0), batches)
    # Steps are next to nothing: the first layer sees the same inputs twice.
    found = update.mean["batch_stats"]["norm_0"]
    mean, var = np.zeros(16), np.ones(16)
    padded = jnp.pad(batches.x, ((0, 0), (0, 0), (2, 2), (2, 2), (0, 0)))
    kernel = params["convolution_0"]["Linear_0"]
    for x, mask in zip(padded, np.array(batches.mask), strict=True):
        kernel_4d = kernel["kernel"].reshape(5, 5, 1, 16)
        y = jax.lax.conv_general_dilated(
            x[mask],
            kernel_4d,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y = np.asarray(y + kernel["bias"]).reshape(-1, 16)
        mean = 0.9 * mean + 0.1 * y.mean(axis=0)
        var = 0.9 * var + 0.1 * y.var(axis=0)
    np.testing.assert_allclose(found["mean"], mean, atol=1e-5)
    np.testing.assert_allclose(found["var"], var, atol=1e-5)


@pytest.mark.parametrize("name", ["fedadam", "scaffold", "pfedme", "fedavgm"])
def test_servers_adopt_statistics_as_they_are(name):
    task = norm_task()
    method = MethodConfig(adaptive_lr=10.0, scaffold_lr=3.0, pfedme_beta=3.0)
    algorithm = build(name, Setting(task, 2, SGD, method=method))
    state = algorithm.init(KEY)
    mean = algorithm.client_finish(
        algorithm.broadcast(state, jnp.array([0])),
        algorithm.client_start(
            algorithm.broadcast(state, jnp.array([0])), algorithm.init_kept(state), KEY
        ),
    ).mean
    mean = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            0.01 * jnp.ones_like(leaf)
            if "batch_stats" in tree.path_name(path)
            else leaf
        ),
        mean,
    )
    after = algorithm.server_update(
        state, jnp.array([0]), Update(mean, None, None, {}), jnp.ones(1)
    )
    assert_close(
        after.shared["batch_stats"],
        jax.tree.map(
            lambda leaf: 0.01 * jnp.ones_like(leaf), state.shared["batch_stats"]
        ),
        atol=0,
    )


def test_a_mixture_uses_the_statistics_of_its_own_batches():
    algorithm = build("apfl", Setting(norm_task(), 2, SGD))
    state = algorithm.init(KEY)
    kept = algorithm.init_kept(state)
    ours = {**kept.params, "batch_stats": _filled(kept.params["batch_stats"], 2.0)}
    shared = {**state.shared, "batch_stats": _filled(kept.params["batch_stats"], 5.0)}
    used = algorithm.client_params(Message(shared, None), kept._replace(params=ours))
    assert_close(used["batch_stats"], ours["batch_stats"], atol=0)


def _filled(tree, value):
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), tree)


MODELS = {
    "vit": tasks.classification(
        ViT(3, patch_size=4, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8), (8, 8, 1)
    ),
    "cnn": tasks.classification(LeNet(3), (8, 8, 1)),
    "cnn_bn": norm_task(),
    "lstm": tasks.next_character(CharLSTM(6, hidden=4), 5),
    "char_transformer": tasks.next_character(
        CharTransformer(6, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8), 5
    ),
}
# Attention, normalization, or one label an example: what these models lack.
LEFT_OUT = {
    "vit": set(),
    "cnn": {"fedbn"},
    "cnn_bn": set(),
    "lstm": {"fedbn", "fedavg_knn", "fedtp_knn"},
    "char_transformer": {"fedavg_knn", "fedtp_knn"},
}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("cnn", "lstm") else [])
        for name in MODELS
    ],
)
def test_every_algorithm_goes_with_every_model(model):
    """Traced, not run: what goes in comes out again in the same shapes."""
    task = MODELS[model]
    # A graph without a server needs three clients.
    setting = Setting(task, 3, SGD, SMALL)
    is_text = task.is_sequence
    x = jnp.zeros((2, 4, 5)) if is_text else jnp.zeros((2, 4, 8, 8, 1))
    batches = Batch(x, jnp.zeros((2, 4), int), jnp.ones((2, 4), bool))
    built, notes = algorithms.build_all("all", setting)
    without = LEFT_OUT[model] | (
        set()
        if "vit" in model or "transformer" in model
        else {name for name in REGISTRY if name.startswith("fedtp")}
    )
    assert {algorithm.name for algorithm in built} == REGISTRY.keys() - without
    assert len(notes) == len(without)

    for algorithm in built:

        def run(algorithm=algorithm):
            state = algorithm.init(KEY)
            kept = algorithm.init_kept(state)
            message, update = one_client(algorithm, batches, state=state, kept=kept)
            personal = jax.tree.map(lambda leaf: leaf[None], update.personal)
            after = algorithm.server_update(
                state,
                jnp.array([0]),
                Update(update.mean, personal, None, {}),
                jnp.ones(1),
            )
            used = algorithm.client_params(message, update.kept)
            if algorithm.adapt is not None:
                used = algorithm.adapt(used, batches, KEY)
            predict = algorithm.predict or task.apply
            return (state, kept), (after, update.kept), predict(used, x[0])

        before, after, logits = jax.eval_shape(run)
        assert jax.tree.structure(before) == jax.tree.structure(after), algorithm.name
        for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), algorithm.name
        assert logits.shape == ((4, 5, 6) if is_text else (4, 3))
