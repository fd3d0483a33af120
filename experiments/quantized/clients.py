"""Every client's personal model of a trained run, with quantized attention.

Ends with a report of fidelity: whose accuracy falls most, worst first.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments import cli, launch, results, setup, sweep, trained
from experiments.sweep import Found, Rule
from experiments.trained import Trained
from fedjax_tp.data.federated import gather
from fedjax_tp.io import folder, plots, report
from fedjax_tp.models.attention import ATTENDED, AttentionFunction

_WORST_SHOWN = 10
_EXAMPLES_A_STEP = 32
_VALUE_EDGES = np.logspace(-8, 0, 33)


@dataclass(frozen=True)
class Flags:
    """Flags of the clients' sweep."""

    run: str | None = None
    """Folder of the run whose clients are measured."""
    algorithm: str = "fedtp"
    """Which of its algorithms."""
    bits: int = 3
    """Bits that are tried at every threshold, and in the report of fidelity."""
    thresholds: str = sweep.THRESHOLDS
    """Attention values at or below them become 0."""
    clients_at_a_time: int = 8
    """Clients measured at a time."""
    value_images: int = 256
    """Test examples, of all clients together, whose attention values are counted."""
    out: str | None = None
    """Folder for the results; unset: quantized-ALGORITHM in that of the run."""


class Measured(NamedTuple):
    """Sums over a client's test examples, by client.

    Attributes:
      correct, examples: `[clients]`.
      pruned, seen: attention values, `[clients, layers, heads]`.
    """

    correct: Any
    examples: Any
    pruned: Any
    seen: Any


def run(flags: Flags) -> None:
    """Measures every client at every rule, and writes the results.

    Raises:
      InputError: a flag or the run does not allow it.
    """
    cli.check_counts(flags, "clients_at_a_time", "value_images")
    thresholds = sweep.parse_thresholds(flags.thresholds)
    rules = sweep.rules(flags.bits, thresholds)
    found = trained.load_transformer(flags.run, flags.algorithm)
    console = launch.make_console()
    out = found.folder / f"quantized-{flags.algorithm}"
    if flags.out is not None:
        out = Path(flags.out)
    folder.open_folder(out, resume=False, can_resume=False)
    setup.write_config(out, "quantized_attention clients", flags)
    console.print(
        f"{flags.algorithm} after {found.round} rounds, "
        f"{found.setup.num_clients} clients, {len(rules)} rules"
    )
    measure = make_measure(found, flags.clients_at_a_time)
    measured = {rule: Measured(*map(np.asarray, measure(rule))) for rule in rules}
    write_results(out, flags, found, measured, console)


def make_measure(found: Trained, clients_at_a_time: int) -> Callable[[Rule], Any]:
    """A function of a rule, compiled once for each kind, that measures all clients."""
    prepared, task = found.setup, found.setup.task
    batch_size = min(_EXAMPLES_A_STEP, max(1, prepared.test_capacity))
    steps = -(-prepared.test_capacity // batch_size)

    def make(attention_of: Callable[[Any, Any], AttentionFunction]) -> Callable:
        def of_all(bits: jax.Array, threshold: jax.Array, state: Any, test: Any) -> Any:
            module = setup.make_module(
                found.flags.model,
                prepared.dataset.x_train.shape[1:],
                prepared.dataset.num_classes,
                attention_of(bits, threshold),
            )

            def of_client(client: jax.Array) -> Measured:
                params = trained.params_of(found.algorithm, state, client)

                def one_step(step: jax.Array) -> Measured:
                    places = step * batch_size + jnp.arange(batch_size)
                    batch = gather(test, client, places, places < test.size[client])
                    logits, sown = module.apply(
                        {"params": params}, batch.x, mutable=[ATTENDED]
                    )
                    metrics = task.score(logits, batch)
                    counts = sweep.pruned_and_seen(sown[ATTENDED], batch.mask)
                    return Measured(metrics.correct, metrics.examples, *counts)

                by_step = jax.lax.map(one_step, jnp.arange(steps))
                return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), by_step)

            clients = jnp.arange(prepared.num_clients)
            return jax.lax.map(of_client, clients, batch_size=clients_at_a_time)

        return of_all

    measure = sweep.by_kind(make)
    return lambda rule: measure(rule, found.state, prepared.test)


def to_found(rule: Rule, measured: Measured) -> Found:
    """Over all clients."""
    share = measured.pruned.sum(axis=0, dtype=np.float64)
    share = share / np.maximum(measured.seen.sum(axis=0, dtype=np.float64), 1)
    score = float(measured.correct.sum() / measured.examples.sum())
    return Found(rule, score, share)


