"""Cosine of CLIP's image and text features; see card.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.rewards.clip import CLIPFeatures
from flowalign.types import Metadata

WEIGHTS = "openai/clip-vit-large-patch14"


class CLIPScore:
    """Differentiable cosine in [-1, 1], about 0.15 to 0.35; the paper's own number is ``2.5 max(cosine, 0)``.

    Args:
        path, processor: folder or hub name of the weights, and of tokenizer and image statistics; None = ``path``.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="clipscore",
        description="how well a picture fits its text, by CLIP",
        modality="image",
        higher_is_better=True,
        native_range=(-1.0, 1.0),
        differentiable=True,
        preprocess="shortest side to the model's size, antialiased bicubic; centre crop; normalise",
        weights=(WeightFile(WEIGHTS, "model.safetensors"),),
        licence="MIT",
        citation="Hessel et al., CLIPScore, arXiv 2104.08718",
        verified="tiny random weights: not yet verified on real weights",
    )

    def __init__(self, path: str = WEIGHTS, processor: str | None = None, device: torch.device | str = "cpu") -> None:
        self.clip = CLIPFeatures(path, processor, device, self.spec.name, crop="transformers")

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores, with gradients to ``media``."""
        check_media(media, prompts, self.spec.name)
        return Scored(self.clip.cosine(media, prompts))

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.clip.to(device)
