"""The server's hypernetwork: a client's embedding in, its personal parameters out.

`h(phi; z)` of FedTP: an embedding z for each client, a ReLU trunk, and one linear head
for each personal leaf (one a block for the ViT). Which leaves are personal is given by
a template, so the same hypernetwork serves any model. Emission and pull-back treat the
whole cohort at once.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_tp import tree
from fedjax_tp.types import Array, Float, InputError, Int, Params, PRNGKey, Tree


@dataclass(frozen=True)
class HypernetworkConfig:
    """Shape and initial values of the hypernetwork.

    Attributes:
      embedding_dim: length of a client's embedding.
      hidden: width of the trunk.
      layers: ReLU layers of the trunk after the first linear one.
      start: what is emitted before training. `paper`: heads as in FedTP's code, so
        that emitted weights are random and differ between clients. `model`: for every
        client the model's own initial weights, plus a difference between clients of
        `spread` times their standard deviation.
      spread: see `start`.
    """

    embedding_dim: int = 128
    hidden: int = 150
    layers: int = 3
    start: Literal["paper", "model"] = "paper"
    spread: float = 0.1
    feature_norm: float = 0.0


class Hypernetwork(NamedTuple):
    """phi (trunk and heads) and the embedding table z.

    Attributes:
      phi: `{"trunk": [{"kernel", "bias"}, ...], "heads": template of the same}`.
      embeddings: one row a client.
    """

    phi: Params
    embeddings: Float[Array, "clients embedding_dim"]


def init_hypernetwork(
    key: PRNGKey, template: Params, num_clients: int, config: HypernetworkConfig
) -> Hypernetwork:
    """Draws phi and the embeddings (z ~ N(0, 1)).

    Args:
      key: consumed.
      template: the personal parameters of one client, as the model initializes them;
        gives the shapes, and for `start="model"` the values emitted at first.
      num_clients: rows of the embedding table.
      config: sizes and initial values.

    Raises:
      InputError: a size below 1, or a spread that is not a finite number >= 0.
    """
    for name in ("embedding_dim", "hidden", "layers"):
        if getattr(config, name) < (name != "layers"):
            raise InputError(
                f"hypernetwork {name} is {getattr(config, name)}; allowed is 1 or more"
            )
    if not 0 <= config.spread < math.inf:
        raise InputError(f"hypernetwork spread is {config.spread}; allowed is >= 0")
    embedding_key, trunk_key, head_key = jax.random.split(key, 3)
    embeddings = jax.random.normal(embedding_key, (num_clients, config.embedding_dim))
    widths = [config.embedding_dim, *[config.hidden] * (config.layers + 1)]
    init_trunk_layer = _init_linear if config.start == "paper" else _init_he
    trunk = [
        init_trunk_layer(layer_key, inputs, outputs)
        for layer_key, inputs, outputs in zip(
            jax.random.split(trunk_key, len(widths) - 1),
            widths,
            widths[1:],
            strict=False,
        )
    ]
    leaves, structure = jax.tree.flatten(template)
    heads = [
        _init_linear(leaf_key, config.hidden, leaf.size)
        for leaf_key, leaf in zip(
            jax.random.split(head_key, len(leaves)), leaves, strict=True
        )
    ]
    if config.start == "model":
        features = _features(trunk, embeddings, config.feature_norm)
        heads = [
            _centred_head(head, leaf, features, config.spread)
            for head, leaf in zip(heads, leaves, strict=True)
        ]
    phi = {"trunk": trunk, "heads": jax.tree.unflatten(structure, heads)}
    return Hypernetwork(phi, embeddings)


def _init_linear(key: PRNGKey, inputs: int, outputs: int) -> Params:
    """Kernel and bias ~ U(-1/sqrt(inputs), 1/sqrt(inputs))."""
    kernel_key, bias_key = jax.random.split(key)
    bound = inputs**-0.5
    return {
        "kernel": jax.random.uniform(
            kernel_key, (inputs, outputs), minval=-bound, maxval=bound
        ),
        "bias": jax.random.uniform(bias_key, (outputs,), minval=-bound, maxval=bound),
    }


def _init_he(key: PRNGKey, inputs: int, outputs: int) -> Params:
    """Kernel ~ N(0, 2 / inputs), no bias (He et al. 2015)."""
    kernel = jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def _centred_head(head: Params, leaf: Array, features: Array, spread: float) -> Params:
    """A head whose emission over the clients has mean `leaf`, std spread * std(leaf)."""
    mean = features.mean(axis=0)
    # A kernel of independent entries with variance s^2 emits differences of variance
    # s^2 * sum_j Var(feature j).
    feature_std = jnp.sqrt(jnp.sum(jnp.var(features, axis=0)))
    kernel = head["kernel"] / jnp.std(head["kernel"])
    kernel = kernel * spread * jnp.std(leaf) / jnp.maximum(feature_std, 1e-6)
    return {"kernel": kernel, "bias": leaf.reshape(-1) - mean @ kernel}


def _trunk(layers: list[Params], z: Array) -> Array:
    features = z @ layers[0]["kernel"] + layers[0]["bias"]
    for layer in layers[1:]:
        features = jax.nn.relu(features) @ layer["kernel"] + layer["bias"]
    return features


def _features(layers, z, norm):
    f = _trunk(layers, z)
    if norm:
        f = norm * f / (1e-6 + jnp.linalg.norm(f, axis=-1, keepdims=True))
    return f


def emit(
    phi: Params, z: Float[Array, "cohort embedding_dim"], template: Tree, feature_norm
) -> Tree:
    """h(phi; z_i) for a cohort: personal parameters stacked on a leading axis.

    Args:
      phi: trunk and heads.
      z: embeddings of the cohort.
      template: shapes of one client's personal parameters (arrays or shape structs).
    """
    features = _features(phi["trunk"], z, feature_norm)

    def from_head(leaf, head):
        flat = features @ head["kernel"] + head["bias"]
        return flat.reshape(len(z), *leaf.shape)

    return jax.tree.map(from_head, template, phi["heads"])


def emit_rows(
    hypernetwork: Hypernetwork, ids: Int[Array, " cohort"], template: Tree, feature_norm
) -> Tree:
    """Personal parameters of clients `ids` (padded ids give some client's)."""
    return emit(
        hypernetwork.phi,
        tree.take(hypernetwork.embeddings, ids),
        template,
        feature_norm,
    )


class PullBack(NamedTuple):
    """Gradients of phi and of the embeddings of the cohort's clients."""

    phi: Params
    z: Float[Array, "cohort embedding_dim"]


def pull_back(
    hypernetwork: Hypernetwork,
    ids: Int[Array, " cohort"],
    trained: Tree,
    weights: Float[Array, " cohort"],
    template: Tree,
    feature_norm,
) -> PullBack:
    """The gradient of 1/2 sum_i w_i ||h(phi; z_i) - trained_i||^2, trained_i fixed.

    FedTP's update (algorithm 1): g_phi = sum_i w_i (dW_i/dphi)^T (W_i - W~_i), and
    g_{z_i} = w_i (dW_i/dz_i)^T (W_i - W~_i), by one reverse pass for the cohort.

    Args:
      hypernetwork: as it was when the cohort received its parameters.
      ids: the cohort; a client with weight 0 changes nothing.
      trained: personal parameters after local training, stacked over the cohort.
      weights: w_i, usually n_i / sum_j n_j.
      template: shapes of one client's personal parameters.
    """
    z = tree.take(hypernetwork.embeddings, ids)
    emitted, vjp = jax.vjp(
        lambda phi, z: emit(phi, z, template, feature_norm), hypernetwork.phi, z
    )

    def weighted_difference(before, after):
        return weights.reshape(-1, *[1] * (before.ndim - 1)) * (before - after)

    return PullBack(*vjp(jax.tree.map(weighted_difference, emitted, trained)))
