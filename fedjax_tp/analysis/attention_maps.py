"""How alike the attention of two models is, and where a model looks."""

import jax.numpy as jnp

from fedjax_tp.types import Array, Float

Maps = Float[Array, "layers batch heads tokens tokens"]


def jensen_shannon(first: Maps, second: Maps) -> Float[Array, " layers"]:
    """Distance of two models' attention, 0 (equal) to 1 (nowhere the same), by layer.

    The root of the Jensen-Shannon divergence in bits (Endres and Schindelin 2003) of
    each token's weights, averaged over tokens, heads and examples. Models from the same
    initial values have their heads in the same order.
    """
    middle = (first + second) / 2
    divergence = sum(_relative_entropy(maps, middle) for maps in (first, second)) / 2
    # Rounding may leave a small negative number.
    distance = jnp.sqrt(jnp.maximum(divergence, 0.0))
    return distance.mean(axis=(1, 2, 3))


def _relative_entropy(p: Maps, q: Maps) -> Float[Array, "layers batch heads tokens"]:
    """KL(p | q) in bits; 0 log 0 is 0."""
    is_positive = p > 0
    ratio = jnp.where(is_positive, p, 1.0) / jnp.where(is_positive, q, 1.0)
    return jnp.sum(p * jnp.log2(ratio), axis=-1)


def cosine_similarity(first: Maps, second: Maps) -> Float[Array, " layers"]:
    """Cosine of two models' maps, each a vector of tokens times tokens, by layer; the
    mean over heads and examples."""
    products = jnp.sum(first * second, axis=(-2, -1))
    squares = jnp.sum(first**2, axis=(-2, -1)) * jnp.sum(second**2, axis=(-2, -1))
    return (products / jnp.sqrt(squares)).mean(axis=(1, 2))


def rollout(maps: Maps) -> Float[Array, "batch tokens tokens"]:
    """Attention rollout (Abnar and Zuidema 2020, section 3): the product over layers of
    A / 2 + I / 2, A being the mean over heads. Rows sum to 1."""
    mixed = maps.mean(axis=2) / 2 + jnp.eye(maps.shape[-1]) / 2
    total = mixed[0]
    for layer in mixed[1:]:
        total = jnp.matmul(layer, total, precision="highest")
    return total
