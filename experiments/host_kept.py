"""Rounds and evaluations of an algorithm whose clients' rows lie in a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import launch
from experiments.setup import Setup
from fedjax_tp import tree
from fedjax_tp.algorithms import Algorithm
from fedjax_tp.data.federated import FederatedDataset
from fedjax_tp.io import client_store
from fedjax_tp.models.task import Metrics
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.evaluation import Evaluate, make_evaluate_rows
from fedjax_tp.simulation.rounds import (
    SimulationState,
    initial_kept,
    make_round_of,
)

_CLIENTS_A_CALL = 64


class Engine(NamedTuple):
    """What the driver needs of a run; the first two as in the library.

    Attributes:
      advance: `(state, data, key, first_round, num_rounds) -> (state, records)`.
      evaluate: `(state, test, train) -> Metrics`.
      save, load: `(folder, round)`, the rows beside a checkpoint.
    """

    advance: Callable[..., tuple[SimulationState, Any]]
    evaluate: Evaluate
    save: Callable[[Path, int], None]
    load: Callable[[Path, int], None]


def open_store(
    algorithm: Algorithm, state: SimulationState, folder: Path
) -> client_store.ClientStore:
    """A store without rows for the clients of a simulation."""
    initial = jax.device_get(
        jax.jit(lambda server: tree.flatten_rows(initial_kept(algorithm, server)))(
            state.server
        )
    )
    return client_store.open_store(folder, initial, len(state.participations))


def make_round(
    algorithm: Algorithm,
    cohort: int,
    schedule: LocalSchedule,
    store: client_store.ClientStore,
) -> Callable[
    [SimulationState, FederatedDataset, Any, int], tuple[SimulationState, Any]
]:
    """A function `(state, data, key, index) -> (state, record)` that runs one round.

    Args:
      algorithm, cohort, schedule: as for `make_round_of`, with a mesh.
      store: where the cohort's rows come from and go to.
    """
    mesh = schedule.mesh
    assert mesh is not None
    sample, round_of = make_round_of(algorithm, cohort, schedule)

    def one_round(
        state: SimulationState, data: FederatedDataset, key: Any, index: int
    ) -> tuple[SimulationState, Any]:
        round_index = jnp.int32(index)
        ids = np.asarray(sample(data, key, round_index))
        rows = launch.replicate(client_store.read_rows(store, ids), mesh)
        state, rows, used_ids, record = round_of(state, rows, data, key, round_index)
        client_store.write_rows(store, *jax.device_get((used_ids, rows)))
        return state, jax.device_get(record)

    return one_round


def open_run(
    algorithm: Algorithm,
    setup: Setup,
    state: SimulationState,
    folder: Path,
    chunk_size: int,
) -> Engine:
    """Opens the store of an algorithm's clients in `folder`, without rows.

    Args:
      algorithm, setup: what runs.
      state: gives the initial rows.
      folder: for the files of rows.
      chunk_size: clients evaluated at a time on one device.
    """
    mesh = setup.schedule.mesh
    assert mesh is not None
    store = open_store(algorithm, state, folder)
    one_round = make_round(algorithm, setup.cohort, setup.schedule, store)
    evaluate_rows = make_evaluate_rows(
        algorithm,
        setup.task,
        capacity=setup.test_capacity,
        chunk_size=chunk_size,
        schedule=setup.schedule,
    )

    def advance(
        state: SimulationState,
        data: FederatedDataset,
        key: Any,
        first_round: int,
        num_rounds: int,
    ) -> tuple[SimulationState, Any]:
        records = []
        for index in range(first_round, first_round + num_rounds):
            state, record = one_round(state, data, key, index)
            records.append(record)
        return state, jax.tree.map(lambda *rows: np.concatenate(rows), *records)

    def evaluate(
        state: SimulationState, test: FederatedDataset, train: FederatedDataset
    ) -> Metrics:
        unit = mesh.size * chunk_size
        block = unit * max(1, _CLIENTS_A_CALL // unit)
        found = []
        for first in range(0, setup.num_clients, block):
            ids = np.arange(first, first + block)
            rows = launch.replicate(client_store.read_rows(store, ids), mesh)
            metrics = evaluate_rows(state.server, rows, jnp.asarray(ids), test, train)
            found.append(jax.device_get(metrics))
        return jax.tree.map(
            lambda *parts: np.concatenate(parts)[: setup.num_clients], *found
        )

    return Engine(
        advance,
        evaluate,
        lambda folder, round_index: client_store.save(store, folder, round_index),
        lambda folder, round_index: client_store.load(store, folder, round_index),
    )
