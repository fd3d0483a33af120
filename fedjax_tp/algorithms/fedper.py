"""FedPer: a personal last layer (Arivazhagan et al. 2019, arXiv 1912.00818).

The paper keeps the last one to four blocks; here, as in FedTP's comparison, the last
linear layer.
"""

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    check_has_head,
    is_head,
    partial_personalization,
)
from fedjax_tp.models.task import Task


def fedper(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """The layer `head` stays on the client, the rest is averaged.

    Raises:
      InputError: the model has no layer of that name.
    """
    check_has_head(task, "fedper")
    return partial_personalization("fedper", task, optimizer, is_head)
