"""How different clients' data are, and how far averaging drifts from central training.

Zhao et al. 2018 (arXiv 1806.00582): the earth mover's distance of a client's labels to
the population's, the weight divergence of FedAvg from central SGD, and a bound on it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_tp import tree
from fedjax_tp.analysis.layers import Layers, layer_norms
from fedjax_tp.models.task import Task, is_statistic
from fedjax_tp.types import Array, Batch, Float, InputError, Int, Params

Distribution = Float[np.ndarray, "*#clients classes"]
Counts = Int[np.ndarray, "clients classes"]


def earth_movers_distance(p: Distribution, q: Distribution) -> Float[np.ndarray, "..."]:
    """sum_i |p_i - q_i|: 0 for equal distributions, 2 for disjoint ones.

    The L1 distance, not halved, as in the paper (section 3.3). All classes are as far
    from one another: renumbering them changes nothing, as it would the distance along a
    line of class numbers.

    Args:
      p, q: distributions over classes along the last axis; each sums to 1.

    Raises:
      InputError: numbers that are no distribution.
    """
    for name, values in (("p", p), ("q", q)):
        if not (np.all(values >= 0) and np.allclose(values.sum(axis=-1), 1, atol=1e-4)):
            raise InputError(
                f"{name} is no distribution over classes: entries must be 0 or more "
                f"and sum to 1; sums are {np.unique(np.round(values.sum(axis=-1), 4))}"
            )
    return np.asarray(np.abs(p - q).sum(axis=-1))


def effective_classes(p: Distribution) -> Float[np.ndarray, "..."]:
    """exp of the entropy: how many equally frequent classes would be as diverse."""
    logs = np.log(np.where(p > 0, p, 1.0))
    return np.asarray(np.exp(-np.sum(p * logs, axis=-1)))


def gini(sizes: np.ndarray) -> float:
    """Gini coefficient of sizes: 0 for equal ones, towards 1 if one has everything.

    Mean absolute difference of two clients over twice the mean size.
    """
    ordered = np.sort(np.asarray(sizes, np.float64))
    total, count = ordered.sum(), len(ordered)
    if total == 0:
        return 0.0
    ranks = np.arange(1, count + 1)
    return float(2 * np.sum(ranks * ordered) / (count * total) - (count + 1) / count)


class Heterogeneity(NamedTuple):
    """How unequal the clients of a partition are. Clients without examples have no
    distribution: they are listed in `empty`, and their figures are NaN.

    Attributes:
      emd: of each client's labels to the population's.
      classes: effective classes of each client.
      sizes: examples of each client.
      mean_emd: over clients, weighted by examples, as in the paper's bound.
      mean_classes: over clients with examples, each counting once.
      population_classes: effective classes of all examples.
      size_variation: standard deviation of the sizes over their mean.
      size_gini: Gini coefficient of the sizes.
      empty: clients without examples.
    """

    emd: Float[np.ndarray, " clients"]
    classes: Float[np.ndarray, " clients"]
    sizes: Int[np.ndarray, " clients"]
    mean_emd: float
    mean_classes: float
    population_classes: float
    size_variation: float
    size_gini: float
    empty: tuple[int, ...]


def heterogeneity(counts: Counts) -> Heterogeneity:
    """Measures a partition.

    Args:
      counts: examples of each class at each client (`partition.label_counts`).

    Raises:
      InputError: no client has an example.
    """
    sizes = counts.sum(axis=1)
    if not sizes.any():
        raise InputError("no client has an example; there is nothing to be compared")
    population = counts.sum(axis=0) / sizes.sum()
    has_some = sizes > 0
    p = counts[has_some] / sizes[has_some, None]
    emd, classes = np.full((2, len(sizes)), np.nan)
    emd[has_some] = earth_movers_distance(p, population)
    classes[has_some] = effective_classes(p)
    return Heterogeneity(
        emd,
        classes,
        sizes,
        mean_emd=float(np.sum(emd[has_some] * sizes[has_some]) / sizes.sum()),
        mean_classes=float(classes[has_some].mean()),
        population_classes=float(effective_classes(population)),
        size_variation=float(sizes.std() / sizes.mean()),
        size_gini=gini(sizes),
        empty=tuple(np.flatnonzero(~has_some).tolist()),
    )


def weight_divergence(federated: Params, central: Params) -> Float[Array, ""]:
    """|w_fed - w_central| / |w_central| over all weights, running statistics apart."""
    difference = jax.tree.map(jnp.subtract, federated, central)
    return weight_norm(difference) / weight_norm(central)


def weight_divergence_by_layer(
    federated: Params, central: Params, layers: Layers
) -> Float[Array, " layers"]:
    """`weight_divergence` of each layer; where it is 0 centrally, of 0 / 0 too, 0 or
    infinity."""
    difference = layer_norms(jax.tree.map(jnp.subtract, federated, central), layers)
    norms = layer_norms(central, layers)
    ratio = difference / jnp.where(norms > 0, norms, 1.0)
    return jnp.where(norms > 0, ratio, jnp.where(difference > 0, jnp.inf, 0.0))


def weight_norm(params: Params) -> Float[Array, ""]:
    """The Euclidean norm of all weights, running statistics apart."""
    _, params = tree.split(params, is_statistic)
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)))


def divergence_bound(
    previous: float,
    weights: Float[np.ndarray, " clients"],
    emd: Float[np.ndarray, " clients"],
    label_shares: Float[np.ndarray, "clients classes"],
    lipschitz: Float[np.ndarray, " classes"],
    largest_gradients: Float[np.ndarray, " steps"],
    lr: float,
) -> float:
    """Bound on |w_fed - w_central| after one more round of T steps (proposition 3.1).

    sum_k n_k/n a_k^T previous + lr sum_k n_k/n EMD_k sum_{j=0}^{T-1} a_k^j g_{T-1-j},
    with a_k = 1 + lr sum_i p_k(i) lambda_i. All clients take part, with plain SGD on
    their expected gradients. The sum over j starts at 0, as our own derivation has it.

    Args:
      previous: the distance before the round.
      weights: n_k / n, which sum to 1.
      emd: earth mover's distance of each client to the population.
      label_shares: p_k(i), each client's distribution over classes.
      lipschitz: lambda_i, of the gradient of class i's expected loss.
      largest_gradients: max_i |gradient of class i's expected loss| at the central
        weights before each of the round's T steps.
      lr: of the SGD.

    Returns:
      The bound; infinity where it is past the floats.
    """
    steps = len(largest_gradients)
    with np.errstate(over="ignore"):
        growth = 1 + lr * label_shares @ lipschitz
        powers = growth[:, None] ** np.arange(steps)
        carried = np.sum(weights * growth**steps) * previous if previous > 0 else 0.0
        drift = np.sum(weights * emd * (powers @ largest_gradients[::-1]))
    return float(carried + lr * drift)


def class_gradients(
    task: Task, params: Params, batch: Batch, num_classes: int
) -> Float[Array, "classes parameters"]:
    """Gradient of each class's mean loss over a batch by the weights, flat; 0 for an
    absent class.

    Args:
      task: model and loss; without dropout.
      params: where.
      batch: examples of all classes.
      num_classes: as many gradients.
    """

    statistics, weights = tree.split(params, is_statistic)

    def of_class(label: Array) -> Array:
        own = batch._replace(mask=batch.mask & (batch.y == label))

        def loss(weights: Params) -> Array:
            return task.loss_of(task.apply(tree.merge(weights, statistics), own.x), own)

        gradient = jax.grad(loss)(weights)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)])

    return jax.lax.map(of_class, jnp.arange(num_classes))
