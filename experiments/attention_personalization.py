"""What does averaging do to attention, and which part of a transformer should be
personal?

    python -m experiments.attention_personalization --dataset fashion_mnist

trains FedAvg, local training, FedTP, and models of which one part stays on the client:
the projections to queries, keys and values; all of attention; the MLPs; the norms; the
head. It ends with a table of accuracies, with distances of attention maps between
local, averaged and FedTP's models on the same images, and with attention rollouts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments import cli, driver, launch, results, setup
from experiments.flags import DataFlags, RunFlags, TrainingFlags, TrainingRunFlags
from experiments.setup import Setup
from experiments.trained import params_of
from fedjax_tp import algorithms
from fedjax_tp.algorithms import Algorithm, Setting, partial_personalization
from fedjax_tp.algorithms.base import is_head
from fedjax_tp.algorithms.fedbn import is_norm
from fedjax_tp.analysis import attention_maps
from fedjax_tp.data.federated import gather
from fedjax_tp.io import folder, plots, report
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.simulation.rounds import SimulationState
from fedjax_tp.types import InputError

EXPERIMENT = "attention_personalization"
COMPARED = ("local", "fedavg", "fedtp")

PARTS: dict[str, Callable[[str], bool]] = {
    "qkv": is_attention_projection,
    "attention": lambda path: "attention" in path.split("/"),
    "mlps": lambda path: "mlp" in path.split("/"),
    "norms": is_norm,
    "head": is_head,
}
"""What may be personal: names by path."""


@dataclass(frozen=True)
class Flags(TrainingRunFlags):
    """Flags of the experiment; --algorithms come to those that it needs itself."""

    map_clients: int = 10
    """Clients whose attention is compared."""
    map_images: int = 32
    """Test images of each of them."""
    parts: str = ",".join(PARTS)
    """Parts of the model, each to be personal alone."""
    pictures: int = 6
    """Images of which rollouts are drawn, one a client."""


DEFAULTS = Flags(
    data=DataFlags(num_clients=50),
    training=TrainingFlags(algorithms="fedavg,local,fedtp", rounds=60, local_epochs=1),
    run=RunFlags(eval_every=20),
)


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; what was done is saved.
    """
    names = algorithms.resolve(flags.training.algorithms)
    missing = [name for name in COMPARED if name not in names]
    if missing:
        raise InputError(
            f"algorithms is {flags.training.algorithms!r}; {missing[0]} is needed too"
        )
    setup.check_flags(flags.data, flags.training, flags.run)
    cli.check_counts(flags, "map_clients", "map_images", "pictures")
    parts = [part.strip() for part in flags.parts.split(",")]
    if not set(parts) <= PARTS.keys() or len(set(parts)) < len(parts):
        raise InputError(
            f"parts is {flags.parts!r}; allowed are some of {', '.join(PARTS)}, each "
            "once"
        )
    if flags.device.kept_on_host == "yes":
        raise InputError("this experiment needs what clients keep on the device")
    flags = replace(flags, device=replace(flags.device, kept_on_host="no"))
    setup.check_one_seed(flags.run)
    mesh = launch.make_mesh(flags.device)
    launch.check_one_process()
    console = launch.make_console()
    prepared = setup.make_setup(
        flags.data, flags.model, flags.training, flags.run, mesh
    )
    if prepared.task.maps is None or prepared.dataset.is_text:
        raise InputError("this experiment needs images and a transformer (--model vit)")
    setting = setup.make_setting(flags, prepared)
    built, notes = algorithms.build_all(flags.training.algorithms, setting)
    prepared = prepared._replace(notices=prepared.notices + notes)
    built += personal_parts(setting, parts)
    prepared, plans, out = results.begin(
        EXPERIMENT, flags, prepared, built, mesh, console
    )
    maps: dict[str, np.ndarray] = {}

    def use(algorithm: Algorithm, state: SimulationState) -> None:
        if algorithm.name in COMPARED:
            maps[algorithm.name] = client_maps(algorithm, state, prepared, flags)

    outcomes = driver.train_all(
        built, prepared, plans, flags.training, flags.run, out, use=use
    )
    results.write_results(
        out, EXPERIMENT, flags, prepared, outcomes, flags.run, console
    )
    write_maps(out, flags, prepared, maps, outcomes, console)


def personal_parts(setting: Setting, parts: Sequence[str]) -> tuple[Algorithm, ...]:
    """An algorithm for each of some parts of the model, which its clients keep."""
    return tuple(
        partial_personalization(
            f"personal_{part}", setting.task, setting.client, PARTS[part]
        )
        for part in parts
    )


def clients_shown(prepared: Setup, count: int) -> list[int]:
    """The first clients that have a test example."""
    sizes = np.asarray(prepared.test.size)
    return np.flatnonzero(sizes > 0)[:count].tolist()


def client_maps(
    algorithm: Algorithm, state: SimulationState, prepared: Setup, flags: Flags
) -> np.ndarray:
    """Attention of each client's own model on its first test images, one image after
    another: `[layers, images, heads, tokens, tokens]`."""
    task_maps = prepared.task.maps
    assert task_maps is not None

    @jax.jit
    def of_client(client: jax.Array) -> jax.Array:
        params = params_of(algorithm, state, client)
        places = jnp.arange(flags.map_images)
        size = prepared.test.size[client]
        return task_maps(params, gather(prepared.test, client, places, places < size).x)

    found = []
    for client in clients_shown(prepared, flags.map_clients):
        count = min(flags.map_images, int(prepared.test.size[client]))
        found.append(np.asarray(of_client(jnp.int32(client)))[:, :count])
    return np.concatenate(found, axis=1)


