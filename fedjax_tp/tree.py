"""Pytrees of arrays: split and merge by path, rows of stacked trees, sums and sizes.

A split leaves None where a leaf went to the other part, so both parts keep the
structure of the whole and `merge` needs no bookkeeping.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_tp.types import Array, Bool, Float, Int, Shaped, Tree

PathPredicate = Callable[[str], bool]


def path_name(path: tuple) -> str:
    """The path of a leaf as text, such as `block_0/attention/qkv`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def split(tree: Tree, predicate: PathPredicate) -> tuple[Tree, Tree]:
    """Splits `tree` into (leaves whose path satisfies `predicate`, all others)."""

    def keep(wanted: bool) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if predicate(path_name(path)) is wanted else None,
            tree,
        )

    return keep(True), keep(False)


def merge(first: Tree, second: Tree) -> Tree:
    """Undoes `split`: takes each leaf from the part that has it."""
    return jax.tree.map(
        lambda a, b: b if a is None else a,
        first,
        second,
        is_leaf=lambda leaf: leaf is None,
    )


def take(stacked: Tree, ids: Int[Array, " rows"]) -> Tree:
    """Rows `ids` of every leaf; an id past the end gives the last row (padding)."""
    return jax.tree.map(lambda leaf: leaf.at[ids].get(mode="clip"), stacked)


def put(stacked: Tree, ids: Int[Array, " rows"], rows: Tree) -> Tree:
    """Writes `rows` at `ids` in every leaf; an id past the end is dropped (padding)."""
    return jax.tree.map(
        lambda leaf, row: leaf.at[ids].set(row, mode="drop"), stacked, rows
    )


def stack_copies(tree: Tree, copies: int) -> Tree:
    """The same tree `copies` times along a new leading axis."""
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (copies, *leaf.shape)), tree
    )


def choose(condition: Bool[Array, ""], if_true: Tree, if_false: Tree) -> Tree:
    """One of two trees of equal structure."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def where_rows(condition: Bool[Array, " rows"], if_true: Tree, if_false: Tree) -> Tree:
    """Chooses row by row of two stacked trees of equal structure."""
    return jax.tree.map(
        lambda a, b: jnp.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b),
        if_true,
        if_false,
    )


def zero_rows_unless(keep: Bool[Array, " rows"], stacked: Tree) -> Tree:
    """Replaces by zeros, NaN included, the rows of every leaf where `keep` is False."""
    return where_rows(keep, stacked, jax.tree.map(jnp.zeros_like, stacked))


def weighted_sums(stacked: Tree, weights: Float[Array, "sums rows"]) -> Tree:
    """sum_i weights[s, i] * row i for each s, in the leaf's full precision."""
    return jax.tree.map(
        lambda leaf: jnp.tensordot(weights, leaf, axes=1, precision="highest").astype(
            leaf.dtype
        ),
        stacked,
    )


def rows_all_finite(stacked: Tree, rows: int) -> Bool[Array, " rows"]:
    """For each row of a stacked tree: are all its numbers finite?"""
    finite = jnp.ones(rows, bool)
    for leaf in jax.tree.leaves(stacked):
        finite &= jnp.isfinite(leaf).reshape(rows, -1).all(axis=1)
    return finite


Flat = dict[str, Shaped[Array, "rows _"]]
"""The rows of a stacked tree as one matrix for each dtype, by the dtype's name."""


def flatten_rows(stacked: Tree) -> Flat:
    """One row of numbers a row of the tree; undone by `unflatten_rows`.

    What is done to whole rows (choose, add, check, move) then is one operation, and not
    one a leaf: less to compile, fewer passes.
    """
    by_type: dict[str, list[Array]] = {}
    for leaf in map(_key_data, jax.tree.leaves(stacked)):
        flat = leaf.reshape(leaf.shape[0], -1)
        by_type.setdefault(leaf.dtype.name, []).append(flat)
    return {name: jnp.concatenate(flats, axis=1) for name, flats in by_type.items()}


def unflatten_rows(flat: Flat, like: Tree) -> Tree:
    """The stacked tree whose rows are those of `flat`.

    Args:
      flat: from `flatten_rows`; may have another number of rows than `like`.
      like: arrays or shape structs; gives structure, shapes and types.
    """
    offsets = dict.fromkeys(flat, 0)

    def next_leaf(leaf: Any) -> Array:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf
        name, size = data.dtype.name, math.prod(data.shape[1:])
        rows = flat[name][:, offsets[name] : offsets[name] + size]
        offsets[name] += size
        rows = rows.reshape(-1, *data.shape[1:])
        if is_key:
            return jax.random.wrap_key_data(rows, impl=jax.random.key_impl(leaf))
        return rows

    return jax.tree.map(next_leaf, like)


def _key_data(leaf: Array) -> Array:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def num_elements(tree: Tree) -> int:
    """How many numbers a tree holds; works on shapes alone (`jax.eval_shape`)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Tree) -> int:
    """How many bytes a tree holds; works on shapes alone (`jax.eval_shape`)."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
