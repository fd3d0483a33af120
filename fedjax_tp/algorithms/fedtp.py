"""FedTP: a hypernetwork on the server emits every client's attention projections.

Li et al. 2023 (arXiv 2211.01572), "learn to personalize". The deviation from the
authors' code: embeddings of clients that were not sampled stay where they are, unless
`move_unsampled` asks for the original's drift under momentum and weight decay.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_tp import tree
from fedjax_tp.algorithms.base import (
    Algorithm,
    ClientOptimizer,
    LocalCarry,
    Message,
    Update,
    check_has_attention,
    client_sgd,
    is_nothing,
    start_training,
    training_metrics,
    training_step,
)
from fedjax_tp.hypernetwork import (
    Hypernetwork,
    HypernetworkConfig,
    emit_rows,
    init_hypernetwork,
    pull_back,
)
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.task import Task
from fedjax_tp.types import Array, Float, Int, Params, PRNGKey, Tree


class FedTPState(NamedTuple):
    """The server's state: xi, (phi, z), their optimizers' states, and what a client
    starts from that keeps a part of the model."""

    shared: Params
    hypernetwork: Hypernetwork
    phi_opt_state: optax.OptState
    embedding_opt_state: optax.OptState
    initial_kept: Params = None


def fedtp(
    task: Task,
    num_clients: int,
    optimizer: ClientOptimizer,
    *,
    hypernetwork: HypernetworkConfig,
    phi_optimizer: optax.GradientTransformation,
    embedding_optimizer: optax.GradientTransformation,
    move_unsampled: bool = False,
    is_personal: tree.PathPredicate = is_attention_projection,
    is_kept: tree.PathPredicate = is_nothing,
    name: str = "fedtp",
) -> Algorithm:
    """Builds FedTP for a task.

    Args:
      task: model and loss; its parameters that `is_personal` names are emitted.
      num_clients: rows of the embedding table.
      optimizer: local training; all parameters move.
      hypernetwork: sizes and initial values.
      phi_optimizer, embedding_optimizer: applied to the pulled-back gradients.
      move_unsampled: step the whole table each round, with zero gradients for the
        clients that were not sampled, as the authors' code does.
      is_personal: names the emitted parameters by path.
      is_kept: names those of the others that clients keep, as in FedPer.
      name: of the algorithm.

    Raises:
      InputError: the model has no parameter that `is_personal` names.
    """
    check_has_attention(task, name, is_personal)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    template, _ = tree.split(shapes, is_personal)
    sgd_step = client_sgd(optimizer)

    def init(key: PRNGKey) -> FedTPState:
        # The same key as every other algorithm gives the model: equal starts.
        personal, others = tree.split(task.init(key), is_personal)
        kept, shared = tree.split(others, is_kept)
        hyper = init_hypernetwork(
            jax.random.fold_in(key, 1), personal, num_clients, hypernetwork
        )
        return FedTPState(
            shared,
            hyper,
            phi_optimizer.init(hyper.phi),
            embedding_optimizer.init(hyper.embeddings),
            kept,
        )

    def broadcast(state: FedTPState, ids: Int[Array, " cohort"]) -> Message:
        return Message(
            state.shared,
            emit_rows(state.hypernetwork, ids, template, hypernetwork),
        )

    def client_start(message: Message, kept: Tree, key: PRNGKey) -> LocalCarry:
        return start_training(client_params(message, kept), sgd_step, key)

    def client_params(message: Message, kept: Tree) -> Params:
        return tree.merge(tree.merge(message.shared, message.personal), kept)

    def client_finish(message: Message, carry: LocalCarry) -> Update:
        personal, others = tree.split(carry.params, is_personal)
        kept, shared = tree.split(others, is_kept)
        return Update(shared, personal, kept, training_metrics(carry))

    def server_update(
        state: FedTPState,
        ids: Int[Array, " cohort"],
        update: Update,
        weights: Float[Array, " cohort"],
    ) -> FedTPState:
        hyper = state.hypernetwork
        grads = pull_back(hyper, ids, update.personal, weights, template, hypernetwork)
        phi_updates, phi_opt_state = phi_optimizer.update(
            grads.phi, state.phi_opt_state, hyper.phi
        )
        step = step_table if move_unsampled else step_rows
        embeddings, embedding_opt_state = step(
            embedding_optimizer,
            hyper.embeddings,
            state.embedding_opt_state,
            ids,
            grads.z,
        )
        phi = optax.apply_updates(hyper.phi, phi_updates)
        return FedTPState(
            update.mean,
            Hypernetwork(phi, embeddings),
            phi_opt_state,
            embedding_opt_state,
            state.initial_kept,
        )

    return Algorithm(
        name=name,
        init=init,
        init_kept=lambda state: state.initial_kept,
        broadcast=broadcast,
        client_start=client_start,
        client_step=training_step(task, sgd_step),
        client_finish=client_finish,
        server_update=server_update,
        client_params=client_params,
        hypernetwork_parameters=tree.num_elements(
            jax.eval_shape(init, jax.random.key(0)).hypernetwork
        ),
    )


Table = Float[Array, "clients embedding_dim"]
Rows = Float[Array, "cohort embedding_dim"]


def step_rows(
    optimizer: optax.GradientTransformation,
    table: Table,
    opt_state: optax.OptState,
    ids: Int[Array, " cohort"],
    grads: Rows,
) -> tuple[Table, optax.OptState]:
    """One optimizer step on the rows `ids` alone, their optimizer state with them."""

    def is_per_row(leaf: Array) -> bool:
        return leaf.shape == table.shape

    rows = tree.take(table, ids)
    row_state = jax.tree.map(
        lambda leaf: tree.take(leaf, ids) if is_per_row(leaf) else leaf, opt_state
    )
    updates, row_state = optimizer.update(grads, row_state, rows)
    new_state = jax.tree.map(
        lambda leaf, row: tree.put(leaf, ids, row) if is_per_row(leaf) else row,
        opt_state,
        row_state,
    )
    return tree.put(table, ids, optax.apply_updates(rows, updates)), new_state


def step_table(
    optimizer: optax.GradientTransformation,
    table: Table,
    opt_state: optax.OptState,
    ids: Int[Array, " cohort"],
    grads: Rows,
) -> tuple[Table, optax.OptState]:
    """One optimizer step on the whole table; rows not in `ids` have gradient zero."""
    dense = jnp.zeros_like(table).at[ids].add(grads, mode="drop")
    updates, opt_state = optimizer.update(dense, opt_state, table)
    return optax.apply_updates(table, updates), opt_state
