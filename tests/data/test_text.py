"""Plays to lines, lines to examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp.data import text

PLAY = r"""# A Play

## ACT I

### SCENE I. A wood.

_Enter ANN, and Bob from
the other side_

**ANN**$
Well met, Bob\--by night,$
__\[Aside]_
and [Aside]_ alone.

_Exit_

But soft!

**Bob**$
*Trumpet within.*
Who's there?

### SCENE II. The same.

Nobody says this.

**BOB**$
I.
""".replace("$", "  ")  # Line ends of Markdown.


def test_speeches_are_what_roles_say_and_nothing_else():
    assert text.speeches(PLAY) == {
        "ANN": ["Well met, Bob--by night,", "and  alone.", "But soft!"],
        "BOB": ["Who's there?", "I."],
    }


@pytest.mark.parametrize(
    ("count", "train"), [(1, 1), (2, 1), (3, 2), (5, 4), (10, 8), (11, 8)]
)
def test_lines_are_split_in_order(count, train):
    lines = [str(i) for i in range(count)]
    first, rest = text.split_lines(lines)
    assert first.split("\n") == lines[:train]
    assert [line for line in rest.split("\n") if line] == lines[train:]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 12))
def test_windows_are_every_stride_with_what_follows(size, length, stride):
    letters = np.arange(size, dtype=np.uint8)
    found = text.windows(letters, length, stride)
    starts = [i for i in range(0, size, stride) if i + length < size]
    assert found.x.shape == (len(starts), length)
    assert found.x[:, 0].tolist() == starts
    assert found.y.tolist() == [start + length for start in starts]


def test_characters_are_encoded_by_their_place():
    letters = text.alphabet(["abba", "cab"])
    assert letters == "abc"
    assert text.encode("cab", letters).tolist() == [2, 0, 1]
    assert text.encode("cab", letters).dtype == np.uint8
