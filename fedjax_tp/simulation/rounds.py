"""Rounds of a federated algorithm, many in one compiled program.

A round: sample clients, broadcast, local training, server update. Its randomness
depends on (key, round, client id) alone, so a run may stop after any round and go on.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_tp import tree
from fedjax_tp.algorithms.base import Algorithm, ServerState
from fedjax_tp.data.federated import FederatedDataset
from fedjax_tp.simulation.cohort import MESH_AXIS, LocalSchedule, run_cohort
from fedjax_tp.types import Array, Bool, Float, InputError, Int, PRNGKey, Tree


class SimulationState(NamedTuple):
    """Everything that a run carries from round to round.

    Attributes:
      server: the algorithm's server state.
      kept: what the clients keep, stacked over all clients.
      participations: rounds in which each client's update was used.
    """

    server: ServerState
    kept: Tree
    participations: Int[Array, " clients"]


class RoundRecord(NamedTuple):
    """What is known of one round (or, stacked, of several).

    Attributes:
      clients: the sampled ids, ascending.
      is_finite: False for a client that was left out of the average.
      metrics: weighted means over the clients that counted, by name; 0 if none did.
    """

    clients: Int[Array, "*rounds cohort"]
    is_finite: Bool[Array, "*rounds cohort"]
    metrics: dict[str, Float[Array, "*rounds"]]


def cohort_size(num_clients: int, fraction: float) -> int:
    """floor(clients * fraction), at least 1.

    Raises:
      InputError: the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise InputError(f"sample fraction is {fraction}; allowed is 0 < fraction <= 1")
    # The small term keeps 0.29 * 100, which floats make 28.999..., at 29.
    return max(1, math.floor(num_clients * fraction + 1e-9))


def sample_clients(key: PRNGKey, num_clients: int, size: int) -> Int[Array, " size"]:
    """A uniform subset of `size` of `num_clients` clients, ascending.

    Floyd's algorithm (Bentley and Floyd 1987): `size` draws whatever the population.
    """
    tops = jnp.arange(num_clients - size, num_clients)
    draws = jax.random.randint(key, (size,), 0, tops + 1)

    def choose(i, chosen):
        is_taken = jnp.any(chosen == draws[i])
        return chosen.at[i].set(jnp.where(is_taken, tops[i], draws[i]))

    nobody = jnp.full(size, -1, tops.dtype)
    return jnp.sort(jax.lax.fori_loop(0, size, choose, nobody))


def init_state(
    algorithm: Algorithm, num_clients: int, key: PRNGKey, *, with_kept: bool = True
) -> SimulationState:
    """The state before the first round; all clients keep the same.

    Args:
      algorithm: what is run.
      num_clients: of the population.
      key: of the server's initial state.
      with_kept: False where what clients keep lies elsewhere; `kept` then is None.
    """
    server = algorithm.init(key)
    kept = None
    if with_kept:
        kept = tree.stack_copies(algorithm.init_kept(server), num_clients)
    return SimulationState(server, kept, jnp.zeros(num_clients, jnp.int32))


def initial_kept(algorithm: Algorithm, server: ServerState) -> Tree:
    """What a client keeps that never took part, stacked: one row."""
    return tree.stack_copies(algorithm.init_kept(server), 1)


def kept_shapes(algorithm: Algorithm, server: ServerState) -> Tree:
    """Shapes and types of `initial_kept`, for `tree.unflatten_rows`."""
    return jax.eval_shape(lambda server: initial_kept(algorithm, server), server)


def _round_keys(key: PRNGKey, round_index: Int[Array, ""]) -> tuple[PRNGKey, PRNGKey]:
    """Keys of a round's sample and of its clients."""
    sample_key, cohort_key = jax.random.split(jax.random.fold_in(key, round_index))
    return sample_key, cohort_key


def sample_round(
    key: PRNGKey, round_index: Int[Array, ""], num_clients: int, cohort: int
) -> Int[Array, " cohort"]:
    """The clients of a round, ascending.

    Args:
      key: of the run.
      round_index: 0 for the first round.
      num_clients, cohort: so many of so many; static.
    """
    return sample_clients(_round_keys(key, round_index)[0], num_clients, cohort)


def run_round(
    algorithm: Algorithm,
    data: FederatedDataset,
    state: SimulationState,
    round_index: Int[Array, ""],
    key: PRNGKey,
    cohort: int,
    schedule: LocalSchedule,
) -> tuple[SimulationState, RoundRecord]:
    """One round.

    Args:
      algorithm: what is run.
      data: training split.
      state: before the round.
      round_index: 0 for the first round.
      key: of the run.
      cohort: clients sampled; static.
      schedule: local training; static.
    """
    ids = sample_round(key, round_index, data.num_clients, cohort)
    new, kept, used_ids, record = run_round_of(
        algorithm,
        data,
        state._replace(kept=None),
        tree.take(state.kept, ids),
        ids,
        _round_keys(key, round_index)[1],
        schedule,
    )
    return new._replace(kept=tree.put(state.kept, used_ids, kept)), record


