"""New clients: what they fit on their own data once the others are trained.

A way to join is a start and a map from what is fitted to a model's parameters. With
FedTP that is an embedding (Li et al. 2023): a few numbers, the server's hypernetwork
makes the rest. It may also be read off the data by an encoder that does not care for
the order of examples, with nothing to fit at all (after Scott et al. 2024, PeFLL).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    PartialState,
    ServerState,
    descent,
    start_training,
    take_step,
    task_objective,
)
from fedjax_tp.algorithms.fedtp import FedTPState
from fedjax_tp.data.federated import (
    FederatedDataset,
    client_sizes,
    gather,
    shuffled,
)
from fedjax_tp.hypernetwork import HypernetworkConfig, emit
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.task import Metrics, Task, masked_mean
from fedjax_tp.types import (
    Array,
    Batch,
    Float,
    InputError,
    Int,
    Params,
    PRNGKey,
    Progress,
    Tree,
)


class Joining(NamedTuple):
    """A way to join.

    Attributes:
      name: of what is fitted.
      start: `(batch) -> variables` to begin with; may look at some examples.
      to_params: `(variables) -> params` of the task.
      optimizer: of the variables.
      own: of a tree like the model's parameters, what is at the variables' place: new
        running statistics go there. None if the variables are no parameters.
    """

    name: str
    start: Callable[[Batch], Tree]
    to_params: Callable[[Tree], Params]
    optimizer: optax.GradientTransformation
    own: Callable[[Tree], Tree]


def joining(
    algorithm: Algorithm,
    server: ServerState,
    optimizer: optax.GradientTransformation,
) -> Joining:
    """What a new client fits with an algorithm whose clients keep a part of the model:
    that part, from where all clients began. If they keep nothing, the whole model.

    Args:
      algorithm: built by `partial_personalization`.
      server: its trained state.
      optimizer: of what is fitted.

    Raises:
      InputError: see `check_joins`.
    """
    check_joins(algorithm)
    kept = algorithm.init_kept(server)
    message = algorithm.broadcast(server, jnp.zeros(1, jnp.int32))
    if jax.tree.leaves(kept):
        return Joining(
            f"{algorithm.name}: what is kept",
            lambda batch: kept,
            lambda variables: algorithm.client_params(message, variables),
            optimizer,
            lambda whole: _where_there(kept, whole),
        )
    params = algorithm.client_params(message, kept)
    return _whole_model(f"{algorithm.name}: fine-tuning", params, optimizer)


def _whole_model(
    name: str, params: Params, optimizer: optax.GradientTransformation
) -> Joining:
    return Joining(name, lambda batch: params, _itself, optimizer, _itself)


def _itself(whole: Tree) -> Tree:
    return whole


def _nothing(whole: Tree) -> None:
    return None


def _where_there(part: Tree, whole: Tree) -> Tree:
    """The leaves of `whole` where `part` has one."""
    return jax.tree.map(
        lambda own, leaf: None if own is None else leaf,
        part,
        whole,
        is_leaf=lambda leaf: leaf is None,
    )


def check_joins(algorithm: Algorithm) -> None:
    """Raises InputError unless it is known what a new client would fit."""
    server = jax.eval_shape(algorithm.init, jax.random.key(0))
    if algorithm.name == "fedtp":
        return
    is_plain = isinstance(server, PartialState) and algorithm.adapt is None
    kept = jax.eval_shape(algorithm.init_kept, server)
    if not is_plain or not _is_part(kept, server.shared):
        raise InputError(
            f"{algorithm.name}: it is not known what a new client would fit; allowed "
            "are fedtp, and algorithms whose clients use one model and keep a part of "
            "it, or nothing"
        )


def _is_part(kept: Tree, shared: Tree) -> bool:
    """Do the two make up one model, each leaf in one of them?"""
    ours, theirs = (
        dict(
            jax.tree_util.tree_leaves_with_path(part, is_leaf=lambda leaf: leaf is None)
        )
        for part in (kept, shared)
    )
    if ours.keys() != theirs.keys():
        return False
    return all((ours[path] is None) != (theirs[path] is None) for path in ours)


def local_joining(
    task: Task, key: PRNGKey, optimizer: optax.GradientTransformation
) -> Joining:
    """Without the others: a model from its initial values."""
    return _whole_model("local training", task.init(key), optimizer)


def emitted_params(
    task: Task, server: FedTPState, config: HypernetworkConfig
) -> Callable[[Float[Array, " embedding_dim"]], Params]:
    """`(embedding) -> params` of FedTP's trained server."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    template, _ = tree.split(shapes, is_attention_projection)

    def to_params(z: Float[Array, " embedding_dim"]) -> Params:
        emitted = emit(server.hypernetwork.phi, z[None], template, config)
        own = jax.tree.map(lambda leaf: leaf[0], emitted)
        return tree.merge(server.shared, own)

    return to_params


