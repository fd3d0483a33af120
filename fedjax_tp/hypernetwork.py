"""The server's hypernetwork: a client's embedding in, its personal parameters out.

`h(phi; z)` of FedTP: an embedding z for each client, a ReLU trunk, and one linear head
for each personal leaf (one a block for the ViT). Which leaves are personal is given by
a template, so the same hypernetwork serves any model. Emission and pull-back treat the
whole cohort at once.

A dense head has a number for each feature and each emitted weight: 178 M for the
paper's ViT of 2 M. With a budget a head emits a low-rank change of a learned base.
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
      parameters: budget for phi, the embeddings apart; 0 for dense heads. A head then
        is `base + A(z) B`: base and B are learned, the features give A, and the rank is
        the largest that the budget allows, the same for all heads.
    """

    embedding_dim: int = 128
    hidden: int = 128
    layers: int = 0
    start: Literal["paper", "model"] = "model"
    spread: float = 1.5
    feature_norm: float = 7.0
    parameters: float = 0.0


PAPER = HypernetworkConfig(
    embedding_dim=128, hidden=150, layers=3, start="paper", feature_norm=0.0
)
"""The sizes and initial values of FedTP's code."""


class Hypernetwork(NamedTuple):
    """phi (trunk and heads) and the embedding table z.

    Attributes:
      phi: `{"trunk": [{"kernel", "bias"}, ...], "heads": template of the same}`; a
        low-rank head's kernel gives A, its bias is the base, its `factor` is B.
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
      InputError: a size below 1, a spread that is not a finite number >= 0, or a budget
        that does not even allow rank 1.
    """
    check_config(config)
    rank = head_rank(template, config)
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
    features = _features(trunk, embeddings, config)
    heads = [
        _init_dense_head(leaf_key, leaf, features, config)
        if rank is None
        else _init_low_rank_head(leaf_key, leaf, features, config, rank)
        for leaf_key, leaf in zip(
            jax.random.split(head_key, len(leaves)), leaves, strict=True
        )
    ]
    phi = {"trunk": trunk, "heads": jax.tree.unflatten(structure, heads)}
    return Hypernetwork(phi, embeddings)


def check_config(config: HypernetworkConfig) -> None:
    """Raises InputError for a size that is too small, or a number not finite."""
    smallest = {"embedding_dim": 1, "hidden": 1, "layers": 0}
    smallest |= {"spread": 0, "feature_norm": 0, "parameters": 0}
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


def head_rank(template: Tree, config: HypernetworkConfig) -> int | None:
    """The rank of the heads that the budget allows; None for dense heads.

    Args:
      template: the personal parameters of one client, or their shapes.
      config: with the budget.

    Raises:
      InputError: the budget does not allow rank 1.
    """
    if not config.parameters:
        return None
    trunk = (config.embedding_dim + config.layers * config.hidden) * config.hidden
    fixed = trunk + (config.layers + 1) * config.hidden + tree.num_elements(template)
    sides = [_sides(leaf) for leaf in jax.tree.leaves(template)]
    a_rank = sum(config.hidden * small + large for small, large in sides)
    rank = int((config.parameters - fixed) // a_rank)
    if rank < 1:
        raise InputError(
            f"hypernetwork parameters is {config.parameters:g}; allowed is 0 (dense "
            f"heads) or {fixed + a_rank:,} or more (heads of rank 1)"
        )
    # A higher rank than the smaller side adds nothing.
    return min(rank, max(small for small, _ in sides))


def _sides(leaf: Any) -> tuple[int, int]:
    """The smaller and the larger side of a leaf as a matrix of its first axis."""
    rows = leaf.shape[0] if leaf.ndim > 1 else 1
    columns = math.prod(leaf.shape) // rows
    return min(rows, columns), max(rows, columns)


def _init_dense_head(
    key: PRNGKey,
    leaf: Array,
    features: Float[Array, "clients hidden"],
    config: HypernetworkConfig,
) -> Params:
    """With `start="model"`, emissions average `leaf` and differ by spread * std."""
    head = _init_linear(key, config.hidden, leaf.size)
    if config.start == "paper":
        return head
    kernel = _telling_apart(head["kernel"], features, config.spread * jnp.std(leaf))
    return {"kernel": kernel, "bias": leaf.reshape(-1) - features.mean(axis=0) @ kernel}


def _init_low_rank_head(
    key: PRNGKey,
    leaf: Array,
    features: Float[Array, "clients hidden"],
    config: HypernetworkConfig,
    rank: int,
) -> Params:
    """Emissions average `leaf`; along each row of B they differ by spread * std."""
    small, large = _sides(leaf)
    rank = min(rank, small)
    kernel_key, factor_key = jax.random.split(key)
    # Orthonormal rows: a step of A moves an emission by what of its gradient lies in
    # their span, and as far as a step of a dense head would.
    factor = jnp.linalg.qr(jax.random.normal(factor_key, (large, rank)))[0].T
    kernel = _init_linear(kernel_key, config.hidden, small * rank)["kernel"]
    if config.start == "model":
        kernel = _telling_apart(kernel, features, config.spread * jnp.std(leaf))
    head = {"kernel": kernel, "factor": factor, "bias": jnp.zeros(leaf.size)}
    mean = _emit_leaf(head, features.mean(axis=0)[None], leaf)[0]
    return head | {"bias": (leaf - mean).reshape(-1)}


def _telling_apart(
    kernel: Float[Array, "hidden out"],
    features: Float[Array, "clients hidden"],
    deviation: Array,
) -> Float[Array, "hidden out"]:
    """The kernel scaled so that what it gives clients differs by `deviation`."""
    # A kernel of independent entries with variance s^2 emits differences of variance
    # s^2 * sum_j Var(feature j).
    difference = jnp.sqrt(jnp.sum(jnp.var(features, axis=0)))
    size = jnp.sqrt(jnp.mean(jnp.sum(features**2, axis=1)))
    # Clients that the trunk does not tell apart (one client, say) get no larger kernel.
    difference = jnp.where(difference > 1e-2 * size, difference, size + 1e-6)
    return kernel / jnp.std(kernel) * deviation / difference


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

    return jax.tree.map(
        lambda leaf, head: _emit_leaf(head, features, leaf), template, phi["heads"]
    )


def _emit_leaf(
    head: Params, features: Float[Array, "cohort hidden"], leaf: Any
) -> Float[Array, "cohort ..."]:
    product = jnp.matmul(features, head["kernel"], precision="highest")
    if "factor" in head:
        small, large = _sides(leaf)
        product = jnp.matmul(
            product.reshape(len(features), small, -1),
            head["factor"],
            precision="highest",
        )
        is_tall = leaf.ndim > 1 and leaf.shape[0] == large
        product = product.mT if is_tall else product
    flat = product.reshape(len(features), -1) + head["bias"]
    return flat.reshape(len(features), *leaf.shape)


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
