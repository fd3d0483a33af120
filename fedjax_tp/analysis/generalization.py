"""How far training and test error may lie apart, by what is shared and what is not.

A bound of Baxter's (2000) multi-task kind, which is ours and not the FedTP paper's. Let
the loss lie in [0, 1]. Client i of N uses parameters some of which all clients share,
while it has a block of others for itself, and has m examples; all N m are independent.
Over all parameters in balls whose centres and radii do not depend on the examples, and
in which the loss of every possible example has the Lipschitz constants below, with
probability 1 - delta,

    |true error - training error|  <=  2 eta + sqrt((C(eta) + log(2 / delta)) / (2 N m))

for every eta > 0, errors being means over clients. C(eta) is the log of the number of
points that come within eta of every choice of parameters, in mean loss over clients. A
ball of radius R in D dimensions is covered by (1 + 2 R / r)^D balls of radius r, and in
a block whose Lipschitz constant is L, r = s eta / L moves the loss by s eta; so

    C(eta) = sum over blocks of  D log(1 + 2 R L / (s eta)),  N times if clients have
                                                              each their own,

for shares s that sum to 1. Hoeffding's inequality at each of those points, and 2 eta
for the way there, in both errors, give the bound.

Divided by N m, a shared block costs D / (N m), and one of each client's own D / m
whatever N: FedTP pays for the hypernetwork together and for the embedding alone.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_tp import tree
from fedjax_tp.hypernetwork import HypernetworkConfig, emit
from fedjax_tp.models.task import Metrics, Task, is_statistic
from fedjax_tp.types import (
    Array,
    Batch,
    Bool,
    Float,
    InputError,
    Int,
    Params,
    PRNGKey,
    Tree,
)

_SCALES = np.geomspace(1e-6, 0.5, 400)


def expected_error(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """1 - softmax(logits)[label]: how often a label drawn from the model's own
    probabilities is wrong; in [0, 1], and smooth."""
    wrong = jnp.arange(logits.shape[-1]) != labels[..., None]
    # A sum of the others' probabilities, which keeps its digits where it is small.
    return jnp.sum(jax.nn.softmax(logits) * wrong, axis=-1)


def with_expected_error(task: Task) -> Task:
    """The same task, whose metrics have the expected error in place of the loss.

    Args:
      task: of classes, one label an example.
    """

    def score(logits: Array, batch: Batch) -> Metrics:
        errors = jnp.where(batch.mask, expected_error(logits, batch.y), 0.0)
        return task.score(logits, batch)._replace(loss=jnp.sum(errors))

    def metrics(params: Params, batch: Batch) -> Metrics:
        return score(task.apply(params, batch.x), batch)

    return task._replace(metrics=metrics, score=score)


class GradientNorms(NamedTuple):
    """Lipschitz constants of the expected error at one model, an example each.

    Attributes:
      shared: Euclidean norm of the gradient of the parameters that clients share.
      personal: likewise, of those that are each client's own.
    """

    shared: Float[Array, " batch"]
    personal: Float[Array, " batch"]


def gradient_norms(
    task: Task, params: Params, batch: Batch, is_personal: tree.PathPredicate
) -> GradientNorms:
    """How fast one client's expected error changes with its parameters.

    Args:
      task: of classes.
      params: of the client. Running statistics, which no gradient moves, count for
        nothing.
      batch: its examples; masked ones give 0.
      is_personal: which parameters are its own.
    """

    def error(params: Params, x: Array, y: Array) -> Array:
        return expected_error(task.apply(params, x[None]), y[None])[0]

    def of_example(x: Array, y: Array, mask: Bool[Array, ""]) -> GradientNorms:
        _, gradient = tree.split(jax.grad(error)(params, x, y), is_statistic)
        personal, shared = tree.split(gradient, is_personal)
        norms = GradientNorms(euclidean_norm(shared), euclidean_norm(personal))
        return jax.tree.map(lambda norm: jnp.where(mask, norm, 0.0), norms)

    return jax.vmap(of_example)(batch.x, batch.y, batch.mask)


def euclidean_norm(params: Tree) -> Float[Array, ""]:
    """Of all numbers together; 0 of an empty tree."""
    squares = [jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)]
    return jnp.sqrt(jnp.asarray(sum(squares), jnp.float32))


class OperatorNorms(NamedTuple):
    """Largest singular values of the hypernetwork's derivatives, one a client: how fast
    all that is emitted for it changes with phi, and with its embedding z."""

    phi: Float[Array, " clients"]
    z: Float[Array, " clients"]


def operator_norms(
    phi: Params,
    z: Float[Array, "clients embedding_dim"],
    template: Tree,
    config: HypernetworkConfig,
    key: PRNGKey,
    *,
    iterations: int = 30,
) -> OperatorNorms:
    """Lipschitz constants of h(phi; z) at given embeddings, by power iteration.

    Estimates from below, which come near in a few tens of iterations.

    Args:
      phi, z, template, config: as for `hypernetwork.emit`.
      key: draws where the iterations begin.
      iterations: of the power iteration.
    """

    def largest_singular_value(
        apply: Callable[[Tree], Tree], at: Tree, key: PRNGKey
    ) -> Float[Array, ""]:
        _, forward = jax.linearize(apply, at)
        backward = jax.linear_transpose(forward, at)
        leaves, structure = jax.tree.flatten(at)
        keys = jax.random.split(key, len(leaves))
        drawn = [
            jax.random.normal(leaf_key, leaf.shape)
            for leaf_key, leaf in zip(keys, leaves, strict=True)
        ]

        def normalized(direction: Tree) -> Tree:
            norm = jnp.maximum(euclidean_norm(direction), 1e-30)
            return jax.tree.map(lambda leaf: leaf / norm, direction)

        def iterate(_: Array, direction: Tree) -> Tree:
            (back,) = backward(forward(direction))
            return normalized(back)

        start = normalized(jax.tree.unflatten(structure, drawn))
        direction = jax.lax.fori_loop(0, iterations, iterate, start)
        return euclidean_norm(forward(direction))

    def of_client(z: Float[Array, " embedding_dim"]) -> OperatorNorms:
        phi_key, z_key = jax.random.split(key)
        return OperatorNorms(
            largest_singular_value(
                lambda phi: emit(phi, z[None], template, config), phi, phi_key
            ),
            largest_singular_value(
                lambda z: emit(phi, z[None], template, config), z, z_key
            ),
        )

    # One client at a time: a direction is as large as phi.
    return jax.lax.map(of_client, z)


class Block(NamedTuple):
    """A part of the parameters, for the bound.

    Attributes:
      name: for tables.
      size: D, how many numbers.
      radius: R, of the ball they lie in.
      lipschitz: L, by how much a loss changes at most with one unit of distance.
      is_personal: does each client have its own?
    """

    name: str
    size: int
    radius: float
    lipschitz: float
    is_personal: bool


class Bound(NamedTuple):
    """The bound, and what it is made of.

    Attributes:
      gap: of training and true error, at most; above 1 it says nothing.
      scale: the eta that makes it smallest.
      entropy: of each block, D log(1 + 2 R L / (s eta)), of all clients together.
    """

    gap: float
    scale: float
    entropy: dict[str, float]


def entropies(
    blocks: Sequence[Block],
    num_clients: int | float,
    scales: Float[np.ndarray, " scales"],
) -> Float[np.ndarray, "blocks scales"]:
    """The terms of C(eta), in nats; shares go by the number of parameters.

    Raises:
      InputError: a size, radius or constant that is negative or not finite, or no
        parameters at all.
    """
    for block in blocks:
        for name in ("size", "radius", "lipschitz"):
            value = getattr(block, name)
            if not 0 <= value < float("inf"):
                raise InputError(
                    f"{name} of {block.name} is {value}; allowed are finite numbers, "
                    "0 or more"
                )
    sizes = np.array(
        [block.size * (num_clients if block.is_personal else 1) for block in blocks],
        np.float64,
    )
    if sizes.sum() == 0:
        raise InputError("blocks have no parameters; allowed is 1 or more")
    reach = np.array([2 * block.radius * block.lipschitz for block in blocks])
    # A block without numbers has no share, and needs none.
    shares = np.where(sizes > 0, sizes, 1.0) / sizes.sum()
    ratio = reach[:, None] / (shares[:, None] * scales)
    return np.asarray(sizes[:, None] * np.log1p(ratio))


def generalization_bound(
    blocks: Sequence[Block],
    num_clients: int,
    samples: int | float,
    *,
    delta: float = 0.05,
) -> Bound:
    """The bound at the eta that makes it smallest; see the module.

    Args:
      blocks: all parameters of the model.
      num_clients: N.
      samples: m, training examples a client.
      delta: the probability that it fails.

    Raises:
      InputError: N or m below 1, delta outside (0, 1), or as for `entropies`.
    """
    _check(num_clients, delta)
    if not samples >= 1:
        raise InputError(f"samples is {samples}; allowed is 1 or more")
    terms = entropies(blocks, num_clients, _SCALES)
    spread = (terms.sum(axis=0) + np.log(2 / delta)) / (2 * num_clients * samples)
    gaps = 2 * _SCALES + np.sqrt(spread)
    best = int(np.argmin(gaps))
    names = [block.name for block in blocks]
    entropy = dict(zip(names, terms[:, best].tolist(), strict=True))
    return Bound(float(gaps[best]), float(_SCALES[best]), entropy)


def samples_needed(
    blocks: Sequence[Block],
    num_clients: int | float,
    *,
    gap: float,
    delta: float = 0.05,
) -> float:
    """m, examples a client, from which on the bound is at most `gap`; at least 1.

    With eta = gap / 4, so that m is 2 / (N gap^2) (C(gap / 4) + log(2 / delta)): the
    terms of shared blocks fall as 1 / N, those of personal ones stay.

    Args:
      blocks: all parameters of the model.
      num_clients: N; also more than memory holds.
      gap: of training and true error.
      delta: the probability that it fails.

    Raises:
      InputError: N below 1, a gap or delta outside (0, 1), or as for `entropies`.
    """
    _check(num_clients, delta)
    if not 0 < gap < 1:
        raise InputError(f"gap is {gap}; allowed are numbers between 0 and 1")
    total = entropies(blocks, num_clients, np.array([gap / 4])).sum()
    return float(max(1.0, 2 / (num_clients * gap**2) * (total + np.log(2 / delta))))


def _check(num_clients: int | float, delta: float) -> None:
    if not num_clients >= 1:
        raise InputError(f"num clients is {num_clients}; allowed is 1 or more")
    if not 0 < delta < 1:
        raise InputError(f"delta is {delta}; allowed are numbers between 0 and 1")
