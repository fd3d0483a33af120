"""Masked losses and metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp import tree
from fedjax_tp.models import task as tasks
from fedjax_tp.models.char_transformer import CharTransformer
from fedjax_tp.models.lstm import CharLSTM
from fedjax_tp.types import Batch


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_masked_mean_is_the_mean_of_what_is_left(mask):
    values = np.array([1.0, -2.0, 4.0, 0.5], np.float32)
    found = tasks.masked_mean(jnp.asarray(values), jnp.array(mask))
    expected = values[np.array(mask)].mean() if any(mask) else 0.0
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_padding_changes_neither_loss_nor_gradient_nor_metrics(small_task):
    params = small_task.init(jax.random.key(0))
    key = jax.random.key(1)
    x = jax.random.normal(key, (3, 8, 8, 1))
    y = jnp.array([0, 2, 1])
    plain = Batch(x, y, jnp.ones(3, bool))
    padded = Batch(
        jnp.concatenate([x, 7 * x[:2]]),
        jnp.concatenate([y, y[:2]]),
        jnp.array([True] * 3 + [False] * 2),
    )
    loss_and_grads = jax.jit(jax.value_and_grad(small_task.loss))
    loss, grads = loss_and_grads(params, plain, key)
    padded_loss, padded_grads = loss_and_grads(params, padded, key)
    np.testing.assert_allclose(loss, padded_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(padded_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    pair = small_task.metrics(params, plain), small_task.metrics(params, padded)
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


MODELS = {
    "lstm": CharLSTM(20, hidden=8),
    "char_transformer": CharTransformer(
        20, dim=16, depth=2, heads=2, head_dim=8, mlp_dim=16, dropout=0.0
    ),
}


def test_text_models_have_as_many_parameters_as_their_layers():
    def count(module):
        task = tasks.next_character(module, 80)
        return tree.num_elements(jax.eval_shape(task.init, jax.random.key(0)))

    gates = 4 * 256
    lstm = 80 * 8 + gates * (8 + 256 + 1) + gates * (256 + 256 + 1) + 256 * 80 + 80
    assert count(CharLSTM(80)) == lstm
    block = 3 * 128 * 512 + 512 * 128 + 128 + 2 * 128 * 256 + 256 + 128 + 4 * 128
    rest = (100 + 80) * 128 + 2 * 128 + 128 * 100 + 100
    assert count(CharTransformer(100)) == 2 * block + rest


@pytest.mark.parametrize("name", MODELS)
def test_no_position_sees_what_follows_it(name):
    task = tasks.next_character(MODELS[name], 10)
    params = task.init(jax.random.key(0))
    text = jax.random.randint(jax.random.key(1), (2, 10), 0, 20).astype(jnp.float32)
    before = task.apply(params, text)
    for place in (1, 5, 9):
        after = task.apply(params, text.at[:, place:].set(3))
        np.testing.assert_allclose(after[:, :place], before[:, :place], atol=1e-5)
        assert not np.allclose(after[:, place], before[:, place])


def test_text_is_scored_at_the_last_position_and_at_all():
    task = tasks.next_character(MODELS["lstm"], 3)
    batch = Batch(
        jnp.array([[1.0, 2, 3], [4, 5, 6], [1, 1, 1]]),
        jnp.array([7, 8, 9]),
        jnp.array([True, True, False]),
    )
    assert tasks.next_characters(batch).tolist() == [[2, 3, 7], [5, 6, 8], [1, 1, 9]]
    right = np.array([[2, 3, 7], [5, 0, 0], [1, 1, 9]])
    logits = 5.0 * jax.nn.one_hot(right, 20)
    found = task.score(logits, batch)
    assert (found.correct, found.examples) == (1, 2)
    np.testing.assert_allclose(found.positions, 1 + 1 / 3)
    losses = -np.log(np.exp([5, 0]) / (np.exp(5) + 19))
    expected = losses[0] + (losses[0] + 2 * losses[1]) / 3
    np.testing.assert_allclose(found.loss, expected, rtol=1e-5)
    np.testing.assert_allclose(task.loss_of(logits, batch), expected / 2, rtol=1e-5)


def test_random_text_is_predicted_at_chance_after_training():
    """A model that saw its targets would be right nearly always: 81% and more in the
    code of FedTP, at a tenth of this size."""
    letters = 10
    task = tasks.next_character(
        CharTransformer(letters, 32, 1, 2, 16, 32, dropout=0.0), 10
    )
    text = jax.random.randint(jax.random.key(0), (512, 11), 0, letters)

    def batch_of(rows):
        x = rows[:, :-1].astype(jnp.float32)
        return Batch(x, rows[:, -1], jnp.ones(len(rows), bool))

    optimizer = optax.adam(3e-3)

    @jax.jit
    def train(params):
        def step(carried, key):
            params, opt_state = carried
            rows = jax.random.randint(key, (64, 11), 0, letters)
            gradient = jax.grad(task.loss)(params, batch_of(rows), key)
            updates, opt_state = optimizer.update(gradient, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        keys = jax.random.split(jax.random.key(1), 100)
        return jax.lax.scan(step, (params, optimizer.init(params)), keys)[0][0]

    params = train(task.init(jax.random.key(2)))
    found = task.metrics(params, batch_of(text))
    # Three standard deviations of a tenth over 512 and over 5,120 predictions.
    assert abs(found.correct / 512 - 0.1) < 0.04
    assert abs(found.positions / 512 - 0.1) < 0.013


def test_a_model_that_is_not_finite_is_never_right(small_task):
    params = small_task.init(jax.random.key(0))
    params["head"]["bias"] = jnp.full(3, jnp.nan)
    batch = Batch(jnp.ones((4, 8, 8, 1)), jnp.zeros(4, int), jnp.ones(4, bool))
    assert small_task.metrics(params, batch).correct == 0
