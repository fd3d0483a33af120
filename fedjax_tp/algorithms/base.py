"""The contract of a federated algorithm, and what algorithms share.

An algorithm is a record of pure functions. Server functions see what a real server
would: its own state, and messages. What a client keeps between rounds (`kept`) is
handed to the client and taken back by the simulation, so the server never sees it and
no byte is counted for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_tp import tree
from fedjax_tp.models.task import Task
from fedjax_tp.types import (
    Array,
    Batch,
    Float,
    InputError,
    Int,
    Params,
    PRNGKey,
    Progress,
    Tree,
)

ServerState = Any
Carry = Any


class Message(NamedTuple):
    """The downlink.

    Attributes:
      shared: one copy for all, no client axis.
      personal: sent to each client alone; stacked over the cohort, or one client's.
    """

    shared: Tree
    personal: Tree


class Update(NamedTuple):
    """The uplink, and what stays behind.

    Attributes:
      mean: to be averaged with weight n_k.
      personal: sent back by each client for itself.
      kept: stays on the client, and comes to it again next time.
      metrics: scalars of the round, by name; `loss` is the mean training loss.
    """

    mean: Tree
    personal: Tree
    kept: Tree
    metrics: dict[str, Float[Array, "*cohort"]]


class Algorithm(NamedTuple):
    """A federated algorithm. Client functions treat one client and are vmapped.

    Attributes:
      name: its name in the registry.
      init: `(key) -> ServerState`.
      init_kept: `(ServerState) -> kept` of a client that never took part.
      broadcast: `(ServerState, ids) -> Message`, `personal` stacked over ids.
      client_start: `(message, kept, key) -> Carry`, when local training begins.
      client_step: `(carry, batch, progress) -> Carry`, one minibatch.
      client_finish: `(message, carry) -> Update`.
      server_update: `(ServerState, ids, Update, weights) -> ServerState`; `mean` is
        the weighted mean, `personal` is stacked, `kept` is None. Weights sum to 1. A
        client that is padding or left out has an id past the end and weight 0.
      client_params: `(message, kept) -> Params`, what a client uses for inference.
      hypernetwork_parameters: numbers in the server's hypernetwork, embeddings
        included; 0 without one.
    """

    name: str
    init: Callable[[PRNGKey], ServerState]
    init_kept: Callable[[ServerState], Tree]
    broadcast: Callable[[ServerState, Int[Array, " cohort"]], Message]
    client_start: Callable[[Message, Tree, PRNGKey], Carry]
    client_step: Callable[[Carry, Batch, Progress], Carry]
    client_finish: Callable[[Message, Carry], Update]
    server_update: Callable[
        [ServerState, Int[Array, " cohort"], Update, Float[Array, " cohort"]],
        ServerState,
    ]
    client_params: Callable[[Message, Tree], Params]
    hypernetwork_parameters: int = 0


@dataclass(frozen=True)
class ClientOptimizer:
    """SGD on the client, started afresh every round.

    Attributes:
      lr: step size.
      momentum: heavy-ball momentum.
      weight_decay: L2 coefficient, added to the gradient before momentum.
    """

    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 0.0


def sgd(
    lr: float, momentum: float, weight_decay: float
) -> optax.GradientTransformation:
    """SGD with L2 added to the gradient before momentum.

    Raises:
      InputError: lr <= 0, momentum outside [0, 1), weight decay < 0, or not finite.
    """
    if not 0 < lr < float("inf"):
        raise InputError(f"learning rate is {lr}; allowed are finite numbers above 0")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum is {momentum}; allowed is 0 <= momentum < 1")
    if not 0 <= weight_decay < float("inf"):
        raise InputError(f"weight decay is {weight_decay}; allowed is 0 or more")
    decay = [optax.add_decayed_weights(weight_decay)] if weight_decay else []
    return optax.chain(*decay, optax.sgd(lr, momentum or None))


class LocalCarry(NamedTuple):
    """A client in the middle of its local training."""

    params: Params
    opt_state: optax.OptState
    key: PRNGKey
    loss_sum: Float[Array, ""]
    examples: Float[Array, ""]


def start_training(
    params: Params, optimizer: optax.GradientTransformation, key: PRNGKey
) -> LocalCarry:
    """Local training of `params` with a fresh optimizer."""
    zero = jnp.zeros(())
    return LocalCarry(params, optimizer.init(params), key, zero, zero)


def training_step(
    task: Task, optimizer: optax.GradientTransformation
) -> Callable[[LocalCarry, Batch, Progress], LocalCarry]:
    """One optimizer step on the mean loss of a minibatch, all parameters moving."""

    def step(carry: LocalCarry, batch: Batch, progress: Progress) -> LocalCarry:
        key = jax.random.fold_in(carry.key, progress.step)
        loss, grads = jax.value_and_grad(task.loss)(carry.params, batch, key)
        updates, opt_state = optimizer.update(grads, carry.opt_state, carry.params)
        examples = jnp.sum(batch.mask)
        return carry._replace(
            params=optax.apply_updates(carry.params, updates),
            opt_state=opt_state,
            loss_sum=carry.loss_sum + loss * examples,
            examples=carry.examples + examples,
        )

    return step


def training_metrics(carry: LocalCarry) -> dict[str, Float[Array, ""]]:
    """Mean loss over the examples seen in this round, each time it was seen."""
    return {"loss": carry.loss_sum / jnp.maximum(carry.examples, 1)}


class PartialState(NamedTuple):
    """The server's state when clients keep a part of the model.

    Attributes:
      shared: the averaged parameters.
      initial_kept: what a client starts from that never took part.
    """

    shared: Params
    initial_kept: Params


def partial_personalization(
    name: str,
    task: Task,
    optimizer: ClientOptimizer,
    is_kept: tree.PathPredicate,
) -> Algorithm:
    """Clients train everything, keep the leaves `is_kept` names, average the rest.

    FedAvg keeps nothing, local training everything; vanilla FedTP, FedPer and FedBN
    lie between. All clients start from the same initial parameters.
    """
    sgd_step = sgd(optimizer.lr, optimizer.momentum, optimizer.weight_decay)

    def init(key: PRNGKey) -> PartialState:
        kept, shared = tree.split(task.init(key), is_kept)
        return PartialState(shared, kept)

    def broadcast(state: PartialState, ids: Array) -> Message:
        return Message(state.shared, None)

    def client_start(message: Message, kept: Tree, key: PRNGKey) -> LocalCarry:
        return start_training(tree.merge(message.shared, kept), sgd_step, key)

    def client_finish(message: Message, carry: LocalCarry) -> Update:
        kept, shared = tree.split(carry.params, is_kept)
        return Update(shared, None, kept, training_metrics(carry))

    def server_update(
        state: PartialState, ids: Array, update: Update, weights: Array
    ) -> PartialState:
        return state._replace(shared=update.mean)

    return Algorithm(
        name=name,
        init=init,
        init_kept=lambda state: state.initial_kept,
        broadcast=broadcast,
        client_start=client_start,
        client_step=training_step(task, sgd_step),
        client_finish=client_finish,
        server_update=server_update,
        client_params=lambda message, kept: tree.merge(message.shared, kept),
    )


def client_update(
    algorithm: Algorithm, message: Message, kept: Tree, batches: Batch, key: PRNGKey
) -> Update:
    """The whole local training of one client: start, every step, finish.

    What a client on a real network runs, and the reference for the simulation.

    Args:
      algorithm: the algorithm.
      message: this client's downlink.
      kept: what this client kept.
      batches: leaves stacked as `[steps, batch, ...]`; all in one epoch.
      key: the client's key of this round.
    """
    num_steps = jnp.asarray(batches.y.shape[0])

    def step(carry, indexed):
        index, batch = indexed
        progress = Progress(index, num_steps, jnp.zeros((), int))
        return algorithm.client_step(carry, batch, progress), None

    carry = algorithm.client_start(message, kept, key)
    carry, _ = jax.lax.scan(step, carry, (jnp.arange(batches.y.shape[0]), batches))
    return algorithm.client_finish(message, carry)
