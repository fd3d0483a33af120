"""Split and merge, rows, sums."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedjax_tp import tree

PARAMS = {"a": {"x": jnp.arange(3.0), "y": jnp.ones((2, 2))}, "b": jnp.zeros(4)}


@given(st.sets(st.sampled_from(["a/x", "a/y", "b"])))
def test_merge_undoes_split(paths):
    chosen, rest = tree.split(PARAMS, lambda path: path in paths)
    assert len(jax.tree.leaves(chosen)) == len(paths)
    assert len(jax.tree.leaves(rest)) == 3 - len(paths)
    for merged in (tree.merge(chosen, rest), tree.merge(rest, chosen)):
        assert jax.tree.structure(merged) == jax.tree.structure(PARAMS)
        assert all(map(np.array_equal, *map(jax.tree.leaves, (merged, PARAMS))))


def test_rows_past_the_end_read_the_last_and_write_nothing():
    stacked = {"w": jnp.arange(6.0).reshape(3, 2)}
    ids = jnp.array([1, 3])
    assert tree.take(stacked, ids)["w"].tolist() == [[2, 3], [4, 5]]
    written = tree.put(stacked, ids, {"w": -jnp.ones((2, 2))})
    assert written["w"].tolist() == [[0, 1], [-1, -1], [4, 5]]


def test_rows_that_are_dropped_become_zero_even_when_nan():
    stacked = {"w": jnp.array([[1.0, 2.0], [jnp.nan, 3.0]])}
    clean = tree.zero_rows_unless(jnp.array([True, False]), stacked)
    assert clean["w"].tolist() == [[1, 2], [0, 0]]


def test_finite_rows():
    stacked = {"w": jnp.array([[1.0], [jnp.inf], [2.0]]), "n": jnp.arange(3)}
    assert tree.rows_all_finite(stacked, 3).tolist() == [True, False, True]


def test_weighted_sums_are_the_sums_of_weighted_rows():
    stacked = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    weights = jnp.array([[0.25, 0.5], [0.0, 1.0]])
    sums = tree.weighted_sums(stacked, weights)["w"]
    assert sums.tolist() == [[1.75, 2.5], [3.0, 4.0]]


def test_rows_are_chosen_one_by_one():
    condition = jnp.array([True, False])
    stacked = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "n": jnp.array([5, 6])}
    zeros = jax.tree.map(jnp.zeros_like, stacked)
    chosen = tree.where_rows(condition, stacked, zeros)
    assert chosen["w"].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert chosen["n"].tolist() == [5, 0]


def test_sizes_come_from_shapes_alone():
    shapes = jax.eval_shape(lambda: PARAMS)
    assert tree.num_elements(shapes) == 11
    assert tree.num_bytes(shapes) == 44
