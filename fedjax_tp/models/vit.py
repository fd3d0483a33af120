"""The vision transformer of FedTP: pre-norm blocks, CLS token, learned positions."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_tp.models.attention import AttentionFunction, SelfAttention
from fedjax_tp.models.layers import Dropout, Linear
from fedjax_tp.types import Array, Float, InputError

# Flax's default is another; FedTP's layers use this one.
LAYER_NORM_EPSILON = 1e-5


def patches(
    images: Float[Array, "batch height width channels"], patch_size: int
) -> Float[Array, "batch patches values"]:
    """Cuts images into flat squares, row by row; values ordered (row, column, channel).

    Raises:
      InputError: the patch size does not divide height and width.
    """
    batch, height, width, channels = images.shape
    check_patch_size(patch_size, height, width)
    rows, columns = height // patch_size, width // patch_size
    grid = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
    values = patch_size * patch_size * channels
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, values)


def check_patch_size(patch_size: int, height: int, width: int) -> None:
    """Raises InputError unless square patches of this size tile the image."""
    if patch_size < 1 or height % patch_size or width % patch_size:
        allowed = [
            p
            for p in range(1, min(height, width) + 1)
            if height % p == 0 and width % p == 0
        ]
        raise InputError(
            f"patch size is {patch_size}; images of {height}x{width} allow "
            f"{', '.join(map(str, allowed))}"
        )


class Mlp(nn.Module):
    """Linear, exact GELU, Linear, with dropout after both."""

    hidden: int
    dropout: float

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch tokens dim"], *, deterministic: bool
    ) -> Float[Array, "batch tokens dim"]:
        dim = x.shape[-1]
        x = jax.nn.gelu(Linear(self.hidden, name="up")(x), approximate=False)
        x = Dropout(self.dropout)(x, deterministic=deterministic)
        x = Linear(dim, name="down")(x)
        return Dropout(self.dropout)(x, deterministic=deterministic)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    heads: int
    head_dim: int
    mlp_dim: int
    dropout: float
    causal: bool = False
    attend: AttentionFunction | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch tokens dim"], *, deterministic: bool
    ) -> Float[Array, "batch tokens dim"]:
        normed = nn.LayerNorm(LAYER_NORM_EPSILON, name="attention_norm")(x)
        attention = SelfAttention(
            self.heads,
            self.head_dim,
            self.dropout,
            self.causal,
            self.attend,
            name="attention",
        )
        x = x + attention(normed, deterministic=deterministic)
        normed = nn.LayerNorm(LAYER_NORM_EPSILON, name="mlp_norm")(x)
        mlp = Mlp(self.mlp_dim, self.dropout, name="mlp")
        return x + mlp(normed, deterministic=deterministic)


class ViT(nn.Module):
    """Images to class logits (Dosovitskiy et al. 2021, sized as in FedTP).

    The defaults are FedTP's: 1,988,490 parameters for 32x32x3 images and 10 classes.

    Attributes:
      num_classes: number of logits.
      patch_size: side of the square patches; must divide height and width.
      dim: width of the residual stream.
      depth: number of blocks.
      heads, head_dim: attention heads; heads * head_dim need not equal dim.
      mlp_dim: hidden width of the MLPs.
      dropout: rate after embedding, attention output and both MLP layers.
      attend: what attends instead of full attention.
    """

    num_classes: int
    patch_size: int = 4
    dim: int = 128
    depth: int = 6
    heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 256
    dropout: float = 0.1
    attend: AttentionFunction | None = None

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        x = Linear(self.dim, name="patch_embedding")(patches(images, self.patch_size))
        normal = nn.initializers.normal(1.0)
        cls = self.param("cls", normal, (1, 1, self.dim))
        x = jnp.concatenate(
            [jnp.broadcast_to(cls, (x.shape[0], 1, self.dim)), x], axis=1
        )
        x = x + self.param("positions", normal, (1, *x.shape[1:]))
        x = Dropout(self.dropout)(x, deterministic=deterministic)
        for i in range(self.depth):
            block = Block(
                self.heads,
                self.head_dim,
                self.mlp_dim,
                self.dropout,
                attend=self.attend,
                name=f"block_{i}",
            )
            x = block(x, deterministic=deterministic)
        x = nn.LayerNorm(LAYER_NORM_EPSILON, name="head_norm")(x[:, 0])
        self.sow("intermediates", "features", x)
        return Linear(self.num_classes, name="head")(x)
