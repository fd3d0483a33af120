"""A pretrained encoder that judges sentences, with quantized attention.

MiniLM-L6, or the model of a folder, is fine-tuned on sentences with a label (SST-2's
.tsv files as GLUE has them, say), then measured on others.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import cli, launch
from experiments.quantized import language
from experiments.quantized.language import LanguageFlags, Loaded
from fedjax_tp import finetuning
from fedjax_tp.data.sentences import Sentences, read_sentences
from fedjax_tp.finetuning import Texts
from fedjax_tp.types import InputError


@dataclass(frozen=True)
class Flags(LanguageFlags):
    """Flags of the sentiment model."""

    train: str | None = None
    """Files of sentences to learn from, with commas between: .tsv or .tsv.gz with
    columns sentence and label. Not needed by a model that has a classifier."""
    validation: str | None = None
    """Files of sentences to be judged."""
    examples: int | None = None
    """Training sentences, drawn at random; unset: all."""
    longest: int = 128
    """Tokens of a sentence that are looked at."""


def run(flags: Flags) -> None:
    """Fine-tunes where needed, sweeps, and writes the results.

    Raises:
      InputError: a flag, a file or the model does not allow it.
    """
    language.check_flags(flags)
    cli.check_counts(flags, "examples")
    if flags.validation is None:
        raise InputError(
            "validation is not given; allowed are .tsv files of sentences, such as "
            "SST-2's dev.tsv"
        )
    judged = read_sentences(_paths(flags.validation))
    learnt = None if flags.train is None else read_sentences(_paths(flags.train))
    labels = 1 + max(int(s.labels.max()) for s in (judged, learnt) if s is not None)
    loaded = language.load(flags, labels=labels, answers=False)
    if not 2 < flags.longest <= loaded.module.config.longest:
        raise InputError(
            f"longest is {flags.longest}; allowed is 3 to "
            f"{loaded.module.config.longest}"
        )
    if learnt is None and not loaded.has_head:
        raise InputError("train is not given, and the model has no classifier")
    launch.check_one_process()
    console = launch.make_console()
    out = language.open_out(flags, "sentiment")
    language.say_what_is_ignored(flags, loaded, flags.train, console)
    if learnt is not None and not loaded.has_head:
        if flags.examples is not None and flags.examples < len(learnt.texts):
            rng = np.random.default_rng(flags.seed)
            rows = rng.choice(len(learnt.texts), flags.examples, replace=False)
            learnt = Sentences(
                tuple(learnt.texts[row] for row in rows), learnt.labels[rows]
            )
        texts = encode(loaded, learnt, flags.longest)
        loaded = language.fine_tune(loaded, texts, flags, out, console)

    def accuracy(logits: np.ndarray) -> float:
        return float(np.mean(logits.argmax(axis=1) == judged.labels))

    found = language.run_sweep(
        flags, loaded, encode(loaded, judged, flags.longest), accuracy
    )
    language.write_results(
        out,
        flags,
        found,
        console,
        name="sentiment",
        score="accuracy",
        summary=f"{len(judged.texts)} sentences judged; thresholds and bits are "
        "compared on these same sentences.",
        more={"sentences": len(judged.texts)},
    )


def _paths(text: str) -> list[Path]:
    return [Path(part.strip()) for part in text.split(",")]


def encode(loaded: Loaded, sentences: Sentences, longest: int) -> Texts:
    """Tokens of sentences, cut off where they are longer."""
    loaded.tokenizer.enable_truncation(longest)
    encoded = loaded.tokenizer.encode_batch(list(sentences.texts))
    loaded.tokenizer.no_truncation()
    tokens = finetuning.pad([e.ids for e in encoded], loaded.module.config.pad)
    return Texts(
        tokens,
        np.array([len(e.ids) for e in encoded], np.int32),
        np.zeros_like(tokens),
        sentences.labels,
        np.ones(len(tokens), bool),
    )
