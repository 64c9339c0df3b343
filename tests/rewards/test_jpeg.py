"""JPEG sizes against the numbers that were measured beforehand for Flow-GRPO's formula (specs/rewards.md, 1.4)."""

from __future__ import annotations

import pytest
import torch

from flowalign.rewards import registry


def noise(share: float, size: int = 256) -> torch.Tensor:
    pixels = torch.rand(1, 1, 3, size, size, generator=torch.Generator().manual_seed(0))
    return 0.5 + share * (pixels - 0.5)


def score(name: str, media: torch.Tensor) -> float:
    return float(registry.create(name)(media, [""] * len(media)).score)


def test_noise_and_grey_have_the_published_scores() -> None:
    assert score("jpeg-compressibility", noise(1.0)) == pytest.approx(-0.155, rel=0.03)
    assert score("jpeg-compressibility", noise(0.0)) == pytest.approx(-0.0033, rel=0.15)


def test_the_two_are_one_size_in_two_units() -> None:
    small, large = (score(f"jpeg-{kind}", noise(0.7)) for kind in ("compressibility", "incompressibility"))
    assert large == pytest.approx(-500 * small, rel=1e-6)


def test_more_noise_is_larger() -> None:
    found = [score("jpeg-incompressibility", noise(share)) for share in (0.0, 0.1, 0.3, 0.6, 1.0)]
    assert found == sorted(found) and len(set(found)) == 5
