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
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.task import Forwarding, Task, is_statistic
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
      adapt: `(params, batches, key) -> adapted`, what a client does with its own
        training data before it is used; None for nothing. Leaves of `batches` are
        `[steps, batch, ...]`; a step whose mask holds nowhere changes nothing.
      predict: `(adapted, x) -> logits`; None for the task's `apply`.
      broadcast_for_use: `(ServerState, ids) -> Message` that models are used with where
        it is another than the one they are trained from; None for `broadcast`.
      reference: `message -> (mean, personal)`, what an update is close to, in its
        structure; None where it has that of the message.
      bits_up: bits that a client sends in a round; None for all numbers as they are.
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
    adapt: Callable[[Params, Batch, PRNGKey], Tree] | None = None
    predict: Callable[[Tree, Array], Array] | None = None
    broadcast_for_use: (
        Callable[[ServerState, Int[Array, " cohort"]], Message] | None
    ) = None
    reference: Callable[[Message], tuple[Tree, Tree]] | None = None
    bits_up: int | None = None


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


def client_sgd(optimizer: ClientOptimizer) -> optax.GradientTransformation:
    """`sgd` with a client's settings; raises as it does."""
    return sgd(optimizer.lr, optimizer.momentum, optimizer.weight_decay)


class LocalCarry(NamedTuple):
    """A client in the middle of its local training.

    `reference` is what its method holds on to during the round: the parameters it
    began with, say, or a control variate.
    """

    params: Params
    opt_state: optax.OptState
    key: PRNGKey
    loss_sum: Float[Array, ""]
    examples: Float[Array, ""]
    reference: Tree = None


Correction = Callable[[Params, Tree], Params]
"""`(params, reference) -> what is added to the gradient of the loss`."""


LocalStep = Callable[[LocalCarry, Batch, Progress], LocalCarry]
"""One step of local training."""


def start_training(
    params: Params,
    optimizer: optax.GradientTransformation,
    key: PRNGKey,
    reference: Tree = None,
) -> LocalCarry:
    """Local training of `params` with a fresh optimizer."""
    zero = jnp.zeros(())
    return LocalCarry(params, optimizer.init(params), key, zero, zero, reference)


class Descent(NamedTuple):
    """What a minibatch says.

    Attributes:
      loss: mean over its examples.
      gradient: of the loss.
      statistics: the model's running statistics after it, at their place in the
        parameters; None of a model without.
      extra: what else the objective found on its way.
    """

    loss: Float[Array, ""]
    gradient: Params
    statistics: Tree = None
    extra: Any = None


Objective = Callable[[Params, Batch, PRNGKey], tuple[Array, tuple[Tree, Any]]]
"""`(params, batch, key) -> (loss, (statistics, extra))`; see `Descent`."""


def task_objective(task: Task) -> Objective:
    """The task's loss, with the model's running statistics if it has some."""

    def objective(
        params: Params, batch: Batch, key: PRNGKey
    ) -> tuple[Array, tuple[Tree, Any]]:
        if task.loss_and_statistics is None:
            return task.loss(params, batch, key), (None, None)
        loss, statistics = task.loss_and_statistics(params, batch, key)
        return loss, (statistics, None)

    return objective


def descent(
    task: Task,
    carry: LocalCarry,
    batch: Batch,
    progress: Progress,
    *,
    objective: Objective | None = None,
) -> Descent:
    """Loss, gradient and new statistics of a minibatch, dropout drawn for this step.

    Args:
      task: model and loss.
      carry: the client's training.
      batch: the minibatch.
      progress: which step it is.
      objective: what is descended; None for `task_objective`.
    """
    key = jax.random.fold_in(carry.key, progress.step)
    of_params = jax.value_and_grad(objective or task_objective(task), has_aux=True)
    (loss, (statistics, extra)), gradient = of_params(carry.params, batch, key)
    return Descent(loss, gradient, statistics, extra)


def take_step(
    optimizer: optax.GradientTransformation,
    carry: LocalCarry,
    batch: Batch,
    found: Descent,
) -> LocalCarry:
    """The carry after an optimizer step; running statistics are adopted as they are."""
    updates, opt_state = optimizer.update(found.gradient, carry.opt_state, carry.params)
    params = optax.apply_updates(carry.params, updates)
    if found.statistics is not None:
        params = tree.merge(found.statistics, params)
    examples = jnp.sum(batch.mask)
    return carry._replace(
        params=params,
        opt_state=opt_state,
        loss_sum=carry.loss_sum + found.loss * examples,
        examples=carry.examples + examples,
    )


def adopt_statistics(params: Params, other: Params) -> Params:
    """Parameters with the running statistics of others: those are no direction to go
    along, and a variance must not become negative."""
    statistics, _ = tree.split(other, is_statistic)
    _, weights = tree.split(params, is_statistic)
    return tree.merge(statistics, weights)


