"""Whether flowalign computes what diffusers' own Stable Diffusion 3 pipeline computes: prompts, one guided velocity, a
28-step picture, and the same picture by ``flowalign sample``.

    python scripts/check_parity_sd3.py [--model shapes-sd3]

Prints the largest difference of each and exits with 1 where one is above its tolerance.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from flowalign import cli
from flowalign.core import guidance, sampling, schedule
from flowalign.models import load_model, resolve

PROMPTS = ["a red circle left of a blue square", "three green triangles"]
NEGATIVE, SCALE, STEPS, SEED = "a yellow cross", 4.5, 28, 7
TOLERANCE = 1e-4
PNG_TOLERANCE = 1 / 255  # a difference of 1e-4 may fall on either side of a rounding


@torch.no_grad()
def differences(path: str, height: int | None, width: int | None) -> Iterator[tuple[str, float, float]]:
    """(what, largest difference, tolerance) of each comparison, in fp32."""
    model = load_model(path)
    # Without a dtype, transformers would load text encoders in that of their files, and not all of them have the same.
    pipe = StableDiffusion3Pipeline.from_pretrained(resolve(path), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    side = pipe.default_sample_size * pipe.vae_scale_factor
    height, width = height or side, width or side
    cond = model.encode(PROMPTS, NEGATIVE)
    assert cond.negative is not None
    theirs = pipe.encode_prompt(PROMPTS, None, None, negative_prompt=[NEGATIVE] * len(PROMPTS))
    ours = (cond.tensors["embeds"], cond.negative["embeds"], cond.tensors["pooled"], cond.negative["pooled"])
    yield "encode", max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)), TOLERANCE

    shape = model.latent_shape(height, width)
    noise = torch.cat([torch.randn((1, *shape), generator=torch.Generator().manual_seed(SEED)) for _ in PROMPTS])
    sigma = torch.full((len(PROMPTS),), 0.6)
    field = guidance.classifier_free(lambda x, s, c: model.velocity(model.transformer, x, s, c), SCALE)
    twice = pipe.transformer(
        torch.cat([noise, noise]),
        timestep=torch.full((2 * len(PROMPTS),), 600.0),
        encoder_hidden_states=torch.cat([theirs[1], theirs[0]]),
        pooled_projections=torch.cat([theirs[3], theirs[2]]),
    ).sample
    without, given = twice.chunk(2)
    guided = without + SCALE * (given - without)
    yield "guided velocity", float((field(noise, sigma, cond) - guided).abs().max()), TOLERANCE

    image = model.decode(sampling.integrate(field, noise, cond, schedule.diffusers_shift(STEPS, model.shift)).final)
    reference = pipe(
        PROMPTS,
        negative_prompt=[NEGATIVE] * len(PROMPTS),
        height=height,
        width=width,
        num_inference_steps=STEPS,
        guidance_scale=SCALE,
        generator=[torch.Generator().manual_seed(SEED) for _ in PROMPTS],
        output_type="pt",
    ).images
    yield f"{STEPS}-step image", float((image[:, 0] - reference).abs().max()), TOLERANCE
    yield "flowalign sample", _by_command(path, height, width, reference), PNG_TOLERANCE


def _by_command(path: str, height: int, width: int, reference: torch.Tensor) -> float:
    """Largest difference of the PNG files that ``flowalign sample`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["sample", path, "--negative", NEGATIVE, "--guidance", str(SCALE), "--steps", str(STEPS)]
        arguments += ["--seed", str(SEED), "--height", str(height), "--width", str(width), "--out", folder]
        for prompt in PROMPTS:
            arguments += ["--prompt", prompt]
        if cli.main(arguments) != 0:
            return float("inf")
        found = [np.asarray(Image.open(file)) for file in sorted(Path(folder).glob("[0-9]*.png"))]
    return float((torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2) / 255 - reference).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shapes-sd3", help="an embedded pipeline, a diffusers folder or a hub id")
    parser.add_argument("--height", type=int, help="in pixels; left out: the model's own")
    parser.add_argument("--width", type=int, help="in pixels; left out: the model's own")
    arguments = parser.parse_args()
    good = True
    for what, difference, tolerance in differences(arguments.model, arguments.height, arguments.width):
        verdict = "ok" if difference <= tolerance else "TOO LARGE"
        good &= difference <= tolerance
        print(f"{what:20s} max difference {difference:.2e}  (tolerance {tolerance:.1e})  {verdict}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
