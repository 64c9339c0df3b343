"""``flowalign evaluate``: a model, and what LoRA files make of it, on the same prompts and the same noise."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.data.prompts import Prompt, load_prompts
from flowalign.models import load_model
from flowalign.models.base import Model
from flowalign.models.lora import load_lora
from flowalign.rewards import registry
from flowalign.rewards.combine import WeightedReward
from flowalign.training import preview
from flowalign.training.evaluate import Evaluation, evaluate, paired_bootstrap
from flowalign.types import FlowAlignError

SHOWN = 16
"""Pictures in a grid."""
BATCH = 32


def run(args: argparse.Namespace) -> int:
    """Writes OUT/report.json and, for the model and each LoRA, OUT/NAME/{metadata.jsonl, grid.png, images/}."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts = load_prompts(args.prompts, args.count)
    rewards = [WeightedReward(name, registry.create(name, device)) for name in names(args.reward)]
    files = [lora_file(Path(path)) for path in args.lora]
    labels = ["base", *(_label(path, args.lora) for path in args.lora)]
    report: dict[str, Any] = {"prompts": len(prompts), "seeds": list(args.seeds), "steps": args.steps}
    base: Evaluation | None = None
    for label, file in zip(labels, [None, *files], strict=True):
        # Loaded afresh for each: no adapter can leave a trace in the next.
        model = load_model(
            args.model,
            dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32,
            device=device,
            max_sequence_length=args.max_sequence_length,
        )
        if file is not None:
            load_lora(model, file)
        result = _evaluate(model, prompts, rewards, args, device)
        texts = [prompts[i].text for i in result.prompt.tolist()]
        write(Path(args.out) / label, result, texts)
        report[label] = summarise(result)
        show(label, report[label])
        if base is None:
            base = result
        else:
            report[label]["differences"] = differences(base, result)
    Path(args.out, "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"pictures and scores: {args.out}")
    return 0


def _evaluate(
    model: Model, prompts: Sequence[Prompt], rewards: Sequence[WeightedReward], args: argparse.Namespace, device: str
) -> Evaluation:
    height, width = native_size(model)
    return evaluate(
        model,
        prompts,
        args.seeds,
        rewards,
        num_steps=args.steps,
        guidance_scale=args.guidance,
        size=(args.height or height, args.width or width),
        batch_size=BATCH,
        device=device,
    )


def names(text: str) -> list[str]:
    """Names of a list that is separated by commas."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def lora_file(path: Path) -> Path:
    """The LoRA file itself, or the only .safetensors in a folder.

    Raises:
        FlowAlignError: there is none, or more than one.
    """
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise FlowAlignError(
            f"--lora {str(path)!r}: {len(found)} .safetensors files in it, expected one; name the file"
        )
    return found[0]


def _label(path: str, paths: Sequence[str]) -> str:
    """A short folder name, unique among ``paths``."""
    name = Path(path).stem if Path(path).suffix else Path(path).name
    return name if [p for p in paths if Path(p).stem == name] == [path] and name != "base" else path.replace("/", "_")


def native_size(model: Model) -> tuple[int, int]:
    """Height and width in pixels that the pipeline draws by default."""
    pipeline = model.pipeline()
    side = int(pipeline.default_sample_size * pipeline.vae_scale_factor)
    return side, side


def summarise(result: Evaluation) -> dict[str, Any]:
    """{name: mean, std, count, invalid} of rewards and sub-scores; a sub-score that does not apply is not invalid."""
    summary = {}
    for name, value in {**result.values, **result.subscores}.items():
        known = value[torch.isfinite(value)].double()
        mean, std = (float(known.mean()), float(known.std(correction=0))) if known.numel() else (None, None)
        invalid = value.numel() - known.numel() if name in result.values else 0
        summary[name] = {"mean": mean, "std": std, "count": known.numel(), "invalid": invalid}
    return summary


def show(label: str, summary: dict[str, Any]) -> None:
    """Prints a summary."""
    print(label)
    for name, values in summary.items():
        if values["mean"] is None:
            print(f"  {name:28s} no sample could be scored")
        else:
            invalid = f", {values['invalid']} invalid" if values["invalid"] else ""
            print(f"  {name:28s} {values['mean']:.4f} ± {values['std']:.4f}  of {values['count']}{invalid}")


def differences(before: Evaluation, after: Evaluation) -> dict[str, dict[str, float]]:
    """Paired differences with 95 % intervals that resample prompts; prints them too."""
    found = {}
    for name, value in after.values.items():
        try:
            found[name] = paired_bootstrap(before.values[name], value, after.prompt)._asdict()
        except FlowAlignError as error:  # the scores themselves are worth keeping
            print(f"  {name:28s} no interval: {error}")
            continue
        print(
            f"  {name:28s} {found[name]['mean']:+.4f} [{found[name]['low']:+.4f}, {found[name]['high']:+.4f}] to base"
        )
    return found


def write(out: Path, result: Evaluation, texts: Sequence[str]) -> None:
    """Puts pictures and their scores into ``out``, as a folder that ``flowalign score`` reads."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    pictures = preview.first_frames(result.media)
    columns: dict[str, Tensor] = {**result.values, **result.subscores}
    with (out / "metadata.jsonl").open("w", encoding="utf-8") as lines:
        for i, text in enumerate(texts):
            file = f"images/{int(result.prompt[i]):05d}_{int(result.seed[i])}.png"
            preview.picture(pictures[i]).save(out / file)
            scores = {name: finite_or_none(float(value[i])) for name, value in columns.items()}
            record = {"file_name": file, "text": text, "seed": int(result.seed[i]), **scores}
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
    preview.save(preview.grid(pictures[:SHOWN], texts[:SHOWN]), out / "grid.png")


def finite_or_none(value: float) -> float | None:
    """JSON has no nan."""
    return value if math.isfinite(value) else None
