"""Where scores go: the journal of a run, by which it can go on, the final table, and its summary."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flowalign.commands.score_listing import PARTIAL, TABLES, Row
from flowalign.types import FlowAlignError


class Journal:
    """The rows that are finished, in OUT.partial.jsonl: a line of settings, then one line for each window of files.

    A window is written whole or not at all: a run that was killed between goes on with the same windows, whose scores
    may differ in the last bit from those of other windows.

    Args:
        table: file of the final table.
        settings: what scores depend on besides the files; a journal of other settings is refused.
        restart: begin anew, whatever is there.

    Raises:
        FlowAlignError: there is a journal of other settings, or one that is damaged before its last line.
    """

    def __init__(self, table: Path, settings: Mapping[str, Any], restart: bool = False) -> None:
        self.path = table.with_name(table.name + PARTIAL)
        self._settings = json.loads(json.dumps(settings, default=str))
        self.known: dict[str, dict[str, Any]] = {}
        if restart:
            self.path.unlink(missing_ok=True)
        end = self._read() if self.path.is_file() else 0
        self._file: BinaryIO = self.path.open("r+b" if end else "wb")
        self._file.truncate(end)  # the torn line of a run that was killed
        self._file.seek(end)
        if not end:
            self._write({"settings": self._settings})

    def _read(self) -> int:
        """Takes over what is finished; returns where the last whole line ends."""
        end = 0
        lines = self.path.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if number == 1:
                    self._compare(record["settings"])
                else:
                    self.known |= {row["key"]: row for row in record["rows"]}
            except (ValueError, KeyError, TypeError):
                if number == len(lines):
                    break
                raise FlowAlignError(f"{self.path}:{number}: damaged; begin anew with --restart") from None
            end += len(line) + 1
        return end

    def _compare(self, old: Mapping[str, Any]) -> None:
        for name in sorted({*old, *self._settings}):
            if old.get(name) != self._settings.get(name):
                raise FlowAlignError(
                    f"{self.path}: was begun with {_setting(name, old.get(name))}, now it is "
                    f"{_setting(name, self._settings.get(name))}; repeat the old command to go on, or begin anew with "
                    "--restart"
                )

    def recall(self, row: Row) -> bool:
        """Fills in a row that is finished; False where it is not, or where its file or caption changed since."""
        record = self.known.get(row.key)
        if record is None:
            return False
        row.reason, row.reasons = record["reason"], dict(record["reasons"])
        row.scores = {name: math.nan if value is None else value for name, value in record["scores"].items()}
        return True

    def append(self, rows: Sequence[Row]) -> None:
        """Keeps the rows of a window, also through a loss of power."""
        self._write(
            {
                "rows": [
                    {"key": r.key, "reason": r.reason, "reasons": r.reasons, "scores": _plain(r.scores)} for r in rows
                ]
            }
        )

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, *, done: bool) -> None:
        """Ends the run; the journal of one that is ``done`` is deleted."""
        self._file.close()
        if done:
            self.path.unlink(missing_ok=True)


def _setting(name: str, value: Any) -> str:
    if isinstance(value, dict):  # rewards and their digests
        value = ", ".join(f"{key} ({str(digest)[:8]})" for key, digest in value.items())
    return f"{name.replace('_', ' ')} {value!r}"


def _plain(scores: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no nan."""
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


def check_table(out: Path) -> None:
    """Refuses a table that could not be written, before anything is scored.

    Raises:
        FlowAlignError: an unknown ending, a folder of this name, or parquet without pyarrow.
    """
    if out.suffix not in TABLES or out.is_dir():
        raise FlowAlignError(f"--out {str(out)!r}: expected a file that ends in .csv, .jsonl or .parquet")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise FlowAlignError(
            f"--out {str(out)!r}: pyarrow is not installed; run pip install 'flowalign[parquet]', or choose .csv"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlowAlignError(f"--out {str(out)!r}: its folder cannot be made ({error.strerror})") from None


def columns(rows: Iterable[Row], rewards: Sequence[str]) -> list[str]:
    """The rewards, then their sub-scores."""
    found = dict.fromkeys(name for row in rows for name in row.scores)
    parts = [name for reward in rewards for name in sorted(found) if name.startswith(reward + "/")]
    return [*rewards, *(name for name in dict.fromkeys(parts) if name not in rewards)]


def write_table(out: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    """One line a file: file_name, text, a number or nothing for each of ``names``, and why it is invalid.

    The file appears whole or not at all.
    """
    unfinished = out.with_name(f".{out.name}.unfinished")
    records = [
        {
            "file_name": row.file,
            "text": row.text,
            **{name: row.scores[name] if row.has(name) else None for name in names},
            "invalid": row.invalid or None,
        }
        for row in rows
    ]
    if out.suffix == ".parquet":
        _write_parquet(unfinished, records, names)
    else:
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            if out.suffix == ".csv":
                table = csv.writer(file)
                table.writerow(["file_name", "text", *names, "invalid"])
                table.writerows(["" if v is None else v for v in record.values()] for record in records)
            else:
                file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    os.replace(unfinished, out)


def _write_parquet(path: Path, records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    fields = [("file_name", text), ("text", text), *((name, pyarrow.float32()) for name in names), ("invalid", text)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records), schema=pyarrow.schema(fields)), path)


def summary(rows: Sequence[Row], names: Sequence[str], rewards: Sequence[str]) -> list[str]:
    """A table as text: mean, standard deviation, least and greatest, and of how many; a sub-score that does not apply
    to a file is not invalid."""
    width = max(len(name) for name in ("score", *names))
    lines = [f"{'score':{width}}  {'mean':>9} {'spread':>9} {'least':>9} {'greatest':>9} {'scored':>7} {'invalid':>8}"]
    for name in names:
        known = np.array([row.scores[name] for row in rows if row.has(name)], np.float64)
        numbers = [known.mean(), known.std(), known.min(), known.max()] if known.size else [math.nan] * 4
        shown = " ".join(f"{'-' if math.isnan(v) else format(v, '.4f'):>9}" for v in numbers)
        invalid = len(rows) - known.size if name in rewards else "-"
        lines.append(f"{name:{width}}  {shown} {known.size:7d} {invalid:>8}")
    return lines
