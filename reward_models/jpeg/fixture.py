"""There are no weights to make."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """No parameters."""
    return {}
