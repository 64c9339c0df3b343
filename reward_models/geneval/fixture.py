"""GenEval without weights: renders of the shapes world and its own segmentation as the detector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowalign.data.worlds import shapes, shapes_render
from flowalign.rewards.contract import Example

CAPTIONS = ("a red circle", "two blue squares", "a green square left of a red cross", "a photo of a cat")


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Constructor parameters; nothing is written to ``folder``."""
    return {"detector": "shapes"}


def example(name: str) -> Example:
    """Three captions with a render each, and one that the world cannot judge."""
    drawn = [shapes_render.render(shapes.parse(text), np.random.default_rng(0)) for text in CAPTIONS[:3]]
    pictures = [torch.from_numpy(np.asarray(one)).permute(2, 0, 1).float() for one in drawn]
    return Example(torch.stack([*pictures, pictures[0]])[:, None], CAPTIONS, valid=3)
