"""A model out of a run folder, for experiments that do not train one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments import cli, launch, setup
from experiments.flags import DeviceFlags, TrainingRunFlags
from experiments.setup import Setup
from fedjax_tp import algorithms
from fedjax_tp.algorithms import Algorithm, Message
from fedjax_tp.algorithms.base import message_for_use
from fedjax_tp.io import checkpoints, client_store
from fedjax_tp.simulation.rounds import SimulationState, init_state
from fedjax_tp.types import Array, InputError, Params

_EXPERIMENTS = (
    "fedtp",
    "attention_personalization",
    "communication",
    "connectivity",
    "compare/group",
)
"""Whose run folders hold the clients that their flags describe."""


class Trained(NamedTuple):
    """An algorithm as its newest checkpoint has it, with the data of its run."""

    folder: Path
    flags: TrainingRunFlags
    setup: Setup
    algorithm: Algorithm
    state: SimulationState
    round: int


def load(run: Path, name: str, mesh: Mesh) -> Trained:
    """Loads one algorithm of a run, of its first seed.

    Args:
      run: the folder.
      name: of the algorithm.
      mesh: the devices.

    Raises:
      InputError: there is no such run, or no such algorithm in it, or its clients do
        not hold whole models of their own that are ready to be used.
    """
    if not (run / "config.json").is_file():
        raise InputError(f"run {run} is no run folder (no config.json)")
    flags = TrainingRunFlags()
    values = cli.saved_flags(run / "config.json", flags, _EXPERIMENTS)
    flags = cli.with_values(flags, values)
    saved = run / "checkpoints"
    has_any = saved.is_dir() and any(saved.iterdir())
    names = sorted(p.name for p in saved.iterdir()) if has_any else []
    if name not in names:
        raise InputError(
            f"algorithm is {name!r}, of which run {run} has no checkpoint; allowed is "
            f"one of {', '.join(names) or 'none: it has no checkpoint at all'}"
        )
    if client_store.has_saved(saved / name):
        raise InputError(
            f"what clients of {name} keep lies on the host in run {run}; train with "
            "--kept-on-host no"
        )
    seeds = flags.run.seeds
    one_seed = replace(flags.run, seeds=1)
    prepared = setup.make_setup(flags.data, flags.model, flags.training, one_seed, mesh)
    algorithm = algorithms.build(name, setup.make_setting(flags, prepared))
    if algorithm.adapt is not None or algorithm.predict is not None:
        raise InputError(
            f"algorithm is {name!r}, whose clients adapt their model before they use "
            "it, or look at their examples; allowed is one with models ready to be used"
        )

    def of_seed(key: jax.Array) -> SimulationState:
        return init_state(algorithm, prepared.num_clients, key)

    init: Callable = of_seed if seeds == 1 else jax.vmap(of_seed)
    key = jax.random.key(0)
    shapes = jax.eval_shape(init, key if seeds == 1 else jax.random.split(key, seeds))
    restored = checkpoints.restore(saved / name, shapes, print, set_aside=False)
    if restored is None:
        raise InputError(f"run {run} has no complete checkpoint of {name} yet")
    state = restored.state
    if seeds > 1:
        state = jax.tree.map(lambda leaf: leaf[0], state)
    return Trained(run, flags, prepared, algorithm, state, restored.round)


def load_transformer(run: str | None, name: str) -> Trained:
    """`load`, on one device of this process, of a model that has attention.

    Args:
      run: the folder; None if it was not given.
      name: of the algorithm.

    Raises:
      InputError: no run is given, or it does not allow it.
    """
    if run is None:
        raise InputError("run is not given; allowed is the folder of a trained run")
    mesh = launch.make_mesh(DeviceFlags(devices=1))
    launch.check_one_process()
    found = load(Path(run), name, mesh)
    if found.setup.task.maps is None:
        raise InputError(f"run {run} is of a model without attention")
    return found


def params_of(algorithm: Algorithm, state: SimulationState, client: Array) -> Params:
    """The whole model of one client; under `jit` or not."""
    message = message_for_use(algorithm, state.server, jnp.asarray(client)[None])
    own = jax.tree.map(lambda leaf: leaf[0], message.personal)
    kept = jax.tree.map(lambda leaf: leaf[client], state.kept)
    return algorithm.client_params(Message(message.shared, own), kept)
