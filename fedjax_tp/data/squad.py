"""Questions on texts in SQuAD v1.1's format: reading, windows, answers and their score.

Rajpurkar et al. 2016. A question may have several right answers; the best one counts.
"""

import gzip
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from fedjax_tp.data.catalog import first_line
from fedjax_tp.types import InputError

LONGEST_QUESTION = 64
"""Tokens; more of a question are cut off."""
LONGEST_ANSWER = 30
"""Tokens."""


class Question(NamedTuple):
    """A question on a text.

    Attributes:
      article: number of the article that the text is of.
      answers: right ones, as they stand in the context.
      starts: where in the context each begins, in characters.
    """

    id: str
    article: int
    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]


class Windows(NamedTuple):
    """Questions with a stretch of their context each, as tokens.

    Attributes:
      tokens, types: `[windows, length]`, padded; types tell question and context apart.
      lengths: real tokens of each.
      spans: where in the context a token begins and ends, in characters; -1 of what is
        no context.
      question: the number of the question that a window is of.
      answer: first and last token of its answer; 0, 0 where the window has none.
    """

    tokens: Integer[np.ndarray, "windows length"]
    types: Integer[np.ndarray, "windows length"]
    lengths: Integer[np.ndarray, " windows"]
    spans: Integer[np.ndarray, "windows length 2"]
    question: Integer[np.ndarray, " windows"]
    answer: Integer[np.ndarray, "windows 2"]


