"""LG-FedAvg: personal representations, a shared last layer.

Liang et al. 2020 (arXiv 2001.01523), algorithm 1: the mirror of FedPer.
"""

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    check_has_head,
    is_head,
    partial_personalization,
)
from fedjax_tp.models.task import Task


def lg_fedavg(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """Everything but the layer `head` stays on the client.

    Raises:
      InputError: the model has no layer of that name.
    """
    check_has_head(task, "lg_fedavg")
    return partial_personalization(
        "lg_fedavg", task, optimizer, lambda path: not is_head(path)
    )
