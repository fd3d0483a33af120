"""Pretrained encoders: the loader on awkward folders, and against transformers."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_tp.inference.attention import quantized_attention
from fedjax_tp.io import pretrained
from fedjax_tp.models import bert
from fedjax_tp.models.attention import ATTENDED
from fedjax_tp.types import InputError

CONFIG = {
    "model_type": "bert",
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
TOKENS = jnp.array([[2, 5, 7, 3], [2, 11, 3, 0]])
LENGTHS = jnp.array([4, 3])


def tensors(*, prefix="bert.", scale="weight", shift="bias"):
    """A08: hidden 16, one layer; LayerNorms of 1.5 and 0.25."""
    rng = np.random.default_rng(0)
    found = {}

    def add(name, *shape):
        found[prefix + name] = rng.normal(size=shape).astype(np.float32) * 0.3

    def linear(name, out, inputs):
        add(f"{name}.weight", out, inputs)
        add(f"{name}.bias", out)

    def norm(name):
        found[f"{prefix}{name}.{scale}"] = np.full(16, 1.5, np.float32)
        found[f"{prefix}{name}.{shift}"] = np.full(16, 0.25, np.float32)

    add("embeddings.word_embeddings.weight", 12, 16)
    add("embeddings.position_embeddings.weight", 16, 16)
    add("embeddings.token_type_embeddings.weight", 2, 16)
    norm("embeddings.LayerNorm")
    layer = "encoder.layer.0"
    for part in ("query", "key", "value"):
        linear(f"{layer}.attention.self.{part}", 16, 16)
    linear(f"{layer}.attention.output.dense", 16, 16)
    norm(f"{layer}.attention.output.LayerNorm")
    linear(f"{layer}.intermediate.dense", 32, 16)
    linear(f"{layer}.output.dense", 16, 32)
    norm(f"{layer}.output.LayerNorm")
    return found


def write_folder(path, tensors, config=CONFIG):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    pretrained.write_tensors(path / "model.safetensors", tensors, {})
    return path


def hidden(path, **heads):
    config, found = pretrained.read_model(path)
    module = bert.Bert(bert.config_from(config), **heads)
    params = bert.params_from(found, module)
    return module, params, module.apply({"params": params}, TOKENS, LENGTHS)


def test_prefix_and_old_names_give_the_same_states(tmp_path):
    _, _, first = hidden(write_folder(tmp_path / "1", tensors()))
    old = tensors(prefix="", scale="gamma", shift="beta")
    old["embeddings.position_ids"] = np.arange(16)[None]
    _, _, second = hidden(write_folder(tmp_path / "2", old))
    np.testing.assert_array_equal(first, second)
    plain = {
        name: np.ones_like(x) if name.endswith("LayerNorm.weight") else x
        for name, x in tensors().items()
    }
    _, _, other = hidden(write_folder(tmp_path / "plain", plain))
    assert np.abs(np.asarray(first - other)).max() > 0.1


def test_words_are_predicted_with_their_embedding(tmp_path):
    found = tensors()
    rng = np.random.default_rng(1)
    head = "cls.predictions"
    found[f"{head}.transform.dense.weight"] = rng.normal(size=(16, 16))
    found[f"{head}.transform.dense.bias"] = rng.normal(size=16)
    found[f"{head}.transform.LayerNorm.weight"] = np.full(16, 1.5)
    found[f"{head}.transform.LayerNorm.bias"] = np.full(16, 0.25)
    found[f"{head}.bias"] = rng.normal(size=12)
    path = write_folder(tmp_path / "3", found)
    config = bert.config_from(CONFIG)
    assert bert.heads_of(found, config) == {"answers": False, "words": True}
    module, params, states = hidden(path, words=True)
    logits = module.apply({"params": params}, states, method="predict_words")
    found[f"{head}.decoder.weight"] = np.zeros((12, 16), np.float32)
    with pytest.raises(
        InputError, match=r"decoder\.weight is not that of the word emb"
    ):
        bert.params_from(found, module)
    h = np.asarray(states, np.float64) @ found[f"{head}.transform.dense.weight"].T
    h = h + found[f"{head}.transform.dense.bias"]
    h = np.asarray(jax.nn.gelu(h, approximate=False), np.float64)
    mean, std = h.mean(-1, keepdims=True), h.std(-1, keepdims=True)
    h = (h - mean) / std * 1.5 + 0.25
    words = found["bert.embeddings.word_embeddings.weight"]
    wanted = h @ words.T + found[f"{head}.bias"]
    np.testing.assert_allclose(logits, wanted, atol=2e-5)


def test_files_beside_the_model_are_not_read(tmp_path):
    path = write_folder(tmp_path / "1", tensors())
    _, _, wanted = hidden(path)
    zeros = {name: np.zeros_like(x) for name, x in tensors().items()}
    pretrained.write_tensors(path / "other.safetensors", zeros, {})
    np.testing.assert_array_equal(hidden(path)[2], wanted)
    (path / "model.safetensors").rename(path / "part.safetensors")
    with pytest.raises(InputError, match=r"no model\.safetensors or index that says"):
        hidden(path)
    index = {"weight_map": dict.fromkeys(tensors(), "part.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(hidden(path)[2], wanted)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    name = "encoder.layer.0.attention.self.key.weight"
    lacking = tensors()
    del lacking[f"bert.{name}"]
    with pytest.raises(InputError, match=f"tensors are missing: {name}$"):
        hidden(write_folder(tmp_path / "4", lacking))
    turned = tensors()
    turned["bert.encoder.layer.0.output.dense.weight"] = np.zeros((32, 16))
    with pytest.raises(
        InputError, match=r"output.dense.weight is \(32, 16\), not \(16, 32\)"
    ):
        hidden(write_folder(tmp_path / "5", turned))
    turned = tensors()
    turned[f"bert.{name}"] = np.zeros((16, 8))
    with pytest.raises(InputError, match=r"key.weight is \(16, 8\), not \(16, 16\)"):
        hidden(write_folder(tmp_path / "6", turned))


def test_a_new_head_is_drawn_and_nothing_else():
    config = bert.config_from(CONFIG)
    module = bert.Bert(config, labels=3)
    with pytest.raises(InputError, match=r"missing: classifier.bias, classifier.w"):
        bert.params_from(tensors(), module)
    params = bert.params_from(tensors(), module, key=jax.random.key(0))
    assert params["head"]["kernel"].shape == (16, 3)
    lacking = tensors()
    del lacking["bert.embeddings.LayerNorm.bias"]
    with pytest.raises(InputError, match=r"missing: embeddings.LayerNorm.bias"):
        bert.params_from(lacking, module, key=jax.random.key(0))


def test_padding_changes_nothing(tmp_path):
    module, params, states = hidden(write_folder(tmp_path / "1", tensors()))
    short = module.apply({"params": params}, TOKENS[1:, :3], LENGTHS[1:])
    np.testing.assert_allclose(states[1, :3], short[0], atol=1e-5)
    other = TOKENS.at[1, 3].set(9)
    found = module.apply({"params": params}, other, LENGTHS)
    np.testing.assert_array_equal(found[1, :3], states[1, :3])
    mean = bert.mean_of(states, LENGTHS)
    np.testing.assert_allclose(mean[1], np.mean(states[1, :3], axis=0), atol=1e-6)


def test_blocks_from_a_cached_state(tmp_path):
    config = bert.config_from(CONFIG | {"num_hidden_layers": 3})
    module = bert.Bert(config, labels=2)
    params = bert.init(module, jax.random.key(0))
    apply = partial(module.apply, {"params": params})
    whole = apply(TOKENS, LENGTHS)
    x = apply(TOKENS, method="embed")
    x = apply(x, LENGTHS, 0, 2, method="encode")
    x = apply(x, LENGTHS, 2, None, method="encode")
    np.testing.assert_array_equal(x, whole)


def test_quantized_attention_in_every_layer():
    config = bert.config_from(CONFIG | {"num_hidden_layers": 2})
    attend = partial(
        quantized_attention, bits=None, threshold=0.0, return_statistics=True
    )
    module, quantized = bert.Bert(config), bert.Bert(config, attend=attend)
    params = bert.init(module, jax.random.key(0))
    wanted = module.apply({"params": params}, TOKENS, LENGTHS)
    found, sown = quantized.apply(
        {"params": params}, TOKENS, LENGTHS, mutable=[ATTENDED]
    )
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(found[row, :length], wanted[row, :length], atol=1e-5)
    for block in ("block_0", "block_1"):
        (statistics,) = sown[ATTENDED][block]["attention"]["statistics"]
        assert statistics.histogram.sum(-1).tolist() == [[16, 16], [9, 9]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type is 't5'; allowed is one of bert, roberta"),
        ({"model_type": None}, "model_type is None; allowed"),
        ({"hidden_size": 15}, "num_attention_heads is 2; allowed is what divides"),
        ({"hidden_size": "16"}, "hidden_size is '16'; allowed is 1 or more"),
        ({"hidden_act": "swish"}, "activation is 'swish'; allowed is one of gelu"),
        ({"hidden_act": []}, r"activation is \[\]; allowed is one of gelu"),
        ({"hidden_dropout_prob": None}, "hidden_dropout_prob is None; allowed is a n"),
        ({"pad_token_id": "x"}, "pad_token_id is 'x'; allowed is a whole number"),
        ({"type_vocab_size": "2"}, "type_vocab_size is '2'; allowed is a whole"),
        ({"is_decoder": True}, "is_decoder is true; allowed are encoders"),
        ({"position_embedding_type": "relative_key"}, "allowed is 'absolute'"),
    ],
)
def test_configurations_that_are_not_ours_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        bert.config_from(CONFIG | change)


def test_a_configuration_without_sizes_names_them():
    with pytest.raises(InputError, match="the config has no vocab_size, hidden_size"):
        bert.config_from({"model_type": "bert"})


def their_config(transformers, kind):
    sizes = {"vocab_size": 30, "max_position_embeddings": 20}
    if kind == "distilbert":
        return transformers.DistilBertConfig(
            dim=16, n_layers=2, n_heads=2, hidden_dim=24, **sizes
        )
    sizes |= {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    if kind == "bert":
        return transformers.BertConfig(hidden_act="gelu_new", **sizes)
    return transformers.RobertaConfig(type_vocab_size=1, pad_token_id=1, **sizes)


@pytest.mark.parametrize("kind", bert.KINDS)
def test_against_transformers(kind, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = their_config(transformers, kind)
    names = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 30, (3, 9))
    lengths = np.array([9, 4, 6])
    is_real = np.arange(9) < lengths[:, None]
    tokens[~is_real] = config.pad_token_id
    inputs = {
        "input_ids": torch.tensor(tokens),
        "attention_mask": torch.tensor(is_real.astype(int)),
    }
    for task, heads, method in (
        ("SequenceClassification", {"labels": 3}, "classify"),
        ("QuestionAnswering", {"answers": True}, "find_answers"),
        ("MaskedLM", {"words": True}, "predict_words"),
    ):
        config.num_labels = 3 if "labels" in heads else 2
        theirs = getattr(transformers, f"{names[kind]}For{task}")(config).eval()
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        folder = tmp_path / task
        theirs.save_pretrained(folder, safe_serialization=True)
        content, found = pretrained.read_model(folder)
        assert bert.heads_of(found, bert.config_from(content)).items() >= heads.items()
        module = bert.Bert(bert.config_from(content), **heads)
        params = bert.params_from(found, module)
        states = module.apply(
            {"params": params}, jnp.asarray(tokens), jnp.asarray(lengths)
        )
        arguments = (jnp.asarray(lengths),) if method == "classify" else ()
        ours = module.apply({"params": params}, states, *arguments, method=method)
        with torch.no_grad():
            output = theirs(**inputs)
        if method == "find_answers":
            wanted = torch.stack([output.start_logits, output.end_logits], -1)
        else:
            wanted = output.logits
        ours, wanted = np.asarray(ours), wanted.numpy()
        if method != "classify":
            ours, wanted = ours[is_real], wanted[is_real]
        np.testing.assert_allclose(ours, wanted, atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def minilm():
    try:
        return pretrained.minilm_folder()
    except InputError:
        pytest.skip("MiniLM is not installed")


def test_minilm_knows_that_two_sentences_are_alike(minilm):
    config, found = pretrained.read_model(minilm)
    module = bert.Bert(bert.config_from(config))
    params = bert.params_from(found, module)
    tokenizer = pretrained.read_tokenizer(minilm, module.config.vocab)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(
        ["A man is eating food.", "A man is eating a piece of bread."]
    )
    tokens = jnp.array([e.ids for e in encoded])
    lengths = jnp.array([sum(e.attention_mask) for e in encoded])
    states = module.apply({"params": params}, tokens, lengths)
    first, second = np.asarray(bert.mean_of(states, lengths), np.float64)
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert cosine == pytest.approx(0.7553, abs=5e-5)


def test_folders_that_cannot_be_read_are_one_clear_line(tmp_path):
    read = pretrained.read_model
    with pytest.raises(InputError, match="is not there"):
        read(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no config\.json"):
        read(tmp_path / "empty")
    path = tmp_path / "pickled"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(InputError, match=r"has no \*\.safetensors$"):
        read(path)
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match=r"pytorch_model\.bin would have to be unpick"):
        read(path)
    (path / "model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(InputError, match=r"cannot read .*model\.safetensors"):
        read(path)


def test_tokenizers_that_do_not_fit(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        pretrained.read_tokenizer(tmp_path, 12)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"cannot read .*tokenizer\.json"):
        pretrained.read_tokenizer(tmp_path, 12)
    words = {f"w{i}": i for i in range(13)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        InputError, match="has token 12, and the model 12 words; allowed is up to 11"
    ):
        pretrained.read_tokenizer(tmp_path, 12)
    assert pretrained.read_tokenizer(tmp_path, 13).get_vocab_size() == 13


def test_tensors_in_half_precision(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    path = tmp_path / "half.safetensors"
    whole = torch.tensor([1.5, -2.25])
    save_file({"a": whole.bfloat16(), "b": whole.half(), "c": torch.tensor([3])}, path)
    found = pretrained.read_tensors(path)
    np.testing.assert_array_equal(found["a"], [1.5, -2.25])
    assert found["a"].dtype == found["b"].dtype == np.float32
    assert np.issubdtype(found["c"].dtype, np.integer)
