"""Build the embedded pipeline ``shapes-sd3`` from nothing: renders, VAE, text towers, transformer, scheduler.

Each stage leaves its result in the work folder and is skipped when it is there, so an interrupted build goes on:

    python scripts/build_shapes_sd3.py                    # everything, about 45 minutes on two cores
    python scripts/build_shapes_sd3.py --stage export     # again with another checkpoint (chosen_step)

Stages: data, vae, latents, transformer, export.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from diffusers import (
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from shapes_sd3_parts import (
    Settings,
    load_data,
    new_pipeline,
    train_vae,
    write_slow_files,
)
from shapes_sd3_training import accuracy, load_latents, sample, train_transformer
from torch import nn
from validate_shapes import rates

from flowalign.data.worlds import shapes

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("data", "vae", "latents", "transformer", "export")


def export(work: Path, out: Path, settings: Settings) -> None:
    """Write the folder, transformer and autoencoder in fp16, reload it, and measure what the model card states."""
    chosen = SD3Transformer2DModel.from_pretrained(work / f"transformer-{settings.chosen_step}").half().float().eval()
    pipe = new_pipeline(work, settings, chosen)
    texts = shapes.prompts("held_out", 8, 1)
    before = sample(pipe, texts, settings, 1.0)
    pipe.transformer.half()
    pipe.vae.half()
    # The small towers stay float32: transformers loads weights in their stored dtype, diffusers in float32 unless told
    # otherwise, and a pipeline of both would not run.
    pipe.save_pretrained(out, safe_serialization=True)
    write_slow_files(pipe.tokenizer, out / "tokenizer")
    write_slow_files(pipe.tokenizer_2, out / "tokenizer_2")
    for path in out.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes them readable by their owner only
    pipe = StableDiffusion3Pipeline.from_pretrained(out, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    change = (sample(pipe, texts, settings, 1.0) - before).abs().max().item()
    if change > 1e-4:
        raise RuntimeError(f"{out}: the reloaded pipeline's images differ by {change:.2g}, expected at most 1e-4.")
    numbers = measure(pipe, work, settings) | {"reload_difference": change}
    (work / "numbers.json").write_text(json.dumps(numbers, indent=1))
    (out / "README.md").write_text(model_card(numbers, settings))


def measure(pipe: StableDiffusion3Pipeline, work: Path, settings: Settings) -> dict[str, Any]:
    """The numbers of the model card; two seeds a prompt."""
    runs = {
        "held-out, no guidance": {"guidance": 1.0},
        f"held-out, guidance {settings.evaluation['guidance']}": {"guidance": settings.evaluation["guidance"]},
        "held-out, no guidance, max_sequence_length 256": {"guidance": 1.0, "nulls": 256},
        "training prompts, no guidance": {"guidance": 1.0, "split": "train"},
    }
    table = {}
    for name, options in runs.items():
        seeds = [accuracy(pipe, settings, seed=seed, **options) for seed in (0, 1)]
        table[name] = {key: round(float(np.mean([row[key] for row in seeds])), 4) for key in seeds[0]}
        print(name, table[name], flush=True)
    scores = [json.loads(line) for line in (work / "scores.jsonl").read_text().splitlines()]
    return {
        "accuracy": table,
        "verifier": rates(pipe.vae, 10_000),
        "parameters": {
            name: sum(parameter.numel() for parameter in module.parameters())
            for name, module in pipe.components.items()
            if isinstance(module, nn.Module)
        },
        "training": training_row(scores, settings),
    }


def training_row(scores: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """The chosen checkpoint's row, with the seconds of the cycles before it added."""
    row = dict(next(row for row in scores if row["step"] == settings.chosen_step))
    ends = np.cumsum([cycle.get("stop", cycle["steps"]) for cycle in settings.transformer["cycles"]]).tolist()
    row["seconds"] += sum(other["seconds"] for other in scores if other["step"] in ends and other["step"] < row["step"])
    return row


def model_card(numbers: dict[str, Any], settings: Settings) -> str:
    """README.md of the folder, from ``shapes_sd3_card.md``."""
    skills = ["color", "counting", "position", "binding", "single", "strict", "soft"]
    table = [f"| prompts | {' | '.join(skills)} |", f"|---|{'---|' * len(skills)}"]
    for name, row in numbers["accuracy"].items():
        table.append(f"| {name} | {' | '.join(f'{row[key]:.3f}' if key in row else '-' for key in skills)} |")
    verifier, training, parameters = numbers["verifier"], numbers["training"], numbers["parameters"]
    recipe, evaluation = settings.transformer, settings.evaluation
    template = (ROOT / "scripts" / "shapes_sd3_card.md").read_text()
    return template.format(
        table="\n".join(table),
        sizes="\n".join(f"| {name} | {count:,} |" for name, count in parameters.items()),
        renders=settings.renders + settings.rare_renders,
        vae_steps=settings.vae["steps"],
        vae_batch=settings.vae["batch"],
        vae_mse=verifier["vae_mse"],
        steps=training["step"],
        cycles=" + ".join(f"{cycle.get('stop', cycle['steps'])} (peak {cycle['peak']})" for cycle in recipe["cycles"]),
        batch=recipe["batch"],
        ema=recipe["ema"],
        loss=training["loss"],
        seconds=training["seconds"],
        shift=settings.scheduler_shift,
        sampler_steps=evaluation["steps"],
        prompts=evaluation["prompts"],
        direct=verifier["direct"],
        after_vae=verifier["after_vae"],
        wrong=verifier["wrong_accepted"],
        wrong_vae=verifier["wrong_accepted_after_vae"],
        reload=numbers["reload_difference"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=Path, default=ROOT / "scripts" / "shapes_sd3.yaml")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "shapes_build")
    parser.add_argument("--out", type=Path, default=ROOT / "flowalign" / "assets" / "shapes-sd3")
    parser.add_argument("--stage", choices=STAGES, help="only this stage (and what it needs); all if absent")
    arguments = parser.parse_args()
    settings = Settings(**yaml.safe_load(arguments.settings.read_text()))
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_flush_denormal(True)
    stages = STAGES if arguments.stage is None else (arguments.stage,)
    for stage in stages:
        if stage == "data":
            load_data(arguments.work, settings)
        elif stage == "vae":
            train_vae(arguments.work, settings)
        elif stage == "latents":
            load_latents(arguments.work, settings)
        elif stage == "transformer":
            train_transformer(arguments.work, settings)
        elif stage == "export":
            export(arguments.work, arguments.out, settings)


if __name__ == "__main__":
    main()
