"""pFedHN: a hypernetwork emits whole models (Shamsian et al. 2021, ICML).

Algorithm 1, with a cohort a round in place of one client: FedTP with every parameter
emitted. Running statistics of batch normalization are averaged; the paper's have none.
"""

import optax

from fedjax_tp.algorithms.base import Algorithm, ClientOptimizer
from fedjax_tp.algorithms.fedtp import fedtp
from fedjax_tp.hypernetwork import HypernetworkConfig
from fedjax_tp.models.task import Task, is_statistic


def pfedhn(
    task: Task,
    num_clients: int,
    optimizer: ClientOptimizer,
    *,
    hypernetwork: HypernetworkConfig,
    phi_optimizer: optax.GradientTransformation,
    embedding_optimizer: optax.GradientTransformation,
    move_unsampled: bool = False,
) -> Algorithm:
    """`fedtp` with all parameters personal; arguments as there."""
    return fedtp(
        task,
        num_clients,
        optimizer,
        hypernetwork=hypernetwork,
        phi_optimizer=phi_optimizer,
        embedding_optimizer=embedding_optimizer,
        move_unsampled=move_unsampled,
        is_personal=lambda path: not is_statistic(path),
        name="pfedhn",
    )
