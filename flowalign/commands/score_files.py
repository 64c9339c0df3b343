"""Scores listed files: reads them in windows of bounded size, and lets no file spoil the scores of another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from flowalign.commands.score_listing import NO_CAPTION, Row, digest
from flowalign.data import media
from flowalign.rewards.base import Scored
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError

WINDOW_PIXELS = 2**25
"""Of the files that are scored together, unless one alone is larger: 400 MB as float32."""

Loaded = tuple[Row, Tensor | None]
"""A row and its media (F, 3, H, W); None where the row says why there are none."""


@dataclass(frozen=True)
class Reading:
    """How files are read and where they go; see `flowalign.data.media.read`."""

    device: str = "cpu"
    batch_size: int = 32
    fps: float | None = None
    max_megapixels: float = media.MAX_MEGAPIXELS


def score_files(
    rows: Sequence[Row],
    judges: Mapping[str, Judge],
    reading: Reading,
    *,
    finished: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> None:
    """Fills in scores and reasons of ``rows``.

    Windows are filled greedily in the order of the rows, so that a run which goes on after one of them forms the same
    windows as one that was never stopped, and gives the same scores to the last bit.

    Args:
        finished: called with the rows of each window, once they have all that they will have.
    """
    needs_text = all("prompt" in judge.spec.needs for judge in judges.values())

    def load(row: Row) -> Loaded:
        if row.reason:
            return row, None
        if row.text is None and needs_text:
            row.reason = NO_CAPTION
            return row, None
        try:
            return row, media.read(row.path, fps=reading.fps, max_megapixels=reading.max_megapixels)
        except FlowAlignError as error:
            row.reason = str(error)
            return row, None

    if any(judge.spec.scope == "groupwise" for judge in judges.values()):
        windows: Iterator[list[Loaded]] = ([load(row) for row in group] for group in _groups(rows))
    else:
        windows = _windows(map(load, rows), reading.batch_size)
    for window in _ahead(windows):
        samples = [(row, one.to(reading.device)) for row, one in window if one is not None]
        for name, judge in judges.items():
            _judge(name, judge, samples)
        finished([row for row, _ in window])
        # Both names outlive the reading of the next window.
        samples.clear()
        window.clear()


def tie_groups(rows: Sequence[Row], judges: Mapping[str, Judge]) -> None:
    """Where a reward depends on all samples of a prompt, the key of each row becomes that of its whole group."""
    if any(judge.spec.scope == "groupwise" for judge in judges.values()):
        for group in _groups(rows):
            whole = digest(sorted(row.key for row in group))
            for row in group:
                row.key = digest([row.key, whole])


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[str | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.text, []).append(row)
    return list(groups.values())


def _windows(loaded: Iterable[Loaded], count: int) -> Iterator[list[Loaded]]:
    """At most ``count`` files, and at most WINDOW_PIXELS of them, unless one alone has more."""
    window: list[Loaded] = []
    pixels = 0
    for row, one in loaded:
        size = 0 if one is None else one.numel() // 3
        if window and (len(window) == count or pixels + size > WINDOW_PIXELS):
            yield window
            window, pixels = [], 0
        window.append((row, one))
        pixels += size
    if window:
        yield window


def _ahead(windows: Iterator[list[Loaded]]) -> Iterator[list[Loaded]]:
    """The next window is read while one is scored."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(next, windows, None)
        while (window := future.result()) is not None:
            future = pool.submit(next, windows, None)
            yield window


def _judge(name: str, judge: Judge, samples: Sequence[tuple[Row, Tensor]]) -> None:
    """Puts the answers of one judge into the rows of a window."""
    wants_text = "prompt" in judge.spec.needs
    judged = []
    for row, one in samples:
        if row.text is None and wants_text:
            row.reasons[name] = NO_CAPTION
        else:
            judged.append((row, one))
    for (row, _), answer in zip(judged, _answers(name, judge, judged), strict=True):
        if isinstance(answer, Exception):
            row.reasons[name] = reason(answer)
            row.scores[name] = math.nan
            continue
        scores, why = answer
        row.scores |= scores
        if not math.isfinite(scores[name]):
            row.reasons[name] = why or f"{name} gave no score"


Answer = tuple[dict[str, float], str]
"""Columns of a sample, and the reason that the judge gave."""


def _answers(name: str, judge: Judge, samples: Sequence[tuple[Row, Tensor]]) -> list[Answer | Exception]:
    """One answer a sample; where the judge raises for all of them, they are shown to it one by one."""
    if not samples:
        return []
    try:
        found = judge([one for _, one in samples], [r.text or "" for r, _ in samples], [r.metadata for r, _ in samples])
        return [_answer(name, found, i) for i in range(len(samples))]
    except Exception as error:
        if len(samples) == 1 or judge.spec.scope == "groupwise":
            return [error] * len(samples)
    single = [_answers(name, judge, [sample])[0] for sample in samples]
    faults = [answer for answer in single if isinstance(answer, Exception)]
    if len(faults) == len(samples) and not any(isinstance(fault, FlowAlignError | ValueError) for fault in faults):
        raise faults[0]  # not the files' fault: the judge is broken, or the device is
    return single


def _answer(name: str, scored: Scored, index: int) -> Answer:
    columns = {name: scored.score, **{f"{name}/{key}": value for key, value in scored.subscores.items()}}
    why = scored.details[index].get("reason") if scored.details else None
    return {key: shortest(float(value[index])) for key, value in columns.items()}, " ".join(str(why or "").split())


def shortest(value: float) -> float:
    """The double with the fewest digits that is ``value`` in float32: 0.1, and not 0.10000000149011612."""
    return float(str(np.float32(value)))


def reason(error: Exception) -> str:
    """One line; the type is named where the message was not written for users."""
    text = " ".join(str(error).split())
    return text if isinstance(error, FlowAlignError | ValueError) and text else f"{type(error).__name__}: {text}"
