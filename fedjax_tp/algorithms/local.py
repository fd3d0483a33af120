"""Local training: every client alone, the floor that personalization must beat."""

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    partial_personalization,
)
from fedjax_tp.models.task import Task


def local(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """Clients keep all parameters; nothing is sent, nothing is averaged.

    A client trains in the rounds it is sampled for, as with every other algorithm, so
    that all of them do the same work. FedTP's code instead trains all clients in
    every round.
    """
    return partial_personalization("local", task, optimizer, lambda path: True)
