"""FedRoD: a generic and a personal head on one body (Chen and Chao 2022, ICLR).

Section 4 with the linear personal head. A client's class frequencies are of the
examples that it has trained on so far, this batch included: after its first epoch, of
all of them. The personal head starts at zero, where the paper draws it at random: so a
client that never took part uses the generic model.
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
    client_sgd,
    descent,
    forward_of,
    is_nothing,
    partial_personalization,
    take_step,
)
from fedjax_tp.models.task import Forward, Task, apply_head, next_characters
from fedjax_tp.types import Array, Batch, Float, Params, PRNGKey, Progress, Tree


class RodKept(NamedTuple):
    """What a client keeps: what the algorithm below has it keep, its head, and how many
    of each class it has seen."""

    below: Tree
    head: Params
    counts: Float[Array, " classes"]


class RodCarry(NamedTuple):
    """Training of the generic model; the personal head and its optimizer; counts."""

    generic: LocalCarry
    head: Params
    opt_state: optax.OptState
    counts: Float[Array, " classes"]


class RodModel(NamedTuple):
    """What a client uses: the generic model and its own head."""

    generic: Params
    head: Params


def balanced(
    logits: Float[Array, "*batch classes"], counts: Float[Array, " classes"]
) -> Float[Array, "*batch classes"]:
    """Logits plus log class frequencies: the balanced softmax of Ren et al. 2020.

    Counts will do: their scale cancels. A class of which there is none gets a very
    small one, not log 0: its gradient is zero while it is no target, and never NaN.
    """
    return logits + jnp.log(jnp.maximum(counts, 1e-12))


def fedrod(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """The generic model learns under the balanced softmax and is averaged; the personal
    head learns what its logits must add to the generic ones, on fixed features.

    Args:
      task: model and loss.
      optimizer: of both; the personal head has momentum of its own.

    Raises:
      InputError: the model has no layer `head`.
    """
    average = partial_personalization("fedrod", task, optimizer, is_nothing)
    return with_personal_head(average, task, optimizer)


def with_personal_head(
    algorithm: Algorithm, task: Task, optimizer: ClientOptimizer
) -> Algorithm:
    """FedRoD's two heads on an algorithm.

    Args:
      algorithm: local training is SGD on the loss, its carry a `LocalCarry`.
      task, optimizer: as the algorithm's.

    Raises:
      InputError: the model has no layer `head`.
    """
    forward = forward_of(task, algorithm.name)
    sgd_step = client_sgd(optimizer)
    shapes = jax.eval_shape(task.init, jax.random.key(0))["head"]
    num_classes = shapes["kernel"].shape[-1]

    def init_kept(state: Tree) -> RodKept:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return RodKept(algorithm.init_kept(state), zeros, jnp.zeros(num_classes))

    def client_start(message: Message, kept: RodKept, key: PRNGKey) -> RodCarry:
        generic = algorithm.client_start(message, kept.below, key)
        return RodCarry(generic, kept.head, sgd_step.init(kept.head), kept.counts)

    def client_step(carry: RodCarry, batch: Batch, progress: Progress) -> RodCarry:
        generic = carry.generic
        labels = next_characters(batch) if task.is_sequence else batch.y[:, None]
        seen = jax.nn.one_hot(labels, num_classes) * batch.mask[:, None, None]
        counts = carry.counts + seen.sum(axis=(0, 1))

        def generic_loss(
            params: Params, batch: Batch, key: PRNGKey
        ) -> tuple[Array, tuple[Tree, Forward]]:
            found = forward(params, batch.x, key, batch.mask)
            loss = task.loss_of(balanced(found.logits, counts), batch)
            return loss, (found.statistics, found)

        found = descent(task, generic, batch, progress, objective=generic_loss)

        def personal_loss(head: Params) -> Array:
            return task.loss_of(_two_heads(found.extra, head), batch)

        updates, opt_state = sgd_step.update(
            jax.grad(personal_loss)(carry.head), carry.opt_state, carry.head
        )
        return RodCarry(
            take_step(sgd_step, generic, batch, found),
            optax.apply_updates(carry.head, updates),
            opt_state,
            counts,
        )

    def client_finish(message: Message, carry: RodCarry) -> Update:
        update = algorithm.client_finish(message, carry.generic)
        kept = RodKept(update.kept, carry.head, carry.counts)
        return update._replace(kept=kept)

    def client_params(message: Message, kept: RodKept) -> RodModel:
        return RodModel(algorithm.client_params(message, kept.below), kept.head)

    def predict(model: RodModel, x: Array) -> Array:
        return _two_heads(forward(model.generic, x, None, None), model.head)

    return algorithm._replace(
        init_kept=init_kept,
        client_start=client_start,
        client_step=client_step,
        client_finish=client_finish,
        client_params=client_params,
        predict=predict,
    )


def _two_heads(found: Forward, head: Params) -> Array:
    return found.logits + apply_head({"head": head}, found.features)
