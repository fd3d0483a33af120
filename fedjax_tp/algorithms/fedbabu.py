"""FedBABU: the head is never trained together (Oh et al. 2022, ICLR).

Algorithm 1. The body is averaged under the head that all began with;
before it is used, each client fine-tunes the whole model on its own data.
"""

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    LocalCarry,
    check_has_head,
    fine_tuning,
    is_head,
    is_nothing,
    partial_personalization,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Batch, Progress


def fedbabu(task: Task, optimizer: ClientOptimizer, *, epochs: int) -> Algorithm:
    """FedAvg with a frozen head, then `epochs` of fine-tuning at each client.

    Args:
      task: model and loss.
      optimizer: of local training and of fine-tuning.
      epochs: of fine-tuning, with the head; 0 uses the averaged body as it is.

    Raises:
      InputError: the model has no layer `head`.
    """
    check_has_head(task, "fedbabu")
    average = partial_personalization("fedbabu", task, optimizer, is_nothing)

    def client_step(carry: LocalCarry, batch: Batch, progress: Progress) -> LocalCarry:
        moved = average.client_step(carry, batch, progress)
        head, _ = tree.split(carry.params, is_head)
        _, body = tree.split(moved.params, is_head)
        return moved._replace(params=tree.merge(head, body))

    return average._replace(
        client_step=client_step, adapt=fine_tuning(task, optimizer, epochs)
    )
