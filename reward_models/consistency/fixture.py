"""Tiny random weights in the form of the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowalign.rewards import tiny_clip


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Writes a ViT or a CLIP into ``folder``.

    Returns:
        Parameters of the reward that load it.
    """
    if name == "background-consistency":
        tiny_clip.write(folder, activation="quick_gelu")
        return {"path": str(folder)}
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    with torch.random.fork_rng(devices=[]):
        model = ViTModel(config, add_pooling_layer=False)
    tiny_clip.randomise(model)
    model.save_pretrained(folder)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=mean, image_std=std).save_pretrained(folder)
    return {"path": str(folder)}
