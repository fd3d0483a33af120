"""FedALA: adaptive local aggregation (Zhang et al. 2023, AAAI), algorithm 1.

The weights are learned on the first steps of a round, where the paper has passes of
their own over a part of the data, and of the head alone (its p = 1).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    LocalCarry,
    Message,
    PartialState,
    Update,
    check_has_head,
    client_sgd,
    descent,
    is_head,
    is_nothing,
    partial_personalization,
    start_training,
    take_step,
    training_metrics,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Batch, Params, PRNGKey, Progress


class AlaKept(NamedTuple):
    """A client's head after its last round, and the weights W of the global one."""

    head: Params
    weights: Params


class AlaCarry(NamedTuple):
    """Training, whose reference is the global head; the old head, and W so far."""

    local: LocalCarry
    kept: AlaKept


def fedala(
    task: Task, optimizer: ClientOptimizer, *, lr: float, share: float
) -> Algorithm:
    """Clients start from head + (global head - head) * W, element by element, learn W,
    then train all parameters; all are averaged. With W at 1 this is FedAvg.

    Args:
      task: model and loss.
      optimizer: local training.
      lr: step size of W, which is cut to [0, 1].
      share: share of the steps of a round that learn W, rounded up; one step at least
        is left for the model. 0 is FedAvg.

    Raises:
      InputError: the model has no layer `head`.
    """
    check_has_head(task, "fedala")
    sgd_step = client_sgd(optimizer)

    def init(key: PRNGKey) -> PartialState:
        params = task.init(key)
        head, _ = tree.split(params, is_head)
        # In buffers of their own: a state that is donated holds none twice.
        kept = AlaKept(jax.tree.map(jnp.copy, head), jax.tree.map(jnp.ones_like, head))
        return PartialState(params, kept)

    def client_params(message: Message, kept: AlaKept) -> Params:
        head, body = tree.split(message.shared, is_head)
        return tree.merge(_between(kept.head, head, kept.weights), body)

    def client_start(message: Message, kept: AlaKept, key: PRNGKey) -> AlaCarry:
        head, _ = tree.split(message.shared, is_head)
        params = client_params(message, kept)
        return AlaCarry(start_training(params, sgd_step, key, head), kept)

    def client_step(carry: AlaCarry, batch: Batch, progress: Progress) -> AlaCarry:
        local, (old, weights) = carry
        steps = jnp.minimum(
            jnp.ceil(share * progress.num_steps), progress.num_steps - 1
        )
        learns_weights = progress.step < steps
        found = descent(task, local, batch, progress)
        gradient, _ = tree.split(found.gradient, is_head)
        stepped = jax.tree.map(
            lambda w, g, ours, theirs: jnp.clip(w - lr * g * (theirs - ours), 0, 1),
            weights,
            gradient,
            old,
            local.reference,
        )
        _, body = tree.split(local.params, is_head)
        started = tree.merge(_between(old, local.reference, stepped), body)
        trained = take_step(sgd_step, local, batch, found)
        return AlaCarry(
            trained._replace(
                params=tree.choose(learns_weights, started, trained.params),
                opt_state=tree.choose(
                    learns_weights, local.opt_state, trained.opt_state
                ),
            ),
            AlaKept(old, tree.choose(learns_weights, stepped, weights)),
        )

    def client_finish(message: Message, carry: AlaCarry) -> Update:
        params = carry.local.params
        head, _ = tree.split(params, is_head)
        kept = AlaKept(head, carry.kept.weights)
        return Update(params, None, kept, training_metrics(carry.local))

    average = partial_personalization("fedala", task, optimizer, is_nothing)
    return average._replace(
        init=init,
        client_start=client_start,
        client_step=client_step,
        client_finish=client_finish,
        client_params=client_params,
    )


def _between(ours: Params, theirs: Params, weights: Params) -> Params:
    return jax.tree.map(lambda a, b, w: a + (b - a) * w, ours, theirs, weights)
