"""Dropout and its random bits against JAX's and Flax's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp.models.layers import Dropout, random_bits


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
)
def test_random_bits_are_jaxs(seed, shape):
    key = jax.random.key(seed)
    assert np.array_equal(random_bits(key, shape), jax.random.bits(key, shape))


def test_other_generators_give_their_own_bits():
    key = jax.random.key(0, impl="rbg")
    assert np.array_equal(random_bits(key, (4, 3)), jax.random.bits(key, (4, 3)))


@pytest.mark.smoke
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_dropout_drops_what_flaxs_does(rate):
    x = jax.random.normal(jax.random.key(1), (40, 50))
    rngs = {"dropout": jax.random.key(2)}
    ours = Dropout(rate).apply({}, x, deterministic=False, rngs=rngs)
    theirs = nn.Dropout(rate).apply({}, x, deterministic=False, rngs=rngs)
    assert np.array_equal(ours == 0, theirs == 0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert abs(float((ours == 0).mean()) - rate) < 0.05


def test_dropout_is_the_identity_when_told_so():
    x = jnp.arange(6.0).reshape(2, 3)
    assert Dropout(0.5).apply({}, x, deterministic=True) is x
    assert Dropout(0.0).apply({}, x, deterministic=False) is x
