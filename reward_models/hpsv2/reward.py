"""``cos(image, text)`` of an open_clip ViT-H/14 tuned on human choices, in its two published versions; see card.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.rewards.openclip import CONFIG, OpenCLIPFeatures
from flowalign.types import Metadata

REPOSITORY = "xswu/HPSv2"
ARCHITECTURE = "ViT-H-14"


class HPSv2:
    """Differentiable cosine in [-1, 1], about 0.2 to 0.35; only differences between pictures of one prompt mean
    something. No temperature: that of PickScore is not part of this score.

    Args:
        path: None = the published weights from the hub; a local file of them; or a folder that holds the published
            file, or a model as open_clip itself saves one.
        model: architecture of open_clip, or JSON file or folder of a configuration; None = the configuration in the
            folder ``path`` where there is one, else ViT-H-14. Of its ``preprocess_cfg`` mean and std are taken;
            pictures are always fitted by the longest side.
        sha256: checksum that the file of weights must have.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="hpsv2",
        description="which of two pictures of a prompt people would pick, by HPS v2",
        modality="image",
        higher_is_better=True,
        native_range=(-1.0, 1.0),
        differentiable=True,
        preprocess="longest side to the model's size, antialiased bicubic; zeros around to a square; normalise",
        weights=(WeightFile(REPOSITORY, "HPS_v2_compressed.pt"),),
        licence="Apache-2.0",
        citation="Wu et al., Human Preference Score v2, arXiv 2306.09341",
        verified="tiny random weights: not yet verified on real weights",
    )

    def __init__(
        self,
        path: str | None = None,
        model: str | None = None,
        sha256: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if model is None:
            model = path if path is not None and (Path(path) / CONFIG).is_file() else ARCHITECTURE
        self.clip = OpenCLIPFeatures(self.spec.weights[0], path, model, sha256, device, self.spec.name)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores, with gradients to ``media``; frames are averaged."""
        check_media(media, prompts, self.spec.name)
        return Scored(self.clip.cosine(media, prompts))

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.clip.to(device)


class HPSv21(HPSv2):
    """HPS v2.1: the same model, tuned on a revised set of choices; its scores are not those of v2."""

    spec: ClassVar[RewardSpec] = replace(
        HPSv2.spec,
        name="hpsv2.1",
        description="which of two pictures of a prompt people would pick, by HPS v2.1",
        weights=(WeightFile(REPOSITORY, "HPS_v2.1_compressed.pt"),),
    )
