"""A data set on the device together with who holds which examples.

Examples are stored once, as they are (uint8 where possible), and their row numbers
sorted by client: a client is a start and a size, skewed sizes cost no padding, and runs
that deal the same examples differently share them. Batches are gathered and normalized
inside the compiled program.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from fedjax_tp.data.catalog import Dataset
from fedjax_tp.types import Array, Batch, Bool, Int, NumpyInts, PRNGKey

Split = Literal["train", "test"]


class FederatedDataset(NamedTuple):
    """One split (train or test) of a data set held by `clients` clients.

    Attributes:
      x: raw examples.
      y: labels.
      rows: where in x and y the examples of the clients are, those of client 0 first.
      start: position in `rows` of the first example of each client.
      size: number of examples of each client.
      mean, std: normalization constants in the units of `x`.
    """

    x: Num[Array, "examples *example"]
    y: Int[Array, " examples"]
    rows: Int[Array, "*seeds held"]
    start: Int[Array, "*seeds clients"]
    size: Int[Array, "*seeds clients"]
    mean: Float[Array, " channels"]
    std: Float[Array, " channels"]

    @property
    def num_clients(self) -> int:
        return self.size.shape[-1]


def federate(
    dataset: Dataset, split: Split, partitions: Sequence[tuple[NumpyInts, ...]]
) -> FederatedDataset:
    """Puts one split of a data set on the device, with who holds what.

    Args:
      dataset: the arrays.
      split: `train` or `test`.
      partitions: example indices held by each client (see `data.partition`), of as many
        clients in each partition. Of several, `rows`, `start` and `size` are stacked.
    """
    if split == "train":
        x, y = dataset.x_train, dataset.y_train
    else:
        x, y = dataset.x_test, dataset.y_test
    rows = [np.concatenate(parts).astype(np.int32) for parts in partitions]
    # One row at least keeps every gather legal; nobody holds what fills up.
    longest = max(1, *map(len, rows))
    padded = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    sizes = np.array([[len(part) for part in parts] for parts in partitions], np.int32)
    starts = np.cumsum(sizes, axis=1, dtype=np.int32) - sizes
    if len(partitions) == 1:
        padded, starts, sizes = padded[0], starts[0], sizes[0]
    return FederatedDataset(
        jnp.asarray(x),
        jnp.asarray(y),
        jnp.asarray(padded),
        jnp.asarray(starts),
        jnp.asarray(sizes),
        jnp.asarray(dataset.mean),
        jnp.asarray(dataset.std),
    )


def client_sizes(
    data: FederatedDataset, ids: Int[Array, " cohort"]
) -> Int[Array, " cohort"]:
    """Number of examples of each client; 0 for a padded id (one past the last)."""
    return data.size.at[ids].get(mode="fill", fill_value=0)


def shuffled(key: PRNGKey, size: Int[Array, ""], capacity: int) -> Int[Array, " n"]:
    """A random order of 0..size-1 in the first `size` of `capacity` places.

    The order depends on key and size alone, not on the capacity.
    """
    draws = jax.random.bits(key, (capacity,), jnp.uint32)
    # Padding sorts last: a real draw as large as its filler stands before it, and the
    # sort is stable.
    filler = jnp.uint32(jnp.iinfo(jnp.uint32).max)
    draws = jnp.where(jnp.arange(capacity) < size, draws, filler)
    return jnp.argsort(draws, stable=True).astype(jnp.int32)


def normalized(x: Any, of: Dataset | FederatedDataset) -> Any:
    """Raw examples as models see them: float32, by the constants of their data set."""
    return (x.astype(np.float32) - of.mean) / of.std


def gather(
    data: FederatedDataset,
    client: Int[Array, ""],
    places: Int[Array, " batch"],
    mask: Bool[Array, " batch"],
) -> Batch:
    """A batch of one client's examples, normalized.

    Args:
      data: the federated split.
      client: the client's id.
      places: places among the client's examples, 0..size-1.
      mask: False where a place is padding.
    """
    start = data.start.at[client].get(mode="clip")
    # Padding repeats the client's own first example: a pixel that is not finite must
    # not reach another client, where even a masked loss has a gradient of NaN.
    rows = data.rows[start + jnp.where(mask, places, 0)]
    return Batch(normalized(data.x[rows], data), data.y[rows], mask)
