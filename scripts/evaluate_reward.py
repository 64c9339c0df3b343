"""How far to trust a reward: does it prefer what people do, how sure may one be, what else does it measure, how fast.

    python scripts/evaluate_reward.py --shapes 200 --reward shapes-verifier,jpeg-compressibility --out runs/reward
    python scripts/evaluate_reward.py --pairs preferences.jsonl --reward pickscore,clipscore --out runs/reward

Each line of the pairs holds {"prompt", "better", "worse"}, with files relative to the list, and may hold "votes", the
share in [0.5, 1] that preferred the better one, and "metadata" for judges that read it. Writes report.md, report.json,
a calibration plot of each reward and the correlation of all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate_reward_plots import plot_calibration, plot_correlation
from PIL import Image

from flowalign.commands import reward_arguments
from flowalign.commands.score_files import WINDOW_PIXELS, Reading, score_files
from flowalign.commands.score_listing import Row
from flowalign.commands.score_progress import ScoreProgress
from flowalign.core import rng
from flowalign.data import media
from flowalign.data.worlds import shapes, shapes_render
from flowalign.rewards import agreement
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError

TIMED, REPEATS = 32, 3
"""Media that throughput is measured on, and how often."""


@dataclass(frozen=True)
class Pair:
    """One preference; ``votes`` is the share that preferred the better one."""

    prompt: str
    better: str
    worse: str
    votes: float = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict)


def load_pairs(path: Path) -> list[Pair]:
    """Reads a preference file.

    Raises:
        FlowAlignError: no such file, no pair in it, or a malformed line.
    """
    if not path.is_file():
        raise FlowAlignError(f"--pairs {str(path)!r}: no such file; give a .jsonl of prompt, better, worse")
    pairs = [
        _pair(line, f"{path}:{number}")
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if line.strip()
    ]
    if not pairs:
        raise FlowAlignError(f"--pairs {str(path)!r}: holds no pair; write one object a line")
    return pairs


def _pair(line: str, where: str) -> Pair:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FlowAlignError(f"{where}: not JSON ({error.msg}); write one object a line") from None
    texts = [record.get(key) for key in ("prompt", "better", "worse")] if isinstance(record, dict) else [None]
    if not all(isinstance(text, str) and text for text in texts):
        raise FlowAlignError(f'{where}: expected an object with the texts "prompt", "better" and "worse"')
    votes, metadata = record.get("votes", 1.0), record.get("metadata", {})
    if isinstance(votes, bool) or not isinstance(votes, int | float) or not 0.5 <= votes <= 1:
        raise FlowAlignError(f'{where}: "votes" is {votes!r}, expected the share in [0.5, 1] that preferred "better"')
    if not isinstance(metadata, dict):
        raise FlowAlignError(f'{where}: "metadata" is {metadata!r}, expected an object')
    return Pair(*texts, votes=float(votes), metadata=metadata)


def write_shapes_pairs(folder: Path, count: int, seed: int = 0) -> Path:
    """Preferences of the shapes world: a render of a held-out caption against one with an attribute changed."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        generator = np.random.default_rng(rng.key(seed, "shapes pairs", i))
        scene = shapes.sample_spec(generator, split="held_out")
        files = {}
        for label, shown in (("better", scene), ("worse", shapes.alter(scene, generator))):
            files[label] = f"{i:05d}_{label}.png"
            pixels = np.asarray(shapes_render.render(shown, generator))
            Image.fromarray(np.round(pixels * 255).astype(np.uint8)).save(folder / files[label])
        lines.append(json.dumps({"prompt": shapes.caption(scene), **files}) + "\n")
    path = folder / "pairs.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def score_pairs(
    pairs: Sequence[Pair], folder: Path, judges: Mapping[str, Judge], reading: Reading
) -> tuple[list[Row], list[tuple[int, int]]]:
    """Rows of all media that differ in file, prompt or metadata, scored; and of each pair the rows of its two."""
    rows: list[Row] = []
    known: dict[str, int] = {}

    def row(file: str, pair: Pair) -> int:
        key = json.dumps([file, pair.prompt, pair.metadata], sort_keys=True)
        if key not in known:
            known[key] = len(rows)
            rows.append(Row(file, folder / file, pair.prompt, dict(pair.metadata)))
        return known[key]

    index = [(row(pair.better, pair), row(pair.worse, pair)) for pair in pairs]
    with ScoreProgress(len(rows)) as progress:
        score_files(
            rows,
            judges,
            reading,
            finished=lambda window: progress.advance(len(window), sum(bool(one.invalid) for one in window)),
        )
    return rows, index


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """(N,) scores; nan = invalid."""
    return np.array([row.scores.get(name, math.nan) for row in rows], np.float64)


def throughput(judge: Judge, rows: Sequence[Row], reading: Reading) -> dict[str, Any]:
    """Media a second with the media in memory, the median of REPEATS after one call to warm up."""
    shown: list[tuple[Row, torch.Tensor]] = []
    pixels = 0
    for row in rows:
        if len(shown) == TIMED or pixels > WINDOW_PIXELS:
            break
        if not row.reason:
            one = media.read(row.path, fps=reading.fps, max_megapixels=reading.max_megapixels).to(reading.device)
            shown.append((row, one))
            pixels += one.numel() // 3
    seconds: list[float] = []
    try:
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            judge([m for _, m in shown], [r.text or "" for r, _ in shown], [r.metadata for r, _ in shown])
            if reading.device.startswith("cuda"):
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except (FlowAlignError, ValueError) as error:  # some of the media are invalid for it; the scores say which
        return {"media_per_second": None, "reason": str(error)}
    return {"media_per_second": len(shown) / statistics.median(seconds[1:]), "media": len(shown)}


