"""The LeNet of the FedTP and pFedHN baselines."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_tp.models.layers import Linear
from fedjax_tp.types import Array, Bool, Float, InputError

_KERNEL = 5
BATCH_NORM_MOMENTUM = 0.9
"""Share of a running statistic that stays when a batch comes."""


def windows(
    images: Float[Array, "batch height width channels"], size: int
) -> Float[Array, "batch rows columns values"]:
    """All size x size windows, flat, ordered (row, column, channel); no padding."""
    rows = images.shape[1] - size + 1
    columns = images.shape[2] - size + 1
    shifted = [
        images[:, i : i + rows, j : j + columns]
        for i in range(size)
        for j in range(size)
    ]
    return jnp.concatenate(shifted, axis=-1)


class Convolution(nn.Module):
    """5x5 convolution as one matrix product over windows.

    Per-client kernels under vmap then are a batched matrix product. XLA would make a
    grouped convolution of them, which on CPU inside a loop is many times slower.
    """

    features: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch rows columns features"]:
        return Linear(self.features)(windows(x, _KERNEL))


@jax.custom_vjp
def _max_of_quads(
    quads: Float[Array, "batch rows 2 columns 2 channels"],
) -> Float[Array, "batch rows columns channels"]:
    """Maximum over 2x2 windows; its gradient goes to the entries that reach it."""
    return quads.max(axis=(2, 4))


def _max_forward(quads: Array) -> tuple[Array, tuple[Array, Array]]:
    top = quads.max(axis=(2, 4))
    return top, (quads, top)


def _max_backward(residuals: tuple[Array, Array], d_top: Array) -> tuple[Array]:
    quads, top = (residuals[0], residuals[1][:, :, None, :, None])
    # The compiler may compute an activation twice with other rounding: no entry then
    # equals the maximum, and JAX's own gradient of a reduction divides by zero.
    is_top = quads >= top - 1e-5 * jnp.abs(top)
    count = jnp.maximum(is_top.sum(axis=(2, 4), keepdims=True), 1)
    return (jnp.where(is_top, d_top[:, :, None, :, None] / count, 0),)


_max_of_quads.defvjp(_max_forward, _max_backward)


def _max_pool(
    x: Float[Array, "batch height width channels"],
) -> Float[Array, "batch rows columns channels"]:
    """Maximum over 2x2 windows; an odd last row or column is dropped."""
    batch, height, width, channels = x.shape
    rows, columns = height // 2, width // 2
    even = x[:, : 2 * rows, : 2 * columns]
    return _max_of_quads(even.reshape(batch, rows, 2, columns, 2, channels))


class LeNet(nn.Module):
    """Two 5x5 convolutions (16, 32) with ReLU and pooling, then 120-84-classes.

    121,182 parameters for 32x32x3 and 10 classes. Images under 16 pixels a side are
    padded so that each convolution keeps their size.

    Attributes:
      num_classes: number of logits.
      batch_norm: normalize over the batch (Ioffe and Szegedy 2015) after both
        convolutions and both hidden layers: 121,686 parameters, running statistics
        apart.
    """

    num_classes: int
    batch_norm: bool = False

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
        mask: Bool[Array, " batch"] | None = None,
    ) -> Float[Array, "batch classes"]:
        """Logits; rows where `mask` is False do not count for batch statistics."""
        if min(images.shape[1:3]) < 4:
            raise InputError(
                f"images are {images.shape[1]}x{images.shape[2]}; the cnn needs 4x4 or "
                "more"
            )
        margin = _KERNEL // 2 if min(images.shape[1:3]) < 16 else 0
        x = images
        for layer, features in enumerate((16, 32)):
            x = jnp.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
            x = Convolution(features, name=f"convolution_{layer}")(x)
            x = self._normalized(x, f"norm_{layer}", deterministic, mask)
            x = _max_pool(jax.nn.relu(x))
        x = x.reshape(len(x), -1)
        for layer, features in enumerate((120, 84)):
            x = Linear(features, name=f"hidden_{layer}")(x)
            x = self._normalized(x, f"norm_{layer + 2}", deterministic, mask)
            x = jax.nn.relu(x)
        self.sow("intermediates", "features", x)
        return Linear(self.num_classes, name="head")(x)

    def _normalized(
        self,
        x: Float[Array, "batch *rest"],
        name: str,
        deterministic: bool,
        mask: Bool[Array, " batch"] | None,
    ) -> Float[Array, "batch *rest"]:
        if not self.batch_norm:
            return x
        if mask is not None:
            mask = jnp.broadcast_to(mask.reshape(-1, *[1] * (x.ndim - 1)), x.shape)
        norm = nn.BatchNorm(
            use_running_average=deterministic,
            momentum=BATCH_NORM_MOMENTUM,
            use_fast_variance=False,
            name=name,
        )
        return norm(x, mask=mask)
