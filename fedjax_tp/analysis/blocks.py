"""What each block of a transformer is worth: the model without it.

The layer-pruning question of Gromov et al. 2024: how much of the accuracy is left when
a block is dropped. In a pre-norm block both branches are added to what goes through, so
a block whose two output layers are zero is the identity.
"""

import re

import jax
import jax.numpy as jnp

from fedjax_tp import tree
from fedjax_tp.models.task import Task
from fedjax_tp.types import Array, Batch, Float, InputError, Params

_BLOCK = re.compile(r"(?:^|/)block_(\d+)/")
_OUTPUT = re.compile(r"(?:^|/)block_(\d+)/(?:attention/out|mlp/down)/")


def num_blocks(params: Params) -> int:
    """Blocks of a model; 0 of one without."""
    paths = [
        tree.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    return len({found[1] for path in paths if (found := _BLOCK.search(path))})


def without_block(params: Params, block: int | Array) -> Params:
    """The model whose block of this number hands on what it is given.

    Raises:
      InputError: the model has no blocks whose outputs are `attention/out` and
        `mlp/down`.
    """
    found = False

    def leaf_without(path: tuple, leaf: Array) -> Array:
        nonlocal found
        output = _OUTPUT.search(tree.path_name(path))
        if output is None:
            return leaf
        found = True
        return jnp.where(jnp.asarray(block) == int(output[1]), 0.0, leaf)

    pruned = jax.tree_util.tree_map_with_path(leaf_without, params)
    if not found:
        raise InputError("the model has no transformer blocks; none can be dropped")
    return pruned


def accuracy_without_each(
    task: Task, params: Params, batch: Batch
) -> Float[Array, " blocks"]:
    """Share of a batch that is right without block 0, without block 1, and so on."""

    def without(block: Array) -> Array:
        found = task.metrics(without_block(params, block), batch)
        return found.correct / jnp.maximum(found.examples, 1)

    return jax.lax.map(without, jnp.arange(num_blocks(params)))
