"""What a gradient tells of the examples that it is of.

Geiping et al. 2020 (NeurIPS, arXiv 2003.14053): an example before a linear layer can be
read off its gradient; behind other layers an image is sought whose gradient points the
same way. For audits of one's own federations.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_tp.models.task import Task
from fedjax_tp.types import Array, Batch, Float, InputError, Int, Params, PRNGKey


def input_of_linear(
    kernel_gradient: Float[Array, "inputs outputs"],
    bias_gradient: Float[Array, " outputs"],
) -> Float[Array, " inputs"]:
    """The one example that a linear layer with a bias has seen, exactly.

    dL/dW[:, i] = x dL/db[i]: any output whose bias has a gradient gives x; taken is the
    largest, which rounding disturbs least. Of several examples it is a mean of theirs,
    weighted by their own dL/db[i].

    Raises:
      InputError: no bias has a gradient; only outside jit.
    """
    output = jnp.argmax(jnp.abs(bias_gradient))
    if not isinstance(output, jax.core.Tracer) and not bias_gradient[output]:
        raise InputError("no bias has a gradient; nothing of the input can be read off")
    return kernel_gradient[:, output] / bias_gradient[output]


def gradient_distance(first: Params, second: Params) -> Float[Array, ""]:
    """1 - cosine of two gradients, all parameters as one vector; 1 if one is 0."""

    def dot(a: Params, b: Params) -> Array:
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), jnp.zeros(()))

    squared = dot(first, first) * dot(second, second)
    return 1 - dot(first, second) / jnp.sqrt(jnp.where(squared > 0, squared, jnp.inf))


def total_variation(
    images: Float[Array, "batch height width channels"],
) -> Float[Array, ""]:
    """Mean absolute difference of neighbouring pixels, down and across, summed."""
    down = jnp.abs(images[:, 1:] - images[:, :-1]).mean()
    return down + jnp.abs(images[:, :, 1:] - images[:, :, :-1]).mean()


def psnr(
    found: Float[Array, "*axes"], true: Float[Array, "*axes"], span: float
) -> Float[Array, ""]:
    """Peak signal-to-noise ratio in dB: 10 log10(span^2 / mean squared error).

    Args:
      found, true: images.
      span: largest pixel less the smallest that there can be.
    """
    return 10 * jnp.log10(span**2 / jnp.mean((found - true) ** 2))


class Attack(NamedTuple):
    """How images are sought; static.

    Attributes:
      steps: of Adam, with the sign of the gradient.
      lr: its first step size; a tenth from 3/8, 5/8 and 7/8 of the steps on each.
      smoothness: weight of the total variation.
      low, high: smallest and largest value of a pixel, normalized as the model sees it.
    """

    steps: int = 400
    lr: float = 0.1
    smoothness: float = 0.1
    low: float = -3.0
    high: float = 3.0


class Reconstruction(NamedTuple):
    """Images that were found, and how far their gradient is from the target."""

    images: Float[Array, "batch height width channels"]
    distance: Float[Array, ""]


def reconstruct(
    task: Task,
    params: Params,
    target: Params,
    labels: Int[Array, " batch"],
    image_shape: tuple[int, int, int],
    key: PRNGKey,
    attack: Attack,
    seen: Callable[[Params], Params] = lambda gradient: gradient,
) -> Reconstruction:
    """Images whose gradient points where the target does: min 1 - cos + s TV(x), boxed.

    Labels are taken as known, as in the paper. Start again with other keys and keep the
    least distance.

    Args:
      task: model and loss; without dropout.
      params: where the gradient was taken.
      target: the gradient; of several local steps, the start less the end.
      labels: of the images that are sought, as many as there were.
      image_shape: height, width, channels.
      key: draws the images to begin with.
      attack: see there.
      seen: the part of a gradient that the attacker sees.
    """
    target = seen(target)
    mask = jnp.ones(labels.shape, bool)

    def gradient(images: Array) -> Params:
        batch = Batch(images, labels, mask)
        of_params = jax.grad(lambda p: task.loss_of(task.apply(p, images), batch))
        return seen(of_params(params))

    def objective(images: Array) -> Array:
        smooth = attack.smoothness * total_variation(images)
        return gradient_distance(gradient(images), target) + smooth

    drops = {int(attack.steps * part): 0.1 for part in (3 / 8, 5 / 8, 7 / 8)}
    optimizer = optax.adam(optax.piecewise_constant_schedule(attack.lr, drops))

    def step(_: Array, carried: tuple[Array, optax.OptState]) -> tuple:
        images, state = carried
        slope = jnp.sign(jax.grad(objective)(images))
        updates, state = optimizer.update(slope, state)
        images = jnp.clip(images + updates, attack.low, attack.high)
        return images, state

    start = jax.random.normal(key, (len(labels), *image_shape))
    images, _ = jax.lax.fori_loop(0, attack.steps, step, (start, optimizer.init(start)))
    return Reconstruction(images, gradient_distance(gradient(images), target))
