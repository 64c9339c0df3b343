"""LAION's aesthetic predictor v2: a linear rating of CLIP's unit image vector; see card.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowalign.rewards import weights
from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.rewards.clip import CLIPFeatures
from flowalign.types import Metadata

CLIP = "openai/clip-vit-large-patch14"
HEAD = WeightFile(
    "camenduru/improved-aesthetic-predictor",  # a copy: the publisher is not on the hub
    "sac+logos+ava1-l14-linearMSE.pth",
    sha256="21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0",
)


class AestheticHead(nn.Module):
    """Unit vectors (N, ``width``) to ratings (N,). The dropout of training stands in the published names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, features: Tensor) -> Tensor:
        ratings: Tensor = self.layers(features)
        return ratings[:, 0]


class Aesthetic:
    """Differentiable rating of about 1 to 10 that reads no prompt.

    Args:
        path: None = the head from the hub; a local file of it, or the folder that holds it.
        clip, processor: folder or hub name of CLIP, and of its image statistics; None = ``clip``.
        sha256: checksum that the file of the head must have.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="aesthetic",
        description="how people would rate a picture from 1 to 10, by LAION's predictor v2",
        modality="image",
        higher_is_better=True,
        # The published head is affine with bias 5.23664 and |w| 17.996, and reads unit vectors.
        native_range=(-12.8, 23.3),
        differentiable=True,
        needs=(),
        preprocess="shortest side to the model's size, antialiased bicubic; centre crop; normalise",
        weights=(HEAD, WeightFile(CLIP, "model.safetensors")),
        licence="Apache-2.0 (head), MIT (CLIP)",
        citation="Schuhmann et al., LAION-5B, arXiv 2210.08402",
        verified="tiny random weights: not yet verified on real weights",
    )

    def __init__(
        self,
        path: str | None = None,
        clip: str = CLIP,
        processor: str | None = None,
        sha256: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        name = self.spec.name
        state = weights.read(weights.locate(HEAD, path, name, sha256), name)
        self.clip = CLIPFeatures(clip, processor, device, name, "clip")
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn globally, and are overwritten
            self.head = AestheticHead(int(self.clip.model.config.projection_dim))
        weights.load_strict(self.head, state, name)
        self.head.to(device).eval().requires_grad_(False)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores, with gradients to ``media``; frames are averaged."""
        check_media(media, prompts, self.spec.name)
        ratings = self.head(self.clip.images(media.flatten(0, 1)))
        return Scored(ratings.view(media.shape[:2]).mean(1))

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.clip.to(device)
        self.head.to(device)
