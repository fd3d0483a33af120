"""The layers of a model, from the input on: what analyses go through one by one.

A layer is all tensors under one name (kernel and bias). Attention projections lie in
one tensor, `qkv`; they are three layers, since averaging may do another thing to each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_tp import tree
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.task import is_statistic
from fedjax_tp.types import Array, Float, InputError, Int, Params, PRNGKey, Tree

_PROJECTIONS = ("q", "k", "v")


class Layers(NamedTuple):
    """Which numbers of a model belong to which layer; static under jit.

    Attributes:
      names: of the layers, from the input to the output.
      index: for each leaf the number of its layer, an array that broadcasts against
        the leaf; -1 for running statistics, which are of no layer.
    """

    names: tuple[str, ...]
    index: Tree

    def numbers(self, names: tuple[str, ...]) -> list[int]:
        """Where some names stand; raises InputError for one that is not there."""
        for name in names:
            if name not in self.names:
                raise InputError(
                    f"layer is {name!r}; this model has {', '.join(self.names)}"
                )
        return [self.names.index(name) for name in names]


def layers_of(init: Callable[[PRNGKey], Params]) -> Layers:
    """The layers of a model, in the order in which it makes its parameters.

    Args:
      init: of the task; it is traced, nothing is computed.
    """
    in_order: list[str] = []

    def note_order(key: PRNGKey) -> Params:
        params = init(key)
        # As they were made: what a trace gives back is in alphabetical order.
        in_order.extend(_paths(params))
        return params

    shapes = jax.eval_shape(note_order, jax.random.key(0))
    names = tuple(dict.fromkeys(name for path in in_order for name in _layers_at(path)))
    places = {name: number for number, name in enumerate(names)}

    def index_of(path: tuple, leaf: Any) -> np.ndarray:
        numbers = [places[name] for name in _layers_at(tree.path_name(path))]
        if not numbers:
            return np.array(-1)
        if len(numbers) == 1:
            return np.array(numbers[0])
        # `[dim, 3, heads, head_dim]`: the second axis has queries, keys and values.
        return np.array(numbers).reshape(1, 3, *[1] * (leaf.ndim - 2))

    return Layers(names, jax.tree_util.tree_map_with_path(index_of, shapes))


def _paths(params: Any, prefix: str = "") -> list[str]:
    if not isinstance(params, dict):
        return [
            (f"{prefix}/{tree.path_name(path)}").strip("/")
            for path, _ in jax.tree_util.tree_leaves_with_path(params)
        ]
    found = []
    for name, inner in params.items():
        found += _paths(inner, f"{prefix}/{name}".strip("/"))
    return found


def _layers_at(path: str) -> list[str]:
    if is_statistic(path):
        return []
    if is_attention_projection(path):
        parent = path.rpartition("/")[0]
        return [f"{parent}/{name}".strip("/") for name in _PROJECTIONS]
    parent, _, name = path.rpartition("/")
    return [parent or name]


def by_layer(values: Float[Array, " layers"], layers: Layers) -> Tree:
    """A tree of arrays that broadcast against the leaves: each has its layer's value;
    running statistics have the mean over layers."""
    padded = jnp.append(values, jnp.mean(values))
    return jax.tree.map(lambda index: padded[index], layers.index)


def interpolate(
    first: Params, second: Params, shares: Float[Array, " layers"], layers: Layers
) -> Params:
    """first + share * (second - first), each layer with its own share."""
    return jax.tree.map(
        lambda a, b, share: a + share * (b - a),
        first,
        second,
        by_layer(shares, layers),
    )


def layer_sums(products: Params, layers: Layers) -> Float[Array, " layers"]:
    """The sum of all numbers of each layer."""
    sums = jnp.zeros(len(layers.names) + 1)
    for leaf, index in zip(
        jax.tree.leaves(products), jax.tree.leaves(layers.index), strict=True
    ):
        full = np.reshape(index, (1,) * (leaf.ndim - index.ndim) + index.shape)
        axes = tuple(i for i in range(leaf.ndim) if full.shape[i] == 1)
        summed = jnp.sum(leaf, axis=axes, keepdims=True)
        sums = sums.at[full.ravel()].add(summed.ravel())
    return sums[:-1]


def layer_norms(params: Params, layers: Layers) -> Float[Array, " layers"]:
    """The Euclidean norm of each layer."""
    return jnp.sqrt(layer_sums(jax.tree.map(jnp.square, params), layers))


def layer_cosines(
    first: Params, second: Params, layers: Layers
) -> Float[Array, " layers"]:
    """The cosine between two models' layers, one after another; 1 where one is 0."""
    dots = layer_sums(jax.tree.map(jnp.multiply, first, second), layers)
    lengths = layer_norms(first, layers) * layer_norms(second, layers)
    return jnp.where(lengths > 0, dots / jnp.where(lengths > 0, lengths, 1.0), 1.0)


def rotation(
    params: Params, initial: Params, layers: Layers
) -> Float[Array, " layers"]:
    """1 - cosine of each layer to its initial value (Carbonnelle and De Vleeschouwer
    2018, arXiv 1806.01603); 0 if it kept its direction, 1 if nothing of it is left."""
    return 1 - layer_cosines(params, initial, layers)


def set_members(names: tuple[str, ...], layers: Layers) -> Int[np.ndarray, " layers"]:
    """1 for the layers named, 0 for the others; raises InputError for unknown ones."""
    members = np.zeros(len(layers.names), int)
    members[layers.numbers(names)] = 1
    return members