def read_questions(path: Path) -> tuple[Question, ...]:
    """The questions of a SQuAD file, which may be compressed by gzip.

    Raises:
      InputError: the file cannot be read, is of another format, or has no question, or
        one without an answer that stands in its context.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"cannot read {path}: {first_line(error)}") from None
    found = []
    try:
        for article, entry in enumerate(content["data"]):
            for paragraph in entry["paragraphs"]:
                context = paragraph["context"]
                if not isinstance(context, str):
                    raise TypeError(f"context is {context!r}")
                for qa in paragraph["qas"]:
                    answers = [
                        (str(a["text"]), int(a["answer_start"])) for a in qa["answers"]
                    ]
                    texts, starts = zip(*answers, strict=True) if answers else ((), ())
                    found.append(
                        Question(
                            str(qa["id"]),
                            article,
                            str(qa["question"]),
                            context,
                            texts,
                            starts,
                        )
                    )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is not in the format of SQuAD v1.1: {first_line(error)}"
        ) from None
    if not found:
        raise InputError(f"{path} has no question")
    for question in found:
        if not question.answers:
            raise InputError(
                f"question {question.id} in {path} has no answer; in SQuAD v1.1 every "
                "one has"
            )
        for answer, start in zip(question.answers, question.starts, strict=True):
            if not answer or question.context[start : start + len(answer)] != answer:
                raise InputError(
                    f"answer {answer!r} of question {question.id} in {path} is not at "
                    f"{start} of its context"
                )
    return tuple(found)


def make_windows(
    tokenizer: Any, questions: Sequence[Question], *, length: int, stride: int
) -> Windows:
    """Cuts contexts that are too long into overlapping windows.

    Args:
      tokenizer: a `tokenizers.Tokenizer`; its truncation is set.
      questions: those to be answered.
      length: the most tokens of a window, question included.
      stride: tokens by which windows of a context overlap.

    Raises:
      InputError: windows are too short for that.
    """
    if not 0 <= stride < length - LONGEST_QUESTION - 8:
        raise InputError(
            f"stride is {stride} with windows of {length} tokens; allowed is 0 to "
            f"{length - LONGEST_QUESTION - 9}"
        )
    tokenizer.no_truncation()
    pairs = []
    for question in questions:
        asked = question.question.strip()
        encoded = tokenizer.encode(asked, add_special_tokens=False)
        if len(encoded.ids) > LONGEST_QUESTION:
            asked = asked[: encoded.offsets[LONGEST_QUESTION - 1][1]]
        pairs.append((asked, question.context))
    tokenizer.enable_truncation(length, stride=stride, strategy="only_second")
    rows: list[tuple[int, Any]] = []
    for number, encoded in enumerate(tokenizer.encode_batch(pairs)):
        rows += [(number, window) for window in (encoded, *encoded.overflowing)]
    tokenizer.no_truncation()
    longest = max(len(window.ids) for _, window in rows)
    tokens = np.zeros((len(rows), longest), np.int32)
    types = np.zeros((len(rows), longest), np.int32)
    spans = np.full((len(rows), longest, 2), -1, np.int32)
    answer = np.zeros((len(rows), 2), np.int32)
    for row, (number, window) in enumerate(rows):
        size = len(window.ids)
        tokens[row, :size] = window.ids
        types[row, :size] = window.type_ids
        is_context = np.array([s == 1 for s in window.sequence_ids])
        spans[row, :size][is_context] = np.array(window.offsets)[is_context]
        answer[row] = _place(spans[row], questions[number])
    return Windows(
        tokens,
        types,
        np.array([len(window.ids) for _, window in rows], np.int32),
        spans,
        np.array([number for number, _ in rows], np.int32),
        answer,
    )


def _place(spans: np.ndarray, question: Question) -> tuple[int, int]:
    """First and last token of the first answer, or 0, 0 if it is not in the window."""
    start, text = question.starts[0], question.answers[0]
    end = start + len(text)
    begins, ends = spans[:, 0], spans[:, 1]
    is_real = (begins >= 0) & (ends > begins)
    first = np.flatnonzero(is_real & (begins <= start) & (start < ends))
    last = np.flatnonzero(is_real & (begins < end) & (end <= ends))
    return (int(first[0]), int(last[-1])) if len(first) and len(last) else (0, 0)


def find_answers(
    windows: Windows,
    logits: Float[np.ndarray, "windows length 2"],
    questions: Sequence[Question],
) -> list[str]:
    """The likeliest stretch of context for each question, over all its windows.

    Args:
      windows: of all questions.
      logits: of each token being the first and the last of an answer.
      questions: those that the windows are of.
    """
    is_context = windows.spans[..., 0] >= 0
    first = np.where(is_context, logits[..., 0], -np.inf)
    last = np.where(is_context, logits[..., 1], -np.inf)
    length = first.shape[1]
    best = np.full(len(first), -np.inf)
    place = np.zeros((len(first), 2), int)
    rows = np.arange(len(first))
    for more in range(min(LONGEST_ANSWER, length)):
        scores = first[:, : length - more] + last[:, more:]
        at = scores.argmax(axis=1)
        better = scores[rows, at] > best
        best[better] = scores[rows, at][better]
        place[better] = np.stack([at, at + more], axis=1)[better]
    answers = [""] * len(questions)
    highest = np.full(len(questions), -np.inf)
    for row, number in enumerate(windows.question):
        if best[row] > highest[number]:
            highest[number] = best[row]
            begin = windows.spans[row, place[row, 0], 0]
            end = windows.spans[row, place[row, 1], 1]
            answers[number] = questions[number].context[begin:end]
    return answers


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and superfluous blanks."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if it is one of the answers after `normalize`, else 0."""
    return float(any(normalize(prediction) == normalize(a) for a in answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, counted with their number; of the
    answer for which it is highest."""
    return max(_f1(prediction, answer) for answer in answers)


def _f1(prediction: str, answer: str) -> float:
    ours, theirs = normalize(prediction).split(), normalize(answer).split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def mean_score(
    score: Callable[[str, Sequence[str]], float],
    predictions: Sequence[str],
    questions: Sequence[Question],
) -> float:
    """The mean of `exact_match` or `f1` over questions."""
    pairs = zip(predictions, questions, strict=True)
    return float(np.mean([score(p, question.answers) for p, question in pairs]))
