"""Pictures and videos as Qwen2-VL (arXiv 2409.12191) sees them, in differentiable torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from flowalign.rewards.blip import MEAN, STD
from flowalign.rewards.clip import normalise

PATCH = 14
"""Pixels of a patch's side."""
MERGE = 2
"""Patches of a side that become one token."""
FRAMES = 2
"""Frames of a patch; a picture is shown twice."""
FACTOR = PATCH * MERGE
LONGEST = 200
"""Times the short side: longer pictures are refused, as by the authors' code."""


def target_size(height: int, width: int, smallest: int, largest: int) -> tuple[int, int] | None:
    """Height and width near the given ones, multiples of 28, with ``smallest`` to ``largest`` pixels where these allow.

    None for a picture that is more than 200 times as long as it is wide.
    """
    if max(height, width) > LONGEST * min(height, width):
        return None
    sides = [round(side / FACTOR) * FACTOR for side in (height, width)]
    if math.prod(sides) > largest:
        scale = math.sqrt(height * width / largest)
        sides = [max(FACTOR, math.floor(side / scale / FACTOR) * FACTOR) for side in (height, width)]
    elif math.prod(sides) < smallest:
        scale = math.sqrt(smallest / (height * width))
        sides = [math.ceil(side * scale / FACTOR) * FACTOR for side in (height, width)]
    return sides[0], sides[1]


def patches(media: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes, normalises and cuts into patches, in the order in which four neighbours become one token.

    Antialiased bicubic, clamped since it overshoots. The authors round to bytes here, after each of two passes; this
    does not, for the sake of gradients.

    Args:
        media: (N, F, 3, H, W) in [0, 1]; the last frame is shown again where F is odd.
        size: of the resized frames, multiples of 28.

    Returns:
        (N, P, 1176), P = ceil(F / 2) * size[0] / 14 * size[1] / 14.
    """
    count, frames = media.shape[:2]
    images = media.flatten(0, 1)
    if images.shape[-2:] != torch.Size(size):
        images = functional.interpolate(images, size, mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)
    shown = normalise(images, MEAN, STD).view(count, frames, 3, *size)
    if frames % FRAMES:
        shown = torch.cat([shown, shown[:, -1:]], 1)
    high, wide = (side // FACTOR for side in size)
    grid = shown.reshape(count, -1, FRAMES, 3, high, MERGE, PATCH, wide, MERGE, PATCH)
    #        0      1      2     3    4     5      6     7     8      9
    return grid.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(count, -1, 3 * FRAMES * PATCH * PATCH)
