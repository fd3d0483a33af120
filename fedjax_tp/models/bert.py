"""Pretrained encoders: BERT, RoBERTa, DistilBERT, and MiniLM, which is a small BERT.

One module has the three architectures (Devlin et al. 2019; Liu et al. 2019; Sanh et al.
2019): post-norm blocks that differ in how positions are counted, in token types, and in
heads. `params_from` fills it with the tensors of a Hugging Face checkpoint, by name.
Query, key and value projections are one parameter `attention/qkv`, as in our other
transformers, so that what is personal there can be here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_tp.models.attention import AttentionFunction, sow_statistics
from fedjax_tp.models.layers import Dropout
from fedjax_tp.tree import path_name
from fedjax_tp.types import Array, Float, InputError, Int, Params

KINDS = ("bert", "roberta", "distilbert")

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclass(frozen=True)
class BertConfig:
    """Architecture and sizes.

    Attributes:
      kind: one of `KINDS`.
      vocab: words.
      dim, depth, heads, mlp_dim: as of `ViT`; a head has dim / heads numbers.
      positions: places that have an embedding.
      token_types: kinds of segments; 0 has none.
      first_position: of the first token; RoBERTa counts from 2.
      pad: the token of padding.
      activation: of the MLPs.
      epsilon: of the layer normalizations.
      dropout: rate after embedding, attention output and MLP, in fine-tuning.
    """

    kind: str
    vocab: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    positions: int
    token_types: int
    first_position: int
    pad: int
    activation: str
    epsilon: float
    dropout: float

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return self.positions - self.first_position


def config_from(content: Mapping[str, Any]) -> BertConfig:
    """The configuration that a `config.json` describes.

    Raises:
      InputError: another architecture, a missing or unusable entry.
    """
    kind = content.get("model_type")
    if kind not in KINDS:
        raise InputError(
            f"model_type is {kind!r}; allowed is one of {', '.join(KINDS)}"
        )
    names = _CONFIG_NAMES["distilbert" if kind == "distilbert" else "bert"]
    missing = [name for name in names.values() if name not in content]
    if missing:
        raise InputError(f"the config has no {', '.join(missing)}")
    sizes = {ours: content[theirs] for ours, theirs in names.items()}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{names[name]} is {size!r}; allowed is 1 or more")
    if sizes["dim"] % sizes["heads"]:
        raise InputError(
            f"{names['heads']} is {sizes['heads']}; allowed is what divides "
            f"{names['dim']}, {sizes['dim']}"
        )
    if content.get("is_decoder"):
        raise InputError("is_decoder is true; allowed are encoders")
    activation = content.get("hidden_act", content.get("activation", "gelu"))
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise InputError(
            f"activation is {activation!r}; allowed is one of {', '.join(_ACTIVATIONS)}"
        )
    positions = content.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise InputError(
            f"position_embedding_type is {positions!r}; allowed is 'absolute'"
        )
    others = {
        "pad_token_id": 1 if kind == "roberta" else 0,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": content.get("dropout", 0.1),
    }
    for name, default in others.items():
        others[name] = content.get(name, default)
        if others[name] is None and name == "pad_token_id":
            others[name] = default
        is_size = name in ("pad_token_id", "type_vocab_size")
        allowed = int if is_size else (int, float)
        if not isinstance(others[name], allowed) or others[name] < 0:
            kind_of = "a whole number" if is_size else "a number"
            raise InputError(
                f"{name} is {others[name]!r}; allowed is {kind_of} from 0 on"
            )
    pad = int(others["pad_token_id"])
    return BertConfig(
        kind=kind,
        **sizes,
        token_types=0 if kind == "distilbert" else int(others["type_vocab_size"]),
        first_position=pad + 1 if kind == "roberta" else 0,
        pad=pad,
        activation=activation,
        epsilon=float(others["layer_norm_eps"]),
        dropout=float(others["hidden_dropout_prob"]),
    )


_CONFIG_NAMES = {
    "bert": {
        "vocab": "vocab_size",
        "dim": "hidden_size",
        "depth": "num_hidden_layers",
        "heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "positions": "max_position_embeddings",
    },
    "distilbert": {
        "vocab": "vocab_size",
        "dim": "dim",
        "depth": "n_layers",
        "heads": "n_heads",
        "mlp_dim": "hidden_dim",
        "positions": "max_position_embeddings",
    },
}


def full_attention(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch length heads head_dim"],
    v: Float[Array, "batch length heads head_dim"],
    *,
    causal: bool = False,
    lengths: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch length heads head_dim"]:
    """Softmax attention that does not look at padding."""
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, key_value_seq_lengths=lengths
    )


class BertAttention(nn.Module):
    """Self-attention with biases and its output projection."""

    heads: int
    attend: AttentionFunction

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length dim"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "batch length dim"]:
        dim = x.shape[-1]
        normal = nn.initializers.normal(0.02)
        shape = (3, self.heads, dim // self.heads)
        qkv = self.param("qkv", normal, (dim, *shape))
        bias = self.param("qkv_bias", nn.initializers.zeros, shape)
        q, k, v = jnp.einsum("bnd,dthe->tbnhe", x, qkv) + bias[:, None, None]
        found = self.attend(q, k, v, causal=False, lengths=lengths)
        attended = sow_statistics(self, found)
        return nn.Dense(dim, kernel_init=normal, name="out")(
            attended.reshape(*x.shape[:2], dim)
        )


class BertBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    config: BertConfig
    attend: AttentionFunction

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length dim"],
        lengths: Int[Array, " batch"],
        *,
        deterministic: bool,
    ) -> Float[Array, "batch length dim"]:
        config = self.config
        drop = Dropout(config.dropout)
        normal = nn.initializers.normal(0.02)
        y = BertAttention(config.heads, self.attend, name="attention")(x, lengths)
        y = drop(y, deterministic=deterministic)
        x = nn.LayerNorm(config.epsilon, name="attention_norm")(x + y)
        y = nn.Dense(config.mlp_dim, kernel_init=normal, name="up")(x)
        y = _ACTIVATIONS[config.activation](y)
        y = nn.Dense(config.dim, kernel_init=normal, name="down")(y)
        y = Dropout(config.dropout)(y, deterministic=deterministic)
        return nn.LayerNorm(config.epsilon, name="mlp_norm")(x + y)


class Bert(nn.Module):
    """Tokens to hidden states, and what heads make of those.

    Attributes:
      config: architecture and sizes.
      labels: of the classification head; None for a model without.
      answers: has a head for the start and end of answers?
      words: has a head for masked words?
      pools: does a dense layer with an activation come before classification (as in all
        three architectures), or does the head see the pooled states?
      pool: classify the `first` token's state, as the three do, or the `mean` of all.
      attend: takes q, k, v, causal and lengths.
    """

    config: BertConfig
    labels: int | None = None
    answers: bool = False
    words: bool = False
    pools: bool = True
    pool: str = "first"
    attend: AttentionFunction = full_attention

    def setup(self) -> None:
        config = self.config
        normal = nn.initializers.normal(0.02)
        dense = partial(nn.Dense, kernel_init=normal)
        norm = partial(nn.LayerNorm, config.epsilon)
        embed = partial(nn.Embed, features=config.dim, embedding_init=normal)
        self.word_embedding = embed(config.vocab)
        self.position_embedding = embed(config.positions)
        if config.token_types:
            self.type_embedding = embed(config.token_types)
        self.embedding_norm = norm()
        self.embedding_dropout = Dropout(config.dropout)
        self.block = [BertBlock(config, self.attend) for _ in range(config.depth)]
        if self.labels is not None:
            if self.pools:
                self.pooler = dense(config.dim)
            self.head = dense(self.labels)
        if self.answers:
            self.answer_head = dense(2)
        if self.words:
            self.word_transform = dense(config.dim)
            self.word_norm = norm()
            self.word_bias = self.param(
                "word_bias", nn.initializers.zeros, (config.vocab,)
            )

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        lengths: Int[Array, " batch"],
        types: Int[Array, "batch length"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch length dim"]:
        """The last hidden states; also makes the parameters of all heads."""
        x = self.embed(tokens, types, deterministic=deterministic)
        x = self.encode(x, lengths, deterministic=deterministic)
        if self.is_initializing():
            if self.labels is not None:
                self.classify(x, lengths)
            if self.answers:
                self.answer_head(x)
            if self.words:
                self.predict_words(x)
        return x

    def embed(
        self,
        tokens: Int[Array, "batch length"],
        types: Int[Array, "batch length"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch length dim"]:
        """What the first block sees."""
        places = self.config.first_position + jnp.arange(tokens.shape[1])
        x = self.word_embedding(tokens) + self.position_embedding(places)
        if self.config.token_types:
            types = jnp.zeros_like(tokens) if types is None else types
            x = x + self.type_embedding(types)
        x = self.embedding_norm(x)
        return self.embedding_dropout(x, deterministic=deterministic)

    def encode(
        self,
        x: Float[Array, "batch length dim"],
        lengths: Int[Array, " batch"],
        first: int = 0,
        last: int | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch length dim"]:
        """Through the blocks `first` to before `last` (None: to the end)."""
        for block in self.block[first:last]:
            x = block(x, lengths, deterministic=deterministic)
        return x

    def classify(
        self, hidden: Float[Array, "batch length dim"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "batch labels"]:
        """Logits of a sequence's label."""
        pooled = hidden[:, 0] if self.pool == "first" else mean_of(hidden, lengths)
        if self.pools:
            pooled = self.pooler(pooled)
            is_distilbert = self.config.kind == "distilbert"
            pooled = jax.nn.relu(pooled) if is_distilbert else jnp.tanh(pooled)
        return self.head(pooled)

    def predict(
        self, hidden: Float[Array, "batch length dim"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "batch *rest"]:
        """What the head makes of hidden states: `find_answers` or `classify`."""
        return (
            self.find_answers(hidden)
            if self.answers
            else self.classify(hidden, lengths)
        )

    def find_answers(
        self, hidden: Float[Array, "batch length dim"]
    ) -> Float[Array, "batch length 2"]:
        """Logits of each token being the first and the last of an answer."""
        return self.answer_head(hidden)

    def predict_words(
        self, hidden: Float[Array, "batch length dim"]
    ) -> Float[Array, "batch length vocab"]:
        """Logits of the word at each place; the output matrix is that of the words."""
        x = _ACTIVATIONS[self.config.activation](self.word_transform(hidden))
        return self.word_embedding.attend(self.word_norm(x)) + self.word_bias


def mean_of(
    hidden: Float[Array, "batch length dim"], lengths: Int[Array, " batch"]
) -> Float[Array, "batch dim"]:
    """The mean state of the tokens that are no padding."""
    is_real = jnp.arange(hidden.shape[1]) < lengths[:, None]
    total = jnp.sum(jnp.where(is_real[..., None], hidden, 0), axis=1)
    return total / jnp.maximum(lengths, 1)[:, None]


def init(module: Bert, key: Array) -> Params:
    """Parameters as before any training."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return module.init(key, tokens, jnp.array([2]))["params"]


def heads_of(tensors: Mapping[str, np.ndarray], config: BertConfig) -> dict[str, Any]:
    """The heads that a checkpoint has, as arguments of `Bert`."""
    names = _normalized(tensors)
    heads: dict[str, Any] = {}
    classifier = _names_of("head/kernel", config)[0]
    if classifier in names:
        heads["labels"] = len(names[classifier])
    heads["answers"] = "qa_outputs.weight" in names
    heads["words"] = _names_of("word_norm/scale", config)[0] in names
    return heads


def params_from(
    tensors: Mapping[str, np.ndarray],
    module: Bert,
    *,
    key: Array | None = None,
) -> Params:
    """Parameters from the tensors of a Hugging Face checkpoint.

    Prefixes (`bert.` and the like) and the old names of layer normalization (`gamma`,
    `beta`) are understood; tensors that the module has no place for are left.

    Args:
      tensors: by name; weights of linear layers are (out, in).
      module: what the parameters are for.
      key: draws the heads that the checkpoint lacks; None allows none to be missing.

    Raises:
      InputError: tensors are missing or of another shape; they are named.
    """
    found = _normalized(tensors)
    config = module.config
    shapes = jax.eval_shape(partial(init, module), jax.random.key(0))
    fresh = None if key is None else init(module, key)
    missing: list[str] = []
    wrong: list[str] = []

    def fill(path: tuple, leaf: Any) -> Any:
        name = path_name(path)
        names = _names_of(name, config)
        absent = [n for n in names if n not in found]
        if absent:
            if fresh is not None and name.split("/")[0] in _HEADS:
                return _at(fresh, name)
            missing.extend(absent)
            return leaf
        parts = [np.asarray(found[n], np.float32) for n in names]
        if "kernel" in name or name.endswith("/qkv"):
            parts = [part.T for part in parts]
        stacked = parts[0]
        if "qkv" in name:
            shape = (*leaf.shape[:-3], leaf.shape[-2] * leaf.shape[-1])
            bad = [
                (n, p) for n, p in zip(names, parts, strict=True) if p.shape != shape
            ]
            wrong.extend(f"{n} is {found[n].shape}, not {shape[::-1]}" for n, _ in bad)
            if bad:
                return leaf
            stacked = np.stack(parts, axis=-2).reshape(leaf.shape)
        elif stacked.shape != leaf.shape:
            wanted = leaf.shape[::-1] if "kernel" in name else leaf.shape
            wrong.append(f"{names[0]} is {found[names[0]].shape}, not {wanted}")
            return leaf
        return jnp.asarray(stacked)

    params = jax.tree_util.tree_map_with_path(fill, shapes)
    words = found.get("embeddings.word_embeddings.weight", np.zeros(0))
    for name in _DECODERS if module.words else ():
        if name in found and not np.array_equal(found[name], words):
            wrong.append(f"{name} is not that of the word embeddings, as it is here")
    if missing:
        raise InputError(f"tensors are missing: {', '.join(missing)}")
    if wrong:
        raise InputError(f"tensors do not fit: {'; '.join(wrong)}")
    return params


def tensors_from(params: Params, config: BertConfig) -> dict[str, np.ndarray]:
    """Undoes `params_from`: tensors by the names of a Hugging Face checkpoint."""
    tensors: dict[str, np.ndarray] = {}

    def put(path: tuple, leaf: Array) -> None:
        name = path_name(path)
        whole = np.asarray(leaf)
        if "qkv" in name:
            whole = whole.reshape(*whole.shape[:-2], -1)
            parts = [np.take(whole, i, axis=-2) for i in range(3)]
        else:
            parts = [whole]
        for theirs, part in zip(_names_of(name, config), parts, strict=True):
            has_prefix = theirs.startswith(("embeddings.", "encoder.", "transformer."))
            is_linear = "kernel" in name or name.endswith("/qkv")
            prefix = f"{config.kind}." if has_prefix or "pooler" in theirs else ""
            tensors[prefix + theirs] = part.T if is_linear else part

    jax.tree_util.tree_map_with_path(put, params)
    return tensors


def _at(tree: Any, name: str) -> Array:
    for part in name.split("/"):
        tree = tree[part]
    return tree


_HEADS = {
    "pooler",
    "head",
    "answer_head",
    "word_transform",
    "word_norm",
    "word_bias",
}
_DECODERS = (
    "cls.predictions.decoder.weight",
    "lm_head.decoder.weight",
    "vocab_projector.weight",
)
_PREFIXES = ("bert.", "roberta.", "distilbert.")
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}

_EMBEDDINGS = {
    "word_embedding": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "type_embedding": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "answer_head": "qa_outputs",
}
_BLOCKS = {
    "bert": {
        "attention/q": "attention.self.query",
        "attention/k": "attention.self.key",
        "attention/v": "attention.self.value",
        "attention/out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "mlp_norm": "output.LayerNorm",
    },
    "distilbert": {
        "attention/q": "attention.q_lin",
        "attention/k": "attention.k_lin",
        "attention/v": "attention.v_lin",
        "attention/out": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "mlp_norm": "output_layer_norm",
    },
}
_KIND_HEADS = {
    "bert": {
        "pooler": "pooler.dense",
        "head": "classifier",
        "word_transform": "cls.predictions.transform.dense",
        "word_norm": "cls.predictions.transform.LayerNorm",
        "word_bias": "cls.predictions.bias",
    },
    "roberta": {
        "pooler": "classifier.dense",
        "head": "classifier.out_proj",
        "word_transform": "lm_head.dense",
        "word_norm": "lm_head.layer_norm",
        "word_bias": "lm_head.bias",
    },
    "distilbert": {
        "pooler": "pre_classifier",
        "head": "classifier",
        "word_transform": "vocab_transform",
        "word_norm": "vocab_layer_norm",
        "word_bias": "vocab_projector.bias",
    },
}


def _names_of(name: str, config: BertConfig) -> list[str]:
    """Their names of our parameter: one, or three of projections."""
    if name == "word_bias":
        return [_KIND_HEADS[config.kind][name]]
    first, _, rest = name.partition("/")
    if not first.startswith("block_"):
        layer = (_EMBEDDINGS | _KIND_HEADS[config.kind])[first]
        return [f"{layer}.{_LEAVES[rest]}"]
    is_distilbert = config.kind == "distilbert"
    names = _BLOCKS["distilbert" if is_distilbert else "bert"]
    stack = "transformer.layer" if is_distilbert else "encoder.layer"
    block = f"{stack}.{first.removeprefix('block_')}"
    if rest in ("attention/qkv", "attention/qkv_bias"):
        leaf = "bias" if rest.endswith("bias") else "weight"
        return [f"{block}.{names[f'attention/{p}']}.{leaf}" for p in "qkv"]
    layer, _, leaf = rest.rpartition("/")
    return [f"{block}.{names[layer]}.{_LEAVES[leaf]}"]


def _normalized(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by their name without prefix, layer normalizations by the new names."""
    found = {}
    for name, tensor in tensors.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        for old, new in (("gamma", "weight"), ("beta", "bias")):
            if name.endswith(f".{old}"):
                name = name.removesuffix(old) + new
        found[name] = tensor
    return found