def evaluate(
    pairs: Sequence[Pair], folder: Path, judges: Mapping[str, Judge], reading: Reading, out: Path, seed: int
) -> dict[str, Any]:
    """Scores, measures, plots; returns what report.json holds."""
    out.mkdir(parents=True, exist_ok=True)
    rows, index = score_pairs(pairs, folder, judges, reading)
    better, worse = (np.array(side) for side in zip(*index, strict=True))
    votes = np.array([pair.votes for pair in pairs])
    report: dict[str, Any] = {
        "pairs": len(pairs),
        "media": len(rows),
        "device": reading.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rewards": {},
    }
    for name, judge in judges.items():
        values = column(rows, name)
        sign = 1.0 if judge.spec.higher_is_better else -1.0
        difference = sign * (values[better] - values[worse])
        found = agreement.calibrate(difference, votes)
        entry: dict[str, Any] = {"digest": judge.digest}
        entry["accuracy"] = agreement.accuracy(difference, [p.prompt for p in pairs], seed=seed).as_dict()
        entry["calibration"] = found.as_dict()
        entry["throughput"] = throughput(judge, rows, reading)
        entry["invalid"] = _reasons(rows, name)
        if found.temperature is not None:
            entry["plot"] = f"calibration-{re.sub('[^A-Za-z0-9.-]+', '_', name)}.png"
            plot_calibration(out / entry["plot"], name, found)
        report["rewards"][name] = entry
    if len(judges) > 1:
        matrix = agreement.spearman({name: column(rows, name) for name in judges})
        report["spearman"] = [[None if math.isnan(v) else v for v in line] for line in matrix.tolist()]
        plot_correlation(out / "correlation.png", list(judges), matrix)
    return report


def _reasons(rows: Sequence[Row], name: str) -> dict[str, int]:
    """{reason: media}, the commonest first."""
    found: dict[str, int] = {}
    for row in rows:
        why = row.reason or row.reasons.get(name)
        if why:
            found[why] = found.get(why, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def markdown(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"# {report['pairs']} preferences, {report['media']} media",
        "",
        "| reward | accuracy | 95 % | ties | invalid pairs | temperature | calibration error | media / s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for name, entry in report["rewards"].items():
        accuracy, fit, speed = entry["accuracy"], entry["calibration"], entry["throughput"]["media_per_second"]
        shown = "-" if accuracy["low"] is None else f"{accuracy['low']:.1%} to {accuracy['high']:.1%}"
        cells = [name, _number(accuracy["mean"], ".1%"), shown, str(accuracy["ties"]), str(accuracy["invalid"])]
        cells += [_number(fit["temperature"], ".4g"), _number(fit["error"], ".3f"), _number(speed, ".1f")]
        lines.append(f"| {' | '.join(cells)} |")
        if fit["reason"]:
            notes.append(f"{name}: no temperature, since {fit['reason']}.")
        notes += [f"{name}: {count} media invalid: {why}" for why, count in list(entry["invalid"].items())[:3]]
    lines += [
        "",
        f"A tie counts half. Intervals resample prompts. Speed: {report['device']}, {report['threads']} threads, media "
        f"in memory, median of {REPEATS}. Temperatures are fitted on these pairs.",
        *("" if not notes else ["", *(f"- {note}" for note in notes)]),
    ]
    if "spearman" in report:
        names = list(report["rewards"])
        lines += ["", "Rank correlation over all media:", "", f"| | {' | '.join(names)} |"]
        lines.append("|---" * (len(names) + 1) + "|")
        for name, row in zip(names, report["spearman"], strict=True):
            lines.append(f"| {name} | {' | '.join(_number(v, '.2f') for v in row)} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = found.add_mutually_exclusive_group(required=True)
    source.add_argument("--pairs", type=Path, metavar="FILE", help="preferences, one object a line")
    source.add_argument("--shapes", type=int, metavar="N", help="make N pairs from the shapes world, in OUT/shapes")
    found.add_argument("--reward", required=True, metavar="NAME[,NAME]")
    found.add_argument("--param", action="append", default=[], metavar="NAME.KEY=VALUE")
    found.add_argument("--device")
    found.add_argument("--frames", default="mean", help="of a video: first, middle, mean, min or uniform:K")
    found.add_argument("--fps", type=float)
    found.add_argument("--batch-size", type=int, default=32)
    found.add_argument("--max-megapixels", type=float, default=media.MAX_MEGAPIXELS)
    found.add_argument("--seed", type=int, default=0, help="of the bootstrap and of --shapes")
    found.add_argument("--out", type=Path, default=Path("runs/reward"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        names = reward_arguments.names(args.reward)
        options = reward_arguments.params(args.param, names)
        reading = Reading(
            reward_arguments.default_device(args.device), args.batch_size, args.fps, max_megapixels=args.max_megapixels
        )
        if args.shapes is not None and args.shapes < 1:
            raise FlowAlignError(f"--shapes {args.shapes}: expected at least 1")
        path = args.pairs or write_shapes_pairs(args.out / "shapes", args.shapes, args.seed)
        pairs = load_pairs(path)
        judges = reward_arguments.judges(
            names, options, device=reading.device, batch_size=reading.batch_size, frames=args.frames
        )
        report = evaluate(pairs, path.parent, judges, reading, args.out, args.seed)
    except FlowAlignError as error:
        print(error, file=sys.stderr)
        return 2
    (args.out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
    text = markdown(report)
    (args.out / "report.md").write_text(text, encoding="utf-8")
    print(f"{text}\nreport: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
