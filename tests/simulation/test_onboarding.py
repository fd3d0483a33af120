"""New clients: what they fit, and from where, against plain gradient descent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_tp.algorithms import Setting, build
from fedjax_tp.data.federated import gather, shuffled
from fedjax_tp.hypernetwork import HypernetworkConfig
from fedjax_tp.models import task as tasks
from fedjax_tp.models.cnn import LeNet
from fedjax_tp.simulation import onboarding
from fedjax_tp.simulation.onboarding import EncoderConfig
from fedjax_tp.types import InputError
from tests.conftest import federate_sizes

KEY = jax.random.key(0)
CONFIG = HypernetworkConfig(embedding_dim=3, hidden=5)
SGD = optax.sgd(0.1)
DATA = federate_sizes([9, 30, 12])


def curve_of(task, method, steps, samples=1000, data=DATA):
    curve = onboarding.make_joining_curve(
        task,
        method,
        steps,
        batch_size=4,
        examples=8,
        capacity=30,
        test_capacity=30,
    )
    return curve(data, DATA, jnp.int32(samples), KEY)


def trained(name, task):
    algorithm = build(name, Setting(task, 3, hypernetwork=CONFIG))
    return algorithm, algorithm.init(KEY)


def test_the_curve_is_gradient_descent_on_the_first_samples(small_task):
    algorithm, server = trained("fedavg", small_task)
    method = onboarding.joining(algorithm, server, SGD)
    assert method.name == "fedavg: fine-tuning"
    found = curve_of(small_task, method, (0, 1, 3), samples=5)
    for client in range(3):
        size = min(5, int(DATA.size[client]))
        params = server.shared
        order_key, draw_key, key = jax.random.split(jax.random.fold_in(KEY, client), 3)
        places = jnp.arange(30)
        own = int(DATA.size[client])
        order = shuffled(order_key, jnp.int32(own), 30)
        assert sorted(order[:own].tolist()) == list(range(own))
        test = gather(DATA, jnp.int32(client), places, places < own)
        for step in range(4):
            if step in (0, 1, 3):
                at = (0, 1, 3).index(step)
                expected = small_task.metrics(params, test)
                np.testing.assert_allclose(
                    found.loss[client, at], expected.loss, rtol=1e-4
                )
                assert found.examples[client, at] == own
            batch_key, loss_key = (jax.random.fold_in(k, step) for k in (draw_key, key))
            drawn = order[jax.random.randint(batch_key, (4,), 0, size)]
            assert set(drawn.tolist()) <= set(order[:size].tolist())
            batch = gather(DATA, jnp.int32(client), drawn, jnp.ones(4, bool))
            gradient = jax.grad(small_task.loss)(params, batch, loss_key)
            params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient)


def test_what_is_kept_is_fitted_and_the_rest_stays(small_task):
    algorithm, server = trained("fedper", small_task)
    method = onboarding.joining(algorithm, server, SGD)
    assert method.name == "fedper: what is kept"
    start = method.start(None)
    assert jax.tree.structure(start) == jax.tree.structure(server.initial_kept)
    params = method.to_params(jax.tree.map(lambda leaf: leaf + 1, start))
    assert np.array_equal(params["attention"]["qkv"], server.shared["attention"]["qkv"])
    assert not np.array_equal(
        params["head"]["bias"], server.initial_kept["head"]["bias"]
    )


@pytest.mark.parametrize("name", ["scaffold", "fedrod", "fedbabu", "pfedhn", "ditto"])
def test_other_algorithms_are_refused(small_task, name):
    algorithm, server = trained(name, small_task)
    with pytest.raises(InputError, match=f"{name}: it is not known what"):
        onboarding.joining(algorithm, server, SGD)


def test_an_embedding_starts_at_the_mean_and_is_fitted_through_the_hypernetwork(
    small_task,
):
    _, server = trained("fedtp", small_task)
    method = onboarding.embedding_joining(small_task, server, CONFIG, SGD)
    embeddings = np.asarray(server.hypernetwork.embeddings)
    mean = embeddings.mean(axis=0)
    # In the direction of the mean, as long as embeddings are.
    start = np.asarray(method.start(None))
    np.testing.assert_allclose(
        start / np.linalg.norm(start), mean / np.linalg.norm(mean), atol=1e-5
    )
    lengths = np.linalg.norm(embeddings, axis=1)
    np.testing.assert_allclose(np.linalg.norm(start), lengths.mean(), rtol=1e-5)
    params = method.to_params(jnp.asarray(start))
    assert np.array_equal(params["head"]["bias"], server.shared["head"]["bias"])
    found = curve_of(small_task, method, (0, 60))
    losses = found.loss.sum(axis=0)
    assert losses[1] < 0.95 * losses[0]
    accuracy = onboarding.pooled_accuracy(found)
    expected = found.correct.sum(axis=0) / 51
    np.testing.assert_allclose(accuracy, expected)


def test_an_encoder_reads_embeddings_whatever_the_order(small_task):
    _, server = trained("fedtp", small_task)

    def method(steps):
        encoder = EncoderConfig(hidden=4, steps=steps, lr=0.05, clients=2, examples=8)
        return onboarding.encoder_joining(
            small_task, server, CONFIG, DATA, KEY, SGD, encoder
        )

    places = jnp.arange(8)
    batch = gather(DATA, jnp.int32(1), places, places < 6)
    untrained, fitted = method(0).start(batch), method(40).start(batch)
    mean = onboarding.mean_embedding(server, CONFIG)
    np.testing.assert_allclose(untrained, mean, atol=1e-6)
    assert not np.allclose(fitted, mean, atol=1e-2)
    order = jnp.array([3, 0, 5, 1, 2, 4, 7, 6])
    turned = jax.tree.map(lambda leaf: leaf[order], batch)
    np.testing.assert_allclose(method(40).start(turned), fitted, atol=1e-5)
    # Rows that are padding are not read.
    mask = np.asarray(batch.mask).reshape(-1, 1, 1, 1)
    other = batch._replace(x=jnp.where(mask, batch.x, 9.0))
    np.testing.assert_allclose(method(40).start(other), fitted, atol=1e-5)
    # The trained encoder, with nothing fitted, is better than the mean embedding.
    before, after = (
        curve_of(small_task, method(steps), (0,)).loss.sum() for steps in (0, 40)
    )
    assert after < before


def test_running_statistics_are_of_the_new_clients_batches():
    task = tasks.classification(LeNet(3, batch_norm=True), (8, 8, 1))
    still = optax.sgd(1e-9)
    local = onboarding.local_joining(task, KEY, still)
    algorithm, server = trained("fedbn", task)
    kept = onboarding.joining(algorithm, server, still)
    found = [
        curve_of(task, method, (0, 1, 40)).loss.sum(axis=0) for method in (local, kept)
    ]
    for losses in found:
        # Nothing but the statistics moves; both begin with the same model. With pooling
        # by a reduction, one gradient here was infinite as it was compiled.
        assert abs(losses[1] - losses[0]) > 1e-4
        assert abs(losses[2] - losses[1]) > 1e-4
    np.testing.assert_allclose(*found, rtol=1e-3)
