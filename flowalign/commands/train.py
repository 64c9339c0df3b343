"""``flowalign train``: one run as a recipe says."""

from __future__ import annotations

import argparse

from flowalign.config.load import load_recipe


def run(args: argparse.Namespace) -> int:
    """Reads the recipe first: nothing heavy starts before it is known to be right."""
    recipe = load_recipe(args.recipe, args.overrides)
    from flowalign.config import build
    from flowalign.training.distributed import Workers

    workers = Workers()
    result = build.train(recipe, resume=args.resume, workers=workers)
    if workers.is_main:
        print(
            f"{result.iteration} iterations in {result.seconds:.0f} s, {result.images_per_second:.1f} images/s\n"
            f"checkpoint: {result.checkpoint}\n"
            f"next: flowalign export {result.checkpoint} --out {recipe.training.output}/lora"
        )
    return 0
