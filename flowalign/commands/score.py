"""``flowalign score``: rewards of pictures that already exist."""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flowalign.commands.evaluate import finite_or_none, names
from flowalign.data.pairs import METADATA, read_image
from flowalign.rewards import combine, registry
from flowalign.rewards.combine import WeightedReward
from flowalign.types import FlowAlignError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
BATCH = 32


@dataclass
class Row:
    """One picture: its scores, or why it has none."""

    file: str
    text: str | None
    reason: str = ""
    scores: dict[str, float] = field(default_factory=dict)


def run(args: argparse.Namespace) -> int:
    """Reads ``path, reward, prompt, out`` and, where given, ``device``. Exit 1 when no picture could be scored."""
    device = getattr(args, "device", None) or ("cuda" if torch.cuda.is_available() else "cpu")
    out = Path(args.out) if args.out else None
    if out is not None and out.suffix not in (".csv", ".jsonl"):
        raise FlowAlignError(f"--out {args.out!r}: expected a file that ends in .csv or .jsonl")
    rewards = [WeightedReward(name, registry.create(name, device)) for name in names(args.reward)]
    rows = list_pictures(Path(args.path), args.prompt)
    score_rows(rows, Path(args.path), rewards, device)
    columns = list(dict.fromkeys(name for row in rows for name in row.scores))
    if out is not None:
        write(out, rows, columns)
    wanted = [r.name for r in rewards]
    for row in rows:
        shown = "  ".join(f"{name} {row.scores[name]:.4f}" for name in wanted if name in row.scores)
        print(f"{row.file}  {shown}" if not row.reason else f"{row.file}  invalid: {row.reason}")
    for name in columns:
        print(summary(name, [row.scores.get(name, math.nan) for row in rows], name in wanted))
    return 0 if any(math.isfinite(row.scores.get(wanted[0], math.nan)) for row in rows) else 1


def list_pictures(path: Path, prompt: str | None) -> list[Row]:
    """Pictures of a folder, or one file. Captions: from metadata.jsonl, else a .txt of the same name, else ``prompt``.

    Raises:
        FlowAlignError: there is no picture.
    """
    if path.is_file():
        return [Row(path.name, _sidecar(path) or prompt)]
    if not path.is_dir():
        raise FlowAlignError(f"score {str(path)!r}: no such folder or file; give a folder of pictures")
    captions = _captions(path / METADATA)
    files = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.suffix.lower() in ENDINGS}
    rows = [Row(name, captions.get(name) or _sidecar(files[name]) or prompt) for name in files]
    rows += [
        Row(name, text, "listed in metadata.jsonl, but missing") for name, text in captions.items() if name not in files
    ]
    if not rows:
        raise FlowAlignError(f"score {str(path)!r}: no picture in it; expected files that end in {', '.join(ENDINGS)}")
    return rows


def _captions(listing: Path) -> dict[str, str]:
    captions = {}
    for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else (), 1):
        try:
            record = json.loads(line) if line.strip() else {}
            if record:
                captions[str(record["file_name"])] = str(record["text"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise FlowAlignError(f'{listing}:{number}: expected an object with "file_name" and "text"') from None
    return captions


def _sidecar(picture: Path) -> str | None:
    text = picture.with_suffix(".txt")
    return text.read_text(encoding="utf-8").strip() or None if text.is_file() else None


def score_rows(rows: Sequence[Row], path: Path, rewards: Sequence[WeightedReward], device: str) -> None:
    """Fills in scores and reasons. Pictures of one size are scored together."""
    folder = path if path.is_dir() else path.parent
    pictures: dict[tuple[int, ...], list[tuple[Row, Tensor]]] = {}
    for row in rows:
        if row.reason:
            continue
        if row.text is None:
            row.reason = f"no caption; add {METADATA}, a .txt of the same name, or --prompt"
            continue
        try:
            image = read_image(folder / row.file)
        except FlowAlignError as error:
            row.reason = str(error)
            continue
        pictures.setdefault(tuple(image.shape), []).append((row, image))
    for group in pictures.values():
        for start in range(0, len(group), BATCH):
            _score_batch(group[start : start + BATCH], rewards, device)


def _score_batch(batch: Sequence[tuple[Row, Tensor]], rewards: Sequence[WeightedReward], device: str) -> None:
    media = torch.stack([image for _, image in batch])[:, None].to(device)
    texts = [str(row.text) for row, _ in batch]
    for reward in rewards:
        try:
            columns = combine.score([reward], media, texts)
        except FlowAlignError as error:
            for row, _ in batch:
                row.reason = "; ".join(filter(None, (row.reason, str(error))))
            continue
        for i, (row, _) in enumerate(batch):
            row.scores |= {name: float(value[i]) for name, value in {**columns.values, **columns.subscores}.items()}
            if math.isnan(row.scores[reward.name]):
                row.reason = "; ".join(filter(None, (row.reason, f"{reward.name} cannot judge it with {row.text!r}")))


def write(out: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """One line a picture; what is invalid has a reason and no number."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        if out.suffix == ".csv":
            table.writerow(["file_name", "text", *columns, "invalid"])
        for row in rows:
            scores = {name: finite_or_none(row.scores.get(name, math.nan)) for name in columns}
            if out.suffix == ".csv":
                table.writerow(
                    [row.file, row.text or "", *("" if v is None else v for v in scores.values()), row.reason]
                )
            else:
                record = {"file_name": row.file, "text": row.text, **scores, "invalid": row.reason or None}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def summary(name: str, values: Sequence[float], is_reward: bool) -> str:
    """Mean, spread and how many have no number; a sub-score that does not apply is not invalid."""
    known = torch.tensor([v for v in values if math.isfinite(v)], dtype=torch.float64)
    if not known.numel() and not is_reward:
        return f"{name}: applies to no picture"
    if not known.numel():
        return f"{name}: nothing could be scored, {len(values)} invalid"
    invalid = f", {len(values) - known.numel()} invalid" if is_reward else f", of {known.numel()} pictures"
    return f"{name}: mean {float(known.mean()):.4f}, spread {float(known.std(correction=0)):.4f}{invalid}"
