"""Federated algorithms, one file each, on the contract of `base`; their registry."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np
import optax

from fedjax_tp.algorithms.apfl import apfl
from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    Message,
    Update,
    check_has_head,
    client_sgd,
    client_update,
    is_head,
    partial_personalization,
    sgd,
)
from fedjax_tp.algorithms.compression import (
    compressed,
    rotated,
    sign,
    topk,
    uniform,
)
from fedjax_tp.algorithms.decentralized import GRAPHS, decentralized, make_graph
from fedjax_tp.algorithms.ditto import ditto
from fedjax_tp.algorithms.fedala import fedala
from fedjax_tp.algorithms.fedavg import fedavg, fedavg_ft, partial_averaging, rtfa
from fedjax_tp.algorithms.fedbabu import fedbabu
from fedjax_tp.algorithms.fedbn import fedbn
from fedjax_tp.algorithms.feddbe import feddbe
from fedjax_tp.algorithms.fedopt import fedadam, fedavgm, fedyogi
from fedjax_tp.algorithms.fedper import fedper
from fedjax_tp.algorithms.fedprox import fedprox
from fedjax_tp.algorithms.fedrep import fedrep
from fedjax_tp.algorithms.fedrod import fedrod, with_personal_head
from fedjax_tp.algorithms.fedtp import fedtp
from fedjax_tp.algorithms.fedtp_vanilla import fedtp_vanilla
from fedjax_tp.algorithms.hierarchical import assign_edges, hierarchical
from fedjax_tp.algorithms.knn import with_memory
from fedjax_tp.algorithms.layca import fedavg_layca
from fedjax_tp.algorithms.lg_fedavg import lg_fedavg
from fedjax_tp.algorithms.local import local
from fedjax_tp.algorithms.moon import moon
from fedjax_tp.algorithms.pfedhn import pfedhn
from fedjax_tp.algorithms.pfedme import pfedme
from fedjax_tp.algorithms.robust import (
    coordinate_median,
    geometric_median,
    trimmed_mean,
    with_aggregate,
)
from fedjax_tp.algorithms.scaffold import scaffold
from fedjax_tp.algorithms.server_averages import (
    exponential_mean,
    iterative_moving_average,
    mean_of_last,
)
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


@dataclass(frozen=True)
class MethodConfig:
    """What single methods add to local training and averaging.

    Attributes:
      prox_mu: FedProx: strength of the pull to the server's model; 0 is FedAvg.
      avgm_lr: FedAvgM: step size of the server; with 1 less the momentum, the server
        moves as far as FedAvg's in the long run.
      avgm_momentum: FedAvgM: momentum of the server.
      scaffold_lr: SCAFFOLD: share of the mean change that the server takes.
      adaptive_lr: FedAdam and FedYogi: step size of the server.
      adaptive_tau: FedAdam and FedYogi: degree of adaptivity.
      rep_head_share: FedRep: share of a round's steps that train the head alone.
      ditto_lambda: Ditto: pull of the personal model to the server's; 0 is local.
      apfl_alpha: APFL: share of the personal model at first.
      apfl_adaptive: APFL: clients learn their shares.
      pfedme_lambda: pFedMe: pull of the personal model to the client's global one.
      pfedme_steps: pFedMe: steps of the personal model on a batch.
      pfedme_beta: pFedMe: share of the mean that the server takes.
      tune_epochs: FedBABU, fedavg_ft and rtfa: epochs of fine-tuning before evaluation.
      moon_mu: MOON: weight of the contrastive loss; 0 is FedAvg.
      moon_temperature: MOON: of the contrastive loss.
      ala_lr: FedALA: step size of the aggregation weights.
      ala_share: FedALA: share of a round's steps that learn them.
      dbe_kappa: FedDBE: pull of mean representations to their consensus.
      knn_neighbours: of the kNN memory.
      knn_share: share of the kNN memory in the prediction.
      layca_lr: fedavg_layca: tangent of the angle by which kernels turn in a step.
      rtfa_lambda: RTFA: pull of the fine-tuned model to the averaged one.
      partial_layers: partial: a regular expression, found in the paths of what is
        averaged (queries, keys and values are one parameter, qkv).
      edges: hierarchical: edges between clients and cloud. Their clients balance
        classes, or with several seeds, whose partitions differ, are taken in turns.
      cloud_every: hierarchical: rounds between two averages at the cloud.
      graph: decentralized: ring, torus or regular (random).
      graph_degree: decentralized: neighbours of a client in the regular graph.
      ima_window: _ima: aggregates in the moving average.
      ima_start: _ima: first round whose average is adopted.
      last_window: _last: states of the server in the mean.
      ema_decay: _ema: of the exponential mean of the server's states.
      trimmed_share: _trimmed: share of the clients cut at each end.
      codec_bits: _uniform and _rotated: bits of a value.
      topk_share: _topk: share of the values that are sent.
    """

    prox_mu: float = 0.01
    avgm_lr: float = 0.1
    avgm_momentum: float = 0.9
    scaffold_lr: float = 1.0
    adaptive_lr: float = 0.01
    adaptive_tau: float = 1e-3
    rep_head_share: float = 0.5
    ditto_lambda: float = 0.1
    apfl_alpha: float = 0.5
    apfl_adaptive: bool = True
    pfedme_lambda: float = 15.0
    pfedme_steps: int = 5
    pfedme_beta: float = 1.0
    tune_epochs: int = 1
    moon_mu: float = 1.0
    moon_temperature: float = 0.5
    ala_lr: float = 1.0
    ala_share: float = 0.2
    dbe_kappa: float = 1.0
    knn_neighbours: int = 10
    knn_share: float = 0.6
    rtfa_lambda: float = 0.1
    layca_lr: float = 0.02
    partial_layers: str = "mlp|norm|head"
    edges: int = 2
    cloud_every: int = 5
    graph: str = "ring"
    graph_degree: int = 4
    ima_window: int = 5
    ima_start: int = 60
    last_window: int = 5
    ema_decay: float = 0.9
    trimmed_share: float = 0.2
    codec_bits: int = 4
    topk_share: float = 0.05


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prox_mu": (lambda x: 0 <= x < inf, "0 or more"),
    "avgm_lr": (lambda x: 0 < x < inf, "above 0"),
    "avgm_momentum": (lambda x: 0 <= x < 1, "0 <= momentum < 1"),
    "scaffold_lr": (lambda x: 0 < x < inf, "above 0"),
    "adaptive_lr": (lambda x: 0 < x < inf, "above 0"),
    "adaptive_tau": (lambda x: 0 < x < inf, "above 0"),
    "rep_head_share": (lambda x: 0 <= x <= 1, "0 to 1"),
    "ditto_lambda": (lambda x: 0 <= x < inf, "0 or more"),
    "apfl_alpha": (lambda x: 0 <= x <= 1, "0 to 1"),
    "pfedme_lambda": (lambda x: 0 < x < inf, "above 0"),
    "pfedme_steps": (lambda x: x >= 1, "1 or more"),
    "pfedme_beta": (lambda x: 0 < x < inf, "above 0"),
    "tune_epochs": (lambda x: x >= 0, "0 or more"),
    "moon_mu": (lambda x: 0 <= x < inf, "0 or more"),
    "moon_temperature": (lambda x: 0 < x < inf, "above 0"),
    "ala_lr": (lambda x: 0 < x < inf, "above 0"),
    "ala_share": (lambda x: 0 <= x <= 1, "0 to 1"),
    "dbe_kappa": (lambda x: 0 <= x < inf, "0 or more"),
    "knn_neighbours": (lambda x: x >= 1, "1 or more"),
    "knn_share": (lambda x: 0 <= x <= 1, "0 to 1"),
    "layca_lr": (lambda x: 0 < x < inf, "above 0"),
    "rtfa_lambda": (lambda x: 0 <= x < inf, "0 or more"),
    "partial_layers": (lambda x: _compiles(x), "a regular expression"),
    "edges": (lambda x: x >= 1, "1 or more"),
    "cloud_every": (lambda x: x >= 1, "1 or more"),
    "graph": (lambda x: x in GRAPHS, f"one of {', '.join(GRAPHS)}"),
    "graph_degree": (lambda x: x >= 2, "2 or more"),
    "ima_window": (lambda x: x >= 1, "1 or more"),
    "ima_start": (lambda x: x >= 1, "1 or more"),
    "last_window": (lambda x: x >= 1, "1 or more"),
    "ema_decay": (lambda x: 0 <= x < 1, "0 <= decay < 1"),
    "trimmed_share": (lambda x: 0 <= x < 0.5, "0 <= share < 0.5"),
    "codec_bits": (lambda x: 1 <= x <= 16, "1 to 16"),
    "topk_share": (lambda x: 0 < x <= 1, "0 < share <= 1"),
}


class Setting(NamedTuple):
    """All that the registered builders may use.

    `label_counts`, examples of each class at each client, is None where seeds have
    partitions of their own.
    """

    task: Task
    num_clients: int
    client: ClientOptimizer = ClientOptimizer()
    hypernetwork: HypernetworkConfig = HypernetworkConfig()
    hypernetwork_optimizer: HypernetworkOptimizer = HypernetworkOptimizer()
    method: MethodConfig = MethodConfig()
    label_counts: np.ndarray | None = None


def check_setting(setting: Setting) -> None:
    """Raises InputError for a value that some registered algorithm would refuse."""
    for name, (is_allowed, allowed) in _ALLOWED.items():
        value = getattr(setting.method, name)
        if not is_allowed(value):
            raise InputError(
                f"{name.replace('_', ' ')} is {value}; allowed is {allowed}"
            )
    client, server = setting.client, setting.hypernetwork_optimizer
    client_sgd(client)
    for lr in (server.lr, server.embedding_lr):
        sgd(lr, server.momentum, server.weight_decay)
    if not 0 <= server.clip < float("inf"):
        raise InputError(f"hypernetwork clip is {server.clip}; allowed is 0 or more")
    check_config(setting.hypernetwork)


def _with_hypernetwork(
    build: Callable[..., Algorithm], setting: Setting, **more: Any
) -> Algorithm:
    server = setting.hypernetwork_optimizer
    clip = [optax.clip_by_global_norm(server.clip)] if server.clip else []
    phi_sgd = sgd(server.lr, server.momentum, server.weight_decay)
    return build(
        setting.task,
        setting.num_clients,
        setting.client,
        **more,
        hypernetwork=setting.hypernetwork,
        phi_optimizer=optax.chain(*clip, phi_sgd),
        embedding_optimizer=sgd(
            server.embedding_lr, server.momentum, server.weight_decay
        ),
        move_unsampled=server.move_unsampled,
    )


def _fedtp(setting: Setting) -> Algorithm:
    return _with_hypernetwork(fedtp, setting)


def _fedtp_per(setting: Setting) -> Algorithm:
    check_has_head(setting.task, "fedtp_per")
    return _with_hypernetwork(fedtp, setting, is_kept=is_head, name="fedtp_per")


def _fedtp_rod(setting: Setting) -> Algorithm:
    generic = _with_hypernetwork(fedtp, setting, name="fedtp_rod")
    return with_personal_head(generic, setting.task, setting.client)


def _hierarchical(setting: Setting) -> Algorithm:
    method, counts = setting.method, setting.label_counts
    edges = method.edges
    if edges > setting.num_clients:
        raise InputError(f"edges is {edges}; allowed is 1 to {setting.num_clients}")
    if counts is None:
        # Nothing is known of their classes: in turns.
        edge_of = np.arange(setting.num_clients) % edges
        examples = np.ones(setting.num_clients)
    else:
        edge_of = assign_edges(counts, edges)
        examples = counts.sum(axis=1)
    return hierarchical(
        setting.task,
        setting.client,
        edge_of,
        np.bincount(edge_of, examples, edges),
        cloud_every=method.cloud_every,
    )


REGISTRY: dict[str, Callable[[Setting], Algorithm]] = {
    "fedtp": _fedtp,
    "fedtp_per": _fedtp_per,
    "fedtp_rod": _fedtp_rod,
    "fedtp_knn": lambda s: _with_knn(_fedtp(s), s),
    "fedtp_vanilla": lambda s: fedtp_vanilla(s.task, s.client),
    "fedavg": lambda s: fedavg(s.task, s.client),
    "local": lambda s: local(s.task, s.client),
    "fedprox": lambda s: fedprox(s.task, s.client, mu=s.method.prox_mu),
    "fedavgm": lambda s: fedavgm(
        s.task, s.client, lr=s.method.avgm_lr, momentum=s.method.avgm_momentum
    ),
    "fedadam": lambda s: fedadam(
        s.task, s.client, lr=s.method.adaptive_lr, tau=s.method.adaptive_tau
    ),
    "fedyogi": lambda s: fedyogi(
        s.task, s.client, lr=s.method.adaptive_lr, tau=s.method.adaptive_tau
    ),
    "scaffold": lambda s: scaffold(
        s.task, s.num_clients, s.client, server_lr=s.method.scaffold_lr
    ),
    "fedper": lambda s: fedper(s.task, s.client),
    "fedrep": lambda s: fedrep(s.task, s.client, head_share=s.method.rep_head_share),
    "lg_fedavg": lambda s: lg_fedavg(s.task, s.client),
    "ditto": lambda s: ditto(s.task, s.client, strength=s.method.ditto_lambda),
    "apfl": lambda s: apfl(
        s.task, s.client, alpha=s.method.apfl_alpha, adaptive=s.method.apfl_adaptive
    ),
    "pfedme": lambda s: pfedme(
        s.task,
        s.client,
        strength=s.method.pfedme_lambda,
        inner_steps=s.method.pfedme_steps,
        beta=s.method.pfedme_beta,
    ),
    "fedavg_ft": lambda s: fedavg_ft(s.task, s.client, epochs=s.method.tune_epochs),
    "fedavg_knn": lambda s: _with_knn(fedavg(s.task, s.client), s),
    "fedbabu": lambda s: fedbabu(s.task, s.client, epochs=s.method.tune_epochs),
    "fedbn": lambda s: fedbn(s.task, s.client),
    "fedrod": lambda s: fedrod(s.task, s.client),
    "moon": lambda s: moon(
        s.task, s.client, mu=s.method.moon_mu, temperature=s.method.moon_temperature
    ),
    "pfedhn": lambda s: _with_hypernetwork(pfedhn, s),
    "fedala": lambda s: fedala(
        s.task, s.client, lr=s.method.ala_lr, share=s.method.ala_share
    ),
    "feddbe": lambda s: feddbe(s.task, s.client, strength=s.method.dbe_kappa),
    "rtfa": lambda s: rtfa(
        s.task,
        s.client,
        epochs=s.method.tune_epochs,
        strength=s.method.rtfa_lambda,
    ),
    "fedavg_layca": lambda s: fedavg_layca(s.task, s.client, lr=s.method.layca_lr),
    "partial": lambda s: partial_averaging(
        s.task, s.client, layers=s.method.partial_layers
    ),
    "hierarchical": _hierarchical,
    "decentralized": lambda s: decentralized(
        s.task,
        s.client,
        make_graph(s.method.graph, s.num_clients, s.method.graph_degree),
    ),
}
"""Builders by name."""


def _with_robust(
    name: str, aggregate: Callable[..., Any]
) -> Callable[[Algorithm, Setting], Algorithm]:
    return lambda a, s: with_aggregate(a, f"{a.name}_{name}", aggregate)


WRAPPERS: dict[str, Callable[[Algorithm, Setting], Algorithm]] = {
    "knn": lambda a, s: _with_knn(a, s),
    "uniform": lambda a, s: compressed(a, uniform(s.method.codec_bits)),
    "rotated": lambda a, s: compressed(a, rotated(s.method.codec_bits)),
    "sign": lambda a, s: compressed(a, sign()),
    "topk": lambda a, s: compressed(a, topk(s.method.topk_share)),
    "median": _with_robust("median", coordinate_median),
    "trimmed": lambda a, s: with_aggregate(
        a,
        f"{a.name}_trimmed",
        partial(trimmed_mean, share=s.method.trimmed_share),
    ),
    "geometric": _with_robust("geometric", geometric_median),
    "ima": lambda a, s: iterative_moving_average(
        a, window=s.method.ima_window, start=s.method.ima_start
    ),
    "last": lambda a, s: mean_of_last(a, window=s.method.last_window),
    "ema": lambda a, s: exponential_mean(a, decay=s.method.ema_decay),
}
"""What may stand behind any name, with `_` before it: `fedavg_median`, and one behind
another: `fedtp_topk_ema`. First a codec, then `_ima`, then a robust aggregate, then
what is only used: `_last`, `_ema`, `_knn`."""


def _with_knn(algorithm: Algorithm, setting: Setting) -> Algorithm:
    method = setting.method
    return with_memory(
        algorithm,
        setting.task,
        neighbours=method.knn_neighbours,
        share=method.knn_share,
    )


def build(name: str, setting: Setting) -> Algorithm:
    """The algorithm of a registered name, with what stands behind it (`WRAPPERS`).

    Raises:
      InputError: there is none of that name, or it does not go with the model.
    """
    parsed = _parse(name)
    if parsed is None:
        raise InputError(f"unknown algorithm {name!r}")
    base, wrappers = parsed
    algorithm = REGISTRY[base](setting)
    for wrapper in wrappers:
        algorithm = WRAPPERS[wrapper](algorithm, setting)
    return algorithm


def _parse(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The registered name in a name, and the wrappers behind it; None if it is none."""
    wrappers: list[str] = []
    while name not in REGISTRY:
        name, _, wrapper = name.rpartition("_")
        if not name or wrapper not in WRAPPERS:
            return None
        wrappers.insert(0, wrapper)
    return name, tuple(wrappers)


