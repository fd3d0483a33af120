"""One client's model as a program that runs without this library (`jax.export`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_tp.tree import path_name
from fedjax_tp.types import Array, Params

PLATFORMS = ("cpu", "cuda", "tpu")


def flat_params(params: Params) -> dict[str, Array]:
    """Parameters by path, such as `block_0/attention/qkv`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path_name(path): leaf for path, leaf in leaves}


def unflat_params(flat: Mapping[str, Any]) -> Params:
    """Undoes `flat_params`, for parameters in nested dictionaries."""
    params: dict = {}
    for name, leaf in flat.items():
        *above, last = name.split("/")
        inner = params
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = leaf
    return params


def export_forward(
    forward: Callable[[Params, Array], Array],
    params: Params,
    example_shape: Sequence[int],
    platforms: Sequence[str] = PLATFORMS,
) -> bytes:
    """Serializes `(flat_params, x) -> logits`, for batches of any size.

    Args:
      forward: of parameters and examples `[batch, *example_shape]`, float32.
      params: their shapes are what counts; weights are an argument of the program.
      example_shape: of one example.
      platforms: where the program shall run.
    """

    def of_flat(flat: dict[str, Array], x: Array) -> Array:
        return forward(unflat_params(flat), x)

    (batch,) = jax.export.symbolic_shape("batch")
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), flat_params(params)
    )
    x = jax.ShapeDtypeStruct((batch, *example_shape), jnp.float32)
    exported = jax.export.export(jax.jit(of_flat), platforms=platforms)(shapes, x)
    return bytes(exported.serialize())
