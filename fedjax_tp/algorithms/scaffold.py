"""SCAFFOLD: control variates against client drift (Karimireddy et al. 2020, ICML).

Algorithm 1, option II, with two deviations. A client's new control is the mean of its
gradients along the round: under plain SGD that is c_i - c + (x - y) / (K lr), and with
momentum it stays a gradient. Parameters are averaged with weights n_k, as in FedAvg;
controls without, as in the paper, so that c stays the mean of all clients' controls.
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
    Update,
    adopt_statistics,
    client_sgd,
    descent,
    start_training,
    take_step,
    training_metrics,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Array, Batch, Float, Params, PRNGKey, Progress, Tree


class ScaffoldState(NamedTuple):
    """Server's parameters x, and its control c: the mean of all clients' controls."""

    shared: Params
    control: Params


class ScaffoldMean(NamedTuple):
    """What is averaged with weights n_k: y, and the change of c_i and 1, both over the
    examples seen. The last two give the change's plain mean: the weights cancel."""

    params: Params
    change: Params
    one: Float[Array, ""]


class ScaffoldCarry(NamedTuple):
    """Training, whose reference is (c, c_i), and the sum of gradients so far."""

    local: LocalCarry
    gradients: Params
    steps: Float[Array, ""]


def scaffold(
    task: Task, num_clients: int, optimizer: ClientOptimizer, *, server_lr: float
) -> Algorithm:
    """Clients step along g - c_i + c, and keep c_i; both x and c are averaged.

    Args:
      task: model and loss.
      num_clients: of the population.
      optimizer: local training.
      server_lr: x moves by this share of the mean change.
    """
    sgd_step = client_sgd(optimizer)

    def init(key: PRNGKey) -> ScaffoldState:
        params = task.init(key)
        return ScaffoldState(params, jax.tree.map(jnp.zeros_like, params))

    def client_start(message: Message, kept: Tree, key: PRNGKey) -> ScaffoldCarry:
        params, control = message.shared
        local = start_training(params, sgd_step, key, (control, kept))
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ScaffoldCarry(local, zeros, jnp.zeros(()))

    def client_step(
        carry: ScaffoldCarry, batch: Batch, progress: Progress
    ) -> ScaffoldCarry:
        local = carry.local
        found = descent(task, local, batch, progress)
        corrected = jax.tree.map(
            lambda g, c, c_i: g - c_i + c, found.gradient, *local.reference
        )
        return ScaffoldCarry(
            take_step(sgd_step, local, batch, found._replace(gradient=corrected)),
            jax.tree.map(jnp.add, carry.gradients, found.gradient),
            carry.steps + 1,
        )

    def client_finish(message: Message, carry: ScaffoldCarry) -> Update:
        _, old = carry.local.reference
        control = jax.tree.map(
            lambda total: total / jnp.maximum(carry.steps, 1), carry.gradients
        )
        seen = jnp.maximum(carry.local.examples, 1)
        change = jax.tree.map(lambda c, c_i: (c - c_i) / seen, control, old)
        mean = ScaffoldMean(carry.local.params, change, 1 / seen)
        return Update(mean, None, control, training_metrics(carry.local))

    def server_update(
        state: ScaffoldState, ids: Array, update: Update, weights: Array
    ) -> ScaffoldState:
        mean: ScaffoldMean = update.mean
        share = jnp.sum(weights > 0) / num_clients / mean.one
        shared = optax.incremental_update(mean.params, state.shared, server_lr)
        return ScaffoldState(
            adopt_statistics(shared, mean.params),
            jax.tree.map(
                lambda c, change: c + share * change, state.control, mean.change
            ),
        )

    def reference(message: Message) -> tuple[ScaffoldMean, None]:
        params, control = message.shared
        zeros = jax.tree.map(jnp.zeros_like, control)
        return ScaffoldMean(params, zeros, jnp.zeros(())), None

    return Algorithm(
        name="scaffold",
        init=init,
        init_kept=lambda state: jax.tree.map(jnp.zeros_like, state.control),
        broadcast=lambda state, ids: Message(state, None),
        client_start=client_start,
        client_step=client_step,
        client_finish=client_finish,
        server_update=server_update,
        client_params=lambda message, kept: message.shared.shared,
        reference=reference,
    )
