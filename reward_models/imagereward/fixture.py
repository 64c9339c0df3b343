"""Weights of ImageReward's form that are small enough to make anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowalign.rewards import blip
from reward_models.imagereward.reward import WEIGHTS, head


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Writes random weights, configuration and tokenizer into ``folder``; returns parameters that load them."""
    return blip.tiny(folder, WEIGHTS.file, head)
