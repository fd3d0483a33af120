"""FedRep: head and representation trained in turns (Collins et al. 2021, ICML).

Algorithm 1. The paper gives the head several epochs and the representation one; here
the head has a share of the round's steps, so that every method does the same work.
"""

from typing import cast

import jax
import jax.numpy as jnp
import optax

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    LocalCarry,
    check_has_head,
    client_sgd,
    is_head,
    partial_personalization,
    start_training,
    training_step,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Batch, Params, PRNGKey, Progress, Tree


def fedrep(task: Task, optimizer: ClientOptimizer, *, head_share: float) -> Algorithm:
    """The head is personal and is trained first, the representation frozen; then the
    representation, the head frozen. Each has momentum of its own.

    Args:
      task: model and loss.
      optimizer: of both phases.
      head_share: share of the steps of a round that train the head, rounded up; below
        1, one step at least is left for the representation.

    Raises:
      InputError: the model has no layer `head`.
    """
    check_has_head(task, "fedrep")
    sgd_step = client_sgd(optimizer)
    in_turns = optax.partition({"head": sgd_step, "body": sgd_step}, _labels)
    move_all = training_step(task, in_turns)

    def client_start(message: Tree, kept: Tree, key: PRNGKey) -> LocalCarry:
        return start_training(tree.merge(message.shared, kept), in_turns, key)

    def client_step(carry: LocalCarry, batch: Batch, progress: Progress) -> LocalCarry:
        head_steps = jnp.ceil(head_share * progress.num_steps)
        if head_share < 1:
            head_steps = jnp.minimum(head_steps, progress.num_steps - 1)
        is_head_phase = progress.step < head_steps
        moved = move_all(carry, batch, progress)
        old, new = (
            dict(cast(optax.PartitionState, c.opt_state).inner_states)
            for c in (carry, moved)
        )
        states = {
            part: tree.choose(is_head_phase == (part == "head"), new[part], old[part])
            for part in new
        }
        (old_head, old_body), (head, body) = (
            tree.split(c.params, is_head) for c in (carry, moved)
        )
        return moved._replace(
            params=tree.merge(
                tree.choose(is_head_phase, head, old_head),
                tree.choose(is_head_phase, old_body, body),
            ),
            opt_state=optax.PartitionState(states),
        )

    per = partial_personalization("fedrep", task, optimizer, is_head)
    return per._replace(client_start=client_start, client_step=client_step)


def _labels(params: Params) -> Tree:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "head" if is_head(tree.path_name(path)) else "body", params
    )
