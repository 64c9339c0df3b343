"""What the tests of every judge need of this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowalign.data.worlds import signs, signs_render
from flowalign.rewards.contract import Example

CAPTIONS = (
    'a red sign that says "OPEN"',
    'a white plate with "Wet Paint" written on it',
    '"Hotel" in yellow letters on a blue plate',
)


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Its models are small and come with rapidocr: nothing to write."""
    return {}


def example(name: str) -> Example:
    """Signs with their captions, the last of them asked for nothing."""
    renders = [signs_render.render(signs.parse(text), np.random.default_rng(0)) for text in CAPTIONS]
    media = torch.from_numpy(np.stack([*renders, renders[0]])).permute(0, 3, 1, 2)[:, None]
    return Example(media, (*CAPTIONS, "a red sign"), valid=3)
