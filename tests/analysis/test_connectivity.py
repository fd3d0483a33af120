"""Barriers against closed forms; layers, directions, subspaces, dropped blocks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_tp import tree
from fedjax_tp.analysis import blocks, connectivity, layers
from fedjax_tp.models import task as tasks
from fedjax_tp.models.char_transformer import CharTransformer
from fedjax_tp.models.cnn import LeNet
from fedjax_tp.models.vit import ViT
from fedjax_tp.types import Batch, InputError

KEY = jax.random.key(0)


def product_task():
    """f = w2 w1 x with the loss (w1 w2 - 1)^2: two layers of one number."""

    def init(key):
        return {"first": {"w": jnp.ones(())}, "second": {"w": jnp.ones(())}}

    def metrics(params, batch):
        loss = (params["first"]["w"] * params["second"]["w"] - 1) ** 2
        count = batch.mask.sum().astype(jnp.float32)
        return tasks.Metrics(count * 0, loss * count, count)

    return tasks.Task(init, None, None, metrics)


def product(first, second):
    return {"first": {"w": jnp.array(first)}, "second": {"w": jnp.array(second)}}


BATCH = Batch(jnp.zeros((2, 1)), jnp.zeros(2, int), jnp.ones(2, bool))


def barriers_of(first, second, shares):
    task = product_task()
    names = layers.layers_of(task.init)
    evaluate = connectivity.make_evaluate_points(task, names)
    points = np.concatenate([connectivity.full_path((0.0, 1.0), names), shares])
    loss = evaluate(first, second, jnp.asarray(points, jnp.float32), BATCH).loss
    return np.asarray(connectivity.barriers(loss[2:], loss[0], loss[1]))


TWO = layers.layers_of(product_task().init)


def test_barriers_of_a_product_of_opposite_signs():
    first, second = product(1.0, 1.0), product(-1.0, -1.0)
    shares = np.concatenate(
        [connectivity.full_path((0.5,), TWO), connectivity.layer_wise(TWO)]
    )
    shares = np.concatenate([shares, connectivity.from_second(shares)])
    np.testing.assert_allclose(
        barriers_of(first, second, shares), np.ones(6), atol=1e-6
    )


def test_barriers_of_a_product_with_other_scales():
    first, second = product(2.0, 0.5), product(0.5, 2.0)
    alone = connectivity.layer_wise(TWO)
    shares = np.concatenate(
        [
            connectivity.full_path((0.5,), TWO),
            alone,
            connectivity.from_second(alone),
        ]
    )
    expected = [0.31640625, 0.140625, 2.25, 2.25, 0.140625]
    # Layer 1 in the first model and in the second, then layer 2 likewise.
    found = barriers_of(first, second, shares)[[0, 1, 3, 2, 4]]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_sets_of_no_layer_and_of_all():
    first, second = product(2.0, 0.7), product(0.3, 2.0)
    both = connectivity.chosen([("first", "second"), ()], TWO)
    every = np.concatenate([both, connectivity.from_second(both)])
    all_first, none_first, all_second, none_second = barriers_of(first, second, every)
    full = barriers_of(first, second, connectivity.full_path((0.5,), TWO))[0]
    assert all_first == pytest.approx(full, abs=1e-6)
    assert all_second == pytest.approx(full, abs=1e-6)
    losses = [(2 * 0.7 - 1) ** 2, (0.3 * 2 - 1) ** 2]
    assert none_first == pytest.approx(losses[0] - np.mean(losses), abs=1e-6)
    assert none_second == pytest.approx(losses[1] - np.mean(losses), abs=1e-6)
    assert barriers_of(first, first, every) == pytest.approx(np.zeros(4), abs=1e-6)


def test_a_linear_network_is_convex_along_one_layer():
    """Adilova et al.: the loss of a deep linear net is convex in each layer alone."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))

    def init(key):
        return {"a": {"w": jnp.zeros((3, 4))}, "b": {"w": jnp.zeros((4, 2))}}

    def metrics(params, batch):
        out = batch.x @ params["a"]["w"] @ params["b"]["w"]
        loss = jnp.sum((out - jnp.asarray(y)) ** 2)
        count = batch.mask.sum().astype(jnp.float32)
        return tasks.Metrics(count * 0, loss, count)

    task = tasks.Task(init, None, None, metrics)
    names = layers.layers_of(init)
    evaluate = connectivity.make_evaluate_points(task, names)
    batch = Batch(jnp.asarray(x, jnp.float32), jnp.zeros(32, int), jnp.ones(32, bool))
    models = [
        {
            "a": {"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)},
            "b": {"w": jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)},
        }
        for _ in range(2)
    ]
    for layer in range(2):
        cut = np.zeros((5, 2), np.float32)
        cut[:, layer] = np.linspace(0, 1, 5)
        losses = np.asarray(evaluate(*models, jnp.asarray(cut), batch).loss)
        assert (np.diff(losses, 2) > 0).all()