def run_round_of(
    algorithm: Algorithm,
    data: FederatedDataset,
    state: SimulationState,
    kept: Tree,
    ids: Int[Array, " cohort"],
    key: PRNGKey,
    schedule: LocalSchedule,
) -> tuple[SimulationState, Tree, Int[Array, " cohort"], RoundRecord]:
    """One round of given clients, who bring what they kept and take it away.

    Args:
      algorithm: what is run.
      data: training split.
      state: before the round; `kept` is None.
      kept: stacked over the cohort.
      ids: the cohort.
      key: of the cohort in this round.
      schedule: local training; static.

    Returns:
      The state, what the clients keep now, the ids under which to store it (past the
      end for a client that is left out: it writes nothing), and the record.
    """
    num_clients = data.num_clients
    message = algorithm.broadcast(state.server, ids)
    result = run_cohort(algorithm, data, message, kept, ids, key, schedule)
    used_ids = jnp.where(result.counts, ids, num_clients)
    server = jax.lax.cond(
        result.counts.any(),
        lambda server: algorithm.server_update(
            server, used_ids, result.update._replace(kept=None), result.weights
        ),
        lambda server: server,
        state.server,
    )
    participations = state.participations.at[used_ids].add(1, mode="drop")
    metrics = {
        name: jnp.sum(jnp.where(result.counts, values, 0.0) * result.weights)
        for name, values in result.update.metrics.items()
    }
    return (
        SimulationState(server, None, participations),
        result.update.kept,
        used_ids,
        RoundRecord(ids, result.is_finite, metrics),
    )


_SHARDED_ELEMENTS = 1 << 20


def state_sharding(state: Tree, mesh: Mesh) -> Tree:
    """Where each leaf of a simulation's state lies: a sharding for each leaf.

    Large matrices of the server (a hypernetwork's heads) are split by their last axis
    where it divides, so that the devices share the server's work and memory; the rest
    is on every device.

    Args:
      state: arrays or shape structs.
      mesh: the devices.
    """

    def of_leaf(leaf: Any) -> NamedSharding:
        is_large = math.prod(leaf.shape) >= _SHARDED_ELEMENTS and leaf.ndim >= 2
        if is_large and leaf.shape[-1] % mesh.size == 0:
            split = PartitionSpec(*[None] * (leaf.ndim - 1), MESH_AXIS)
            return NamedSharding(mesh, split)
        return NamedSharding(mesh, PartitionSpec())

    everywhere = NamedSharding(mesh, PartitionSpec())
    sharding = jax.tree.map(lambda leaf: everywhere, state)
    return sharding._replace(server=jax.tree.map(of_leaf, state.server))


OVER_SEEDS = FederatedDataset(None, None, 0, 0, 0, None, None)  # type: ignore[arg-type]
"""`in_axes` of data with partitions stacked over seeds, the examples in one copy."""


def make_advance(
    algorithm: Algorithm,
    cohort: int,
    schedule: LocalSchedule,
    max_rounds: int,
    *,
    over_seeds: bool = False,
) -> Any:
    """A jitted `advance(state, data, key, first_round, num_rounds)`.

    The result runs `num_rounds <= max_rounds` rounds in one program, compiled once
    whatever the number; records are stacked over `max_rounds`, the rest zeros. The
    state passed in is donated.

    Args:
      algorithm: what is run.
      cohort: clients sampled a round.
      schedule: local training.
      max_rounds: the most rounds a call may run.
      over_seeds: state, key and partitions (see `OVER_SEEDS`) have a leading axis, one
        simulation a seed; records have it after the one of rounds.
    """

    @partial(jax.jit, donate_argnums=0)
    def advance(state, data, key, first_round, num_rounds):
        def in_place(state):
            if schedule.mesh is None:
                return state
            sharding = state_sharding(state, schedule.mesh)
            return jax.lax.with_sharding_constraint(state, sharding)

        def one_round(state, round_index):
            def of_seed(data, state, key):
                return run_round(
                    algorithm, data, state, round_index, key, cohort, schedule
                )

            if over_seeds:
                of_seed = jax.vmap(of_seed, in_axes=(OVER_SEEDS, 0, 0))
            state, record = of_seed(data, state, key)
            return in_place(state), record

        record_shape = jax.eval_shape(one_round, state, first_round)[1]
        records = jax.tree.map(
            lambda leaf: jnp.zeros((max_rounds, *leaf.shape), leaf.dtype), record_shape
        )

        def body(i, carried):
            state, records = carried
            state, record = one_round(state, first_round + i)
            records = jax.tree.map(lambda all, one: all.at[i].set(one), records, record)
            return state, records

        state, records = jax.lax.fori_loop(0, num_rounds, body, (state, records))
        # The result goes in again: elsewhere it would be compiled for anew.
        return in_place(state), records

    return advance


def make_round_of(algorithm: Algorithm, cohort: int, schedule: LocalSchedule) -> Any:
    """Jitted `sample` and `round_of`, for what clients keep outside the device.

    `sample(data, key, round_index) -> ids`; then `round_of(state, rows, data, key,
    round_index) -> (state, rows, used ids, record)`, with the cohort's rows as
    `tree.flatten_rows` gives them and a record of one round (a leading axis of 1). The
    state passed in is donated. Results are those of `make_advance`, to rounding.
    """

    @jax.jit
    def sample(data, key, round_index):
        return sample_round(key, round_index, data.num_clients, cohort)

    @partial(jax.jit, donate_argnums=0)
    def round_of(state, rows, data, key, round_index):
        new, kept, used_ids, record = run_round_of(
            algorithm,
            data,
            state,
            tree.unflatten_rows(rows, kept_shapes(algorithm, state.server)),
            sample_round(key, round_index, data.num_clients, cohort),
            _round_keys(key, round_index)[1],
            schedule,
        )
        if schedule.mesh is not None:
            sharding = state_sharding(new, schedule.mesh)
            new = jax.lax.with_sharding_constraint(new, sharding)
        record = jax.tree.map(lambda leaf: leaf[None], record)
        return new, tree.flatten_rows(kept), used_ids, record

    return sample, round_of