def count_values(found: Trained, examples: int) -> np.ndarray:
    """The share of each layer's attention values in bins of `_VALUE_EDGES`.

    Values below the lowest edge are in the first bin.
    """
    prepared = found.setup
    maps = prepared.task.maps
    assert maps is not None
    sizes = np.asarray(prepared.test.size)
    a_client = max(1, examples // int((sizes > 0).sum()))

    @jax.jit
    def of_client(client: jax.Array) -> jax.Array:
        params = trained.params_of(found.algorithm, found.state, client)
        places = jnp.arange(a_client)
        batch = gather(prepared.test, client, places, places < sizes.max())
        return maps(params, batch.x)

    totals: Any = 0
    for client in np.flatnonzero(sizes > 0):
        count = min(a_client, int(sizes[client]))
        values = np.asarray(of_client(jnp.int32(client)))[:, :count]
        totals = totals + np.stack(
            [
                np.histogram(np.clip(layer[layer > 0], 1e-8, 1), _VALUE_EDGES)[0]
                for layer in values
            ]
        )
    return totals / totals.sum(axis=1, keepdims=True)


def write_results(
    out: Path,
    flags: Flags,
    found: Trained,
    measured: dict[Rule, Measured],
    console: Console,
) -> None:
    """Writes tables, pictures, summary and report; prints the tables."""
    over_all = [to_found(rule, m) for rule, m in measured.items()]
    tables, pictures, summary = sweep.write_sweep(
        out, over_all, bits=flags.bits, score="accuracy", console=console
    )
    best = sweep.best_within_loss(over_all, flags.bits)
    rule = Rule(flags.bits, sweep.PAPER_THRESHOLD) if best is None else best.rule
    fidelity = fidelity_rows(measured, rule)
    folder.write_csv(out / "fidelity.csv", fidelity)
    worst = report.Table(
        f"Fidelity: clients whose accuracy falls most with {rule.label}",
        ["client", "test examples", "full, %", "quantized, %", "points", "pruned, %"],
        [
            [
                str(row["client"]),
                str(row["examples"]),
                f"{100 * row['full']:.1f}",
                f"{100 * row['quantized']:.1f}",
                f"{100 * row['difference']:+.1f}",
                f"{100 * row['share_pruned']:.1f}",
            ]
            for row in fidelity[:_WORST_SHOWN]
        ],
    )
    results.show(console, worst)
    values = out / "values.png"
    plots.attention_values(
        values,
        _VALUE_EDGES,
        count_values(found, flags.value_images),
        sweep.PAPER_THRESHOLD,
    )
    pictures["Attention values by layer, at full precision"] = values
    differences = np.array([row["difference"] for row in fidelity])
    folder.write_json(
        out / "summary.json",
        {
            "experiment": "quantized_attention clients",
            "run": str(flags.run),
            "algorithm": flags.algorithm,
            "rounds": found.round,
            "fidelity_rule": rule.label,
            "clients_that_lose": int((differences < 0).sum()),
            "worst_difference": float(differences.min()),
        }
        | summary,
    )
    report.write_report(
        out / "report.html",
        title=f"Quantized attention of {flags.algorithm}'s clients",
        summary=f"{found.setup.num_clients} clients of {found.setup.dataset.name} "
        f"after {found.round} rounds; {int(measured[rule].examples.sum())} test "
        "examples. "
        "Thresholds and bits are compared on these same examples.",
        tables=[*tables, worst],
        pictures=pictures,
        notices=found.setup.notices,
        command=setup.command_line("quantized_attention"),
        settings=asdict(flags),
    )
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)


def fidelity_rows(
    measured: dict[Rule, Measured], rule: Rule
) -> Sequence[dict[str, Any]]:
    """What each client with test examples loses by a rule, worst first."""
    full, quantized = measured[sweep.FULL], measured[rule]
    rows = []
    for client in np.flatnonzero(full.examples > 0).tolist():
        examples = full.examples[client]
        before, after = (float(m.correct[client] / examples) for m in (full, quantized))
        rows.append(
            {
                "client": client,
                "examples": int(examples),
                "full": before,
                "quantized": after,
                "difference": after - before,
                "share_pruned": float(
                    quantized.pruned[client].sum() / quantized.seen[client].sum()
                ),
            }
        )
    return sorted(rows, key=lambda row: (row["difference"], row["client"]))
