"""Tiny random weights in the form of the published ones: half precision, under "state_dict", in a torch file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from flowalign.rewards import tiny_clip
from flowalign.rewards.openclip import CONFIG
from reward_models.hpsv2.reward import HPSv2, HPSv21


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Writes a model of 1.6 million parameters, nearly all of them the embeddings of open_clip's own tokens.

    Returns:
        Parameters of ``name``, "hpsv2" or "hpsv2.1", that load it.
    """
    import open_clip

    config = {
        "embed_dim": tiny_clip.WIDTH,
        "vision_cfg": {"image_size": tiny_clip.SIZE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    }
    with torch.random.fork_rng(devices=[]):
        model = open_clip.CLIP(**config)
    tiny_clip.randomise(model)
    file = {"hpsv2": HPSv2, "hpsv2.1": HPSv21}[name].spec.weights[0].file
    state = {key: value.half() for key, value in model.state_dict().items()}
    torch.save({"state_dict": state}, folder / file)
    (folder / CONFIG).write_text(json.dumps({"model_cfg": config}))
    return {"path": str(folder)}
