"""pFedMe: personal models as Moreau envelopes (Dinh et al. 2020, NeurIPS), algorithm 1.

FedTP's comparison leaves the server's beta out; here it is 1 unless told. The inner
problem starts from the personal model of the batch before.
"""

import jax
import optax

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    LocalCarry,
    Message,
    PartialState,
    Update,
    adopt_statistics,
    is_nothing,
    partial_personalization,
    proximal,
    sgd,
    start_training,
    training_metrics,
    training_step,
    two_models,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Array, Batch, PRNGKey, Progress, Tree


def pfedme(
    task: Task,
    optimizer: ClientOptimizer,
    *,
    strength: float,
    inner_steps: int,
    beta: float,
) -> Algorithm:
    """On each batch theta descends F(theta) + strength / 2 * |theta - w|^2, then
    w <- w - lr * strength * (w - theta). Clients keep and use theta, w is averaged.

    Args:
      task: model and loss.
      optimizer: step size of both, and L2 of theta; momentum is not used.
      strength: lambda of the paper.
      inner_steps: K, steps of theta on a batch.
      beta: w_{t+1} = (1 - beta) * w_t + beta * mean.
    """
    inner = sgd(optimizer.lr, 0.0, optimizer.weight_decay)
    # The reference is the client's w.
    inner_step = training_step(task, inner, proximal(strength))

    def client_start(message: Message, kept: Tree, key: PRNGKey) -> LocalCarry:
        return start_training(message.shared, inner, key, message.shared)

    def client_step(carry: LocalCarry, batch: Batch, progress: Progress) -> LocalCarry:
        carry = jax.lax.fori_loop(
            0, inner_steps, lambda _, c: inner_step(c, batch, progress), carry
        )
        w = optax.incremental_update(
            carry.params, carry.reference, optimizer.lr * strength
        )
        return carry._replace(reference=adopt_statistics(w, carry.params))

    def client_finish(message: Message, carry: LocalCarry) -> Update:
        return Update(carry.reference, None, carry.params, training_metrics(carry))

    def server_update(
        state: PartialState, ids: Array, update: Update, weights: Array
    ) -> PartialState:
        shared = optax.incremental_update(update.mean, state.shared, beta)
        return state._replace(shared=adopt_statistics(shared, update.mean))

    average = partial_personalization("pfedme", task, optimizer, is_nothing)
    return average._replace(
        init=lambda key: two_models(task, key),
        client_start=client_start,
        client_step=client_step,
        client_finish=client_finish,
        server_update=server_update,
        client_params=lambda message, kept: kept,
    )
