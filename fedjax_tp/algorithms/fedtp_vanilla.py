"""Vanilla FedTP: every client keeps its own attention projections.

Li et al. 2023 (arXiv 2211.01572), "vanilla personalization"; `Personalized-T` in the
authors' code.
"""

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    check_names_some,
    partial_personalization,
)
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.task import Task


def fedtp_vanilla(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """Query, key and value projections stay on the client, the rest is averaged.

    Raises:
      InputError: the model has none.
    """
    check_names_some(
        task,
        is_attention_projection,
        "fedtp_vanilla needs a model with attention projections, this one has none; "
        "allowed is a transformer (--model vit or char_transformer)",
    )
    return partial_personalization(
        "fedtp_vanilla", task, optimizer, is_attention_projection
    )
