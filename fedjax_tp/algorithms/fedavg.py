"""FedAvg: one model, averaged (McMahan et al. 2017, algorithm 1).

With fine-tuning before use: FTFA and RTFA of Cheng, Chadha and Duchi 2023 (AISTATS,
arXiv 2108.07313). With a part of the layers averaged: Adilova et al. 2024 (ICLR).
"""

import re

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    check_names_some,
    fine_tuning,
    is_nothing,
    partial_personalization,
    proximal,
)
from fedjax_tp.models.task import Task


def fedavg(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """The server adopts the n_k-weighted mean of the cohort's parameters."""
    return partial_personalization("fedavg", task, optimizer, is_nothing)


def fedavg_ft(task: Task, optimizer: ClientOptimizer, *, epochs: int) -> Algorithm:
    """FedAvg whose clients fine-tune the model on their own data before they use it
    (FTFA).

    Args:
      task: model and loss.
      optimizer: of local training and of fine-tuning.
      epochs: of fine-tuning; 0 is FedAvg.
    """
    tune = fine_tuning(task, optimizer, epochs)
    return fedavg(task, optimizer)._replace(name="fedavg_ft", adapt=tune)


def rtfa(
    task: Task, optimizer: ClientOptimizer, *, epochs: int, strength: float
) -> Algorithm:
    """FedAvg whose clients, before use, minimize their loss plus strength times the
    squared distance to the averaged model (RTFA).

    Args:
      task: model and loss.
      optimizer: of local training and of fine-tuning.
      epochs: of fine-tuning; 0 is FedAvg.
      strength: lambda; 0 is `fedavg_ft`.
    """
    tune = fine_tuning(task, optimizer, epochs, proximal(2 * strength))
    return fedavg(task, optimizer)._replace(name="rtfa", adapt=tune)


def partial_averaging(
    task: Task, optimizer: ClientOptimizer, *, layers: str
) -> Algorithm:
    """Only chosen layers are averaged, the others stay on the clients.

    Args:
      task: model and loss.
      optimizer: of local training.
      layers: a regular expression; parameters are averaged in whose path it is found.

    Raises:
      InputError: it names no parameter of the model.
    """
    pattern = re.compile(layers)

    def is_averaged(path: str) -> bool:
        return pattern.search(path) is not None

    check_names_some(
        task,
        is_averaged,
        f"partial layers is {layers!r}, which names no parameter of this model",
    )
    return partial_personalization(
        "partial", task, optimizer, lambda path: not is_averaged(path)
    )