def embedding_joining(
    task: Task,
    server: FedTPState,
    config: HypernetworkConfig,
    optimizer: optax.GradientTransformation,
) -> Joining:
    """FedTP: the embedding alone, from the mean of the trained clients'."""
    mean = mean_embedding(server, config)
    to_params = emitted_params(task, server, config)
    return Joining(
        "fedtp: embedding", lambda batch: mean, to_params, optimizer, _nothing
    )


def mean_embedding(
    server: FedTPState, config: HypernetworkConfig
) -> Float[Array, " embedding_dim"]:
    """The mean of the trained clients' embeddings.

    Where features have a fixed norm it is scaled to the norm that embeddings have: what
    is emitted stays about the same, and a step of the embedding goes as far as it
    would for a trained client, however many there are.
    """
    embeddings = server.hypernetwork.embeddings
    mean = embeddings.mean(axis=0)
    if not config.feature_norm:
        return mean
    typical = jnp.mean(jnp.linalg.norm(embeddings, axis=1))
    return mean * typical / (jnp.linalg.norm(mean) + 1e-6)


class EncoderConfig(NamedTuple):
    """Size and training of the encoder.

    Attributes:
      hidden: width of its two layers.
      steps: Adam steps.
      lr: step size.
      clients: trained clients a step.
      examples: examples of a client that it reads, and again as many for its loss.
    """

    hidden: int = 64
    steps: int = 500
    lr: float = 1e-3
    clients: int = 4
    examples: int = 64


def encoder_joining(
    task: Task,
    server: FedTPState,
    config: HypernetworkConfig,
    train: FederatedDataset,
    key: PRNGKey,
    optimizer: optax.GradientTransformation,
    encoder: EncoderConfig,
) -> Joining:
    """FedTP: the embedding that an encoder reads off some examples; fitted from there.

    z = mean z + A mean_i relu(B [features(x_i), onehot(y_i)]), its features those of
    the model that the mean embedding gives. A and B descend the loss of the trained
    clients' models that their examples give, everything else fixed; A starts at zero.

    Args:
      task: model and loss, with features.
      server: trained.
      config: of the hypernetwork.
      train: of the trained clients.
      key: of the encoder's initial values and batches.
      optimizer: of an embedding that is fitted from there.
      encoder: sizes.
    """
    forward = task.forward
    assert forward is not None
    to_params = emitted_params(task, server, config)
    mean = mean_embedding(server, config)
    middle = to_params(mean)
    dim, num_classes = middle["head"]["kernel"].shape
    init_key, train_key = jax.random.split(key)
    lecun = jax.nn.initializers.lecun_normal()
    weights = {
        "inner": lecun(init_key, (dim + num_classes, encoder.hidden)),
        "bias": jnp.zeros(encoder.hidden),
        "outer": jnp.zeros((encoder.hidden, len(mean))),
    }

    def encode(weights: Params, batch: Batch) -> Float[Array, " embedding_dim"]:
        features = forward(middle, batch.x, None, None).features
        features = features.reshape(len(batch.y), -1, dim).mean(axis=1)
        # Every feature counts alike, whatever its scale.
        squares = jnp.sum(features**2, axis=1)
        features = features / jnp.sqrt(masked_mean(squares, batch.mask) / dim + 1e-6)
        read = jnp.concatenate([features, jax.nn.one_hot(batch.y, num_classes)], axis=1)
        hidden = jax.nn.relu(read @ weights["inner"] + weights["bias"])
        return mean + masked_mean(hidden, batch.mask) @ weights["outer"]

    def loss_of(weights: Params, key: PRNGKey) -> Array:
        client_key, *batch_keys = jax.random.split(key, 4)
        client = jax.random.randint(client_key, (), 0, train.num_clients)
        size = client_sizes(train, client[None])[0]
        read, judged = (
            draw_batch(k, train, client, size, encoder.examples) for k in batch_keys[:2]
        )
        params = to_params(encode(weights, read))
        return task.loss(params, judged, batch_keys[2])

    adam = optax.adam(encoder.lr)

    def step(carried: Any, key: PRNGKey) -> tuple[Any, None]:
        weights, opt_state = carried
        keys = jax.random.split(key, encoder.clients)
        gradient = jax.grad(lambda w: jnp.mean(jax.lax.map(partial(loss_of, w), keys)))(
            weights
        )
        updates, opt_state = adam.update(gradient, opt_state)
        return (optax.apply_updates(weights, updates), opt_state), None

    @jax.jit
    def fit(weights: Params) -> Params:
        keys = jax.random.split(train_key, encoder.steps)
        return jax.lax.scan(step, (weights, adam.init(weights)), keys)[0][0]

    return Joining(
        "fedtp: encoder, embedding",
        partial(encode, fit(weights)),
        to_params,
        optimizer,
        _nothing,
    )


