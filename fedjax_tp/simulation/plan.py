"""What a run will cost, from shapes alone: nothing is compiled or allocated here."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_tp import tree
from fedjax_tp.algorithms.base import Algorithm, Carry, Message
from fedjax_tp.data.federated import FederatedDataset
from fedjax_tp.models.task import Task
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import init_state
from fedjax_tp.types import Batch, Tree


class Plan(NamedTuple):
    """Sizes of a run of one algorithm; bytes are of one client in one round.

    Attributes:
      client_parameters: numbers in the model a client trains.
      hypernetwork_parameters: numbers in the server's hypernetwork.
      bytes_down, bytes_up: sent to and by a sampled client in a round.
      state_bytes: server state and what all clients keep.
      memory_bytes: estimate of the peak on the device: data, state and the new state,
        and for each client of a chunk its parameters, gradients, optimizer state, and
        the activations that its backward pass keeps.
    """

    client_parameters: int
    hypernetwork_parameters: int
    bytes_down: int
    bytes_up: int
    state_bytes: int
    memory_bytes: int


def make_plan(
    algorithm: Algorithm,
    task: Task,
    data: FederatedDataset,
    cohort: int,
    schedule: LocalSchedule,
) -> Plan:
    """Plans a run; see `Plan`."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    state = jax.eval_shape(lambda k: init_state(algorithm, data.num_clients, k), key)
    message = jax.eval_shape(algorithm.broadcast, state.server, one)
    own = _first_row(message.personal)
    kept = _first_row(state.kept)
    message = Message(message.shared, own)
    carry = jax.eval_shape(algorithm.client_start, message, kept, key)
    update = jax.eval_shape(algorithm.client_finish, message, carry)
    params = jax.eval_shape(algorithm.client_params, message, kept)
    residuals = jax.eval_shape(
        lambda p, b, k: jax.vjp(lambda q: task.loss(q, b, k), p)[1],
        params,
        jax.eval_shape(lambda: _empty_batch(data, schedule.batch_size)),
        key,
    )
    down = tree.num_bytes(message)
    up = tree.num_bytes((update.mean, update.personal))
    state_bytes = tree.num_bytes(state)
    # New parameters and gradients stand beside the carry while a step is computed.
    per_client = (
        2 * _array_bytes(carry) + tree.num_bytes(params) + tree.num_bytes(residuals)
    )
    cohort_bytes = cohort * tree.num_bytes((update.personal, update.kept, own, kept))
    return Plan(
        client_parameters=tree.num_elements(params),
        hypernetwork_parameters=algorithm.hypernetwork_parameters,
        bytes_down=down,
        bytes_up=up,
        state_bytes=state_bytes,
        memory_bytes=tree.num_bytes(data)
        + 2 * state_bytes
        + cohort_bytes
        + tree.num_bytes(update.mean)
        + schedule.lanes * per_client,
    )


def _first_row(stacked: Tree) -> Tree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked
    )


def _array_bytes(carry: Carry) -> int:
    arrays = [
        leaf
        for leaf in jax.tree.leaves(carry)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    return tree.num_bytes(arrays)


def _empty_batch(data: FederatedDataset, batch_size: int) -> Batch:
    return Batch(
        jnp.zeros((batch_size, *data.x.shape[1:])),
        jnp.zeros(batch_size, data.y.dtype),
        jnp.zeros(batch_size, bool),
    )
