"""Distances of attention maps against SciPy's, and rollout by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.spatial import distance

from fedjax_tp.analysis import attention_maps
from fedjax_tp.models import task as tasks
from fedjax_tp.models.vit import ViT


def draw(seed, shape=(2, 3, 2, 4, 4)):
    scores = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(jax.nn.softmax(2 * scores), jnp.float32)


def test_distance_and_similarity_are_scipys():
    a, b = draw(0), draw(1)
    # A weight of zero, as under a causal mask.
    a = a.at[..., 0, 1:].set(0).at[..., 0, 0].set(1)
    rows = distance.jensenshannon(np.array(a), np.array(b), base=2, axis=-1)
    found = attention_maps.jensen_shannon(a, b)
    np.testing.assert_allclose(found, rows.mean(axis=(1, 2, 3)), rtol=1e-4)
    flat = (np.array(m).reshape(2, 6, 16) for m in (a, b))
    cosines = [
        np.mean([1 - distance.cosine(x, y) for x, y in zip(*layers, strict=True)])
        for layers in zip(*flat, strict=True)
    ]
    np.testing.assert_allclose(
        attention_maps.cosine_similarity(a, b), cosines, rtol=1e-5
    )


def test_a_model_is_at_no_distance_from_itself_and_others_at_one_at_most():
    a = draw(0)
    np.testing.assert_allclose(attention_maps.jensen_shannon(a, a), 0, atol=1e-3)
    np.testing.assert_allclose(attention_maps.cosine_similarity(a, a), 1, atol=1e-6)
    one, other = jnp.eye(4), jnp.eye(4)[::-1]
    apart = attention_maps.jensen_shannon(
        one[None, None, None], other[None, None, None]
    )
    np.testing.assert_allclose(apart, 1, atol=1e-6)


def test_rollout_multiplies_layers_with_their_residuals():
    maps = draw(2, (2, 1, 2, 3, 3))
    first, second = (np.array(m[0]).mean(axis=0) / 2 + np.eye(3) / 2 for m in maps)
    found = attention_maps.rollout(maps)
    np.testing.assert_allclose(found[0], second @ first, rtol=1e-5)
    np.testing.assert_allclose(found.sum(axis=-1), 1, rtol=1e-5)


def test_maps_are_the_weights_with_which_the_model_attends():
    model = ViT(3, patch_size=4, dim=8, depth=2, heads=2, head_dim=4, mlp_dim=8)
    task = tasks.classification(model, (8, 8, 1))
    params = task.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 1))
    maps = task.maps(params, x)
    assert maps.shape == (2, 2, 2, 5, 5)
    np.testing.assert_allclose(maps.sum(axis=-1), 1, rtol=1e-5)
    # Of the first layer, from the formula.
    from fedjax_tp.models.vit import patches

    embedded = patches(x, 4) @ params["patch_embedding"]["kernel"]
    embedded = embedded + params["patch_embedding"]["bias"]
    cls = jnp.broadcast_to(params["cls"], (2, 1, 8))
    tokens = jnp.concatenate([cls, embedded], axis=1) + params["positions"]
    norm = params["block_0"]["attention_norm"]
    centred = tokens - tokens.mean(axis=-1, keepdims=True)
    normed = centred / jnp.sqrt(tokens.var(axis=-1, keepdims=True) + 1e-5)
    normed = normed * norm["scale"] + norm["bias"]
    qkv = params["block_0"]["attention"]["qkv"]
    q, k = (jnp.einsum("bnd,dhe->bhne", normed, qkv[:, i]) for i in range(2))
    expected = jax.nn.softmax(jnp.einsum("bhqe,bhke->bhqk", q, k) / 2)
    np.testing.assert_allclose(maps[0], expected, atol=1e-5)
