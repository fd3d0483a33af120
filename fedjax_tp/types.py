"""The shared vocabulary: names for the pytrees and arrays that every room passes on.

Nothing here computes. Shapes are written with jaxtyping; `clients` is the axis of a
cohort or of the whole population, `batch` the axis of the examples in one step.
"""

from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Integer, Key, PyTree, Shaped, UInt8, UInt32

Tree = PyTree[Any]
"""Any pytree of arrays; absent leaves are None (see `fedjax_tp.tree.split`)."""

Params = PyTree[Float[Array, "..."]]
"""Trainable parameters of one client, or of the server, without a client axis."""

PRNGKey = Key[Array, ""]
"""One typed JAX key (`jax.random.key`), not an array of keys."""

NumpyInts = Integer[np.ndarray, " _"]
"""A flat NumPy array of integers: labels or example indices."""


class InputError(ValueError):
    """What the user asked for cannot be done; the message says what is allowed."""


class Batch(NamedTuple):
    """One minibatch. Rows where `mask` is False are padding and count for nothing."""

    x: Shaped[Array, "batch *example"]
    y: Int[Array, " batch"]
    mask: Bool[Array, " batch"]


class Progress(NamedTuple):
    """Where a client stands in its local training of one round."""

    step: Int[Array, ""]
    num_steps: Int[Array, ""]
    epoch: Int[Array, ""]


__all__ = [
    "Array",
    "Batch",
    "Bool",
    "Float",
    "InputError",
    "Int",
    "NumpyInts",
    "PRNGKey",
    "Params",
    "Progress",
    "PyTree",
    "Shaped",
    "Tree",
    "UInt8",
    "UInt32",
]
