"""Tiny random weights in the form of the published ones: a CLIP, and the state dict of the head in a torch file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowalign.rewards import tiny_clip
from reward_models.aesthetic.reward import HEAD, AestheticHead


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Writes CLIP and head into ``folder``.

    Returns:
        Parameters of the reward that load them.
    """
    tiny_clip.write(folder, activation="quick_gelu")
    with torch.random.fork_rng(devices=[]):
        head = AestheticHead(tiny_clip.WIDTH)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            # Keeps the size of what passes through, so that pictures differ in their ratings.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    state = head.state_dict()
    state["layers.7.bias"].fill_(5.0)
    torch.save(state, folder / HEAD.file)
    return {"path": str(folder), "clip": str(folder)}
