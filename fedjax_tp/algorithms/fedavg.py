"""FedAvg: one model, averaged (McMahan et al. 2017, algorithm 1); with fine-tuning."""

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    fine_tuning,
    is_nothing,
    partial_personalization,
)
from fedjax_tp.models.task import Task


def fedavg(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """The server adopts the n_k-weighted mean of the cohort's parameters."""
    return partial_personalization("fedavg", task, optimizer, is_nothing)


def fedavg_ft(task: Task, optimizer: ClientOptimizer, *, epochs: int) -> Algorithm:
    """FedAvg whose clients fine-tune the model on their own data before they use it.

    Args:
      task: model and loss.
      optimizer: of local training and of fine-tuning.
      epochs: of fine-tuning; 0 is FedAvg.
    """
    tune = fine_tuning(task, optimizer, epochs)
    return fedavg(task, optimizer)._replace(name="fedavg_ft", adapt=tune)
