"""What a reward is: the facts about it, what it is given and what it answers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from flowalign.types import Metadata


class WeightFile(NamedTuple):
    """One file of weights; ``sha256`` None where the publisher gives none that was checked."""

    repository: str
    file: str
    revision: str = "main"
    sha256: str | None = None


class Scale(NamedTuple):
    """A published way to bring raw scores to a common size: ``(score - offset) / divisor``."""

    offset: float = 0.0
    divisor: float = 1.0


@dataclass(frozen=True)
class RewardSpec:
    """Facts about a reward that a user must know before trusting its number.

    Args:
        native_range: no raw score lies outside; ends may be infinite.
        scope: "groupwise" where the score of a sample depends on the other samples of its prompt.
        needs: what it reads besides media.
        preprocess: what happens to the pixels, in words; part of the digest, since it is part of the score.
        scales: published scalings by name.
        extra: optional dependency of flowalign that it needs, as in ``pip install 'flowalign[ocr]'``.
        verified: how the number was checked: "exact", "real weights", "tiny random weights: not yet verified on real
            weights", ...
    """

    name: str
    description: str
    modality: Literal["image", "video"]
    higher_is_better: bool
    native_range: tuple[float, float]
    differentiable: bool
    licence: str
    citation: str
    verified: str
    scope: Literal["pointwise", "groupwise"] = "pointwise"
    needs: tuple[Literal["prompt", "metadata"], ...] = ("prompt",)
    preprocess: str = "none"
    weights: tuple[WeightFile, ...] = ()
    scales: Mapping[str, Scale] = field(default_factory=dict)
    extra: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; infinite ends of the range become None."""
        low, high = (None if abs(end) == float("inf") else end for end in self.native_range)
        return asdict(self) | {
            "native_range": [low, high],
            "needs": list(self.needs),
            "weights": [file._asdict() for file in self.weights],
            "scales": {name: scale._asdict() for name, scale in self.scales.items()},
        }

    def digest(self, settings: Any = None) -> str:
        """SHA-256 of the spec and of what the reward was made with: two scores are comparable where it is equal."""
        text = json.dumps([self.as_dict(), settings], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Scored:
    """B raw scores. ``score`` (B,) float32, nan where one could not be computed; ``details`` (B or 0) says why."""

    score: Tensor
    subscores: Mapping[str, Tensor] = field(default_factory=dict)
    details: tuple[Mapping[str, Any], ...] = ()

    @property
    def valid(self) -> Tensor:
        """(B,) bool."""
        return torch.isfinite(self.score)


class Reward(Protocol):
    """Scores media against prompts. Written once per judge; used through `flowalign.rewards.judge.Judge`, which checks
    media, reduces frames, sorts out ragged sizes and splits batches."""

    spec: RewardSpec

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """Media (B, F, 3, H, W) float32 in [0, 1] and B prompts to B scores. Image rewards are given F = 1.

        A differentiable reward keeps the graph to ``media``; its own weights are frozen.
        """
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
    if not media.numel():
        return
    low, high = (float(end) for end in torch.aminmax(media.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):  # not always: picking out values costs ten times their memory
        finite = media.detach()[torch.isfinite(media)]
        low, high = (float(end) for end in torch.aminmax(finite)) if finite.numel() else (0.0, 1.0)
    if low < -1e-3 or high > 1 + 1e-3:
        raise ValueError(f"{where}: media lies in [{low:.3g}, {high:.3g}], expected [0, 1]; rescale it first")
