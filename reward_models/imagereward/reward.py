"""A perceptron on BLIP, tuned on people's rankings of pictures; see card.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.rewards.blip import CONFIG, TOKENIZER, BLIPScores
from flowalign.types import Metadata

WEIGHTS = WeightFile("THUDM/ImageReward", "ImageReward.pt")
LENGTH = 35
"""Tokens of a prompt, [CLS] and [SEP] among them."""
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the head's answers on the authors' data; part of the published score."""


def head(width: int) -> nn.Sequential:
    """Linear throughout: dropout does nothing here, but counts in the names of the weights."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 128),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )


class ImageReward:
    """Differentiable score of about -2.3 to 2; 0 is a middling picture of the authors' data.

    Args:
        path: a local ImageReward.pt with med_config.json beside it, or their folder; None fetches both.
        tokenizer: folder or hub name of bert-base-uncased.
        sha256: of a local ImageReward.pt.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="imagereward",
        description="which of several pictures of a prompt people would rank higher",
        modality="image",
        higher_is_better=True,
        native_range=(float("-inf"), float("inf")),
        differentiable=True,
        preprocess="shortest side to 224, antialiased bicubic; centre crop; normalise as CLIP; prompts of 35 tokens",
        weights=(WEIGHTS, WEIGHTS._replace(file=CONFIG), WeightFile(TOKENIZER, "vocab.txt")),
        licence="Apache-2.0",
        citation="Xu et al., ImageReward, arXiv 2304.05977",
        verified="tiny random weights, against the authors' code: not yet verified on real weights",
    )

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str = TOKENIZER,
        sha256: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.blip = BLIPScores(
            WEIGHTS,
            path,
            head,
            tokenizer=tokenizer,
            length=LENGTH,
            sha256=sha256,
            device=device,
            name=self.spec.name,
        )

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.blip.to(device)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores, the mean over frames, with gradients to ``media``."""
        check_media(media, prompts, self.spec.name)
        return Scored((self.blip(media, prompts) - MEAN) / STD)