def draw_batch(
    key: PRNGKey,
    data: FederatedDataset,
    client: Int[Array, ""],
    size: Int[Array, ""],
    batch_size: int,
) -> Batch:
    """A batch of the client's first `size` examples, drawn with replacement."""
    places = jax.random.randint(key, (batch_size,), 0, jnp.maximum(size, 1))
    return gather(data, client, places, jnp.ones(batch_size, bool))


def make_joining_curve(
    task: Task,
    method: Joining,
    steps: Sequence[int],
    *,
    batch_size: int,
    examples: int,
    capacity: int,
    test_capacity: int,
) -> Callable[..., Metrics]:
    """Compiles `curve(train, test, samples, key) -> Metrics`, `[clients, steps]`.

    Every client starts, takes so many steps on batches of `samples` of its training
    examples (all, if it has fewer), and is measured on all its test examples.

    Args:
      task: model, loss and metrics.
      method: how clients join.
      steps: ascending numbers of steps after which to measure.
      batch_size: examples a step.
      examples: how many the start may look at.
      capacity, test_capacity: training and test examples of the largest client.
    """

    of_params = task_objective(task)

    def one_client(train, test, samples, key, client):
        held = client_sizes(train, client[None])[0]
        # Examples may be stored class by class: any few of them must be a mix. Those of
        # 8 samples are among those of 32.
        order_key, draw_key, key = jax.random.split(key, 3)
        order = shuffled(order_key, held, capacity)
        size = jnp.maximum(jnp.minimum(held, samples), 1)
        places = jnp.arange(examples)
        seen = gather(train, client, order.at[places].get(mode="clip"), places < size)
        carry = start_training(method.start(seen), method.optimizer, key)
        test_places = jnp.arange(test_capacity)
        test_size = client_sizes(test, client[None])[0]
        batch = gather(test, client, test_places, test_places < test_size)

        def objective(variables, batch, key):
            params = method.to_params(variables)
            loss, (statistics, _) = of_params(params, batch, key)
            if statistics is not None:
                statistics = method.own(statistics)
            return loss, (statistics, None)

        def step(index, carry):
            batch_key = jax.random.fold_in(draw_key, index)
            places = jax.random.randint(batch_key, (batch_size,), 0, size)
            drawn = gather(train, client, order[places], jnp.ones(batch_size, bool))
            progress = Progress(index, bounds[-1], jnp.zeros((), int))
            found = descent(task, carry, drawn, progress, objective=objective)
            return take_step(method.optimizer, carry, drawn, found)

        bounds = jnp.array([0, *steps])

        def segment(carry, i):
            carry = jax.lax.fori_loop(bounds[i], bounds[i + 1], step, carry)
            return carry, task.metrics(method.to_params(carry.params), batch)

        return jax.lax.scan(segment, carry, jnp.arange(len(steps)))[1]

    @jax.jit
    def curve(
        train: FederatedDataset,
        test: FederatedDataset,
        samples: Int[Array, ""],
        key: PRNGKey,
    ) -> Metrics:
        clients = jnp.arange(train.num_clients)
        return jax.lax.map(
            lambda client: one_client(
                train, test, samples, jax.random.fold_in(key, client), client
            ),
            clients,
        )

    return curve


def pooled_accuracy(metrics: Metrics) -> Float[Any, " steps"]:
    """Accuracy after each number of steps, all clients' test examples together."""
    return metrics.correct.sum(axis=0) / metrics.examples.sum(axis=0)
