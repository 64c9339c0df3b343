"""Fixtures of the training tests."""

from __future__ import annotations

import pytest

from flowalign.training.distributed import Workers


@pytest.fixture(scope="session")
def workers() -> Workers:
    """One process on the CPU."""
    return Workers("cpu")