def training_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    correction: Correction | None = None,
) -> LocalStep:
    """One optimizer step on the mean loss of a minibatch, all parameters moving.

    Args:
      task: gives the loss.
      optimizer: of the client.
      correction: added to the gradient, given parameters and the carry's reference.
    """

    def step(carry: LocalCarry, batch: Batch, progress: Progress) -> LocalCarry:
        found = descent(task, carry, batch, progress)
        if correction is not None:
            added = correction(carry.params, carry.reference)
            gradient = jax.tree.map(jnp.add, found.gradient, added)
            found = found._replace(gradient=gradient)
        return take_step(optimizer, carry, batch, found)

    return step


def proximal(strength: float) -> Correction:
    """The gradient of strength / 2 * |params - reference|^2."""
    return lambda params, reference: jax.tree.map(
        lambda w, r: strength * (w - r), params, reference
    )


def is_nothing(path: str) -> bool:
    """Names no parameter."""
    return False


def is_head(path: str) -> bool:
    """Is the parameter at `path` one of the last layer, which models call `head`?"""
    return path.startswith("head/")


def check_names_some(task: Task, predicate: tree.PathPredicate, what: str) -> None:
    """Raises InputError if the model has no parameter that the predicate names."""
    named, _ = tree.split(jax.eval_shape(task.init, jax.random.key(0)), predicate)
    if not jax.tree.leaves(named):
        raise InputError(what)


def forward_of(task: Task, name: str) -> Forwarding:
    """The task's `forward`, for an algorithm that works on features.

    Raises:
      InputError: the model has no layer `head`, or the task no `forward`.
    """
    check_has_head(task, name)
    if task.forward is None:
        raise InputError(f"{name} needs a task that says what its features are")
    return task.forward


def fine_tuning(
    task: Task,
    optimizer: ClientOptimizer,
    epochs: int,
    correction: Correction | None = None,
) -> Callable[[Params, Batch, PRNGKey], Params]:
    """`Algorithm.adapt` as local training of all parameters.

    Args:
      task: model and loss.
      optimizer: starts afresh.
      epochs: passes over the client's examples, in the same order each.
      correction: see `training_step`; its reference is what tuning began with.
    """
    sgd_step = client_sgd(optimizer)
    step = training_step(task, sgd_step, correction)

    def adapt(params: Params, batches: Batch, key: PRNGKey) -> Params:
        # Batches that are padding come last.
        num_batches = jnp.sum(jnp.any(batches.mask, axis=1))
        num_steps = epochs * num_batches

        def one_step(index: Array, carry: LocalCarry) -> LocalCarry:
            epoch, place = jnp.divmod(index, jnp.maximum(num_batches, 1))
            batch = jax.tree.map(lambda leaf: leaf[place], batches)
            return step(carry, batch, Progress(index, num_steps, epoch))

        carry = start_training(params, sgd_step, key, params if correction else None)
        return jax.lax.fori_loop(0, num_steps, one_step, carry).params

    return adapt


def check_has_head(task: Task, name: str) -> None:
    """Raises InputError if the model has no layer `head`, which `name` needs."""
    check_names_some(task, is_head, f"{name} needs a model whose last layer is `head`")


def check_has_attention(
    task: Task, name: str, is_needed: tree.PathPredicate = is_attention_projection
) -> None:
    """Raises InputError if the model has no attention projections (or whatever else is
    needed), which `name` makes personal."""
    check_names_some(
        task,
        is_needed,
        f"{name} needs a model with attention projections, this one has none; allowed "
        "is a transformer (--model vit or char_transformer)",
    )


def training_metrics(carry: LocalCarry) -> dict[str, Float[Array, ""]]:
    """Mean loss over the examples seen in this round, each time it was seen."""
    return {"loss": carry.loss_sum / jnp.maximum(carry.examples, 1)}


class PartialState(NamedTuple):
    """The server's state when clients keep a part of the model.

    Attributes:
      shared: the averaged parameters.
      initial_kept: what a client starts from that never took part.
      opt_state: of the server's optimizer, if it has one.
    """

    shared: Params
    initial_kept: Params
    opt_state: optax.OptState = ()


def two_models(task: Task, key: PRNGKey) -> PartialState:
    """One model as the server's and as what each client keeps at first.

    In buffers of their own: a state that is donated must not hold one of them twice.
    """
    params = task.init(key)
    return PartialState(params, jax.tree.map(jnp.copy, params))


