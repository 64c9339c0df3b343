"""``flowalign export``: a checkpoint in a format that others load."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowalign.config import build
from flowalign.config.load import load_recipe
from flowalign.models.lora import WeightSets
from flowalign.training import checkpoint
from flowalign.training.export import export_lora, export_merged
from flowalign.types import FlowAlignError


def run(args: argparse.Namespace) -> int:
    """Reads ``checkpoint, format, weights, out``."""
    folder = Path(args.checkpoint)
    state = checkpoint.load(folder)
    recipe = load_recipe(folder / checkpoint.RECIPE, [])
    if args.format == "diffusers" and recipe.tuning.kind != "lora":
        raise FlowAlignError(f"export {folder}: tuning is {recipe.tuning.kind!r} and has no LoRA; use --format merged")
    if args.weights == "ema" and state.ema is None:
        raise FlowAlignError(
            f"export {folder}: holds no averaged weights; use --weights current, or train with ema_decay"
        )
    model = build.build_model(recipe, "cpu")
    WeightSets(model.transformer).load(None, state.ema if args.weights == "ema" and state.ema else state.trainable)
    if args.format == "diffusers":
        print(f'{export_lora(model, args.out)}\nload it with: pipe.load_lora_weights("{args.out}")')
    else:
        export_merged(model, args.out)
        print(f'{args.out}\nload it with: {type(model.pipeline()).__name__}.from_pretrained("{args.out}")')
    return 0
