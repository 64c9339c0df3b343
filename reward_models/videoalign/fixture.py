"""Weights of VideoReward's form that are small enough to make anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowalign.rewards import tiny_qwen2_vl
from flowalign.rewards.qwen2_vl import LoRA
from reward_models.videoalign.reward import LORA_SCALE, PREFIX, TOKENS, WEIGHTS, head, template


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Writes random weights, configuration and tokenizer into ``folder``; returns parameters that load them."""
    base = folder / "base"
    tiny_qwen2_vl.write_base(base, template())
    state = tiny_qwen2_vl.weights(base, head, TOKENS, LoRA(4, LORA_SCALE))
    torch.save({PREFIX + key: value for key, value in state.items()}, folder / Path(WEIGHTS.file).name)
    return {"path": str(folder), "base": str(base), "precision": "fp32"}
