"""APFL: a mixture of the global and a personal model (Deng et al. 2020, 2003.13461).

Algorithm 1 and equation 10. Both models step on every batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    LocalCarry,
    Message,
    PartialState,
    Update,
    adopt_statistics,
    client_sgd,
    descent,
    is_nothing,
    partial_personalization,
    start_training,
    take_step,
    training_metrics,
    training_step,
    two_models,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Array, Batch, Float, Params, PRNGKey, Progress


class ApflKept(NamedTuple):
    """The personal model v, and its share alpha of the mixture."""

    params: Params
    alpha: Float[Array, ""]


class ApflCarry(NamedTuple):
    """Training of the global and of the personal model, and the share."""

    shared: LocalCarry
    personal: LocalCarry
    alpha: Float[Array, ""]


def apfl(
    task: Task, optimizer: ClientOptimizer, *, alpha: float, adaptive: bool
) -> Algorithm:
    """FedAvg, and v that descends the loss of alpha * v + (1 - alpha) * w, the model
    that is used. Alpha 0 is FedAvg (running statistics apart), alpha 1 local training.

    Args:
      task: model and loss.
      optimizer: of both models.
      alpha: share of v at first.
      adaptive: each client steps its alpha once a round along
        <v - w, gradient of the mixture>, and cuts it to [0, 1].
    """
    sgd_step = client_sgd(optimizer)
    shared_step = training_step(task, sgd_step)

    def init(key: PRNGKey) -> PartialState:
        state = two_models(task, key)
        kept = ApflKept(state.initial_kept, jnp.asarray(alpha, jnp.float32))
        return state._replace(initial_kept=kept)

    def client_start(message: Message, kept: ApflKept, key: PRNGKey) -> ApflCarry:
        return ApflCarry(
            start_training(message.shared, sgd_step, key),
            start_training(kept.params, sgd_step, key),
            kept.alpha,
        )

    def client_step(carry: ApflCarry, batch: Batch, progress: Progress) -> ApflCarry:
        w, v, share = carry.shared.params, carry.personal.params, carry.alpha
        mixed = carry.personal._replace(params=_mix(v, w, share))
        found = descent(task, mixed, batch, progress)
        if adaptive:
            slope = optax.tree.vdot(jax.tree.map(jnp.subtract, v, w), found.gradient)
            stepped = jnp.clip(share - optimizer.lr * slope, 0, 1)
            share = jnp.where(progress.step == 0, stepped, share)
        of_v = jax.tree.map(lambda g: share * g, found.gradient)
        return ApflCarry(
            shared_step(carry.shared, batch, progress),
            take_step(sgd_step, carry.personal, batch, found._replace(gradient=of_v)),
            share,
        )

    def client_finish(message: Message, carry: ApflCarry) -> Update:
        kept = ApflKept(carry.personal.params, carry.alpha)
        metrics = training_metrics(carry.personal)
        return Update(carry.shared.params, None, kept, metrics)

    average = partial_personalization("apfl", task, optimizer, is_nothing)
    return average._replace(
        init=init,
        client_start=client_start,
        client_step=client_step,
        client_finish=client_finish,
        client_params=lambda message, kept: _mix(
            kept.params, message.shared, kept.alpha
        ),
    )


def _mix(v: Params, w: Params, alpha: Float[Array, ""]) -> Params:
    mixed = jax.tree.map(lambda a, b: alpha * a + (1 - alpha) * b, v, w)
    # Those of v were taken when the mixture saw its batches.
    return adopt_statistics(mixed, v)
