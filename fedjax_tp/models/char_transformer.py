"""A character model of causal transformer blocks, sized as FedTP's for Shakespeare.

FedTP's own has post-norm blocks, fixed positions and no causal mask. Without the mask
a position sees the character it has to predict: all but the last are right for free.
"""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_tp.models.attention import AttentionFunction
from fedjax_tp.models.layers import Dropout, Linear
from fedjax_tp.models.vit import LAYER_NORM_EPSILON, Block
from fedjax_tp.types import Array, Float


class CharTransformer(nn.Module):
    """Characters to logits of the character that follows, at every position.

    Attributes:
      num_characters: size of the alphabet.
      dim, depth, heads, head_dim, mlp_dim, dropout, attend: as of `ViT`.
    """

    num_characters: int
    dim: int = 128
    depth: int = 2
    heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 256
    dropout: float = 0.1
    attend: AttentionFunction | None = None

    @nn.compact
    def __call__(
        self, text: Float[Array, "batch length"], *, deterministic: bool = True
    ) -> Float[Array, "batch length characters"]:
        normal = nn.initializers.normal(1.0)
        embed = nn.Embed(
            self.num_characters, self.dim, embedding_init=normal, name="embedding"
        )
        x = embed(text.astype(jnp.int32))
        x = x + self.param("positions", normal, (1, *x.shape[1:]))
        x = Dropout(self.dropout)(x, deterministic=deterministic)
        for i in range(self.depth):
            x = Block(
                self.heads,
                self.head_dim,
                self.mlp_dim,
                self.dropout,
                causal=True,
                attend=self.attend,
                name=f"block_{i}",
            )(x, deterministic=deterministic)
        x = nn.LayerNorm(LAYER_NORM_EPSILON, name="head_norm")(x)
        self.sow("intermediates", "features", x)
        return Linear(self.num_characters, name="head")(x)
