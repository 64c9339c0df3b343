"""``exp(logit_scale) cos(image, text)`` of a CLIP tuned on human choices; see card.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from flowalign.rewards.base import RewardSpec, Scale, Scored, WeightFile, check_media
from flowalign.rewards.clip import CLIPFeatures
from flowalign.types import Metadata

WEIGHTS = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class PickScore:
    """Differentiable score of about 17 to 24; only differences between pictures of one prompt mean something.

    Args:
        path, processor: folder or hub name of the weights, and of tokenizer and image statistics.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="pickscore",
        description="which of two pictures of a prompt people would pick",
        modality="image",
        higher_is_better=True,
        native_range=(-100.0, 100.0),
        differentiable=True,
        preprocess="shortest side to the model's size, antialiased bicubic; centre crop; normalise",
        weights=(WeightFile(WEIGHTS, "model.safetensors"),),
        scales={"flow-grpo": Scale(divisor=26.0)},
        licence="MIT",
        citation="Kirstain et al., Pick-a-Pic, arXiv 2305.01569",
        verified="tiny random weights: not yet verified on real weights",
    )

    def __init__(
        self, path: str = WEIGHTS, processor: str | None = PROCESSOR, device: torch.device | str = "cpu"
    ) -> None:
        self.clip = CLIPFeatures(path, processor, device, self.spec.name, crop="transformers")

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores, with gradients to ``media``."""
        check_media(media, prompts, self.spec.name)
        return Scored(self.clip.logit_scale * self.clip.cosine(media, prompts))

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.clip.to(device)