def partial_personalization(
    name: str,
    task: Task,
    optimizer: ClientOptimizer,
    is_kept: tree.PathPredicate,
    *,
    correction: Correction | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    local_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """Clients train everything, keep the leaves `is_kept` names, average the rest.

    FedAvg keeps nothing, local training everything; vanilla FedTP and FedPer lie
    between. All clients start from the same initial parameters.

    Args:
      name: of the algorithm.
      task: model and loss.
      optimizer: local training.
      is_kept: names by path what clients keep.
      correction: see `training_step`; its reference is what the client began with.
      server_optimizer: steps the shared parameters along (before - mean), the
        pseudo-gradient of Reddi et al. 2021; None adopts the mean.
      local_optimizer: of the clients; None for the SGD of `optimizer`.
    """
    sgd_step = local_optimizer or client_sgd(optimizer)

    def init(key: PRNGKey) -> PartialState:
        kept, shared = tree.split(task.init(key), is_kept)
        opt_state = server_optimizer.init(shared) if server_optimizer else ()
        return PartialState(shared, kept, opt_state)

    def broadcast(state: PartialState, ids: Array) -> Message:
        return Message(state.shared, None)

    def client_start(message: Message, kept: Tree, key: PRNGKey) -> LocalCarry:
        params = tree.merge(message.shared, kept)
        return start_training(params, sgd_step, key, params if correction else None)

    def client_finish(message: Message, carry: LocalCarry) -> Update:
        kept, shared = tree.split(carry.params, is_kept)
        return Update(shared, None, kept, training_metrics(carry))

    def server_update(
        state: PartialState, ids: Array, update: Update, weights: Array
    ) -> PartialState:
        if server_optimizer is None:
            return state._replace(shared=update.mean)
        gradient = jax.tree.map(jnp.subtract, state.shared, update.mean)
        updates, opt_state = server_optimizer.update(
            gradient, state.opt_state, state.shared
        )
        shared = optax.apply_updates(state.shared, updates)
        shared = adopt_statistics(shared, update.mean)
        return state._replace(shared=shared, opt_state=opt_state)

    return Algorithm(
        name=name,
        init=init,
        init_kept=lambda state: state.initial_kept,
        broadcast=broadcast,
        client_start=client_start,
        client_step=training_step(task, sgd_step, correction),
        client_finish=client_finish,
        server_update=server_update,
        client_params=lambda message, kept: tree.merge(message.shared, kept),
    )


def of_whole_models(
    name: str,
    task: Task,
    optimizer: ClientOptimizer,
    *,
    init: Callable[[PRNGKey], ServerState],
    models: Callable[[ServerState, Int[Array, " cohort"]], Params],
    server_update: Callable[..., ServerState],
) -> Algorithm:
    """Each client is sent a whole model of its own, trains it, and sends it back.

    Args:
      name: of the algorithm.
      task: model and loss.
      optimizer: of local training.
      init: the state of whoever averages.
      models: `(state, ids)`: the models of some clients, stacked.
      server_update: `Algorithm.server_update`; trained models are `update.personal`.
    """
    sgd_step = client_sgd(optimizer)

    def client_finish(message: Message, carry: LocalCarry) -> Update:
        return Update(None, carry.params, None, training_metrics(carry))

    return Algorithm(
        name=name,
        init=init,
        init_kept=lambda state: None,
        broadcast=lambda state, ids: Message(None, models(state, ids)),
        client_start=lambda message, kept, key: start_training(
            message.personal, sgd_step, key
        ),
        client_step=training_step(task, sgd_step),
        client_finish=client_finish,
        server_update=server_update,
        client_params=lambda message, kept: message.personal,
    )


def message_for_use(
    algorithm: Algorithm, state: ServerState, ids: Int[Array, " cohort"]
) -> Message:
    """What models are used with, for `client_params`."""
    return (algorithm.broadcast_for_use or algorithm.broadcast)(state, ids)


class ClientShapes(NamedTuple):
    """Shapes and types of what one client is sent, holds, and sends back.

    Attributes:
      message: its downlink, without a client axis.
      kept: what it keeps.
      carry: what it holds in training.
      update: its uplink.
      params: the model that it uses.
    """

    message: Message
    kept: Tree
    carry: Carry
    update: Update
    params: Params


def client_shapes(algorithm: Algorithm) -> ClientShapes:
    """Traces one client through a round; nothing is computed."""

    def of_client(key: PRNGKey) -> ClientShapes:
        state = algorithm.init(key)
        message = algorithm.broadcast(state, jnp.zeros(1, jnp.int32))
        own = jax.tree.map(lambda leaf: leaf[0], message.personal)
        message = message._replace(personal=own)
        kept = algorithm.init_kept(state)
        carry = algorithm.client_start(message, kept, key)
        return ClientShapes(
            message,
            kept,
            carry,
            algorithm.client_finish(message, carry),
            algorithm.client_params(message, kept),
        )

    return jax.eval_shape(of_client, jax.random.key(0))


def reference_of(algorithm: Algorithm) -> Callable[[Message], tuple[Tree, Tree]]:
    """`message -> (mean, personal)` that an update is close to.

    Raises:
      InputError: the algorithm does not say, and its update has another structure than
        the message.
    """
    if algorithm.reference is not None:
        return algorithm.reference
    shapes = client_shapes(algorithm)
    message, update = shapes.message, shapes.update
    shared = _part_like(update.mean, message.shared)
    personal = _part_like(update.personal, message.personal)
    if shared is None or personal is None:
        raise InputError(
            f"{algorithm.name} sends back another thing than it was sent, and does not "
            "say what that is close to; its updates cannot be compressed"
        )
    return lambda message: (shared(message.shared), personal(message.personal))


def _part_like(wanted: Tree, sent: Tree) -> Callable[[Tree], Tree] | None:
    """A function that gives of what was sent the part built as `wanted`, if any."""

    def shapes(part: Tree) -> Tree:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), part)

    if not jax.tree.leaves(wanted):
        return lambda part: wanted
    if shapes(wanted) == shapes(sent):
        return lambda part: part
    return None


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