def write_maps(
    out: Path,
    flags: Flags,
    prepared: Setup,
    maps: Mapping[str, np.ndarray],
    outcomes: Sequence[driver.Outcome],
    console: Console,
) -> None:
    """Writes distances, rollouts, the ablation's table and the report; prints them."""
    pairs = list(combinations(COMPARED, 2))

    def by_layer(figure: Callable[[jax.Array, jax.Array], jax.Array]) -> list[Any]:
        return [
            np.asarray(figure(*(jnp.asarray(maps[name]) for name in pair))).tolist()
            for pair in pairs
        ]

    distances = by_layer(attention_maps.jensen_shannon)
    similarities = by_layer(attention_maps.cosine_similarity)
    titles = [f"{first} and {second}" for first, second in pairs]
    rows = [
        {
            "first": first,
            "second": second,
            "layer": layer,
            "jensen_shannon": distance,
            "cosine": similarity,
        }
        for (first, second), *found in zip(pairs, distances, similarities, strict=True)
        for layer, (distance, similarity) in enumerate(zip(*found, strict=True), 1)
    ]
    folder.write_csv(out / "attention.csv", rows)
    pictures = {
        "Distance of attention maps": out / "distance.png",
        "Similarity of attention maps": out / "similarity.png",
        "Attention rollout of the class token": out / "rollout.png",
    }
    distance_file, similarity_file, rollout_file = pictures.values()
    plots.map_distances(
        distance_file,
        dict(zip(titles, distances, strict=True)),
        "Jensen-Shannon distance",
    )
    plots.map_distances(
        similarity_file,
        dict(zip(titles, similarities, strict=True)),
        "cosine similarity",
    )
    draw_rollouts(rollout_file, flags, prepared, maps)
    attention = report.Table(
        "Attention maps: Jensen-Shannon distance / cosine similarity by layer",
        ["models", *(f"layer {layer + 1}" for layer in range(len(distances[0])))],
        [
            [title, *(f"{d:.3f} / {s:.3f}" for d, s in zip(*found, strict=True))]
            for title, *found in zip(titles, distances, similarities, strict=True)
        ],
    )
    ablation = ablation_table(outcomes)
    folder.write_csv(
        out / "ablation.csv",
        [dict(zip(ablation.header, row, strict=True)) for row in ablation.rows],
    )
    report.write_report(
        out / "attention.html",
        title=f"Attention and what is personal, on {prepared.dataset.name}",
        summary=f"{prepared.num_clients} clients, {flags.training.rounds} rounds. Maps "
        f"are of {len(clients_shown(prepared, flags.map_clients))} clients' models on "
        "their own test images.",
        tables=[ablation, attention],
        pictures=pictures,
        notices=prepared.notices,
        command=setup.command_line(EXPERIMENT),
        settings=cli.to_flat(flags),
    )
    for table in (ablation, attention):
        results.show(console, table)
    console.print(f"attention: {out / 'attention.html'}", soft_wrap=True)


def ablation_table(outcomes: Sequence[driver.Outcome]) -> report.Table:
    """Accuracy by what is personal, and what a client sends in a round."""
    what = {
        "fedavg": "nothing",
        "local": "everything",
        "fedtp": "qkv, from a hypernetwork",
    } | {f"personal_{part}": part for part in PARTS}
    rows = [
        [
            what[outcome.algorithm],
            f"{100 * outcome.summaries[0].pooled:.1f}",
            f"{100 * outcome.summaries[0].worst_decile:.1f}",
            results.human(outcome.plan.bytes_up),
        ]
        for outcome in outcomes
        if outcome.algorithm in what
    ]
    header = ["personal", "accuracy, %", "worst decile, %", "sent a round"]
    return report.Table("What is personal", header, rows)


def draw_rollouts(
    path: Path, flags: Flags, prepared: Setup, maps: Mapping[str, np.ndarray]
) -> None:
    """The first test image of a few clients, and where each model looks."""
    clients = clients_shown(prepared, min(flags.pictures, flags.map_clients))
    counts = [
        min(flags.map_images, int(prepared.test.size[client]))
        for client in clients_shown(prepared, flags.map_clients)
    ]
    places = np.cumsum([0, *counts])[: len(clients)]
    rows = np.asarray(prepared.test.rows)[np.asarray(prepared.test.start)[clients]]
    images = np.asarray(prepared.test.x)[rows].astype(np.float64)
    span = images.max() - images.min()
    labels = np.asarray(prepared.test.y)[rows]
    height, width = images.shape[1:3]
    by_model = {}
    for name, found in maps.items():
        rolled = attention_maps.rollout(jnp.asarray(found[:, places]))
        # What the class token attends to, itself apart.
        heat = np.asarray(rolled)[:, 0, 1:]
        side = round((heat.shape[1] * height / width) ** 0.5)
        by_model[name] = heat.reshape(len(heat), side, -1)
    plots.rollouts(
        path,
        (images - images.min()) / (span or 1.0),
        by_model,
        [
            f"client {client}\n{prepared.dataset.class_names[label]}"
            for client, label in zip(clients, labels, strict=True)
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.experiment_main(
        run,
        DEFAULTS,
        argv,
        name=EXPERIMENT,
        description=__doc__,
        normalize=setup.with_absolute_paths,
    )


if __name__ == "__main__":
    raise SystemExit(main())
