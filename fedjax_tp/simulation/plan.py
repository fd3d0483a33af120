"""What a run will cost, from shapes alone: nothing is compiled or allocated here."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_tp import tree
from fedjax_tp.algorithms.base import Algorithm, Carry, client_shapes
from fedjax_tp.data.federated import FederatedDataset
from fedjax_tp.models.task import Task
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import init_state, state_sharding
from fedjax_tp.types import Batch


class Plan(NamedTuple):
    """Sizes of a run of one algorithm; messages are of one client in one round.

    Attributes:
      client_parameters: numbers in the model a client trains.
      hypernetwork_parameters: numbers in the server's hypernetwork.
      bytes_down, bytes_up: sent to and by a sampled client in a round.
      state_bytes: server state and what all clients keep.
      kept_bytes: what all clients keep.
      fixed_bytes: on each device, whatever the lanes: data, state, and what a cohort
        brings back.
      lane_bytes: for each client that trains at a time: its parameters, gradients,
        optimizer state, and the activations that its backward pass keeps; its examples
        too, if it adapts before it is used.
      server_bytes: what the server's update needs while no client trains.
      lanes: as many.
    """

    client_parameters: int
    hypernetwork_parameters: int
    bytes_down: int
    bytes_up: int
    state_bytes: int
    kept_bytes: int
    fixed_bytes: int
    lane_bytes: int
    server_bytes: int
    lanes: int

    @property
    def memory_bytes(self) -> int:
        """Estimate of the peak on each device."""
        training = self.lanes * self.lane_bytes
        return self.fixed_bytes + max(training, self.server_bytes)


def make_plan(
    algorithm: Algorithm,
    task: Task,
    data: FederatedDataset,
    cohort: int,
    schedule: LocalSchedule,
    *,
    seeds: int = 1,
) -> Plan:
    """Plans a run; see `Plan`.

    Args:
      algorithm, task, data, cohort, schedule: as for the run.
      seeds: simulations at once.
    """
    devices = 1 if schedule.mesh is None else schedule.mesh.size
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda k: init_state(algorithm, data.num_clients, k), key)
    message, kept, carry, update, params = client_shapes(algorithm)
    residuals = jax.eval_shape(
        lambda p, b, k: jax.vjp(lambda q: task.loss(q, b, k), p)[1],
        # What a client uses may have more to it: a head of its own, say.
        jax.eval_shape(task.init, key),
        jax.eval_shape(lambda: _empty_batch(data, schedule.batch_size)),
        key,
    )
    state_bytes = seeds * tree.num_bytes(state)
    split_bytes = state_bytes
    if schedule.mesh is not None:
        leaves = jax.tree.leaves(state)
        shardings = jax.tree.leaves(state_sharding(state, schedule.mesh))
        split_bytes = seeds * sum(
            tree.num_bytes(jax.ShapeDtypeStruct(s.shard_shape(leaf.shape), leaf.dtype))
            for leaf, s in zip(leaves, shardings, strict=True)
        )
    # New parameters and gradients stand beside the carry while a step is computed; a
    # client that comes from another lane has their place between two steps.
    per_client = (
        2 * _array_bytes(carry)
        + tree.num_bytes(params)
        + tree.num_bytes(residuals)
        + 4 * schedule.local_epochs * schedule.capacity
    )
    if algorithm.adapt is not None:
        # All of a client's examples at once.
        shape = (schedule.capacity, *data.x.shape[1:])
        per_client += tree.num_bytes(jax.ShapeDtypeStruct(shape, jnp.float32))
    rows = (update.personal, update.kept, message.personal, kept)
    cohort_bytes = seeds * cohort * tree.num_bytes(rows)
    bytes_up = tree.num_bytes((update.mean, update.personal))
    if algorithm.bits_up is not None:
        bytes_up = -(-algorithm.bits_up // 8)
    return Plan(
        client_parameters=tree.num_elements(params),
        hypernetwork_parameters=algorithm.hypernetwork_parameters,
        bytes_down=tree.num_bytes(message),
        bytes_up=bytes_up,
        state_bytes=state_bytes,
        kept_bytes=seeds * tree.num_bytes(state.kept),
        fixed_bytes=tree.num_bytes(data)
        + split_bytes
        + cohort_bytes
        + 2 * seeds * tree.num_bytes(update.mean),
        lane_bytes=per_client,
        server_bytes=4 * seeds * algorithm.hypernetwork_parameters // devices,
        lanes=schedule.lanes,
    )


def fitting_lanes(
    plans: Sequence[Plan], most: int, limit_bytes: int | None
) -> tuple[int, Plan]:
    """The most lanes with which every plan fits, and the plan that needs most memory.

    Args:
      plans: of the algorithms of a run.
      most: lanes that would be used if memory were no matter.
      limit_bytes: of a device; None if it is not known.

    Returns:
      Lanes (0 if not even one client fits), and the plan.
    """
    hungriest = max(plans, key=lambda plan: plan._replace(lanes=1).memory_bytes)
    lanes = most
    if limit_bytes is not None:
        for plan in plans:
            if plan.fixed_bytes + plan.server_bytes > limit_bytes:
                return 0, plan
            room = limit_bytes - plan.fixed_bytes
            lanes = min(lanes, room // max(plan.lane_bytes, 1))
    return lanes, hungriest


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
