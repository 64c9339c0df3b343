"""Text that a prompt asks for, text that was found, and how far they are apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from flowalign.types import Metadata

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|”([^”]*)”|«([^»]*)»|＂([^＂]*)＂')


class Line(NamedTuple):
    """A piece of text and its place: left edge, top and bottom in pixels, y downwards."""

    text: str
    left: float
    top: float
    bottom: float


def wanted(prompt: str, metadata: Metadata | None) -> str:
    """The text that a picture should show: ``metadata["text"]``, else what stands between the first pair of double
    quotes, straight or curly.

    Raises:
        ValueError: there is none; says why.
    """
    if metadata is not None and "text" in metadata:
        text = metadata["text"]
        if not isinstance(text, str):
            raise ValueError(f"metadata 'text' is {text!r}, expected a string")
        where = "metadata 'text'"
    else:
        found = _QUOTED.search(prompt)
        if found is None:
            raise ValueError(f"prompt {prompt!r} has no text between double quotes, and no metadata 'text' came")
        text, where = str(next(group for group in found.groups() if group is not None)), f"prompt {prompt!r}"
    if not plain(text):
        raise ValueError(f"{where} asks for an empty text")
    return text


def plain(text: str) -> str:
    """Without white space and in lower case: what is compared."""
    return "".join(text.split()).lower()


def in_reading_order(lines: Sequence[Line]) -> list[Line]:
    """From top to bottom, and within a row from left to right.

    A piece stands in a row if its middle lies less than half a height, of the flattest piece, from the mean middle of
    the row.
    """
    rows: list[list[Line]] = []
    for line in sorted(lines, key=_middle):
        row = rows[-1] if rows else []
        if row and _middle(line) - fmean(map(_middle, row)) < 0.5 * min(map(_height, [*row, line])):
            row.append(line)
        else:
            rows.append([line])
    return [line for row in rows for line in sorted(row, key=lambda line: line.left)]


def _middle(line: Line) -> float:
    return (line.top + line.bottom) / 2


def _height(line: Line) -> float:
    return line.bottom - line.top


def similarity(read: str, target: str) -> float:
    """Flow-GRPO's score of plain texts, in [0, 1].

    1 if ``target`` occurs in ``read``; else 1 - d / len(target) with the edit distance d, at most len(target).

    Source: Flow-GRPO, arXiv 2505.05470, as its code has it.
    """
    if target in read:
        return 1.0
    return 1.0 - min(levenshtein(read, target), len(target)) / len(target)


def levenshtein(a: str, b: str) -> int:
    """Least number of characters to insert, delete or replace that turns ``a`` into ``b``."""
    row = list(range(len(b) + 1))  # distances from the part of a read so far to each beginning of b
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]
