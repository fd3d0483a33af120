"""The ViT against the paper's counts and a NumPy reading of its formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, softmax

from fedjax_tp import tree
from fedjax_tp.models import task as tasks
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.vit import ViT, patches
from fedjax_tp.types import InputError


@pytest.mark.parametrize(("classes", "expected"), [(10, 1_988_490), (100, 2_000_100)])
def test_parameter_counts_are_the_papers(classes, expected):
    task = tasks.classification(ViT(classes), (32, 32, 3))
    params = jax.eval_shape(task.init, jax.random.key(0))
    personal, shared = tree.split(params, is_attention_projection)
    assert tree.num_elements(params) == expected
    assert tree.num_elements(personal) == 1_179_648
    assert tree.num_elements(shared) == expected - 1_179_648


def layer_norm(x, p):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * p["scale"] + p["bias"]


def linear(x, p):
    return x @ p["kernel"] + p["bias"]


def reference_vit(params, image, patch, heads, head_dim):
    """One image through the formulas, token by token, head by head."""
    height, width, _ = image.shape
    flat = [
        image[r : r + patch, c : c + patch].reshape(-1)
        for r in range(0, height, patch)
        for c in range(0, width, patch)
    ]
    x = linear(np.stack(flat), params["patch_embedding"])
    x = np.concatenate([params["cls"][0], x]) + params["positions"][0]
    for name in sorted(n for n in params if n.startswith("block_")):
        block = params[name]
        normed = layer_norm(x, block["attention_norm"])
        qkv = block["attention"]["qkv"]
        heads_out = []
        for h in range(heads):
            q, k, v = (normed @ qkv[:, i, h] for i in range(3))
            heads_out.append(softmax(q @ k.T / np.sqrt(head_dim), axis=-1) @ v)
        x = x + linear(np.concatenate(heads_out, -1), block["attention"]["out"])
        hidden = linear(layer_norm(x, block["mlp_norm"]), block["mlp"]["up"])
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        x = x + linear(hidden, block["mlp"]["down"])
    return linear(layer_norm(x[0], params["head_norm"]), params["head"])


@pytest.mark.parametrize(("size", "channels", "patch"), [(8, 1, 2), (6, 3, 3)])
def test_the_forward_pass_is_the_formulas(size, channels, patch):
    module = ViT(
        5,
        patch_size=patch,
        dim=12,
        depth=2,
        heads=3,
        head_dim=5,
        mlp_dim=7,
        dropout=0.3,
    )
    task = tasks.classification(module, (size, size, channels))
    params = task.init(jax.random.key(1))
    images = np.random.default_rng(0).normal(size=(4, size, size, channels))
    logits = task.apply(params, jnp.asarray(images, jnp.float32))
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = [reference_vit(exact, image, patch, 3, 5) for image in images]
    np.testing.assert_allclose(logits, np.stack(expected), atol=2e-5)


def test_a_patch_size_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"patch size is 3; .* 8x8 allow 1, 2, 4, 8"):
        patches(jnp.zeros((1, 8, 8, 1)), 3)


def test_initial_values_have_the_bounds_of_the_papers_layers():
    task = tasks.classification(ViT(10), (32, 32, 3))
    params = task.init(jax.random.key(0))
    qkv = params["block_0"]["attention"]["qkv"]
    assert abs(qkv).max() <= 128**-0.5
    # sqrt(1 / (3 * 128)) = 0.0510, the standard deviation measured in the paper's code.
    assert abs(float(qkv.std()) - 0.051) < 5e-4
    assert abs(float(params["positions"].std()) - 1) < 0.03
    assert abs(float(params["head"]["kernel"].std()) - 0.051) < 3e-3


def test_dropout_acts_in_training_alone(vit_task):
    params = vit_task.init(jax.random.key(0))
    x = jnp.ones((2, 8, 8, 1))
    batch = tasks.Batch(x, jnp.array([0, 1]), jnp.array([True, True]))
    losses = [vit_task.loss(params, batch, jax.random.key(k)) for k in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert np.array_equal(vit_task.apply(params, x), vit_task.apply(params, x))
