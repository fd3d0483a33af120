"""The server's hypernetwork: a client's embedding in, its personal parameters out.

`h(phi; z)` of FedTP: an embedding z for each client, a ReLU trunk, and one linear head
for each personal leaf (one a block for the ViT). Which leaves are personal is given by
a template, so the same hypernetwork serves any model. Emission and pull-back treat the
whole cohort at once.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_tp import tree
from fedjax_tp.types import Array, Float, InputError, Int, Params, PRNGKey, Tree


@dataclass(frozen=True)
class HypernetworkConfig:
    """Shape and initial values of the hypernetwork.

    The defaults were found on validation splits; `PAPER` has those of FedTP's code.

    Attributes:
      embedding_dim: length of a client's embedding.
      hidden: width of the trunk.
      layers: ReLU layers of the trunk after the first linear one. Each makes the
        features of different clients more alike, and an update of one client then
        disturbs the others more.
      start: what is emitted before training. `paper`: all layers as in FedTP's code, so
        that emitted weights are random and nearly the same for all clients. `model`:
        the model's own initial weights, plus differences between clients of `spread`
        times their standard deviation, from a trunk that tells clients apart (He
        initialization, no bias).
      spread: see `start`.
      feature_norm: the trunk's output is scaled to this norm, so that a step of the
        heads moves a client's emission by lr * weight * feature_norm^2 of what is
        missing; 0 leaves it as it is, as the paper does.
    """

    embedding_dim: int = 128
    hidden: int = 128
    layers: int = 0
    start: Literal["paper", "model"] = "model"
    spread: float = 1.5
    feature_norm: float = 7.0


PAPER = HypernetworkConfig(
    embedding_dim=128, hidden=150, layers=3, start="paper", feature_norm=0.0
)
"""The sizes and initial values of FedTP's code."""


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
    check_config(config)
    embedding_key, trunk_key, head_key = jax.random.split(key, 3)
    embeddings = jax.random.normal(embedding_key, (num_clients, config.embedding_dim))
    widths = [config.embedding_dim, *[config.hidden] * (config.layers + 1)]
    init_trunk_layer = _init_linear if config.start == "paper" else _init_he
    trunk = [
        init_trunk_layer(layer_key, inputs, outputs)
        for layer_key, (inputs, outputs) in zip(
            jax.random.split(trunk_key, len(widths) - 1),
            itertools.pairwise(widths),
            strict=True,
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
        features = _features(trunk, embeddings, config)
        heads = [
            _centred_head(head, leaf, features, config.spread)
            for head, leaf in zip(heads, leaves, strict=True)
        ]
    phi = {"trunk": trunk, "heads": jax.tree.unflatten(structure, heads)}
    return Hypernetwork(phi, embeddings)


def check_config(config: HypernetworkConfig) -> None:
    """Raises InputError for a size that is too small, or a number not finite."""
    smallest = {"embedding_dim": 1, "hidden": 1, "layers": 0}
    smallest |= {"spread": 0, "feature_norm": 0}
    for name, least in smallest.items():
        value = getattr(config, name)
        if not least <= value < math.inf:
            raise InputError(
                f"hypernetwork {name} is {value}; allowed is {least} or more"
            )


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


def _centred_head(
    head: Params,
    leaf: Array,
    features: Float[Array, "clients hidden"],
    spread: float,
) -> Params:
    """A head whose emissions average `leaf`, and differ by spread * std(leaf)."""
    mean = features.mean(axis=0)
    # A kernel of independent entries with variance s^2 emits differences of variance
    # s^2 * sum_j Var(feature j).
    difference = jnp.sqrt(jnp.sum(jnp.var(features, axis=0)))
    size = jnp.sqrt(jnp.mean(jnp.sum(features**2, axis=1)))
    # Clients that the trunk does not tell apart (one client, say) get no larger kernel.
    difference = jnp.where(difference > 1e-2 * size, difference, size + 1e-6)
    kernel = head["kernel"] / jnp.std(head["kernel"])
    kernel = kernel * spread * jnp.std(leaf) / difference
    return {"kernel": kernel, "bias": leaf.reshape(-1) - mean @ kernel}


def _features(
    trunk: list[Params],
    z: Float[Array, "cohort embedding_dim"],
    config: HypernetworkConfig,
) -> Float[Array, "cohort hidden"]:
    features = z @ trunk[0]["kernel"] + trunk[0]["bias"]
    for layer in trunk[1:]:
        features = jax.nn.relu(features) @ layer["kernel"] + layer["bias"]
    if not config.feature_norm:
        return features
    # Inside the root, so that a client whose ReLUs are all dead has a gradient of zero.
    squares = jnp.sum(features**2, axis=-1, keepdims=True)
    return config.feature_norm * features * jax.lax.rsqrt(squares + 1e-6)


def emit(
    phi: Params,
    z: Float[Array, "cohort embedding_dim"],
    template: Tree,
    config: HypernetworkConfig,
) -> Tree:
    """h(phi; z_i) for a cohort: personal parameters stacked on a leading axis.

    Args:
      phi: trunk and heads.
      z: embeddings of the cohort.
      template: shapes of one client's personal parameters (arrays or shape structs).
      config: as phi was drawn with.
    """
    features = _features(phi["trunk"], z, config)

    def from_head(leaf: Any, head: Params) -> Array:
        product = jnp.matmul(features, head["kernel"], precision="highest")
        flat = product + head["bias"]
        return flat.reshape(len(z), *leaf.shape)

    return jax.tree.map(from_head, template, phi["heads"])


def emit_rows(
    hypernetwork: Hypernetwork,
    ids: Int[Array, " cohort"],
    template: Tree,
    config: HypernetworkConfig,
) -> Tree:
    """Personal parameters of clients `ids` (padded ids give some client's)."""
    return emit(
        hypernetwork.phi,
        tree.take(hypernetwork.embeddings, ids),
        template,
        config,
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
    config: HypernetworkConfig,
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
      config: as phi was drawn with.
    """
    z = tree.take(hypernetwork.embeddings, ids)
    emitted, vjp = jax.vjp(
        lambda phi, z: emit(phi, z, template, config), hypernetwork.phi, z
    )

    def weighted_difference(before, after):
        return weights.reshape(-1, *[1] * (before.ndim - 1)) * (before - after)

    return PullBack(*vjp(jax.tree.map(weighted_difference, emitted, trained)))
