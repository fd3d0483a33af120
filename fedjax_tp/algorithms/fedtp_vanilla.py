"""Vanilla FedTP: every client keeps its own attention projections.

Li et al. 2023 (arXiv 2211.01572), "vanilla personalization"; `Personalized-T` in the
authors' code.
"""

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    check_has_attention,
    partial_personalization,
)
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.task import Task


def fedtp_vanilla(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """Query, key and value projections stay on the client, the rest is averaged.

    Raises:
      InputError: the model has none.
    """
    check_has_attention(task, "fedtp_vanilla")
    return partial_personalization(
        "fedtp_vanilla", task, optimizer, is_attention_projection
    )
