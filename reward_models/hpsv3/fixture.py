"""Weights of HPSv3's form that are small enough to make anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from flowalign.rewards import tiny_qwen2_vl
from reward_models.hpsv3.reward import TOKEN, WEIGHTS, head, template


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Writes random weights, configuration and tokenizer into ``folder``; returns parameters that load them."""
    base = folder / "base"
    tiny_qwen2_vl.write_base(base, template())
    save_file(tiny_qwen2_vl.weights(base, head, (TOKEN,)), folder / WEIGHTS.file)
    return {"path": str(folder), "base": str(base), "precision": "fp32"}
