"""FedAvg: one model, averaged (McMahan et al. 2017, algorithm 1)."""

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    partial_personalization,
)
from fedjax_tp.models.task import Task


def fedavg(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """The server adopts the n_k-weighted mean of the cohort's parameters."""
    return partial_personalization("fedavg", task, optimizer, lambda path: False)
