"""How far a run is: a bar where someone watches, and a line now and then where the output goes to a file."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS = 10.0
"""Between two lines."""


class ScoreProgress:
    """Files done, rate, time left and how many are invalid, on standard error.

    Args:
        total: files.
        done: files that an earlier run finished; they do not count towards the rate.
    """

    def __init__(self, total: int, done: int = 0) -> None:
        self._total, self._done, self._earlier, self._invalid = total, done, done, 0
        self._start = self._shown = time.monotonic()
        self._bar: Progress | None = None
        console = Console(stderr=True)
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("scoring"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.1f}/s"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[invalid]} invalid"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("scoring", total=total, completed=done, rate=0.0, invalid=0)

    def __enter__(self) -> ScoreProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int, invalid: int) -> None:
        """``count`` more files are done, of which ``invalid`` have no score."""
        self._done, self._invalid = self._done + count, self._invalid + invalid
        now = time.monotonic()
        rate = (self._done - self._earlier) / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=rate, invalid=self._invalid)
        elif now - self._shown >= SECONDS and self._done < self._total:
            self._shown = now
            left = (self._total - self._done) / rate
            print(
                f"scored {self._done} of {self._total} files, {rate:.1f}/s, {left:.0f} s left, {self._invalid} invalid",
                file=sys.stderr,
                flush=True,
            )
