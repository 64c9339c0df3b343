"""``flowalign demo``: aligns the embedded model with its verifier and shows what became better."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from flowalign.config import build
from flowalign.config.load import load_recipe
from flowalign.config.schema import Recipe
from flowalign.core.schedule import ScheduleName
from flowalign.data.prompts import load_prompts
from flowalign.data.worlds import shapes
from flowalign.models.base import Model
from flowalign.rewards import registry
from flowalign.rewards.combine import WeightedReward
from flowalign.training import preview
from flowalign.training.distributed import Workers
from flowalign.training.evaluate import Difference, Evaluation, evaluate, paired_bootstrap
from flowalign.training.export import export_lora

RECIPE = "shapes/demo"
PROMPTS, SEEDS = 128, (0, 1)
"""Held-out prompts and noise seeds of the evaluations."""
STEPS: int = 10
SCHEDULE: ScheduleName = "diffusers"
SHOWN = 16
"""Prompts in the picture."""
STRICT = "shapes-verifier"
MARKER = "report.json"


def run(args: argparse.Namespace) -> int:
    """Reads ``output`` and ``overrides``; writes OUTPUT/{report.json, before_after.png, lora/, training/}."""
    start = time.monotonic()
    console, output = Console(), Path(args.output)
    recipe = load_recipe(RECIPE, [*args.overrides, f"training.output={output / 'training'}"])
    # A demo may be run again; only what an earlier one wrote is replaced.
    shutil.rmtree(output / "training", ignore_errors=True)
    workers = Workers()
    model = build.build_model(recipe, workers.device)
    judge = _Judge(recipe, workers.device)
    console.print(
        f"[bold]1/3[/] {recipe.model.path} draws {len(judge.texts)} prompts it never saw, from {len(SEEDS)} seeds each"
    )
    before = judge(model)
    console.print(f"    strict accuracy {_percent(_mean(before))}")
    console.print(f"[bold]2/3[/] {recipe.algorithm.name} with the reward of the verifier, on other prompts")
    result = build.train(recipe, workers=workers, model=model)
    with result.weights.use("ema") if recipe.training.ema_decay is not None else nullcontext():
        console.print("[bold]3/3[/] the same prompts and seeds again")
        after = judge(model)
        export_lora(model, output / "lora")
    difference = paired_bootstrap(_strict(before), _strict(after), before.prompt)
    _draw(output / "before_after.png", judge.texts, before, after)
    report = _report(before, after, difference, judge.texts) | {
        "training_seconds": result.seconds,
        "seconds": time.monotonic() - start,
        "images_per_second": result.images_per_second,
        "iterations": result.iteration,
    }
    (output / MARKER).write_text(json.dumps(report, indent=1) + "\n")
    _show(console, report, output)
    return 0


@dataclass(frozen=True)
class _Judge:
    """Draws the held-out prompts with fixed noise, and scores them strictly."""

    recipe: Recipe
    device: torch.device

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompt in load_prompts("shapes:held_out", PROMPTS)]

    def __call__(self, model: Model) -> Evaluation:
        return evaluate(
            model,
            load_prompts("shapes:held_out", PROMPTS),
            SEEDS,
            [WeightedReward(STRICT, registry.create(STRICT, self.device, score="strict"))],
            num_steps=STEPS,
            schedule_name=SCHEDULE,
            size=(self.recipe.model.height, self.recipe.model.width),
            batch_size=self.recipe.training.rollout_batch_size,
            device=self.device,
        )


def _strict(evaluation: Evaluation) -> torch.Tensor:
    return evaluation.values[STRICT]


def _mean(evaluation: Evaluation) -> float:
    return float(_strict(evaluation).nanmean())


def _report(before: Evaluation, after: Evaluation, difference: Difference, texts: Sequence[str]) -> dict[str, object]:
    """Accuracies are shares in [0, 1]; the interval is that of their difference."""
    skill = [shapes.parse(texts[i]).skill for i in before.prompt.tolist()]
    rows = {name: torch.tensor([s == name for s in skill]) for name in sorted(set(skill))}
    return {
        "before": _mean(before),
        "after": _mean(after),
        "difference": difference.mean,
        "ci_low": difference.low,
        "ci_high": difference.high,
        "prompts": len(texts),
        "seeds": list(SEEDS),
        "skills": {
            name: {"before": float(_strict(before)[row].nanmean()), "after": float(_strict(after)[row].nanmean())}
            for name, row in rows.items()
        },
    }


def _draw(path: Path, texts: Sequence[str], before: Evaluation, after: Evaluation) -> None:
    """The first prompts with their first seed, whatever came out: a picture of chosen successes would prove nothing."""
    first = (before.seed == SEEDS[0]).nonzero().flatten()[:SHOWN]
    right = [(_strict(e)[first] > 0.5).tolist() for e in (before, after)]
    title = f"The first {len(first)} of {len(texts)} held-out prompts, same noise before and after training"
    chosen = [texts[i] for i in before.prompt[first].tolist()]
    preview.before_after(path, chosen, before.media[first], after.media[first], right[0], right[1], title=title)


def _show(console: Console, report: dict[str, object], output: Path) -> None:
    table = Table(title="strict accuracy on held-out prompts", title_justify="left")
    for heading in ("skill", "before", "after"):
        table.add_column(heading, justify="left" if heading == "skill" else "right")
    skills = report["skills"]
    assert isinstance(skills, dict)
    for name, value in skills.items():
        table.add_row(name, _percent(value["before"]), _percent(value["after"]))
    table.add_section()
    table.add_row("all", _percent(report["before"]), _percent(report["after"]), style="bold")
    console.print(table)
    console.print(
        f"difference {_points(report['difference'])} points, 95 % interval {_points(report['ci_low'])} to "
        f"{_points(report['ci_high'])} (paired bootstrap over {report['prompts']} prompts x {len(SEEDS)} seeds)"
    )
    console.print(f"{report['seconds']:.0f} s in all, {report['images_per_second']:.1f} images/s in training")
    console.print(f"see {output / 'before_after.png'}; LoRA for diffusers in {output / 'lora'}", soft_wrap=True)


def _percent(share: object) -> str:
    assert isinstance(share, float)
    return f"{100 * share:.1f} %"


def _points(share: object) -> str:
    assert isinstance(share, float)
    return f"{100 * share:+.1f}"
