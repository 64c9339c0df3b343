"""Pictures with soft structure, sharp edges and fine detail: what a wrong resize would move."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """(height, width, 3) bytes."""
    y, x = np.mgrid[0:height, 0:width]
    generator = np.random.default_rng([seed, height, width])
    turn = generator.uniform(0, 2 * np.pi, 3)
    soft = np.stack([np.sin(x / 17 + turn[i]) * np.cos(y / (11 + i)) for i in range(3)], -1)
    edges = np.where(((x - width / 3) ** 2 + (y - height / 2) ** 2 < (min(height, width) / 3) ** 2)[..., None], 1, -1)
    fine = np.sign(np.sin(1.9 * x + turn[0]) * np.sin(2.3 * y + turn[1]))[..., None]
    noise = generator.uniform(-1, 1, (height, width, 3))
    mixed = 0.5 + 0.2 * soft + 0.12 * edges * [1, 0.2, -0.8] + 0.12 * fine + 0.06 * noise
    return (mixed.clip(0, 1) * 255).round().astype(np.uint8)


def pil(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(picture(height, width, seed))


def images(height: int, width: int, *seeds: int) -> torch.Tensor:
    """(N, 3, height, width) float32 in [0, 1], one a seed."""
    stack = np.stack([picture(height, width, seed) for seed in seeds or (0,)])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).float() / 255


def media(height: int, width: int, *seeds: int) -> torch.Tensor:
    """(N, 1, 3, height, width)."""
    return images(height, width, *seeds)[:, None]
