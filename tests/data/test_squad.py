"""Questions in SQuAD's format: score, windows, answers, bad files."""

import gzip
import json

import numpy as np
import pytest

from fedjax_tp.data import squad
from fedjax_tp.types import InputError

tokenizers = pytest.importorskip("tokenizers")


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("rain rain rain rain rain", ["rain"], 0, 0.333333),
        ("north harbour", ["the old north harbour wall"], 0, 0.666667),
        ("north harbour", ["the old north harbour wall", "North Harbour!"], 1, 1),
        ("the Blue-Green  Café!", ["bluegreen café"], 1, 1),
        ("the Blue-Green  Café!", ["blue green café"], 0, 0.4),
        ("", ["rain"], 0, 0),
        ("The", ["a"], 1, 0),
    ],
)
def test_exact_match_and_f1(prediction, answers, exact, f1):
    """A10, computed by SQuAD's rules."""
    assert squad.exact_match(prediction, answers) == exact
    assert squad.f1(prediction, answers) == pytest.approx(f1, abs=1e-6)


def questions(contexts):
    entries = []
    for number, (context, asked) in enumerate(contexts):
        qas = [
            {
                "id": f"{number}-{i}",
                "question": question,
                "answers": [{"text": answer, "answer_start": context.index(answer)}],
            }
            for i, (question, answer) in enumerate(asked)
        ]
        entries.append({"paragraphs": [{"context": context, "qas": qas}]})
    return {"data": entries}


LONG = " ".join(f"w{i}" for i in range(300)) + " treasure here " + "end " * 50


def write(path, content):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        json.dump(content, file)
    return path


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "hidden", "treasure"]
    found = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: i for i, word in enumerate(words)}, unk_token="[UNK]"
        )
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return found


def test_windows_cover_a_long_text_and_one_has_the_answer(tmp_path, tokenizer):
    short = ("A treasure is hidden.", [("What is hidden?", "treasure")])
    content = questions([(LONG, [("What is hidden?", "treasure here")]), short])
    asked = squad.read_questions(write(tmp_path / "q.json.gz", content))
    assert [q.article for q in asked] == [0, 1]
    windows = squad.make_windows(tokenizer, asked, length=128, stride=40)
    of_long = windows.question == 0
    assert of_long.sum() > 3
    assert (windows.lengths <= 128).all()
    covered = set()
    for spans in windows.spans[of_long]:
        covered |= {tuple(s) for s in spans if s[0] >= 0}
    assert len(covered) == len(LONG.split())
    for row, number in enumerate(windows.question):
        first, last = windows.answer[row]
        if first:
            begin, end = windows.spans[row, first, 0], windows.spans[row, last, 1]
            assert asked[number].context[begin:end] == asked[number].answers[0]
    assert (windows.answer[of_long][:, 0] > 0).sum() >= 1
    assert (windows.answer[of_long][:, 0] == 0).sum() >= 1
    # Question and context are told apart, and the question is never the answer.
    assert (windows.types[windows.spans[..., 0] >= 0] == 1).all()


def test_the_likeliest_stretch_over_all_windows_wins(tmp_path, tokenizer):
    content = questions([(LONG, [("What is hidden?", "treasure here")])])
    asked = squad.read_questions(write(tmp_path / "q.json", content))
    windows = squad.make_windows(tokenizer, asked, length=128, stride=40)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(*windows.tokens.shape, 2))
    found = squad.find_answers(windows, logits, asked)
    # By trying every pair of tokens.
    best, wanted = -np.inf, None
    for row, spans in enumerate(windows.spans):
        places = np.flatnonzero(spans[:, 0] >= 0)
        for first in places:
            for last in places[(places >= first) & (places < first + 30)]:
                score = logits[row, first, 0] + logits[row, last, 1]
                if score > best:
                    best, wanted = score, LONG[spans[first, 0] : spans[last, 1]]
    assert found == [wanted]
    # Higher outside of the context counts for nothing.
    logits[:, 0] = 100
    assert squad.find_answers(windows, logits, asked) == [wanted]
    row = int(np.flatnonzero(windows.answer[:, 0])[0])
    first, last = windows.answer[row]
    logits[row, first, 0] = logits[row, last, 1] = 50
    answers = squad.find_answers(windows, logits, asked)
    assert answers == ["treasure here"]
    assert squad.mean_score(squad.exact_match, answers, asked) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rows": []}, "not in the format of SQuAD v1.1: 'data'"),
        ({"data": []}, "has no question"),
        ({"data": [{"paragraphs": [{"context": 5, "qas": []}]}]}, "context is 5"),
        ({"data": [{"paragraphs": [{"context": "x"}]}]}, "format of SQuAD"),
        (
            {
                "data": [
                    {
                        "paragraphs": [
                            {
                                "context": "x",
                                "qas": [{"id": 7, "question": "?", "answers": []}],
                            }
                        ]
                    }
                ]
            },
            "question 7 in .* has no answer",
        ),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        squad.read_questions(write(tmp_path / "q.json", content))


def test_an_answer_that_is_not_where_it_should_be_is_named(tmp_path):
    content = questions([("A treasure.", [("What?", "treasure")])])
    qa = content["data"][0]["paragraphs"][0]["qas"][0]
    qa["answers"][0]["answer_start"] = 3
    with pytest.raises(
        InputError, match=r"'treasure' of question 0-0 in .* is not at 3"
    ):
        squad.read_questions(write(tmp_path / "q.json", content))


def test_unreadable_files_and_windows_that_are_too_short(tmp_path, tokenizer):
    with pytest.raises(InputError, match="cannot read"):
        squad.read_questions(tmp_path / "nowhere.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b'{"data": []}')[:-9])
    with pytest.raises(InputError, match="cannot read"):
        squad.read_questions(tmp_path / "cut.json.gz")
    content = questions([("A treasure.", [("What?", "treasure")])])
    asked = squad.read_questions(write(tmp_path / "q.json", content))
    with pytest.raises(InputError, match="stride is 60 with windows of 128 tokens"):
        squad.make_windows(tokenizer, asked, length=128, stride=60)


def test_a_very_long_question_is_cut_off(tmp_path, tokenizer):
    asked = questions([("A treasure.", [("what " * 200, "treasure")])])
    read = squad.read_questions(write(tmp_path / "q.json", asked))
    windows = squad.make_windows(tokenizer, read, length=128, stride=16)
    assert len(windows.lengths) == 1
    assert windows.lengths[0] == squad.LONGEST_QUESTION + 3 + 3
    assert windows.answer[0].tolist() != [0, 0]
