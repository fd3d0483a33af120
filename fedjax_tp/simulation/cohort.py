"""Runs the local training of one pure client over a cohort of unequal clients.

Clients are dealt to devices by their work, and on a device to `lanes`: so many clients
train at a time under vmap, and a lane that is done takes the longest client that waits.
Between two such moments all lanes just step, in a loop whose trip count is traced. So
one compiled program serves every cohort, and no step is padding until the queue is
empty. A running weighted sum takes the averaged part; only what is personal is held per
client.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, PartitionSpec

from fedjax_tp import tree
from fedjax_tp.algorithms.base import Algorithm, Message, Update
from fedjax_tp.data.federated import FederatedDataset, client_sizes, gather, shuffled
from fedjax_tp.types import Array, Bool, Float, Int, PRNGKey, Progress, Tree

MESH_AXIS = "clients"


class LocalSchedule(NamedTuple):
    """How clients train in a round; static under jit.

    Attributes:
      batch_size: examples a step; the last step of an epoch may have fewer.
      local_epochs: passes over the client's examples.
      capacity: examples of the largest client.
      lanes: clients trained at a time on one device.
      mesh: devices on one axis named `clients`; None for one device, wherever the
        arguments are.
    """

    batch_size: int
    local_epochs: int
    capacity: int
    lanes: int
    mesh: Mesh | None = None


class CohortResult(NamedTuple):
    """What comes back from a cohort.

    Attributes:
      update: `mean` averaged; `personal`, `kept` and `metrics` stacked, rows of
        clients that are left out zeroed (their metrics are left as they are).
      weights: n_k / sum n_k over the clients that count; 0 for the others.
      is_finite: False where a client's loss or update was not finite.
      counts: does the client count (it is no padding, and finite)?
    """

    update: Update
    weights: Float[Array, " cohort"]
    is_finite: Bool[Array, " cohort"]
    counts: Bool[Array, " cohort"]


def num_local_steps(
    size: Int[Array, "*clients"], schedule: LocalSchedule
) -> Int[Array, "*clients"]:
    """epochs * ceil(size / batch): optimizer steps of clients in one round."""
    return schedule.local_epochs * -(-size // schedule.batch_size)


def run_cohort(
    algorithm: Algorithm,
    data: FederatedDataset,
    message: Message,
    kept: Tree,
    ids: Int[Array, " cohort"],
    key: PRNGKey,
    schedule: LocalSchedule,
) -> CohortResult:
    """Trains the clients `ids` from what they were sent and what they kept.

    Under `jax.vmap` (over seeds, say; with one copy of the examples) the cohorts become
    one: their clients share the lanes and the devices.

    Args:
      algorithm: its client functions are used.
      data: training split.
      message: `personal` stacked over the cohort.
      kept: stacked over the cohort.
      ids: the cohort; an id past the end is padding and changes nothing.
      key: of the round. A client's randomness depends on it and the client's id.
      schedule: static.
    """
    keys = jax.vmap(lambda id: jax.random.fold_in(key, id))(ids)

    def with_leading_axis(stacked: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf[None], stacked)

    @custom_vmap
    def train(data, message, kept, ids, keys):
        outputs = _train_cohorts(
            algorithm,
            data,
            Message(with_leading_axis(message.shared), message.personal),
            kept,
            ids,
            keys,
            jnp.zeros(ids.shape, jnp.int32),
            1,
            schedule,
        )
        return jax.tree.map(lambda leaf: leaf[0], outputs.mean), outputs.rows

    @train.def_vmap
    def train_cohorts_as_one(axis_size, in_batched, *inputs):
        data_batched, *rest_batched = in_batched
        if data_batched.x or data_batched.y:
            raise NotImplementedError("vmap over examples; map rows, start and size")

        def every(leaf, is_batched):
            shape = (axis_size, *leaf.shape)
            return leaf if is_batched else jnp.broadcast_to(leaf, shape)

        data, message, kept, ids, keys = inputs
        message, kept, ids, keys = jax.tree.map(
            every, (message, kept, ids, keys), tuple(rest_batched)
        )
        rows, start, size = (
            every(getattr(data, name), getattr(data_batched, name))
            for name in ("rows", "start", "size")
        )
        cohort = ids.shape[1]
        of_run = jnp.arange(axis_size, dtype=jnp.int32)[:, None]
        # An id past the end of its own run must lie past the end of all of them.
        is_client = ids < data.num_clients
        outputs = _train_cohorts(
            algorithm,
            data._replace(
                rows=rows.reshape(-1),
                start=(start + of_run * rows.shape[1]).reshape(-1),
                size=size.reshape(-1),
            ),
            Message(message.shared, _flatten(message.personal)),
            _flatten(kept),
            jnp.where(
                is_client, ids + of_run * size.shape[1], axis_size * size.shape[1]
            ).reshape(-1),
            _flatten(keys),
            jnp.repeat(of_run[:, 0], cohort),
            axis_size,
            schedule,
        )
        by_run = jax.tree.map(
            lambda leaf: leaf.reshape(axis_size, cohort, *leaf.shape[1:]), outputs.rows
        )
        return (outputs.mean, by_run), jax.tree.map(
            lambda _: True, (outputs.mean, by_run)
        )

    mean, rows = train(data, message, kept, ids, keys)
    sizes = client_sizes(data, ids)
    counts = rows.is_finite & (sizes > 0)
    weights = jnp.where(counts, sizes, 0).astype(jnp.float32)
    total = jnp.maximum(weights.sum(), 1)
    mean = jax.tree.map(lambda leaf: (leaf / total).astype(leaf.dtype), mean)
    return CohortResult(
        Update(mean, rows.personal, rows.kept, rows.metrics),
        weights / total,
        rows.is_finite,
        counts,
    )


def _flatten(stacked: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stacked)


class _Rows(NamedTuple):
    """One row a client of the cohort; clients that were not trained have zeros."""

    personal: Tree
    kept: Tree
    metrics: Tree
    is_finite: Bool[Array, " cohort"]


class _Outputs(NamedTuple):
    mean: Tree  # sum of n_k * mean, one a run
    rows: _Rows


class _Lanes(NamedTuple):
    """What the clients in the lanes are doing.

    Attributes:
      place: of the client in the cohort; the length of the cohort in an idle lane.
      done, num_steps: steps done, of how many.
      id: of the client in the data.
      order: in which it visits its examples, epoch by epoch.
      carry: its training.
    """

    place: Int[Array, " lanes"]
    done: Int[Array, " lanes"]
    num_steps: Int[Array, " lanes"]
    id: Int[Array, " lanes"]
    order: Int[Array, "lanes epochs capacity"]
    carry: Tree


def _train_cohorts(
    algorithm: Algorithm,
    data: FederatedDataset,
    message: Message,
    kept: Tree,
    ids: Int[Array, " cohort"],
    keys: Any,
    run_of: Int[Array, " cohort"],
    num_runs: int,
    schedule: LocalSchedule,
) -> _Outputs:
    """Trains clients of one or more runs; `message.shared` is stacked over the runs."""
    steps = num_local_steps(client_sizes(data, ids), schedule)
    longest_first = jnp.argsort(-steps, stable=True).astype(jnp.int32)
    inputs = (data, message, kept, ids, keys, run_of)
    mesh = schedule.mesh
    if mesh is None or mesh.size == 1:
        queue_length = jnp.sum(steps > 0)
        return _train_queue(
            algorithm, schedule, num_runs, longest_first, queue_length, *inputs
        )

    def on_device(queues, lengths, *inputs):
        outputs = _train_queue(
            algorithm, schedule, num_runs, queues[0], lengths[0], *inputs
        )
        # A client was trained on one device, and has zeros on the others.
        outputs = outputs._replace(
            rows=outputs.rows._replace(is_finite=~outputs.rows.is_finite)
        )
        total = jax.tree.map(
            lambda leaf: jax.lax.psum(
                leaf.astype(jnp.int32) if leaf.dtype == bool else leaf, MESH_AXIS
            ),
            outputs,
        )
        return total._replace(
            rows=total.rows._replace(is_finite=total.rows.is_finite == 0)
        )

    queues, lengths = _deal_by_work(steps, longest_first, mesh.size)
    split, whole = PartitionSpec(MESH_AXIS), PartitionSpec()
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(split, split, *[whole] * len(inputs)),
        out_specs=whole,
        check_vma=False,
    )(queues, lengths, *inputs)


def _deal_by_work(
    steps: Int[Array, " cohort"], longest_first: Int[Array, " cohort"], devices: int
) -> tuple[Int[Array, "devices cohort"], Int[Array, " devices"]]:
    """Each client, longest first, to the device with the least work (Graham 1969).

    Clients without a step go nowhere.
    """
    cohort = steps.shape[0]

    def deal(i, dealt):
        queues, lengths, work = dealt
        place = longest_first[i]
        device = jnp.argmin(work)
        has_steps = steps[place] > 0
        slot = jnp.where(has_steps, lengths[device], cohort)
        return (
            queues.at[device, slot].set(place, mode="drop"),
            lengths.at[device].add(has_steps.astype(jnp.int32)),
            work.at[device].add(steps[place]),
        )

    nothing = jnp.zeros(devices, jnp.int32)
    queues = jnp.zeros((devices, cohort), jnp.int32)
    queues, lengths, _ = jax.lax.fori_loop(0, cohort, deal, (queues, nothing, nothing))
    return queues, lengths


def _train_queue(
    algorithm: Algorithm,
    schedule: LocalSchedule,
    num_runs: int,
    queue: Int[Array, " cohort"],
    queue_length: Int[Array, ""],
    data: FederatedDataset,
    message: Message,
    kept: Tree,
    ids: Int[Array, " cohort"],
    keys: Any,
    run_of: Int[Array, " cohort"],
) -> _Outputs:
    """Trains the first `queue_length` clients of a queue of places in the cohort."""
    lanes, cohort = schedule.lanes, ids.shape[0]

    def received(place: Array) -> Message:
        run = run_of.at[place].get(mode="clip")
        return Message(
            tree.take(message.shared, run), tree.take(message.personal, place)
        )

    def fresh(place: Array) -> _Lanes:
        """Lanes whose clients are about to begin."""
        id = ids.at[place].get(mode="clip")
        client_keys = jax.vmap(jax.random.split)(tree.take(keys, place))
        size = client_sizes(data, id)
        orders = jax.vmap(_epoch_orders, in_axes=(0, 0, None))
        carry = jax.vmap(algorithm.client_start)(
            received(place), tree.take(kept, place), client_keys[:, 1]
        )
        return _Lanes(
            place,
            jnp.zeros_like(place),
            num_local_steps(size, schedule),
            id,
            orders(client_keys[:, 0], size, schedule),
            carry,
        )

    def load(state: _Lanes, taken: Array) -> tuple[_Lanes, Array]:
        """Gives idle lanes the next clients of the queue."""
        is_idle = state.place == cohort
        nth = taken + jnp.cumsum(is_idle, dtype=jnp.int32) - 1
        is_new = is_idle & (nth < queue_length)
        place = jnp.where(is_new, queue.at[nth].get(mode="clip"), state.place)
        state = tree.where_rows(is_new, fresh(place), state)
        return state, taken + jnp.sum(is_new, dtype=jnp.int32)

    def advance(state: _Lanes) -> _Lanes:
        """Steps all lanes until the first is done; idle ones step for nothing."""
        remaining = jnp.where(
            state.place < cohort,
            state.num_steps - state.done,
            jnp.iinfo(jnp.int32).max,
        )
        count = remaining.min()
        steps = jax.lax.fori_loop(
            0,
            count,
            lambda i, carry: _step(
                algorithm, data, schedule, state._replace(carry=carry), i
            ),
            state.carry,
        )
        return state._replace(done=state.done + count, carry=steps)

    def unload(state: _Lanes, outputs: _Outputs) -> tuple[_Lanes, _Outputs]:
        """Takes the results of the clients that are done; their lanes are idle."""
        is_done = (state.place < cohort) & (state.done >= state.num_steps)
        update = jax.vmap(algorithm.client_finish)(received(state.place), state.carry)
        is_finite = tree.rows_all_finite(update, lanes)
        counts = is_done & is_finite
        clean = tree.zero_rows_unless(counts, update._replace(metrics={}))
        weights = jnp.where(counts, client_sizes(data, state.id), 0)
        run = run_of.at[state.place].get(mode="clip")
        by_run = jnp.where(run == jnp.arange(num_runs)[:, None], weights, 0)
        mean = jax.tree.map(
            jnp.add, outputs.mean, tree.weighted_sums(clean.mean, by_run * 1.0)
        )
        rows = _Rows(clean.personal, clean.kept, update.metrics, is_finite)
        place = jnp.where(is_done, state.place, cohort)
        return (
            state._replace(place=jnp.where(is_done, cohort, state.place)),
            _Outputs(mean, tree.put(outputs.rows, place, rows)),
        )

    def until_one_is_done(carried):
        state, taken, outputs = carried
        state, taken = jax.lax.cond(
            taken < queue_length, load, lambda *same: same, state, taken
        )
        state, outputs = unload(advance(state), outputs)
        return state, taken, outputs

    def is_unfinished(carried):
        state, taken, _ = carried
        return (taken < queue_length) | jnp.any(state.place < cohort)

    idle = fresh(jnp.full(lanes, cohort, jnp.int32))
    update = jax.eval_shape(
        jax.vmap(algorithm.client_finish), received(idle.place), idle.carry
    )

    def zeros(rows: int, stacked: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), stacked
        )

    nothing = _Outputs(
        zeros(num_runs, update.mean),
        _Rows(
            zeros(cohort, update.personal),
            zeros(cohort, update.kept),
            zeros(cohort, update.metrics),
            jnp.ones(cohort, bool),
        ),
    )
    carried = (idle, jnp.int32(0), nothing)
    return jax.lax.while_loop(is_unfinished, until_one_is_done, carried)[2]


def _step(
    algorithm: Algorithm,
    data: FederatedDataset,
    schedule: LocalSchedule,
    state: _Lanes,
    ahead: Int[Array, ""],
) -> Tree:
    """The carries after step `done + ahead` of each lane."""

    def one_client(carry, step, num_steps, id, size, order):
        epoch, batch_index = jnp.divmod(
            step, jnp.maximum(num_steps // schedule.local_epochs, 1)
        )
        positions = batch_index * schedule.batch_size + jnp.arange(schedule.batch_size)
        places = order.at[epoch, positions].get(mode="clip")
        batch = gather(data, id, places, positions < size)
        return algorithm.client_step(carry, batch, Progress(step, num_steps, epoch))

    return jax.vmap(one_client)(
        state.carry,
        state.done + ahead,
        state.num_steps,
        state.id,
        client_sizes(data, state.id),
        state.order,
    )


def _epoch_orders(
    key: PRNGKey, size: Int[Array, ""], schedule: LocalSchedule
) -> Int[Array, "epochs capacity"]:
    """For each local epoch, the order in which a client visits its examples."""
    epoch_keys = jax.vmap(lambda epoch: jax.random.fold_in(key, epoch))(
        jnp.arange(schedule.local_epochs)
    )
    return jax.vmap(shuffled, in_axes=(0, None, None))(
        epoch_keys, size, schedule.capacity
    )
