"""Attention and its hand-written gradients against autodiff of the plain formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fedjax_tp.inference.attention import quantized_attention
from fedjax_tp.models.attention import ATTENDED, attention, multi_head_attention
from fedjax_tp.models.char_transformer import CharTransformer
from fedjax_tp.models.vit import ViT


def plain_attention(q, k, v, causal=False):
    scores = jnp.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    if causal:
        later = np.triu(np.ones(scores.shape[-2:], bool), 1)
        scores = scores - 1e30 * later
    return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores), v)


def plain_multi_head(x, qkv, out, causal=False):
    q, k, v = jnp.einsum("bnd,dthe->tbhne", x, qkv)
    return jnp.einsum("bhne,hew->bnw", plain_attention(q, k, v, causal), out)


def with_gradients(function, cotangent, *inputs):
    value, vjp = jax.vjp(function, *inputs)
    return value, *vjp(cotangent)


def draw(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def multi_head_inputs(rng, batch=3, tokens=5, dim=6, heads=2, head_dim=4, width=7):
    return (
        draw(rng, batch, tokens, dim),
        draw(rng, dim, 3, heads, head_dim) / dim**0.5,
        draw(rng, heads, head_dim, width),
    ), draw(rng, batch, tokens, width)


@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "scale"),
    [(1, 1, 1, 1.0), (5, 3, 3, 30.0), (4, 6, 5, 0.1)],
)
def test_attention_is_the_formula_with_its_gradients(queries, keys, head_dim, scale):
    rng = np.random.default_rng(queries + 10 * keys)
    q, k, v = (draw(rng, 2, 3, n, head_dim) for n in (queries, keys, keys))
    cotangent = draw(rng, 2, 3, queries, head_dim)
    found = with_gradients(attention, cotangent, scale * q, k, v)
    expected = with_gradients(plain_attention, cotangent, scale * q, k, v)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1, scale))


def test_attention_gradients_are_those_of_finite_differences():
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 1, 1, 4, 3) for _ in range(3))
    check_grads(
        jax.jit(attention), (q, k, v), 1, ["rev"], atol=2e-2, rtol=2e-2, eps=1e-2
    )


# All heads at once, and one after another.
@pytest.mark.parametrize("cache_bytes", [1 << 30, 0])
def test_multi_head_attention_is_the_formula_with_its_gradients(cache_bytes):
    inputs, cotangent = multi_head_inputs(np.random.default_rng(1))
    function = functools.partial(multi_head_attention, cache_bytes=cache_bytes)
    found = with_gradients(function, cotangent, *inputs)
    expected = with_gradients(plain_multi_head, cotangent, *inputs)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache_bytes", [1 << 30, 0])
def test_causal_attention_is_the_formula_with_a_mask(cache_bytes):
    inputs, cotangent = multi_head_inputs(np.random.default_rng(1))
    found, expected = (
        with_gradients(functools.partial(f, causal=True, **more), cotangent, *inputs)
        for f, more in (
            (multi_head_attention, {"cache_bytes": cache_bytes}),
            (plain_multi_head, {}),
        )
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("cache_bytes", [1 << 30, 0])
def test_clients_with_their_own_weights_are_each_computed_alone(cache_bytes):
    clients = [multi_head_inputs(np.random.default_rng(seed)) for seed in range(3)]
    function = functools.partial(multi_head_attention, cache_bytes=cache_bytes)

    def train(inputs, cotangent):
        return with_gradients(function, cotangent, *inputs)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients)
    together = jax.jit(jax.vmap(train))(*stacked)
    for i, (inputs, cotangent) in enumerate(clients):
        alone = with_gradients(plain_multi_head, cotangent, *inputs)
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache_bytes", [1 << 30, 0])
def test_bfloat16_stays_bfloat16_and_near_float32(cache_bytes):
    inputs, cotangent = multi_head_inputs(np.random.default_rng(2))
    function = functools.partial(multi_head_attention, cache_bytes=cache_bytes)
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (inputs, cotangent))
    found = with_gradients(function, halves[1], *halves[0])
    expected = with_gradients(plain_multi_head, cotangent, *inputs)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        # bfloat16 has 8 bits; the products add up 20 of them at most.
        error = jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()
        assert error < 0.03


@pytest.mark.parametrize("causal", [False, True])
def test_other_platforms_take_jaxs_attention(monkeypatch, causal):
    inputs, cotangent = multi_head_inputs(np.random.default_rng(3))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    calls = []
    theirs = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *qkv, **more: calls.append(1) or theirs(*qkv, **more),
    )
    found = with_gradients(
        functools.partial(multi_head_attention, causal=causal), cotangent, *inputs
    )
    expected = with_gradients(
        functools.partial(plain_multi_head, causal=causal), cotangent, *inputs
    )
    assert calls
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_large_scores_stay_finite():
    q = jnp.full((1, 1, 2, 4), 1e4)
    value, *gradients = with_gradients(attention, jnp.ones((1, 1, 2, 4)), q, q, q)
    assert all(np.isfinite(leaf).all() for leaf in (value, *gradients))


def _codes_of_many_bits(q, k, v, *, causal):
    return quantized_attention(
        q, k, v, bits=None, threshold=0.0, causal=causal, return_statistics=True
    )


@pytest.mark.parametrize("kind", ["vit", "char_transformer"])
def test_models_take_an_attention_function_and_nothing_else_changes(kind):
    sizes = {"dim": 8, "depth": 2, "heads": 2, "head_dim": 4, "mlp_dim": 8}
    if kind == "vit":
        x = jax.random.normal(jax.random.key(0), (3, 8, 8, 1))
        plain, quantized = (
            ViT(3, patch_size=4, attend=attend, **sizes)
            for attend in (None, _codes_of_many_bits)
        )
    else:
        x = jax.random.randint(jax.random.key(0), (3, 7), 0, 5).astype(float)
        plain, quantized = (
            CharTransformer(5, attend=attend, **sizes)
            for attend in (None, _codes_of_many_bits)
        )
    params = plain.init(jax.random.key(1), x)
    jax.tree.map(
        np.testing.assert_array_equal,
        params,
        {"params": quantized.init(jax.random.key(1), x)["params"]},
    )
    found, sown = quantized.apply(params, x, mutable=[ATTENDED])
    np.testing.assert_allclose(found, plain.apply(params, x), atol=1e-5)
    tokens = 5 if kind == "vit" else 7
    seen = tokens**2 if kind == "vit" else tokens * (tokens + 1) // 2
    for block in ("block_0", "block_1"):
        (statistics,) = sown[ATTENDED][block]["attention"]["statistics"]
        assert (np.asarray(statistics.histogram) == [0, seen]).all()
