"""What there is to score: media files of a folder, each with its caption and metadata."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowalign.data import media
from flowalign.data.pairs import METADATA
from flowalign.types import FlowAlignError

ENDINGS = (*media.PICTURES, *media.VIDEOS, *media.UNSUPPORTED)
TABLES = (".csv", ".jsonl", ".parquet")
SHEET = "-best-worst.png"
"""Ending of a contact sheet, after the stem of its table."""
PARTIAL = ".partial.jsonl"
NO_CAPTION = f"no caption; add {METADATA}, a .txt of the same name, or --prompt"


@dataclass
class Row:
    """One file: its scores, or why it has none.

    Args:
        file: name relative to the listed folder, with slashes.
        key: of all that its scores depend on, but for the settings of the run.
        reason: why the file as a whole is invalid.
        reasons: {reward: why it gave no score}.
        scores: {reward or "reward/sub-score": number}; nan where there is none.
    """

    file: str
    path: Path
    text: str | None
    metadata: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    reason: str = ""
    reasons: dict[str, str] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def invalid(self) -> str:
        """All reasons as one sentence; empty where every reward gave a score."""
        named = (why if name in why else f"{name}: {why}" for name, why in self.reasons.items())
        return self.reason or "; ".join(named)

    def has(self, name: str) -> bool:
        """Whether there is a finite score called ``name``."""
        return math.isfinite(self.scores.get(name, math.nan))


@dataclass(frozen=True)
class Caption:
    """What a line of metadata.jsonl says of a file; ``conflict`` where two lines say different things."""

    text: str | None
    metadata: dict[str, Any]
    conflict: bool = False


def list_media(path: Path, prompt: str | None = None) -> list[Row]:
    """Pictures and videos of a folder and all folders in it, or one file; sorted by name.

    A caption comes from a metadata.jsonl of the file's folder or of one above, else from a .txt of the same name, else
    it is ``prompt``. Further keys of metadata.jsonl are kept as metadata.

    Raises:
        FlowAlignError: no such path, nothing to score in it, or a malformed metadata.jsonl.
    """
    if path.is_file():
        known = _captions(path.parent, [path.parent / METADATA])
        rows = [_row(path.name, path, known.get(path.name), prompt)]
    elif path.is_dir():
        rows = _folder(path, prompt)
    else:
        raise FlowAlignError(f"score {str(path)!r}: no such folder or file; give a folder of pictures or videos")
    if any(media.is_video(row.path) and not row.reason for row in rows):
        media.check_video_support()
    return rows


def _folder(path: Path, prompt: str | None) -> list[Row]:
    entries = [path / name for name in _walk(path)]
    known = _captions(path, [entry for entry in entries if entry.name == METADATA])
    files = {p.relative_to(path).as_posix(): p for p in entries if p.suffix.lower() in ENDINGS and not _is_sheet(p)}
    files |= {name: path / name for name in known if name not in files}
    if not files:
        expected = ", ".join((*media.PICTURES, *media.VIDEOS))
        raise FlowAlignError(f"score {str(path)!r}: no picture or video in it; expected files that end in {expected}")
    return [_row(name, files[name], known.get(name), prompt) for name in sorted(files)]


def _walk(path: Path) -> Iterator[str]:
    """Files below ``path``, relative to it; hidden ones, such as the ._ files of macOS, are nobody's pictures."""
    for folder, inside, files in os.walk(path):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), path)


def _is_sheet(path: Path) -> bool:
    """Whether a picture is the contact sheet of a table beside it."""
    if not path.name.endswith(SHEET):
        return False
    stem = path.name.removesuffix(SHEET)
    return any(path.with_name(stem + end + more).is_file() for end in TABLES for more in ("", PARTIAL))


def _row(name: str, path: Path, caption: Caption | None, prompt: str | None) -> Row:
    row = Row(name, path, caption.text if caption else None, dict(caption.metadata) if caption else {})
    try:
        row.text = row.text or _sidecar(path) or prompt
    except UnicodeDecodeError:
        row.reason = f"its caption {path.with_suffix('.txt').name} is not UTF-8; save it as UTF-8"
    if caption and caption.conflict:
        row.reason = f"listed twice in {METADATA}, with different captions or keys; delete one line"
    elif name.startswith(("../", "/")):
        row.reason = f"listed in {METADATA}, but outside the folder; move it there"
    elif caption and not path.is_file():
        row.reason = f"listed in {METADATA}, but missing"
    seen = path.stat() if path.is_file() else None
    stamp = [seen.st_size, seen.st_mtime_ns] if seen else None
    row.key = digest([name, row.text, row.metadata, stamp])
    return row


def digest(value: Any) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _sidecar(path: Path) -> str | None:
    text = path.with_suffix(".txt")
    return text.read_text(encoding="utf-8").strip() or None if text.is_file() else None


def _captions(root: Path, listings: Iterable[Path]) -> dict[str, Caption]:
    """{file relative to ``root``: what is said of it}; a listing's names are relative to its own folder."""
    found: dict[str, Caption] = {}
    for listing in listings:
        folder = listing.parent.relative_to(root).as_posix()
        for number, line in enumerate(_lines(listing), 1):
            if not line.strip():
                continue
            name, caption = _record(line, f"{listing}:{number}")
            name = os.path.normpath(f"{folder}/{name}" if not name.startswith("/") else name).replace(os.sep, "/")
            conflict = name in found and found[name] != caption
            found[name] = Caption(caption.text, caption.metadata, conflict)
    return found


def _lines(listing: Path) -> Sequence[str]:
    try:
        # Not splitlines: JSON may hold other line separators of Unicode within its texts.
        return listing.read_text(encoding="utf-8").split("\n") if listing.is_file() else ()
    except UnicodeDecodeError:
        raise FlowAlignError(f"{listing}: not UTF-8; save it as UTF-8") from None


def _record(line: str, where: str) -> tuple[str, Caption]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FlowAlignError(f"{where}: not JSON ({error.msg}); write one object a line") from None
    name, text = (record.get("file_name"), record.get("text")) if isinstance(record, dict) else (None, None)
    if not isinstance(name, str) or not name or not (text is None or isinstance(text, str)):
        raise FlowAlignError(f'{where}: expected an object with "file_name" and "text"')
    rest = {key: value for key, value in record.items() if key not in ("file_name", "text")}
    return name, Caption(text.strip() or None if text else None, rest)
