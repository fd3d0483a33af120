"""Examples on the device: shuffles and gathers."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp.data import federated
from tests.conftest import federate_sizes


@settings(max_examples=25, deadline=None)
@given(size=st.integers(0, 40), more=st.integers(0, 20), seed=st.integers(0, 2**31))
def test_a_shuffle_is_a_permutation_whatever_the_capacity(size, more, seed):
    key = jax.random.key(seed)
    order = federated.shuffled(key, jnp.array(size), max(size, 1))[:size]
    padded = federated.shuffled(key, jnp.array(size), size + more + 1)[:size]
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == padded.tolist()


def test_shuffles_are_uniform():
    keys = jax.random.split(jax.random.key(0), 6000)
    orders = jax.vmap(lambda k: federated.shuffled(k, jnp.array(3), 5)[:3])(keys)
    _, counts = np.unique(np.asarray(orders), axis=0, return_counts=True)
    assert len(counts) == 6
    assert np.abs(counts - 1000).max() < 120


def test_a_gather_gives_the_clients_normalized_examples():
    data = federate_sizes([4, 3, 6])
    mask = jnp.array([True, True, False])
    batch = federated.gather(data, jnp.array(1), jnp.array([2, 0, 9]), mask)
    raw = np.asarray(data.x)[[6, 4]].astype(np.float32)
    np.testing.assert_allclose(batch.x[:2], (raw - 60) / 70, rtol=1e-6)
    assert batch.y[:2].tolist() == np.asarray(data.y)[[6, 4]].tolist()
    assert np.isfinite(batch.x).all()


def test_padding_holds_nothing_of_another_client():
    data = federate_sizes([4, 3])
    mask = jnp.array([True, False, False])
    batch = federated.gather(data, jnp.array(1), jnp.array([2, 7, 9]), mask)
    own = (np.asarray(data.x)[4].astype(np.float32) - 60) / 70
    np.testing.assert_allclose(batch.x[1], own, rtol=1e-6)
    np.testing.assert_allclose(batch.x[2], own, rtol=1e-6)


def test_a_padded_client_has_no_examples():
    data = federate_sizes([4, 3])
    sizes = federated.client_sizes(data, jnp.array([1, 2, 0]))
    assert sizes.tolist() == [3, 0, 4]


def test_examples_stay_uint8_on_the_device():
    assert federate_sizes([4, 3]).x.dtype == jnp.uint8
