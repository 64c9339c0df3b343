"""Weights that are small enough to make anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowalign.rewards import tiny_clip


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    """A folder with a tiny CLIP and all that belongs to it."""
    folder = tmp_path_factory.mktemp("clip")
    tiny_clip.write(folder, "quick_gelu")
    return folder