def test_cumulative_sets_grow_in_order():
    names = layers.Layers(("a", "b", "c"), None)
    found = connectivity.cumulative([2, 0], names)
    assert found.tolist() == [[0, 0, 0.5], [0.5, 0, 0.5]]
    with pytest.raises(InputError, match="different layers from 0 to 2"):
        connectivity.cumulative([0, 0], names)
    with pytest.raises(InputError, match="layer is 'x'; this model has a, b, c"):
        connectivity.chosen([("x",)], names)


def test_layers_stand_in_the_order_of_the_model():
    module = ViT(3, patch_size=4, dim=8, depth=2, heads=2, head_dim=4, mlp_dim=8)
    names = layers.layers_of(tasks.classification(module, (8, 8, 1)).init).names
    inside = ["attention_norm", "attention/q", "attention/k", "attention/v"]
    inside += ["attention/out", "mlp_norm", "mlp/up", "mlp/down"]
    by_block = [f"block_{i}/{name}" for i in range(2) for name in inside]
    assert names == (
        "patch_embedding",
        "cls",
        "positions",
        *by_block,
        "head_norm",
        "head",
    )
    text = CharTransformer(9, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8)
    names = layers.layers_of(tasks.next_character(text, 6).init).names
    assert names[0] == "embedding"
    assert names[-1] == "head"
    cnn = tasks.classification(LeNet(3, batch_norm=True), (8, 8, 1))
    found = layers.layers_of(cnn.init)
    assert found.names[0].startswith("convolution_0")
    assert found.names[-1] == "head"
    assert {int(i) for i in jax.tree.leaves(found.index["batch_stats"])} == {-1}


@pytest.fixture(scope="module")
def vit():
    module = ViT(
        3, patch_size=4, dim=8, depth=2, heads=2, head_dim=4, mlp_dim=8, dropout=0.0
    )
    task = tasks.classification(module, (8, 8, 1))
    first, second = (jax.jit(task.init)(jax.random.key(i)) for i in range(2))
    return task, first, second


def test_projections_are_three_layers(vit):
    task, first, second = vit
    names = layers.layers_of(task.init)
    share = np.zeros(len(names.names), np.float32)
    share[names.names.index("block_1/attention/k")] = 1.0
    mixed = jax.jit(lambda share: layers.interpolate(first, second, share, names))(
        jnp.asarray(share)
    )
    qkv = mixed["block_1"]["attention"]["qkv"]
    for i, model in ((0, first), (1, second), (2, first)):
        np.testing.assert_allclose(
            qkv[:, i], model["block_1"]["attention"]["qkv"][:, i], atol=1e-6
        )
    np.testing.assert_array_equal(mixed["head"]["kernel"], first["head"]["kernel"])
    norms = np.asarray(layers.layer_norms(first, names))
    assert np.sum(norms**2) == pytest.approx(
        float(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(first))), rel=1e-5
    )
    place = names.names.index("block_0/attention/v")
    expected = np.linalg.norm(first["block_0"]["attention"]["qkv"][:, 2])
    assert norms[place] == pytest.approx(expected, rel=1e-6)


def test_rotation_is_one_less_the_cosine():
    initial = product(3.0, 1.0)
    assert layers.rotation(product(6.0, -2.0), initial, TWO).tolist() == [0, 2]
    a = {"first": {"w": jnp.array([3.0, 4.0])}, "second": {"w": jnp.zeros(2)}}
    b = {"first": {"w": jnp.array([4.0, -3.0])}, "second": {"w": jnp.zeros(2)}}
    found = layers.rotation(b, a, TWO)
    np.testing.assert_allclose(found, [1, 0], atol=1e-6)


