"""What `sentiment` and `qa` share: a pretrained model, its fine-tuning and sweep."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments import cli, launch, setup, sweep
from experiments.sweep import Found, Rule
from fedjax_tp import finetuning, tree
from fedjax_tp.finetuning import Texts
from fedjax_tp.io import folder, pretrained, report
from fedjax_tp.io.signals import stop_signals
from fedjax_tp.models import bert
from fedjax_tp.models.attention import ATTENDED, AttentionFunction
from fedjax_tp.models.bert import Bert
from fedjax_tp.types import InputError, Params

_SHOWN_EVERY = 30.0
"""Seconds."""
_OURS = "fedjax_tp"
"""Where a saved model's config says what the three architectures do not."""


@dataclass(frozen=True)
class LanguageFlags:
    """Flags of a language model."""

    model: str | None = None
    """Folder of the model: config.json, safetensors, tokenizer.json. One that has the
    head is not trained. Unset: MiniLM-L6, from its package."""
    layers: int | None = None
    """Last blocks that are trained with the head; 0 trains the head alone. Unset: all
    of the model."""
    epochs: int = 1
    """Passes over the training texts."""
    learning_rate: float | None = None
    """Highest; unset: 1e-4, or 1e-3 for the head alone."""
    batch_size: int = 32
    """Texts of a step."""
    seed: int = 0
    """Draws the new head, the order of texts, and dropout."""
    bits: int = 3
    """Bits that are tried at every threshold."""
    thresholds: str = sweep.THRESHOLDS
    """Attention values at or below them become 0."""
    out: str | None = None
    """Folder for the results; the fine-tuned model is saved in `model` inside it."""


class Loaded(NamedTuple):
    """A model as its folder has it, and whether it already has the wanted head."""

    module: Bert
    params: Params
    tokenizer: Any
    config: dict[str, Any]
    has_head: bool


def check_flags(flags: LanguageFlags) -> None:
    """Raises InputError for values that no data could make valid."""
    cli.check_counts(flags, "epochs", "batch_size")
    if flags.learning_rate is not None and not 0 < flags.learning_rate < 1:
        raise InputError(
            f"learning rate is {flags.learning_rate}; allowed is above 0 and below 1"
        )
    if not 0 <= flags.seed < 2**32:
        raise InputError(f"seed is {flags.seed}; allowed is 0 to {2**32 - 1}")
    sweep.rules(flags.bits, sweep.parse_thresholds(flags.thresholds))


def load(flags: LanguageFlags, *, labels: int | None, answers: bool) -> Loaded:
    """The model of the flags, with a head for labels or for answers.

    Raises:
      InputError: the folder or what is in it does not allow it.
    """
    path = pretrained.minilm_folder() if flags.model is None else Path(flags.model)
    content, tensors = pretrained.read_model(path)
    config = bert.config_from(content)
    finetuning.check_layers(flags.layers, config.depth)
    tokenizer = pretrained.read_tokenizer(path, config.vocab)
    heads = bert.heads_of(tensors, config)
    ours = content.get(_OURS, {})
    has_head = bool(heads["answers"]) if answers else "labels" in heads
    if labels is not None and has_head:
        if labels > heads["labels"]:
            raise InputError(
                f"the model in {path} has {heads['labels']} labels, and sentences have "
                f"{labels}"
            )
        labels = heads["labels"]
    if not has_head:
        # A head of our own sees the mean of all tokens, not a pooler's output.
        ours = {"pool": "mean", "pools": False}
    module = Bert(
        config,
        labels=labels,
        answers=answers,
        pool=ours.get("pool", "first"),
        pools=ours.get("pools", True),
    )
    key = None if has_head else jax.random.key(flags.seed)
    params = bert.params_from(tensors, module, key=key)
    return Loaded(module, params, tokenizer, content | {_OURS: ours}, has_head)


def open_out(flags: LanguageFlags, name: str) -> Path:
    """Makes the folder for the results, with its config.

    Raises:
      InputError: it is there and not empty, or cannot be written.
    """
    out = setup.new_folder(name) if flags.out is None else Path(flags.out)
    folder.open_folder(out, resume=False, can_resume=False)
    setup.write_config(out, f"quantized_attention {name}", flags)
    return out


def say_what_is_ignored(
    flags: LanguageFlags, loaded: Loaded, train: str | None, console: Console
) -> None:
    """Says that a model which has its head is not trained."""
    if loaded.has_head and (train is not None or flags.layers is not None):
        console.print(
            f"note: the model in {flags.model} has its head and is not trained; flags "
            "of training are not used"
        )


