"""The LSTM of LEAF's Shakespeare task (Caldas et al. 2018)."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_tp.models.layers import Linear
from fedjax_tp.types import Array, Float


class CharLSTM(nn.Module):
    """Characters to logits of the character that follows, at every position.

    Attributes:
      num_characters: size of the alphabet.
      embedding_dim: of a character.
      hidden: width of each layer.
      layers: as many.
    """

    num_characters: int
    embedding_dim: int = 8
    hidden: int = 256
    layers: int = 2

    @nn.compact
    def __call__(
        self, text: Float[Array, "batch length"], *, deterministic: bool = True
    ) -> Float[Array, "batch length characters"]:
        embed = nn.Embed(self.num_characters, self.embedding_dim, name="embedding")
        x = embed(text.astype(jnp.int32))
        for layer in range(self.layers):
            cell = nn.OptimizedLSTMCell(self.hidden, name=f"lstm_{layer}")
            x = nn.RNN(cell)(x)
        self.sow("intermediates", "features", x)
        return Linear(self.num_characters, name="head")(x)
