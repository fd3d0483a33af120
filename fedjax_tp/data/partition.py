"""Who holds which examples: labels in, lists of example indices a client out.

Every scheme writes a matrix of shares: which part of each class each client holds.
`deal` hands out the training and the test examples by the same shares, so a client's
test split has the class mix of its training split. NumPy alone, one seeded generator,
and every loop is bounded.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fedjax_tp.types import InputError, NumpyInts

Shares = Float[np.ndarray, "clients classes"]
Counts = Int[np.ndarray, "clients classes"]

_DIRICHLET_DRAWS = 20


class Partition(NamedTuple):
    """Indices into the training and the test examples, one array a client."""

    train: tuple[NumpyInts, ...]
    test: tuple[NumpyInts, ...]

    @property
    def num_clients(self) -> int:
        return len(self.train)


class Request(NamedTuple):
    """What a scheme may look at: labels of the training examples, and settings.

    Attributes:
      labels: class of each training example, 0..num_classes-1.
      alpha: concentration of the Dirichlet draws.
      classes_per_client: classes (pathological) or shards (shards) a client.
      min_examples: training examples every client has at least.
      superclass: coarse class of each class, or None.
    """

    labels: NumpyInts
    num_classes: int
    num_clients: int
    alpha: float = 0.3
    classes_per_client: int = 2
    min_examples: int = 10
    superclass: NumpyInts | None = None


def deal(
    labels: NumpyInts, shares: Shares, rng: np.random.Generator
) -> tuple[NumpyInts, ...]:
    """Deals the examples of each class to the clients by their shares of that class.

    Args:
      labels: class of each example, 0..classes-1.
      shares: share of each class that each client holds; columns sum to 1.
      rng: shuffles the examples of a class before they are dealt.

    Returns:
      Sorted example indices for each client; each example goes to exactly one.
    """
    counts = _round_shares(shares, np.bincount(labels, minlength=shares.shape[1]))
    held: list[list[np.ndarray]] = [[] for _ in range(len(shares))]
    for label in range(shares.shape[1]):
        examples = rng.permutation(np.flatnonzero(labels == label))
        parts = np.split(examples, np.cumsum(counts[:-1, label]))
        for client, part in enumerate(parts):
            held[client].append(part)
    return tuple(np.sort(np.concatenate(parts)) for parts in held)


def iid(request: Request, rng: np.random.Generator) -> Shares:
    """A random split into parts whose sizes differ by at most one."""
    shuffled = rng.permutation(request.labels)
    parts = np.array_split(shuffled, request.num_clients)
    return _as_shares(
        np.stack([np.bincount(p, minlength=request.num_classes) for p in parts])
    )


def pathological(request: Request, rng: np.random.Generator) -> Shares:
    """k classes a client, each split among its holders in parts ~ U(0.4, 0.6).

    The rule of pFedHN that FedTP's code uses: classes are dealt from those with most
    places left, so that each has the same number of holders to within one.

    Raises:
      InputError: k is not in 1..num_classes, or some class would have no holder.
    """
    num_classes, per_client = request.num_classes, request.classes_per_client
    if not 1 <= per_client <= num_classes:
        raise InputError(
            f"classes per client is {per_client}; this data allows 1 to {num_classes}"
        )
    places = request.num_clients * per_client
    if places < num_classes:
        raise InputError(
            f"{request.num_clients} clients with {per_client} classes each leave some "
            f"of the {num_classes} classes without a client; clients times classes "
            f"per client must be at least {num_classes}"
        )
    open_places = np.full(num_classes, places // num_classes)
    open_places[rng.permutation(num_classes)[: places % num_classes]] += 1
    shares = np.zeros((request.num_clients, num_classes))
    for client in range(request.num_clients):
        order = rng.permutation(num_classes)
        fullest = order[np.argsort(-open_places[order], kind="stable")]
        chosen = fullest[:per_client]
        shares[client, chosen] = rng.uniform(0.4, 0.6, per_client)
        open_places[chosen] -= 1
    return shares / shares.sum(axis=0)


def dirichlet(request: Request, rng: np.random.Generator) -> Shares:
    """Each class is spread over the clients by Dir(alpha); clients keep a minimum.

    As in FedTP's code, a client that already holds its equal part of the examples
    gets none of the classes that follow. Where the original draws again without end
    until every client has the minimum, this draws at most a fixed number of times and
    then tops up the clients below it from those that hold most.

    Raises:
      InputError: the minimum cannot be met; the message names the largest that can.
    """
    _require_minimum(request, f"dirichlet (alpha {request.alpha:g})")
    for _ in range(_DIRICHLET_DRAWS):
        counts = _dirichlet_counts(request, rng)
        if counts.sum(axis=1).min() >= request.min_examples:
            break
    _top_up(counts, request.min_examples)
    return _as_shares(counts)


def _dirichlet_counts(request: Request, rng: np.random.Generator) -> Counts:
    class_sizes = np.bincount(request.labels, minlength=request.num_classes)
    counts = np.zeros((request.num_clients, request.num_classes), int)
    equal_part = class_sizes.sum() / request.num_clients
    for label in rng.permutation(np.flatnonzero(class_sizes)):
        open_clients = counts.sum(axis=1) < equal_part
        draw = rng.dirichlet(np.full(request.num_clients, request.alpha))
        shares = np.where(open_clients, draw, 0.0)
        # A tiny alpha can put the whole class on clients that are already full.
        if not shares.sum() > 0:
            shares = open_clients.astype(float)
        shares = shares / shares.sum()
        counts[:, [label]] = _round_shares(shares[:, None], class_sizes[[label]])
    return counts


def dirichlet2(request: Request, rng: np.random.Generator) -> Shares:
    """Pachinko allocation: a mix over superclasses ~ Dir(alpha), inside ~ Dir(10).

    Clients draw in turn, without replacement, an equal number of examples each; a
    class that is used up drops out of the mixes that follow (FedTP's CIFAR-100 split).

    Raises:
      InputError: the data has no superclasses.
    """
    superclass = request.superclass
    if superclass is None:
        raise InputError(
            "dirichlet2 needs superclasses, which this data set does not have; "
            "cifar100 has, and an .npz may hold an array `superclass`"
        )
    left = np.bincount(request.labels, minlength=request.num_classes)
    groups = [np.flatnonzero(superclass == g) for g in np.unique(superclass)]
    counts = np.zeros((request.num_clients, request.num_classes), int)
    parts = np.array_split(request.labels, request.num_clients)
    for client, part in enumerate(parts):
        coarse_mix = rng.dirichlet(np.full(len(groups), request.alpha))
        mix = np.zeros(request.num_classes)
        for weight, members in zip(coarse_mix, groups, strict=True):
            mix[members] = weight * rng.dirichlet(np.full(len(members), 10.0))
        counts[client] = _draw_without_replacement(len(part), mix, left, rng)
        left = left - counts[client]
    return _as_shares(counts)


def _draw_without_replacement(
    size: int,
    mix: Float[np.ndarray, " classes"],
    left: Int[np.ndarray, " classes"],
    rng: np.random.Generator,
) -> Int[np.ndarray, " classes"]:
    drawn = np.zeros_like(left)
    while (missing := size - drawn.sum()) > 0:
        room = left - drawn
        open_mix = np.where(room > 0, mix, 0.0)
        if not open_mix.sum() > 0:
            open_mix = room.astype(float)
        wanted = rng.multinomial(missing, open_mix / open_mix.sum())
        drawn = drawn + np.minimum(wanted, room)
    return drawn


def shards(request: Request, rng: np.random.Generator) -> Shares:
    """The examples sorted by class, cut in equal shards, some shards a client.

    The non-IID split of FedAvg (McMahan et al. 2017, section 3).

    Raises:
      InputError: fewer examples than shards, or less than one shard a client.
    """
    num_shards = request.num_clients * request.classes_per_client
    if not 1 <= num_shards <= len(request.labels):
        raise InputError(
            f"{request.num_clients} clients with {request.classes_per_client} shards "
            f"each is {num_shards} shards; allowed are 1 to {len(request.labels)}, "
            "the number of examples"
        )
    pieces = np.array_split(np.sort(request.labels), num_shards)
    counts = np.zeros((request.num_clients, request.num_classes), int)
    for place, piece in enumerate(rng.permutation(num_shards)):
        client = place % request.num_clients
        counts[client] += np.bincount(pieces[piece], minlength=request.num_classes)
    return _as_shares(counts)


def quantity(request: Request, rng: np.random.Generator) -> Shares:
    """Sizes ~ Dir(alpha), all clients with the class mix of the whole set.

    Raises:
      InputError: the minimum cannot be met; the message names the largest that can.
    """
    _require_minimum(request, f"quantity (alpha {request.alpha:g})")
    sizes = rng.dirichlet(np.full(request.num_clients, request.alpha))
    sizes = sizes / sizes.sum() if sizes.sum() > 0 else np.ones_like(sizes) / len(sizes)
    shares = np.repeat(sizes[:, None], request.num_classes, axis=1)
    class_sizes = np.bincount(request.labels, minlength=request.num_classes)
    counts = _round_shares(shares, class_sizes)
    _top_up(counts, request.min_examples)
    return _as_shares(counts)


def _round_shares(shares: Shares, class_sizes: Int[np.ndarray, " classes"]) -> Counts:
    """Whole numbers of examples, column sums kept, by rounding cumulative shares."""
    bounds = np.rint(np.cumsum(shares, axis=0) * class_sizes).astype(int)
    # Rounding errors in the last cumulative sum must not lose an example.
    bounds[-1] = class_sizes
    return np.diff(bounds, axis=0, prepend=0)


def _as_shares(counts: Counts) -> Shares:
    totals = counts.sum(axis=0)
    equal = np.full(counts.shape, 1 / len(counts))
    return np.where(totals > 0, counts / np.maximum(totals, 1), equal)


def _require_minimum(request: Request, scheme: str) -> None:
    available = len(request.labels)
    needed = request.num_clients * request.min_examples
    if needed > available:
        raise InputError(
            f"{scheme} with {request.num_clients} clients and at least "
            f"{request.min_examples} examples each needs {needed} examples, there are "
            f"{available}; the largest feasible minimum is "
            f"{available // request.num_clients}"
        )


def _top_up(counts: Counts, minimum: int) -> None:
    """Moves examples, in place, from the largest clients to those below `minimum`."""
    for client in np.flatnonzero(counts.sum(axis=1) < minimum):
        while (missing := minimum - counts[client].sum()) > 0:
            donor = counts.sum(axis=1).argmax()
            label = counts[donor].argmax()
            spare = counts[donor].sum() - minimum
            moved = min(missing, spare, counts[donor, label])
            counts[donor, label] -= moved
            counts[client, label] += moved


SCHEMES: dict[str, Callable[[Request, np.random.Generator], Shares]] = {
    "iid": iid,
    "pathological": pathological,
    "dirichlet": dirichlet,
    "dirichlet2": dirichlet2,
    "shards": shards,
    "quantity": quantity,
}


def make_partition(
    scheme: str, request: Request, test_labels: NumpyInts, *, seed: int
) -> Partition:
    """Splits a data set over clients by a scheme's name.

    Args:
      scheme: one of `SCHEMES`.
      request: labels of the training examples, and the scheme's settings.
      test_labels: labels of the test examples, dealt by the same shares.
      seed: the same seed gives the same partition on every machine.

    Raises:
      InputError: unknown scheme, or settings that are not allowed or cannot be met.
    """
    if scheme not in SCHEMES:
        known = ", ".join([*SCHEMES, "natural", "file:PATH"])
        raise InputError(f"unknown partition {scheme!r}; known are {known}")
    check_settings(request)
    if request.num_clients > len(request.labels):
        raise InputError(
            f"{request.num_clients} clients cannot each have a training example; "
            f"there are {len(request.labels)}"
        )
    rng = np.random.default_rng(seed)
    shares = SCHEMES[scheme](request, rng)
    parts = (deal(request.labels, shares, rng), deal(test_labels, shares, rng))
    return _without_empty_clients(Partition(*parts), scheme)


def natural(
    owners: tuple[NumpyInts, NumpyInts],
    total: int,
    num_clients: int | None,
    *,
    seed: int,
) -> Partition:
    """Every owner of examples a client; some of them drawn at random if asked for.

    Args:
      owners: of each training and each test example, 0..total-1.
      total: number of owners.
      num_clients: so many of them; None for all.
      seed: of the draw.

    Raises:
      InputError: more clients than owners, or less than one.
    """
    wanted = total if num_clients is None else num_clients
    if not 1 <= wanted <= total:
        raise InputError(
            f"number of clients is {wanted}; this data has 1 to {total} by nature"
        )
    drawn = np.sort(np.random.default_rng(seed).permutation(total)[:wanted])

    def held(owner: NumpyInts) -> tuple[NumpyInts, ...]:
        order = np.argsort(owner, kind="stable")
        bounds = np.searchsorted(owner[order], np.arange(total + 1))
        return tuple(order[bounds[i] : bounds[i + 1]] for i in drawn)

    return _without_empty_clients(Partition(*map(held, owners)), "natural")


def check_settings(request: Request) -> None:
    """Raises InputError for settings that no data could make valid."""
    alpha = request.alpha
    if not (np.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha is {alpha}; allowed are finite numbers above 0")
    for name, value in (
        ("number of clients", request.num_clients),
        ("classes per client", request.classes_per_client),
        ("minimum of examples", request.min_examples),
    ):
        if value < 1:
            raise InputError(f"{name} is {value}; allowed is 1 or more")


def _without_empty_clients(partition: Partition, scheme: str) -> Partition:
    empty = [i for i, part in enumerate(partition.train) if len(part) == 0]
    if empty:
        raise InputError(
            f"partition {scheme!r} leaves {len(empty)} of {partition.num_clients} "
            f"clients without a training example (client {empty[0]} first); "
            "allowed are fewer clients or more examples"
        )
    return partition


def read_partition(
    path: str | Path, num_train: int, num_test: int, num_clients: int | None = None
) -> Partition:
    """Reads index lists `{"train": [[...], ...], "test": [[...], ...]}` from JSON.

    Raises:
      InputError: unreadable file, wrong structure, an index out of range or used
        twice, a client without training examples, another number of clients.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read partition file {path}: {error}") from None
    if not isinstance(content, dict) or not {"train", "test"} <= content.keys():
        raise InputError(
            f"partition file {path} must hold an object with the lists train and test"
        )
    made_for = content.get("examples", {"train": num_train, "test": num_test})
    if made_for != {"train": num_train, "test": num_test}:
        raise InputError(
            f"partition file {path} was made for {made_for} examples; this data has "
            f"{num_train} for training and {num_test} for test"
        )
    train = _index_lists(content["train"], num_train, f"{path}: train")
    test = _index_lists(content["test"], num_test, f"{path}: test")
    if len(train) != len(test):
        raise InputError(
            f"partition file {path} has {len(train)} clients in train and "
            f"{len(test)} in test; they must be equal"
        )
    if num_clients is not None and num_clients != len(train):
        raise InputError(
            f"number of clients is {num_clients}; partition file {path} holds "
            f"{len(train)}"
        )
    return _without_empty_clients(Partition(train, test), f"file:{path}")


def _index_lists(lists: Any, limit: int, place: str) -> tuple[NumpyInts, ...]:
    if not isinstance(lists, list) or not lists:
        raise InputError(f"{place} must be a non-empty list of lists of indices")
    used = np.zeros(limit, bool)
    parts = []
    for client, part in enumerate(lists):
        good = isinstance(part, list) and all(type(index) is int for index in part)
        if not good:
            raise InputError(f"{place}, client {client}: must be a list of integers")
        outside = [index for index in part if not 0 <= index < limit]
        if outside:
            raise InputError(
                f"{place}, client {client}: index {outside[0]}; allowed are 0 to "
                f"{limit - 1}"
            )
        indices = np.array(part, int)
        twice = indices[used[indices]]
        if len(twice) or len(np.unique(indices)) < len(indices):
            raise InputError(f"{place}, client {client}: an index is used twice")
        used[indices] = True
        parts.append(indices)
    return tuple(parts)


def label_counts(
    parts: tuple[NumpyInts, ...], labels: NumpyInts, num_classes: int
) -> Counts:
    """How many examples of each class each client holds, `[clients, classes]`."""
    return np.stack([np.bincount(labels[p], minlength=num_classes) for p in parts])