def fine_tune(
    loaded: Loaded, texts: Texts, flags: LanguageFlags, out: Path, console: Console
) -> Loaded:
    """Trains what the flags say, and saves the model in a folder to be read again.

    Raises:
      Interrupted: told to stop; nothing of the training is kept.
    """
    module, layers = loaded.module, flags.layers
    started = time.perf_counter()
    if layers is not None:
        needed = 4 * texts.tokens.size * module.config.dim
        available = launch.available_memory()
        if available is not None and needed > available:
            raise InputError(
                f"what the frozen part makes of the texts takes {needed:,} bytes, and "
                f"{available:,} are free; train on fewer texts, or without --layers"
            )
        states = finetuning.frozen_states(module, loaded.params, texts, layers)
        texts = texts._replace(states=states)
        console.print(f"frozen part computed: {time.perf_counter() - started:.0f} s")
    rng = np.random.default_rng(flags.seed)
    steps_an_epoch = sum(1 for _ in finetuning.batches(texts, flags.batch_size))
    steps = flags.epochs * steps_an_epoch
    rate = flags.learning_rate or (1e-3 if layers == 0 else 1e-4)
    optimizer = finetuning.make_optimizer(rate, steps)
    depth = module.config.depth
    tuned = finetuning.start(loaded.params, layers, depth, optimizer)
    step = finetuning.make_step(module, layers, optimizer)
    key = jax.random.key(flags.seed)
    done, losses, shown = 0, [], started
    console.print(f"{len(texts.lengths)} texts, {steps} steps")
    with stop_signals() as stop_signal:
        for _ in range(flags.epochs):
            for _, batch in finetuning.batches(texts, flags.batch_size, rng=rng):
                tuned, loss = step(tuned, batch, jax.random.fold_in(key, done))
                losses.append(loss)
                done += 1
                now = time.perf_counter()
                if now - shown > _SHOWN_EVERY or done == steps:
                    mean = float(jnp.mean(jnp.stack(losses)))
                    if not np.isfinite(mean):
                        raise InputError(
                            f"the loss is {mean} in step {done}; nothing is saved; a "
                            f"smaller --learning-rate than {rate:g} may help"
                        )
                    left = (now - started) / done * (steps - done) / 60
                    console.print(
                        f"step {done}/{steps}, loss {mean:.3f}, {left:.1f} minutes left"
                    )
                    losses, shown = [], now
                if (stop := stop_signal()) is not None:
                    raise cli.Interrupted(
                        stop, f"stopped in step {done}; nothing is saved"
                    )
    console.print(f"fine-tuned in {(time.perf_counter() - started) / 60:.1f} minutes")
    params = tree.merge(tuned.trained, tuned.frozen)
    save(out / "model", loaded, params)
    return loaded._replace(params=params, has_head=True)


def save(path: Path, loaded: Loaded, params: Params) -> None:
    """Writes a model's folder: configuration, safetensors, tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = bert.tensors_from(params, loaded.module.config)
    pretrained.write_tensors(path / "model.safetensors", tensors, {"format": "pt"})
    folder.write_text(path / "tokenizer.json", loaded.tokenizer.to_str())
    folder.write_json(path / "config.json", loaded.config)


def make_predict(
    module: Bert, params: Params, size: int
) -> Callable[[Rule, Texts], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """`(rule, texts) -> logits, pruned, seen`: values by layer and head over all texts.

    Compiled once for each kind of rule and width.

    Args:
      module, params: the model.
      size: texts at a time.
    """

    def make(attention_of: Callable[[Any, Any], AttentionFunction]) -> Callable:
        def predict(bits: Any, threshold: Any, params: Params, batch: Texts) -> Any:
            model = module.clone(attend=attention_of(bits, threshold))
            variables = {"params": params}
            x: Any = model.apply(variables, batch.tokens, batch.types, method="embed")
            hidden, sown = model.apply(
                variables, x, batch.lengths, method="encode", mutable=[ATTENDED]
            )
            logits = model.apply(variables, hidden, batch.lengths, method="predict")
            # Padding fills a batch up with its first text: that counts once.
            return logits, *sweep.pruned_and_seen(sown[ATTENDED], batch.is_real)

        return predict

    call = sweep.by_kind(make)

    def predict(rule: Rule, texts: Texts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        width = (texts.tokens.shape[1], 2) if module.answers else (module.labels,)
        logits = np.zeros((len(texts.lengths), *width), np.float32)
        pruned = seen = np.zeros((module.config.depth, module.config.heads))
        for rows, batch in finetuning.batches(texts, size):
            real = rows >= 0
            found, *counts = map(np.asarray, call(rule, params, batch))
            if not np.isfinite(found[real]).all():
                raise InputError(f"logits of the model are not finite ({rule.label})")
            if module.answers:
                logits[rows[real], : found.shape[1]] = found[real]
            else:
                logits[rows[real]] = found[real]
            pruned, seen = pruned + counts[0], seen + counts[1]
        return logits, pruned, seen

    return predict


def run_sweep(
    flags: LanguageFlags,
    loaded: Loaded,
    texts: Texts,
    score: Callable[[np.ndarray], float],
) -> list[Found]:
    """Scores of all rules on some texts, full precision first."""
    predict = make_predict(loaded.module, loaded.params, flags.batch_size)
    found = []
    for rule in sweep.rules(flags.bits, sweep.parse_thresholds(flags.thresholds)):
        logits, pruned, seen = predict(rule, texts)
        found.append(Found(rule, score(logits), pruned / np.maximum(seen, 1)))
    return found


def write_results(
    out: Path,
    flags: LanguageFlags,
    found: Sequence[Found],
    console: Console,
    *,
    name: str,
    score: str,
    summary: str,
    more: dict[str, Any],
    tables: Sequence[report.Table] = (),
) -> None:
    """Writes the sweep's tables and pictures, `summary.json` and the report."""
    swept, pictures, entries = sweep.write_sweep(
        out, found, bits=flags.bits, score=score, console=console
    )
    experiment = f"quantized_attention {name}"
    folder.write_json(out / "summary.json", {"experiment": experiment} | more | entries)
    report.write_report(
        out / "report.html",
        title=f"Quantized attention of a language model: {name}",
        summary=summary,
        tables=[*tables, *swept],
        pictures=pictures,
        notices=[],
        command=setup.command_line("quantized_attention"),
        settings=vars(flags),
    )
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)
