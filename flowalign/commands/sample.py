"""``flowalign sample``: pictures from prompts, the same that the diffusers pipeline draws from the same seed."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from flowalign.commands.evaluate import lora_file, native_size
from flowalign.core import guidance, sampling, schedule
from flowalign.data.prompts import load_prompts
from flowalign.models import load_model
from flowalign.models.lora import load_lora
from flowalign.training import preview
from flowalign.training.evaluate import velocity_of
from flowalign.types import FlowAlignError

BATCH = 8


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    """Reads ``model, prompt, prompts, lora, steps, guidance, negative, seed, num_images, height, width, precision,
    max_sequence_length, out``; writes OUT/PROMPT_SEED.png and OUT/grid.png."""
    texts = [*args.prompt, *((p.text for p in load_prompts(args.prompts)) if args.prompts else ())]
    if not texts:
        raise FlowAlignError('sample: no prompt came; give --prompt "a red circle" or --prompts FILE')
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    model = load_model(args.model, dtype=dtype, device=device, max_sequence_length=args.max_sequence_length)
    if args.lora:
        load_lora(model, lora_file(Path(args.lora)))
    height, width = native_size(model)
    shape = model.latent_shape(args.height or height, args.width or width)
    velocity = guidance.classifier_free(velocity_of(model), args.guidance)
    sigmas = schedule.diffusers_shift(args.steps, model.shift)
    jobs = list(product(range(len(texts)), range(args.seed, args.seed + args.num_images)))
    media = []
    for start in track(range(0, len(jobs), BATCH), "sampling", console=Console(stderr=True), transient=True):
        chosen = jobs[start : start + BATCH]
        cond = model.encode([texts[p] for p, _ in chosen], None if args.guidance == 1 else args.negative).to(device)
        # A leading 1 and the model's dtype, as the pipeline draws its latents: other calls draw other numbers.
        noise = [
            torch.randn((1, *shape), generator=torch.Generator("cpu").manual_seed(s), dtype=dtype) for _, s in chosen
        ]
        final = sampling.integrate(velocity, torch.cat(noise).to(device).float(), cond, sigmas).final
        media.append(model.decode(final).cpu())
    out = Path(args.out)
    pictures = preview.first_frames(torch.cat(media))
    for (p, seed), image in zip(jobs, pictures, strict=True):
        path = out / f"{p:05d}_{seed}.png"
        preview.save(preview.picture(image), path)
        print(path)
    captions = [texts[p] if args.num_images == 1 else f"{texts[p]} (seed {s})" for p, s in jobs]
    preview.save(preview.grid(pictures, captions), out / "grid.png")
    print(out / "grid.png")
    return 0
