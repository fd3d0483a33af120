"""Ditto: a personal model beside the global one (Li et al. 2021, ICML), algorithm 1.

Both take a step on every batch; the paper's personal solver may take others.
"""

from typing import NamedTuple

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    LocalCarry,
    Message,
    Update,
    client_sgd,
    is_nothing,
    partial_personalization,
    proximal,
    start_training,
    training_metrics,
    training_step,
    two_models,
)
from fedjax_tp.models.task import Task
from fedjax_tp.types import Batch, PRNGKey, Progress, Tree


class DittoCarry(NamedTuple):
    """Training of the global and of the personal model."""

    shared: LocalCarry
    personal: LocalCarry


def ditto(task: Task, optimizer: ClientOptimizer, *, strength: float) -> Algorithm:
    """FedAvg, and v_k minimizing F_k(v) + strength / 2 * |v - w_t|^2, kept and used.

    With strength 0, v_k is local training.
    """
    sgd_step = client_sgd(optimizer)
    shared_step = training_step(task, sgd_step)
    personal_step = training_step(task, sgd_step, proximal(strength))

    def client_start(message: Message, kept: Tree, key: PRNGKey) -> DittoCarry:
        return DittoCarry(
            start_training(message.shared, sgd_step, key),
            start_training(kept, sgd_step, key, message.shared),
        )

    def client_step(carry: DittoCarry, batch: Batch, progress: Progress) -> DittoCarry:
        return DittoCarry(
            shared_step(carry.shared, batch, progress),
            personal_step(carry.personal, batch, progress),
        )

    def client_finish(message: Message, carry: DittoCarry) -> Update:
        metrics = training_metrics(carry.personal)
        return Update(carry.shared.params, None, carry.personal.params, metrics)

    average = partial_personalization("ditto", task, optimizer, is_nothing)
    return average._replace(
        init=lambda key: two_models(task, key),
        client_start=client_start,
        client_step=client_step,
        client_finish=client_finish,
        client_params=lambda message, kept: kept,
    )