def build_all(
    names: str, setting: Setting
) -> tuple[tuple[Algorithm, ...], tuple[str, ...]]:
    """The algorithms of a list as for `resolve`, and a note on each that is left out.

    Of `all`, those are left out that do not go with the model.

    Raises:
      InputError: see `resolve` and `build`.
    """
    built, notes = [], []
    for name in resolve(names):
        try:
            built.append(build(name, setting))
        except InputError as error:
            if names != "all":
                raise
            notes.append(f"{name} is left out: {error}")
    return tuple(built), tuple(notes)


def resolve(names: str) -> tuple[str, ...]:
    """Algorithm names from a comma-separated list; `all` is every registered one.

    Raises:
      InputError: an unknown name, one named twice, or none at all.
    """
    if names == "all":
        return tuple(REGISTRY)
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    unknown = [name for name in wanted if _parse(name) is None]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        what = f"unknown algorithm {unknown[0]!r}" if unknown else f"got {names!r}"
        raise InputError(
            f"{what}; allowed are 'all' or some of {', '.join(REGISTRY)}, each once, "
            f"and any with {', '.join(f'_{name}' for name in WRAPPERS)} after it"
        )
    return wanted


__all__ = [
    "REGISTRY",
    "WRAPPERS",
    "Algorithm",
    "ClientOptimizer",
    "HypernetworkOptimizer",
    "Message",
    "MethodConfig",
    "Setting",
    "Update",
    "apfl",
    "build",
    "build_all",
    "check_setting",
    "client_sgd",
    "client_update",
    "ditto",
    "fedadam",
    "fedala",
    "fedavg",
    "fedavg_ft",
    "fedavgm",
    "fedbabu",
    "fedbn",
    "feddbe",
    "fedper",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedtp",
    "fedtp_vanilla",
    "fedyogi",
    "lg_fedavg",
    "local",
    "moon",
    "partial_personalization",
    "pfedhn",
    "pfedme",
    "resolve",
    "scaffold",
    "sgd",
    "with_memory",
    "with_personal_head",
]
