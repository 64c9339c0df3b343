"""Validate the shapes world's verifier on 10,000 fresh renders: direct, after the VAE, and on wrong captions.

    python scripts/validate_shapes.py          # about 4 minutes on two cores; exit status 1 if a target is missed

Half of the renders are of the training split and half are held out; none was seen in training (other seeds). A wrong
caption differs from the right one in one attribute: colour, shape, count or relation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from flowalign.data.worlds import shapes, shapes_render
from flowalign.data.worlds.shapes_verifier import verify

ASSET = Path(__file__).resolve().parent.parent / "flowalign" / "assets" / "shapes-sd3"
TARGETS = {"direct": 0.995, "after_vae": 0.99, "wrong_accepted": 0.005, "wrong_accepted_after_vae": 0.005}
SEED = 77_001


@torch.no_grad()
def rates(vae: AutoencoderKL, n: int, seed: int = SEED) -> dict[str, float]:
    """Shares of right verdicts and of wrong captions accepted on ``n`` renders; the VAE's squared error in [0, 1]."""
    halves = [
        shapes_render.render_many(n // 2, seed, "train"),
        shapes_render.render_many(n - n // 2, seed + 1, "held_out"),
    ]
    images = torch.from_numpy(np.concatenate([half[0] for half in halves])).permute(0, 3, 1, 2).float() / 255.0
    right = [text for half in halves for text in half[1]]
    rng = np.random.default_rng(seed)
    wrong = [shapes.caption(shapes.alter(shapes.parse(text), rng)) for text in right]
    totals = dict.fromkeys(TARGETS, 0.0) | {"vae_mse": 0.0}
    for first in range(0, n, 250):
        part = slice(first, first + 250)
        decoded = vae.decode(vae.encode(2.0 * images[part] - 1.0).latent_dist.mean).sample
        decoded = (0.5 * decoded + 0.5).clamp(0.0, 1.0)
        for name, pictures in (("direct", images[part]), ("after_vae", decoded)):
            totals[name] += float(verify(pictures, right[part]).strict.sum())
            accepted = "wrong_accepted" if name == "direct" else "wrong_accepted_after_vae"
            totals[accepted] += float(verify(pictures, wrong[part]).strict.sum())
        totals["vae_mse"] += float((decoded - images[part]).square().mean()) * len(decoded)
    return {name: total / n for name, total in totals.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, default=ASSET / "vae", help="folder of the AutoencoderKL")
    parser.add_argument("--renders", type=int, default=10_000)
    arguments = parser.parse_args()
    vae = AutoencoderKL.from_pretrained(arguments.vae, torch_dtype=torch.float32).eval()
    measured = rates(vae, arguments.renders)
    missed = False
    for name, target in TARGETS.items():
        ok = measured[name] <= target if name.startswith("wrong") else measured[name] >= target
        sign = "<=" if name.startswith("wrong") else ">="
        print(f"{name:25s} {measured[name]:8.4%}   target {sign} {target:.1%}   {'ok' if ok else 'MISSED'}")
        missed = missed or not ok
    print(f"{'vae_mse':25s} {measured['vae_mse']:.6f}   (RGB in [0, 1])")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
