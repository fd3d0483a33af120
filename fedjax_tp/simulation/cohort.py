"""Runs the local training of one pure client over a cohort of unequal clients.

`lanes` clients train at a time under vmap, on each device of a mesh. All steps of the
cohort are laid end to end and cut into one equal piece a lane, none shorter than the
longest client (McNaughton 1959). A client that lies across a cut begins in one lane
and, after one exchange, ends in the lane before: so a lane has max(total / lanes,
longest) steps, and none is padding.

Between two changes of clients all lanes just step, in a loop whose trip count is
traced: one compiled program serves every cohort. A running weighted sum takes the
averaged part; only what is personal is held per client.
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
        return outputs._replace(mean=jax.tree.map(lambda leaf: leaf[0], outputs.mean))

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
            lambda leaf: leaf.reshape(axis_size, cohort, *leaf.shape[1:]),
            outputs._replace(mean=None),
        )
        outputs = by_run._replace(mean=outputs.mean)
        return outputs, jax.tree.map(lambda _: True, outputs)

    outputs = train(data, message, kept, ids, keys)
    sizes = client_sizes(data, ids)
    counts = outputs.is_finite & (sizes > 0)
    weights = jnp.where(counts, sizes, 0).astype(jnp.float32)
    total = jnp.maximum(weights.sum(), 1)
    mean = jax.tree.map(lambda leaf: (leaf / total).astype(leaf.dtype), outputs.mean)
    return CohortResult(
        outputs.update._replace(mean=mean),
        weights / total,
        outputs.is_finite,
        counts,
    )


def _flatten(stacked: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stacked)


class _Outputs(NamedTuple):
    """`mean` is sum of n_k * mean, one a run; the rest has a row a client."""

    mean: Tree
    update: Update
    is_finite: Bool[Array, " cohort"]


class _Rows(NamedTuple):
    """What comes from each client; zeros for those not trained here."""

    own: tree.Flat
    metrics: Tree
    is_finite: Any


class _Totals(NamedTuple):
    mean: tree.Flat
    rows: _Rows


class _Timeline(NamedTuple):
    """The cohort's steps end to end, longest client first.

    Attributes:
      place: of each client in the cohort.
      num_steps, end: its steps, and where they end.
      piece: steps a lane.
    """

    place: Int[Array, " cohort"]
    num_steps: Int[Array, " cohort"]
    end: Int[Array, " cohort"]
    piece: Int[Array, ""]


class _Turn(NamedTuple):
    """A client's time in a lane.

    Attributes:
      exists: False past the last client of the lane.
      first, last: step at which the client comes into the lane, and leaves it.
      leaves: does it go on in another lane?
    """

    exists: Bool[Array, " lanes"]
    first: Int[Array, " lanes"]
    last: Int[Array, " lanes"]
    leaves: Bool[Array, " lanes"]


def _timeline(steps: Int[Array, " cohort"], lanes: int) -> _Timeline:
    place = jnp.argsort(-steps, stable=True).astype(jnp.int32)
    num_steps = steps[place]
    end = jnp.cumsum(num_steps, dtype=jnp.int32)
    piece = jnp.maximum(jnp.maximum(-(-end[-1] // lanes), num_steps[0]), 1)
    return _Timeline(place, num_steps, end, piece)


def _first_turn(
    timeline: _Timeline, lane: Int[Array, " lanes"]
) -> Int[Array, " lanes"]:
    """Which client of the timeline is the first of a lane."""
    begin = lane * timeline.piece
    return jnp.searchsorted(timeline.end, begin, side="right").astype(jnp.int32)


def _turn(
    timeline: _Timeline, lane: Int[Array, " lanes"], turn: Int[Array, " lanes"]
) -> _Turn:
    num_steps = timeline.num_steps.at[turn].get(mode="fill", fill_value=0)
    end = timeline.end.at[turn].get(mode="clip")
    # What is cut off on the left is the end of a client: it must come last.
    cut_left = jnp.maximum(lane * timeline.piece - (end - num_steps), 0)
    cut_right = jnp.maximum(end - (lane + 1) * timeline.piece, 0)
    exists = (num_steps > 0) & (cut_right < num_steps)
    return _Turn(exists, cut_right, num_steps - cut_left, cut_left > 0)


class _Lanes(NamedTuple):
    """What the clients in the lanes are doing.

    Attributes:
      turn: the client of the timeline that is in the lane, or will be next.
      is_busy: is it?
      place: of the client in the cohort.
      done: its steps so far.
      id: of the client in the data.
      num_steps: of the client.
      order: in which it visits its examples, epoch by epoch.
      carry: its training.
    """

    turn: Int[Array, " lanes"]
    is_busy: Bool[Array, " lanes"]
    place: Int[Array, " lanes"]
    done: Int[Array, " lanes"]
    id: Int[Array, " lanes"]
    num_steps: Int[Array, " lanes"]
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
    inputs = (data, message, kept, ids, keys, run_of)
    mesh = schedule.mesh
    if mesh is None or mesh.size == 1:
        return _train_lanes(algorithm, schedule, num_runs, 1, *inputs)

    whole = PartitionSpec()
    return jax.shard_map(
        lambda *inputs: _train_lanes(algorithm, schedule, num_runs, mesh.size, *inputs),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )(*inputs)


def _train_lanes(
    algorithm: Algorithm,
    schedule: LocalSchedule,
    num_runs: int,
    devices: int,
    data: FederatedDataset,
    message: Message,
    kept: Tree,
    ids: Int[Array, " cohort"],
    keys: Any,
    run_of: Int[Array, " cohort"],
) -> _Outputs:
    """Trains the clients in this device's lanes; the outputs are of all devices."""
    lanes, cohort = schedule.lanes, ids.shape[0]
    timeline = _timeline(
        num_local_steps(client_sizes(data, ids), schedule), devices * lanes
    )
    may_change = devices * lanes > 1
    device = jax.lax.axis_index(MESH_AXIS) if devices > 1 else 0
    lane = device * lanes + jnp.arange(lanes, dtype=jnp.int32)
    all_lanes = jnp.arange(devices * lanes, dtype=jnp.int32)
    first_turns = _turn(timeline, all_lanes, _first_turn(timeline, all_lanes))
    # The exchange comes when the last of those that change lanes is ready to.
    exchange_time = jnp.max(
        jnp.where(first_turns.exists & first_turns.leaves, first_turns.last, 0)
    )

    shared, own = tree.flatten_rows(message.shared), (message.personal, kept)
    own_rows = tree.flatten_rows(own)

    def received(place: Array) -> tuple[Message, Tree]:
        """What clients were sent, and what they kept."""
        run = run_of.at[place].get(mode="clip")
        sent = tree.unflatten_rows(tree.take(shared, run), message.shared)
        personal, kept = tree.unflatten_rows(tree.take(own_rows, place), own)
        return Message(sent, personal), kept

    def fresh(turn: Array) -> _Lanes:
        """Lanes whose clients are about to begin."""
        place = timeline.place.at[turn].get(mode="clip")
        id = ids[place]
        client_keys = jax.vmap(jax.random.split)(tree.take(keys, place))
        size = client_sizes(data, id)
        orders = jax.vmap(_epoch_orders, in_axes=(0, 0, None))
        start = jax.vmap(algorithm.client_start)
        carry = start(*received(place), client_keys[:, 1])
        return _Lanes(
            turn,
            jnp.ones(lanes, bool),
            place,
            jnp.zeros(lanes, jnp.int32),
            id,
            num_local_steps(size, schedule),
            orders(client_keys[:, 0], size, schedule),
            carry,
        )

    def finish(state: _Lanes) -> Update:
        sent, _ = received(state.place)
        return jax.vmap(algorithm.client_finish)(sent, state.carry)

    def is_waiting(state: _Lanes, is_exchanged: Array) -> Array:
        """Lanes that are idle and have a client that may begin."""
        turn = _turn(timeline, lane, state.turn)
        return ~state.is_busy & turn.exists & ((turn.first == 0) | is_exchanged)

    def load(state: _Lanes, changing: tree.Flat, is_exchanged: Array) -> _Lanes:
        begins = is_waiting(state, is_exchanged)
        first = _turn(timeline, lane, state.turn).first
        new = fresh(state.turn)
        if may_change:
            came = tree.unflatten_rows(changing, new.carry)
            carry = tree.where_rows(first > 0, came, new.carry)
            new = new._replace(done=first, carry=carry)
        # A single lane is loaded only when it waits.
        return new if lanes == 1 else tree.where_rows(begins, new, state)

    def advance(state: _Lanes, time: Array, deadline: Array) -> tuple[_Lanes, Array]:
        """Steps all lanes until a client leaves its lane; the idle ones for nothing."""
        remaining = _turn(timeline, lane, state.turn).last - state.done
        count = jnp.min(jnp.where(state.is_busy, remaining, deadline - time))
        count = jnp.minimum(count, deadline - time)
        carry = jax.lax.fori_loop(
            0,
            count,
            lambda i, carry: _step(
                algorithm, data, schedule, state._replace(carry=carry), i
            ),
            state.carry,
        )
        return state._replace(done=state.done + count, carry=carry), time + count

    def unload(
        state: _Lanes, changing: tree.Flat, outputs: _Totals
    ) -> tuple[_Lanes, tree.Flat, _Totals]:
        """Takes the results of clients that are done, and keeps those that go on."""
        turn = _turn(timeline, lane, state.turn)
        is_over = state.is_busy & (state.done >= turn.last)
        is_done = is_over & ~turn.leaves
        update = finish(state)
        flat = tree.flatten_rows(update.mean), tree.flatten_rows(_own(update))
        is_finite = tree.rows_all_finite((flat, update.metrics), lanes)
        counts = is_done & is_finite
        mean, own = tree.zero_rows_unless(counts, flat)
        weights = jnp.where(counts, client_sizes(data, state.id), 0)
        run = run_of[state.place]
        by_run = jnp.where(run == jnp.arange(num_runs)[:, None], weights, 0)
        mean = jax.tree.map(
            jnp.add, outputs.mean, tree.weighted_sums(mean, by_run * 1.0)
        )
        rows = _Rows(own, update.metrics, is_finite)
        place = jnp.where(is_done, state.place, cohort)
        return (
            state._replace(turn=state.turn + is_over, is_busy=state.is_busy & ~is_over),
            tree.where_rows(
                is_over & turn.leaves, tree.flatten_rows(state.carry), changing
            )
            if may_change
            else changing,
            _Totals(mean, tree.put(outputs.rows, place, rows)),
        )

    def one_change(carried):
        state, changing, outputs, time, deadline, is_exchanged = carried
        state = jax.lax.cond(
            jnp.any(is_waiting(state, is_exchanged)),
            load,
            lambda state, *_: state,
            state,
            changing,
            is_exchanged,
        )
        state, time = advance(state, time, deadline)
        state, changing, outputs = unload(state, changing, outputs)
        return state, changing, outputs, time, deadline, is_exchanged

    def is_unfinished(carried):
        state, *_, time, deadline, is_exchanged = carried
        is_any_left = jnp.any(state.is_busy | is_waiting(state, is_exchanged))
        return is_any_left & (time < deadline)

    def phase(index, carried):
        """Before the exchange (0), and after it (1)."""
        state, changing, outputs, time = carried
        is_exchanged = index == 1
        deadline = jnp.where(is_exchanged, jnp.iinfo(jnp.int32).max, exchange_time)
        state, changing, outputs, time, *_ = jax.lax.while_loop(
            is_unfinished,
            one_change,
            (state, changing, outputs, time, deadline, is_exchanged),
        )
        return state, _to_lane_before(changing, devices), outputs, time

    state = fresh(_first_turn(timeline, lane))
    state = state._replace(is_busy=jnp.zeros(lanes, bool))
    update = jax.eval_shape(finish, state)

    def zeros(rows: int, stacked: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), stacked
        )

    nothing = _Totals(
        zeros(num_runs, jax.eval_shape(tree.flatten_rows, update.mean)),
        _Rows(
            zeros(cohort, jax.eval_shape(tree.flatten_rows, _own(update))),
            zeros(cohort, update.metrics),
            jnp.ones(cohort, bool),
        ),
    )
    changing = tree.flatten_rows(state.carry) if may_change else {}
    carried = (state, changing, nothing, jnp.int32(0))
    mean, rows = jax.lax.fori_loop(0, 2, phase, carried)[2]
    if devices > 1:
        # A client ends on one device, and has zeros on the others.
        is_missing = (~rows.is_finite).astype(jnp.int32)
        mean, rows, is_missing = jax.lax.psum(
            (mean, rows._replace(is_finite=None), is_missing), MESH_AXIS
        )
        rows = rows._replace(is_finite=is_missing == 0)
    personal, kept = tree.unflatten_rows(rows.own, _own(update))
    return _Outputs(
        tree.unflatten_rows(mean, update.mean),
        update._replace(mean=None, personal=personal, kept=kept, metrics=rows.metrics),
        rows.is_finite,
    )


def _own(update: Update) -> tuple[Tree, Tree]:
    return update.personal, update.kept


def _to_lane_before(stacked: Tree, devices: int) -> Tree:
    """Row i + 1 in row i, across devices; the last lane gets what nobody needs."""

    def shift(leaf: Array) -> Array:
        first = leaf[:1]
        if devices > 1:
            pairs = [(device, device - 1) for device in range(1, devices)]
            first = jax.lax.ppermute(first, MESH_AXIS, pairs)
        return jnp.concatenate([leaf[1:], first])

    return jax.tree.map(shift, stacked)


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
