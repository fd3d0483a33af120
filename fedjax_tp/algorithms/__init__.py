"""Federated algorithms, one file each, on the contract of `base`; their registry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import optax

from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    Message,
    Update,
    client_update,
    partial_personalization,
    sgd,
)
from fedjax_tp.algorithms.fedavg import fedavg
from fedjax_tp.algorithms.fedtp import fedtp
from fedjax_tp.algorithms.fedtp_vanilla import fedtp_vanilla
from fedjax_tp.algorithms.local import local
from fedjax_tp.hypernetwork import HypernetworkConfig, check_config
from fedjax_tp.models.task import Task
from fedjax_tp.types import InputError


@dataclass(frozen=True)
class HypernetworkOptimizer:
    """SGD on the server, for phi and for the embeddings.

    Attributes:
      lr: step size of phi.
      embedding_lr: step size of the embeddings.
      momentum, weight_decay: of both; L2 is added before momentum.
      clip: largest global norm of phi's gradient; 0 for none.
      move_unsampled: also step the embeddings of clients that were not sampled.
    """

    lr: float = 0.01
    embedding_lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float = 0.0
    move_unsampled: bool = False


class Setting(NamedTuple):
    """All that the registered builders may use."""

    task: Task
    num_clients: int
    client: ClientOptimizer = ClientOptimizer()
    hypernetwork: HypernetworkConfig = HypernetworkConfig()
    hypernetwork_optimizer: HypernetworkOptimizer = HypernetworkOptimizer()


def check_setting(setting: Setting) -> None:
    """Raises InputError for a value that some registered algorithm would refuse."""
    client, server = setting.client, setting.hypernetwork_optimizer
    sgd(client.lr, client.momentum, client.weight_decay)
    for lr in (server.lr, server.embedding_lr):
        sgd(lr, server.momentum, server.weight_decay)
    if not 0 <= server.clip < float("inf"):
        raise InputError(f"hypernetwork clip is {server.clip}; allowed is 0 or more")
    check_config(setting.hypernetwork)


def _fedtp(setting: Setting) -> Algorithm:
    server = setting.hypernetwork_optimizer
    clip = [optax.clip_by_global_norm(server.clip)] if server.clip else []
    phi_sgd = sgd(server.lr, server.momentum, server.weight_decay)
    return fedtp(
        setting.task,
        setting.num_clients,
        setting.client,
        hypernetwork=setting.hypernetwork,
        phi_optimizer=optax.chain(*clip, phi_sgd),
        embedding_optimizer=sgd(
            server.embedding_lr, server.momentum, server.weight_decay
        ),
        move_unsampled=server.move_unsampled,
    )


REGISTRY: dict[str, Callable[[Setting], Algorithm]] = {
    "fedtp": _fedtp,
    "fedtp_vanilla": lambda s: fedtp_vanilla(s.task, s.client),
    "fedavg": lambda s: fedavg(s.task, s.client),
    "local": lambda s: local(s.task, s.client),
}
"""Builders by name."""


def resolve(names: str) -> tuple[str, ...]:
    """Algorithm names from a comma-separated list; `all` is every registered one.

    Raises:
      InputError: an unknown name, one named twice, or none at all.
    """
    if names == "all":
        return tuple(REGISTRY)
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    unknown = [name for name in wanted if name not in REGISTRY]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        what = f"unknown algorithm {unknown[0]!r}" if unknown else f"got {names!r}"
        raise InputError(
            f"{what}; allowed are 'all' or some of {', '.join(REGISTRY)}, each once"
        )
    return wanted


__all__ = [
    "REGISTRY",
    "Algorithm",
    "ClientOptimizer",
    "HypernetworkOptimizer",
    "Message",
    "Setting",
    "Update",
    "check_setting",
    "client_update",
    "fedavg",
    "fedtp",
    "fedtp_vanilla",
    "local",
    "partial_personalization",
    "resolve",
    "sgd",
]
