"""Tiny random weights in the form of the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowalign.rewards import tiny_clip


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Writes model and tokenizer into ``folder``.

    Returns:
        Parameters of the reward that load them.
    """
    tiny_clip.write(folder, activation="gelu")
    return {"path": str(folder), "processor": str(folder)}
