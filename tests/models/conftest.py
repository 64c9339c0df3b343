"""Fixtures of the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_sd3


@pytest.fixture(scope="session", params=[False, True], ids=["no_t5", "t5"])
def folder(request, tmp_path_factory) -> Path:
    """A tiny pipeline without and with a T5."""
    return tiny_sd3.build(tmp_path_factory.mktemp("sd3"), t5=request.param)


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory) -> Path:
    """A tiny pipeline with a T5."""
    return tiny_sd3.build(tmp_path_factory.mktemp("sd3"), t5=True)
