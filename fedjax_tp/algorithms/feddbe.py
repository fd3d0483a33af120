"""FedDBE: domain bias out of the representation (Zhang et al. 2023, NeurIPS).

Its personal representation bias memory, and its mean regularization.

The consensus to which mean representations are drawn is the last cohort's mean, where
the paper's is that of all clients after their first round.
"""

from typing import Any, NamedTuple

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
)
from fedjax_tp.models.task import Task, apply_head, masked_mean
from fedjax_tp.types import Array, Batch, Bool, Float, Params, PRNGKey, Progress, Tree


class DbeShared(NamedTuple):
    """The model, the mean representation of the last cohort, and is there one yet?"""

    params: Params
    consensus: Float[Array, " dim"]
    is_known: Float[Array, ""]


class DbeModel(NamedTuple):
    """A client's model: the shared one, and what it adds to every representation."""

    params: Params
    bias: Float[Array, " dim"]


class DbeCarry(NamedTuple):
    """Training, whose reference is (consensus, is it known?), and the sum of means."""

    local: LocalCarry
    means: Float[Array, " dim"]


def feddbe(task: Task, optimizer: ClientOptimizer, *, strength: float) -> Algorithm:
    """FedAvg of a model whose head takes features + bias, the bias kept by the client,
    with strength * mean((mean of features - consensus)^2) added to the loss.

    Args:
      task: model and loss.
      optimizer: local training, of the bias too.
      strength: kappa of the paper.

    Raises:
      InputError: the model has no layer `head`.
    """
    forward = forward_of(task, "feddbe")
    sgd_step = client_sgd(optimizer)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    dim = shapes["head"]["kernel"].shape[0]

    def init(key: PRNGKey) -> DbeShared:
        return DbeShared(task.init(key), jnp.zeros(dim), jnp.zeros(()))

    def client_start(message: Message, kept: Array, key: PRNGKey) -> DbeCarry:
        params, *reference = message.shared
        model = DbeModel(params, kept)
        local = start_training(model, sgd_step, key, tuple(reference))
        return DbeCarry(local, jnp.zeros(dim))

    def client_step(carry: DbeCarry, batch: Batch, progress: Progress) -> DbeCarry:
        local = carry.local
        consensus, is_known = local.reference

        def objective(
            model: DbeModel, batch: Batch, key: PRNGKey
        ) -> tuple[Array, tuple[Tree, Array]]:
            found = forward(model.params, batch.x, key, batch.mask)
            mean = mean_features(found.features, batch.mask)
            logits = apply_head(model.params, found.features + model.bias)
            away = jnp.mean((mean - consensus) ** 2)
            loss = task.loss_of(logits, batch) + strength * is_known * away
            statistics = found.statistics
            if statistics is not None:
                statistics = DbeModel(statistics, None)  # type: ignore[arg-type]
            return loss, (statistics, mean)

        found = descent(task, local, batch, progress, objective=objective)
        local = take_step(sgd_step, local, batch, found)
        return DbeCarry(local, carry.means + found.extra * jnp.sum(batch.mask))

    def client_finish(message: Message, carry: DbeCarry) -> Update:
        params, bias = carry.local.params
        mean = carry.means / jnp.maximum(carry.local.examples, 1)
        shared = DbeShared(params, mean, jnp.ones(()))
        return Update(shared, None, bias, training_metrics(carry.local))

    def predict(model: DbeModel, x: Array) -> Array:
        features = forward(model.params, x, None, None).features
        return apply_head(model.params, features + model.bias)

    average = partial_personalization("feddbe", task, optimizer, is_nothing)
    return average._replace(
        init=init,
        init_kept=lambda state: jnp.zeros(dim),
        broadcast=lambda state, ids: Message(state, None),
        client_start=client_start,
        client_step=client_step,
        client_finish=client_finish,
        server_update=_adopt,
        client_params=lambda message, kept: DbeModel(message.shared.params, kept),
        predict=predict,
    )


def _adopt(state: DbeShared, ids: Array, update: Update, weights: Array) -> Any:
    return update.mean


def mean_features(
    features: Float[Array, "batch *positions dim"], mask: Bool[Array, " batch"]
) -> Float[Array, " dim"]:
    """Mean over the rows where `mask` holds, and over positions."""
    rows = features.reshape(len(features), -1, features.shape[-1]).mean(axis=1)
    return masked_mean(rows, mask)
