"""FedProx: FedAvg whose clients are held near the server's model.

Li et al. 2020 (MLSys), equation 2 and algorithm 2, with a fixed number of local steps
for all clients; the paper also lets slow clients stop early.
"""

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    is_nothing,
    partial_personalization,
    proximal,
)
from fedjax_tp.models.task import Task


def fedprox(task: Task, optimizer: ClientOptimizer, *, mu: float) -> Algorithm:
    """Clients minimize F_k(w) + mu / 2 * |w - w_t|^2; `mu` 0 is FedAvg."""
    return partial_personalization(
        "fedprox", task, optimizer, is_nothing, correction=proximal(mu)
    )
