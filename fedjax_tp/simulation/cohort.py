"""Runs the local training of one pure client over a cohort of unequal clients.

Clients run under vmap, `chunk_size` at a time, in a loop over chunks that keeps a
running weighted sum. A chunk's trip count is its longest client's, a traced number, so
one compiled program serves every cohort.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_tp import tree
from fedjax_tp.algorithms.base import Algorithm, Message, Update
from fedjax_tp.data.federated import FederatedDataset, client_sizes, gather, shuffled
from fedjax_tp.types import Array, Bool, Float, Int, PRNGKey, Progress, Tree


class LocalSchedule(NamedTuple):
    """How clients train in a round; static under jit.

    Attributes:
      batch_size: examples a step; the last step of an epoch may have fewer.
      local_epochs: passes over the client's examples.
      capacity: examples of the largest client.
      chunk_size: clients trained at a time.
    """

    batch_size: int
    local_epochs: int
    capacity: int
    chunk_size: int


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

    Args:
      algorithm: its client functions are used.
      data: training split.
      message: `personal` stacked over the cohort.
      kept: stacked over the cohort.
      ids: the cohort; an id past the end is padding and changes nothing.
      key: of the round. A client's randomness depends on it and the client's id.
      schedule: static.
    """
    cohort, chunk = ids.shape[0], schedule.chunk_size
    padding = -cohort % chunk

    def to_chunks(stacked):
        def reshape(leaf, filler):
            leaf = jnp.concatenate([leaf, filler]) if padding else leaf
            return leaf.reshape(-1, chunk, *leaf.shape[1:])

        return jax.tree.map(
            lambda leaf: reshape(leaf, jnp.repeat(leaf[-1:], padding, axis=0)), stacked
        )

    padded_ids = jnp.concatenate([ids, jnp.full(padding, data.num_clients, ids.dtype)])
    chunk_ids = padded_ids.reshape(-1, chunk)

    def run_chunk(total, inputs):
        ids, personal, kept = inputs
        update = _train_chunk(
            algorithm, data, Message(message.shared, personal), kept, ids, key, schedule
        )
        finite = tree.rows_all_finite(update, chunk)
        sizes = client_sizes(data, ids)
        counts = finite & (sizes > 0)
        weights = jnp.where(counts, sizes, 0).astype(jnp.float32)
        clean = tree.zero_rows_unless(counts, update._replace(metrics={}))
        mean_sum, weight_sum = total
        mean_sum = jax.tree.map(
            jnp.add, mean_sum, tree.weighted_sum(clean.mean, weights)
        )
        rest = clean._replace(mean=None, metrics=update.metrics)
        return (mean_sum, weight_sum + weights.sum()), (rest, weights, finite, counts)

    mean_shape = jax.eval_shape(
        lambda: (
            algorithm.client_finish(
                *_one_client_shapes(algorithm, message, kept, key)
            ).mean
        )
    )
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), mean_shape)
    (mean_sum, weight_sum), stacked = jax.lax.scan(
        run_chunk,
        (zeros, jnp.zeros(())),
        (chunk_ids, to_chunks(message.personal), to_chunks(kept)),
    )
    rest, weights, finite, counts = jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:cohort], stacked
    )
    total = jnp.maximum(weight_sum, 1)
    mean = jax.tree.map(lambda leaf: (leaf / total).astype(leaf.dtype), mean_sum)
    return CohortResult(rest._replace(mean=mean), weights / total, finite, counts)


def _one_client_shapes(algorithm, message, kept, key):
    first = jax.tree.map(lambda leaf: leaf[0], (message.personal, kept))
    message = Message(message.shared, first[0])
    return message, algorithm.client_start(message, first[1], key)


def _train_chunk(
    algorithm: Algorithm,
    data: FederatedDataset,
    message: Message,
    kept: Tree,
    ids: Int[Array, " chunk"],
    key: PRNGKey,
    schedule: LocalSchedule,
) -> Update:
    sizes = client_sizes(data, ids)
    num_steps = num_local_steps(sizes, schedule)
    keys = jax.vmap(lambda id: jax.random.split(jax.random.fold_in(key, id)))(ids)
    orders = jax.vmap(_epoch_orders, in_axes=(0, 0, None))(keys[:, 0], sizes, schedule)
    over_clients = Message(None, 0)

    def one_client_step(step, carry, id, size, num_steps, order):
        epoch, batch_index = jnp.divmod(
            step, jnp.maximum(num_steps // schedule.local_epochs, 1)
        )
        positions = batch_index * schedule.batch_size + jnp.arange(schedule.batch_size)
        is_live = step < num_steps
        places = order.at[epoch, positions].get(mode="clip")
        batch = gather(data, id, places, (positions < size) & is_live)
        progress = Progress(step, num_steps, epoch)
        new_carry = algorithm.client_step(carry, batch, progress)
        if schedule.chunk_size == 1:
            # The loop ends with this client: no step is padding.
            return new_carry
        return tree.where(is_live, new_carry, carry)

    def step_all(step, carry):
        in_axes = (None, 0, 0, 0, 0, 0)
        step_clients = jax.vmap(one_client_step, in_axes)
        return step_clients(step, carry, ids, sizes, num_steps, orders)

    start = jax.vmap(algorithm.client_start, in_axes=(over_clients, 0, 0))
    carry = start(message, kept, keys[:, 1])
    carry = jax.lax.fori_loop(0, num_steps.max(), step_all, carry)
    return jax.vmap(algorithm.client_finish, in_axes=(over_clients, 0))(message, carry)


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
