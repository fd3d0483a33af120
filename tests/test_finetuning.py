"""Fine-tuning: what is frozen stays, what is cached changes nothing, batches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_tp import finetuning, tree
from fedjax_tp.finetuning import Texts
from fedjax_tp.models import bert
from fedjax_tp.types import InputError

CONFIG = bert.BertConfig("bert", 30, 8, 2, 2, 16, 40, 2, 0, 0, "gelu", 1e-12, 0.0)


def initial(module):
    return jax.jit(partial(bert.init, module))(jax.random.key(0))


def texts(count=11, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 37, count).astype(np.int32)
    tokens = rng.integers(1, 30, (count, 40)).astype(np.int32)
    tokens[np.arange(40) >= lengths[:, None]] = 0
    labels = rng.integers(0, 3, count).astype(np.int32)
    return Texts(tokens, lengths, np.zeros_like(tokens), labels, np.ones(count, bool))


def test_batches_have_every_text_once_and_fit():
    all_texts = texts()
    for rng in (None, np.random.default_rng(0)):
        seen = []
        for rows, batch in finetuning.batches(all_texts, 3, rng=rng):
            assert batch.tokens.shape in {(3, 16), (3, 32), (3, 40)}
            assert (batch.lengths <= batch.tokens.shape[1]).all()
            np.testing.assert_array_equal(batch.is_real, rows >= 0)
            real = rows[rows >= 0]
            width = batch.tokens.shape[1]
            np.testing.assert_array_equal(
                batch.tokens[rows >= 0], all_texts.tokens[real, :width]
            )
            seen += real.tolist()
        assert sorted(seen) == list(range(11))


def losses_and_gradients(module, params, batch, layers):
    def loss(params, batch):
        logits = finetuning.logits_of(module, params, batch, layers, None)
        return finetuning.loss_of(logits, batch)

    return jax.jit(jax.value_and_grad(loss))(params, batch)


@pytest.mark.parametrize("layers", [0, 1])
def test_from_cached_states_the_loss_and_its_gradients_are_the_same(layers):
    module = bert.Bert(CONFIG, labels=3)
    params = initial(module)
    plain = texts()
    states = finetuning.frozen_states(module, params, plain, layers, size=4)
    wanted, gradients = losses_and_gradients(module, params, plain, None)
    cached = plain._replace(states=jnp.asarray(states))
    found, ours = losses_and_gradients(module, params, cached, layers)
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    trained = finetuning.is_trained(layers, CONFIG.depth)
    ours, _ = tree.split(ours, trained)
    wanted, _ = tree.split(gradients, trained)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, wanted)


@pytest.mark.parametrize("layers", [None, 1])
def test_steps_learn_and_leave_the_rest_alone(layers):
    module = bert.Bert(CONFIG, labels=3, pool="mean", pools=False)
    params = initial(module)
    before = jax.device_get(params)
    batch = texts()
    if layers is not None:
        states = finetuning.frozen_states(module, params, batch, layers)
        batch = batch._replace(states=states)
    optimizer = optax.adam(3e-2)
    tuned = finetuning.start(params, layers, CONFIG.depth, optimizer)
    step = finetuning.make_step(module, layers, optimizer)
    losses = []
    for i in range(12):
        tuned, loss = step(tuned, batch, jax.random.key(i))
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
    after = tree.merge(tuned.trained, tuned.frozen)
    trained = finetuning.is_trained(layers, CONFIG.depth)
    moved = jax.tree_util.tree_map_with_path(
        lambda path, a, b: trained(tree.path_name(path)) or bool((a == b).all()),
        jax.device_get(after),
        before,
    )
    assert all(jax.tree.leaves(moved))
    assert (after["head"]["kernel"] != before["head"]["kernel"]).any()


def test_padding_and_texts_that_fill_up_count_for_nothing():
    module = bert.Bert(CONFIG, answers=True)
    params = initial(module)
    batch = texts(4)
    batch = batch._replace(target=np.array([[1, 2], [0, 0], [0, 1], [2, 2]], np.int32))
    batch = jax.tree.map(jnp.asarray, batch)
    first = batch._replace(is_real=jnp.array([True, True, False, False]))
    wanted, _ = losses_and_gradients(
        module, params, Texts(*(x if x is None else x[:2] for x in batch)), None
    )
    found, _ = losses_and_gradients(module, params, first, None)
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)
    # By hand, of the first text.
    logits = jax.jit(
        lambda params, batch: finetuning.logits_of(module, params, batch, None, None)
    )(params, batch)
    row = np.asarray(logits[0, : batch.lengths[0]], np.float64)
    logs = row - np.log(np.exp(row).sum(axis=0))
    alone = batch._replace(is_real=jnp.array([True, False, False, False]))
    loss = finetuning.loss_of(logits, alone)
    assert float(loss) == pytest.approx(-(logs[1, 0] + logs[2, 1]) / 2, rel=1e-5)


def test_the_rate_warms_up_and_falls_to_nothing():
    optimizer = finetuning.make_optimizer(1.0, 20)
    params = {"w": jnp.ones(())}
    state = optimizer.init(params)
    sizes = []
    for _ in range(20):
        updates, state = optimizer.update({"w": jnp.ones(())}, state, params)
        sizes.append(abs(float(updates["w"])))
    # The first step of a run of one step trains.
    assert sizes[0] == pytest.approx(0.5, rel=0.02)
    assert sizes[1:3] == pytest.approx([1, 1], rel=0.02)
    assert (np.diff(sizes[2:]) < 0).all()
    assert sizes[-1] < 0.1 * max(sizes)


def test_too_many_layers_are_refused():
    params = initial(bert.Bert(CONFIG, labels=3))
    with pytest.raises(InputError, match="layers is 3; allowed is 0 to 2, or unset"):
        finetuning.start(params, 3, CONFIG.depth, optax.sgd(0.1))


def test_tensors_go_out_as_they_came_in():
    for kind in bert.KINDS:
        config = bert.BertConfig(
            kind, 30, 8, 2, 2, 16, 40, 0 if kind == "distilbert" else 1, 0, 0, "gelu",
            1e-5, 0.0,
        )  # fmt: skip
        module = bert.Bert(config, labels=3, answers=True)
        params = initial(module)
        tensors = bert.tensors_from(params, config)
        again = bert.params_from(tensors, module)
        jax.tree.map(np.testing.assert_array_equal, again, params)
        prefixed = [name for name in tensors if name.startswith(f"{kind}.")]
        assert f"{kind}.embeddings.word_embeddings.weight" in prefixed
        assert "qa_outputs.weight" in tensors
