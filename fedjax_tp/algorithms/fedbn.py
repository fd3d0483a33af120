"""FedBN: normalization layers stay on the client (Li et al. 2021, ICLR).

Scale, shift and running statistics, as in the paper; FedTP's code averages the last.
Of a transformer, the layer norms.
"""

import re

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    check_names_some,
    partial_personalization,
)
from fedjax_tp.models.task import Task

_NORM = re.compile(r"(^|[/_])norm(_\d+)?/")


def is_norm(path: str) -> bool:
    """Does the leaf at `path` belong to a layer named `norm`, `norm_0`, `mlp_norm`?"""
    return _NORM.search(path) is not None


def fedbn(task: Task, optimizer: ClientOptimizer) -> Algorithm:
    """All but the normalization layers is averaged.

    Raises:
      InputError: the model has none.
    """
    check_names_some(
        task,
        is_norm,
        "fedbn needs a model with normalization layers, this one has none; allowed is "
        "a transformer or --model cnn_bn",
    )
    return partial_personalization("fedbn", task, optimizer, is_norm)
