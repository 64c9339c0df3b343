"""What a reward is, and the one check that every image passes before it is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from flowalign.types import Metadata


@dataclass(frozen=True)
class RewardSpec:
    """Facts about a reward that a user must know before trusting its number."""

    name: str
    description: str
    modality: Literal["image", "video"]
    higher_is_better: bool
    native_range: tuple[float, float]
    differentiable: bool
    needs_prompt: bool
    weights: str  # repository@revision/file, or "none"
    licence: str
    citation: str
    verified: str  # how: "real weights", "tiny random weights", "exact"


@dataclass(frozen=True)
class Scored:
    """B scores. ``score`` (B,) float32, nan where one could not be computed; ``details`` says why."""

    score: Tensor
    subscores: Mapping[str, Tensor] = field(default_factory=dict)
    details: tuple[Mapping[str, Any], ...] = ()


class Reward(Protocol):
    """Scores media against prompts."""

    spec: RewardSpec

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """Media (B, F, 3, H, W) float32 in [0, 1] and B prompts to B scores."""
        ...


def check_media(media: Tensor, prompts: Sequence[str], where: str) -> None:
    """Refuses media that a reward would misread.

    Raises:
        ValueError: wrong rank, channel count, dtype, number of prompts, or values outside [0, 1].
    """
    if media.ndim != 5 or media.shape[2] != 3:
        raise ValueError(f"{where}: media has shape {tuple(media.shape)}, expected (B, F, 3, H, W)")
    if media.shape[0] != len(prompts):
        raise ValueError(f"{where}: {media.shape[0]} media came with {len(prompts)} prompts, expected as many of each")
    if not media.dtype.is_floating_point:
        raise ValueError(f"{where}: media is {media.dtype}, expected float32 in [0, 1]; divide uint8 by 255")
    finite = media[torch.isfinite(media)]
    if finite.numel() and (finite.min() < -1e-3 or finite.max() > 1 + 1e-3):
        low, high = float(finite.min()), float(finite.max())
        raise ValueError(f"{where}: media lies in [{low:.3g}, {high:.3g}], expected [0, 1]; rescale it first")
