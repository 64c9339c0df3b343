"""``flowalign score``: rewards of pictures and videos that already exist."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flowalign import __version__
from flowalign.commands import reward_arguments, score_sheet, score_table
from flowalign.commands.score_files import Reading, score_files, tie_groups
from flowalign.commands.score_listing import Row, list_media
from flowalign.commands.score_progress import ScoreProgress
from flowalign.rewards.judge import Judge

SHOWN = 40
"""Files printed one by one; of more, only those that are invalid."""


def run(args: argparse.Namespace) -> int:
    """Reads ``path, reward, param, prompt, out, device, frames, fps, batch_size, max_megapixels, restart``; writes OUT
    and its contact sheet. Exit 1 where the first reward scored nothing."""
    out = Path(args.out) if args.out else None
    if out is not None:
        score_table.check_table(out)
    names = reward_arguments.names(args.reward)
    options = reward_arguments.params(args.param, names)
    reading = Reading(
        reward_arguments.default_device(args.device), args.batch_size, args.fps, max_megapixels=args.max_megapixels
    )
    rows = list_media(Path(args.path), args.prompt)
    judges = reward_arguments.judges(
        names, options, device=reading.device, batch_size=reading.batch_size, frames=args.frames
    )
    tie_groups(rows, judges)
    journal = None
    if out is not None:
        journal = score_table.Journal(out, _settings(args, judges, reading), args.restart)
    _score(rows, judges, reading, journal)
    columns = score_table.columns(rows, names)
    if out is not None:
        score_table.write_table(out, rows, columns)
    show(rows, columns, names)
    if out is not None:
        print(f"scores: {out}")
        choice = score_sheet.choose(rows, names[0], judges[names[0]].spec.higher_is_better)
        if choice.best:
            sheet = score_sheet.sheet_path(out)
            score_sheet.write_sheet(sheet, choice, names[0], fps=reading.fps, max_megapixels=reading.max_megapixels)
            print(f"best and worst: {sheet}")
    if journal is not None:
        journal.close(done=True)
    return 0 if any(row.has(names[0]) for row in rows) else 1


def _settings(args: argparse.Namespace, judges: dict[str, Judge], reading: Reading) -> dict[str, object]:
    """What the scores depend on besides the files: a run goes on only where all of it is the same."""
    return {
        "version": __version__,
        "path": str(Path(args.path).resolve()),
        "prompt": args.prompt,
        "rewards": {name: judge.digest for name, judge in judges.items()},
        "frames": args.frames,
        "fps": reading.fps,
        "max_megapixels": reading.max_megapixels,
        "batch_size": reading.batch_size,
        "device": reading.device,
    }


def _score(
    rows: Sequence[Row], judges: dict[str, Judge], reading: Reading, journal: score_table.Journal | None
) -> None:
    todo = [row for row in rows if journal is None or not journal.recall(row)]
    if len(todo) < len(rows):
        print(f"going on: {len(rows) - len(todo)} of {len(rows)} files are scored already", file=sys.stderr)

    def finished(window: Sequence[Row]) -> None:
        if journal is not None:
            journal.append(window)
        progress.advance(len(window), sum(bool(row.invalid) for row in window))

    try:
        with ScoreProgress(len(rows), len(rows) - len(todo)) as progress:
            score_files(todo, judges, reading, finished=finished)
    except BaseException:
        if journal is not None:
            journal.close(done=False)
            print("score: stopped; the same command goes on from here", file=sys.stderr)
        raise


def show(rows: Sequence[Row], columns: Sequence[str], rewards: Sequence[str]) -> None:
    """Prints files and a summary."""
    chosen = [row for row in rows if len(rows) <= SHOWN or row.invalid]
    for row in chosen[:SHOWN]:
        scores = [f"{name} {row.scores[name]:.4f}" for name in rewards if row.has(name)]
        print("  ".join([row.file, *scores, *([f"invalid: {row.invalid}"] if row.invalid else [])]))
    if len(chosen) > SHOWN:
        print(f"... and {len(chosen) - SHOWN} more that are invalid, see the table")
    print("\n".join(score_table.summary(rows, columns, rewards)))