def test_random_directions_are_as_long_layer_by_layer(vit):
    task, first, second = vit
    names = layers.layers_of(task.init)
    direction = jax.jit(
        lambda key: connectivity.random_direction(key, first, second, names)
    )(KEY)
    difference = jax.tree.map(jnp.subtract, second, first)
    np.testing.assert_allclose(
        layers.layer_norms(direction, names),
        layers.layer_norms(difference, names),
        rtol=1e-5,
        atol=1e-6,
    )
    cosines = np.asarray(layers.layer_cosines(direction, difference, names))
    assert np.abs(cosines[:3]).max() < 0.7


def test_directions_inside_a_trajectory_and_outside():
    rng = np.random.default_rng(0)
    models = rng.normal(size=(4, 30)).astype(np.float32)
    models[3] = models[0] + models[1]
    basis = connectivity.trajectory_basis(jnp.asarray(models))
    lengths = np.linalg.norm(basis, axis=1)
    assert lengths == pytest.approx([1, 1, 1, 0], abs=1e-5)
    inside = np.asarray(connectivity.direction_inside(KEY, basis))
    outside = np.asarray(connectivity.direction_outside(KEY, basis))
    for direction in (inside, outside):
        assert np.linalg.norm(direction) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(models @ outside, np.zeros(4), atol=1e-5)
    weights = np.linalg.lstsq(models[:3].T, inside, rcond=None)[0]
    np.testing.assert_allclose(models[:3].T @ weights, inside, atol=1e-5)


def test_statistics_are_computed_anew_between_models():
    task = tasks.classification(LeNet(3, batch_norm=True), (8, 8, 1))
    params = jax.jit(task.init)(KEY)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(2.0, 3.0, size=(2, 16, 8, 8, 1)), jnp.float32)
    batches = Batch(x, jnp.zeros((2, 16), int), jnp.ones((2, 16), bool))
    found = jax.jit(partial(connectivity.recalibrate, task))(params, batches)
    step = jax.jit(lambda p, b: task.loss_and_statistics(p, b, KEY)[1]["batch_stats"])
    after = [
        step(params, jax.tree.map(lambda leaf, i=i: leaf[i], batches)) for i in range(2)
    ]
    # A step of the running mean takes 0.1 of the batch's own beside 0.9 of the old.
    expected = jax.tree.map(
        lambda old, *new: np.mean([(n - 0.9 * old) / 0.1 for n in new], axis=0),
        params["batch_stats"],
        *after,
    )
    pairs = zip(*map(jax.tree.leaves, (found["batch_stats"], expected)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)
    np.testing.assert_array_equal(found["head"]["kernel"], params["head"]["kernel"])


def test_a_dropped_block_is_the_identity(vit):
    task, first, _ = vit
    one_block = tasks.classification(
        ViT(
            3, patch_size=4, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8, dropout=0.0
        ),
        (8, 8, 1),
    )
    x = jax.random.normal(KEY, (5, 8, 8, 1))
    rest = {name: leaf for name, leaf in first.items() if name != "block_1"}
    np.testing.assert_allclose(
        jax.jit(task.apply)(blocks.without_block(first, 1), x),
        jax.jit(one_block.apply)(rest, x),
        atol=1e-5,
    )
    assert blocks.num_blocks(first) == 2
    # Labels that the model is right about without block 0, and never without block 1.
    without = [jax.jit(task.apply)(blocks.without_block(first, i), x) for i in (0, 1)]
    labels, others = (logits.argmax(axis=1) for logits in without)
    labels = jnp.where(labels == others, (labels + 1) % 3, labels)
    batch = Batch(x, labels, jnp.ones(5, bool))
    found = jax.jit(partial(blocks.accuracy_without_each, task))(first, batch)
    expected = [(logits.argmax(axis=1) == labels).mean() for logits in without]
    np.testing.assert_allclose(found, expected)
    assert expected[1] == 0
    with pytest.raises(InputError, match="no transformer blocks"):
        blocks.without_block({"head": {"kernel": jnp.ones((2, 2))}}, 0)
    assert tree.num_elements(blocks.without_block(first, 0)) == tree.num_elements(first)
