"""Renders to judge; there are no weights to make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowalign.data.worlds import shapes, shapes_render
from flowalign.rewards.contract import Example

CAPTIONS = ("a red circle", "two blue squares", "a green square left of a red cross", "a photo of a cat")


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """No parameters."""
    return {}


def example(name: str) -> Example:
    """Three renders under their captions, and one under a caption that is not of the world."""
    renders = [shapes_render.render(shapes.parse(text), np.random.default_rng(0)) for text in CAPTIONS[:3]]
    pictures = [torch.from_numpy(np.asarray(p)).permute(2, 0, 1).float() for p in renders]
    return Example(torch.stack([*pictures, pictures[0]])[:, None], CAPTIONS, valid=3)
