"""A pretrained encoder that finds answers in texts, with quantized attention.

The model of a folder, or MiniLM-L6 fine-tuned on most of the articles of a file in
SQuAD v1.1's format, answers questions on the rest; exact match and F1 by SQuAD's rules.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import launch
from experiments.quantized import language
from experiments.quantized.language import LanguageFlags
from experiments.sweep import Found
from fedjax_tp.data import squad
from fedjax_tp.data.squad import Question, Windows
from fedjax_tp.finetuning import Texts
from fedjax_tp.io import folder, report
from fedjax_tp.types import InputError


@dataclass(frozen=True)
class Flags(LanguageFlags):
    """Flags of the question answering model."""

    questions: str | None = None
    """File of questions in SQuAD v1.1's format; .json or .json.gz."""
    train: str | None = None
    """File of questions to learn from; unset: those on most articles of --questions,
    unless the model finds answers already."""
    held_out: float = 0.2
    """Share of the articles that is not learnt from, where there is no --train."""
    length: int = 384
    """The most tokens of a question and a stretch of its text."""
    stride: int = 128
    """Tokens by which stretches of a text overlap."""
    epochs: int = 2
    """Passes over the training questions."""
    batch_size: int = 8
    """Windows of a step."""


def run(flags: Flags) -> None:
    """Fine-tunes where needed, sweeps, and writes the results.

    Raises:
      InputError: a flag, a file or the model does not allow it.
    """
    language.check_flags(flags)
    if not 0 < flags.held_out < 1:
        raise InputError(f"held out is {flags.held_out}; allowed is 0 < held out < 1")
    if flags.questions is None:
        raise InputError(
            "questions is not given; allowed is a file in SQuAD v1.1's format"
        )
    asked = squad.read_questions(Path(flags.questions))
    learnt = None if flags.train is None else squad.read_questions(Path(flags.train))
    loaded = language.load(flags, labels=None, answers=True)
    if flags.length > loaded.module.config.longest:
        raise InputError(
            f"length is {flags.length}; the model allows up to "
            f"{loaded.module.config.longest}"
        )
    if learnt is None and not loaded.has_head:
        learnt, asked = split_by_article(asked, flags.held_out, flags.seed)
    windows = squad.make_windows(
        loaded.tokenizer, asked, length=flags.length, stride=flags.stride
    )
    launch.check_one_process()
    console = launch.make_console()
    out = language.open_out(flags, "qa")
    language.say_what_is_ignored(flags, loaded, flags.train, console)
    if learnt is not None and not loaded.has_head:
        texts = as_texts(
            squad.make_windows(
                loaded.tokenizer, learnt, length=flags.length, stride=flags.stride
            )
        )
        loaded = language.fine_tune(loaded, texts, flags, out, console)
    answers: list[list[str]] = []

    def score(logits: np.ndarray) -> float:
        answers.append(squad.find_answers(windows, logits, asked))
        return squad.mean_score(squad.f1, answers[-1], asked)

    found = language.run_sweep(flags, loaded, as_texts(windows), score)
    matches = [squad.mean_score(squad.exact_match, a, asked) for a in answers]
    folder.write_json(
        out / "answers.json",
        {q.id: a for q, a in zip(asked, answers[0], strict=True)},
    )
    language.write_results(
        out,
        flags,
        found,
        console,
        name="qa",
        score="F1",
        summary=f"{len(asked)} questions on {len({q.article for q in asked})} "
        "articles; thresholds and bits are compared on these same questions.",
        more={
            "questions": len(asked),
            "exact_match": {
                f.rule.label: match for f, match in zip(found, matches, strict=True)
            },
        },
        tables=[exact_table(found, matches)],
    )
    console.print(
        f"exact match {100 * matches[0]:.1f}%, F1 {100 * found[0].score:.1f}% at full "
        "precision"
    )


def split_by_article(
    questions: tuple[Question, ...], held_out: float, seed: int
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Questions to learn from, and those on articles that are held out.

    Raises:
      InputError: there are too few articles.
    """
    articles = sorted({question.article for question in questions})
    count = round(held_out * len(articles))
    if not 0 < count < len(articles):
        raise InputError(
            f"held out is {held_out} of {len(articles)} articles; at least one must be "
            "held out, and one left"
        )
    chosen = np.random.default_rng(seed).permutation(articles)[:count].tolist()
    return (
        tuple(q for q in questions if q.article not in chosen),
        tuple(q for q in questions if q.article in chosen),
    )


def as_texts(windows: Windows) -> Texts:
    """Windows for the model."""
    return Texts(
        windows.tokens,
        windows.lengths,
        windows.types,
        windows.answer,
        np.ones(len(windows.lengths), bool),
    )


def exact_table(found: list[Found], matches: list[float]) -> report.Table:
    """Exact match beside F1, for the report."""
    return report.Table(
        "Exact match and F1",
        ["attention values", "exact match, %", "F1, %"],
        [
            [
                f.rule.label,
                f"{100 * match:.1f}",
                f"{100 * f.score:.1f}",
            ]
            for f, match in zip(found, matches, strict=True)
        ],
    )
