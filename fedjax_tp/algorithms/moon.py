"""MOON: model-contrastive learning (Li et al. 2021, CVPR), algorithm 1, equation 3.

The representation is what the head takes; the paper puts a projection of two layers
before it. Of a text, that of the last position.
"""

import jax
import jax.numpy as jnp

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    LocalCarry,
    Message,
    Update,
    client_sgd,
    descent,
    forward_of,
    is_nothing,
    partial_personalization,
    start_training,
    take_step,
    training_metrics,
    two_models,
)
from fedjax_tp.models.task import Task, masked_mean
from fedjax_tp.types import Array, Batch, Float, Params, PRNGKey, Progress, Tree


def moon(
    task: Task, optimizer: ClientOptimizer, *, mu: float, temperature: float
) -> Algorithm:
    """FedAvg whose clients are drawn to the server's representation of an example, and
    away from that of the model they ended their last round with, which they keep.

    Args:
      task: model and loss.
      optimizer: local training.
      mu: weight of the contrastive loss; 0 is FedAvg.
      temperature: of the contrastive loss.

    Raises:
      InputError: the model has no layer `head`.
    """
    forward = forward_of(task, "moon")
    sgd_step = client_sgd(optimizer)

    def client_start(message: Message, kept: Tree, key: PRNGKey) -> LocalCarry:
        references = (message.shared, kept)
        return start_training(message.shared, sgd_step, key, references)

    def client_step(carry: LocalCarry, batch: Batch, progress: Progress) -> LocalCarry:
        globally, before = (
            forward(params, batch.x, None, None).features for params in carry.reference
        )

        def objective(
            params: Params, batch: Batch, key: PRNGKey
        ) -> tuple[Array, tuple[Tree, None]]:
            found = forward(params, batch.x, key, batch.mask)
            losses = contrastive(found.features, globally, before, temperature)
            contrast = masked_mean(losses, batch.mask)
            loss = task.loss_of(found.logits, batch) + mu * contrast
            return loss, (found.statistics, None)

        found = descent(task, carry, batch, progress, objective=objective)
        return take_step(sgd_step, carry, batch, found)

    def client_finish(message: Message, carry: LocalCarry) -> Update:
        return Update(carry.params, None, carry.params, training_metrics(carry))

    average = partial_personalization("moon", task, optimizer, is_nothing)
    return average._replace(
        init=lambda key: two_models(task, key),
        client_start=client_start,
        client_step=client_step,
        client_finish=client_finish,
    )


def contrastive(
    features: Float[Array, "batch *positions dim"],
    positive: Float[Array, "batch *positions dim"],
    negative: Float[Array, "batch *positions dim"],
    temperature: float,
) -> Float[Array, " batch"]:
    """-log(e^(s+/t) / (e^(s+/t) + e^(s-/t))), s being cosine similarities."""

    def similarity(other: Array) -> Array:
        a, b = (
            z[:, -1] if z.ndim == 3 else z
            for z in (features, jax.lax.stop_gradient(other))
        )
        squares = jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1)
        return jnp.sum(a * b, axis=-1) * jax.lax.rsqrt(squares + 1e-12)

    difference = (similarity(negative) - similarity(positive)) / temperature
    return jax.nn.softplus(difference)
