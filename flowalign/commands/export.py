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
    weights = {"current": state.trainable, **state.sets}
    if args.weights not in weights:
        raise FlowAlignError(f"export {folder}: holds no {args.weights!r} weights; it has {', '.join(weights)}")
    model = build.build_model(recipe, "cpu")
    WeightSets(model.transformer).load(None, weights[args.weights])
    if args.format == "diffusers":
        written, call = export_lora(model, args.out), "pipe.load_lora_weights"
    else:
        written, call = export_merged(model, args.out), f"{type(model.pipeline()).__name__}.from_pretrained"
    print(f"{written}: the {args.weights} weights after {state.iteration} iterations")
    print(f'load it with: {call}("{args.out}")')
    return 0
