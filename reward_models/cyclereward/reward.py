"""A perceptron on BLIP, tuned on how well text and picture can be made from each other again; see card.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.rewards.blip import CONFIG, TOKENIZER, BLIPScores
from flowalign.types import FlowAlignError, Metadata

REPOSITORY, RELEASE = "https://github.com/hjbahng/cyclereward", "v1.0.0"
WEIGHTS = {
    variant: WeightFile(REPOSITORY, f"CycleReward-{label}.pth", RELEASE)
    for variant, label in (("combo", "Combo"), ("i2t", "I2T"), ("t2i", "T2I"))
}
LENGTH = 128
"""Tokens of a prompt, [CLS] and [SEP] among them."""


def head(width: int) -> nn.Sequential:
    """Unlike ImageReward's, with GELU between the layers."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.GELU(),
        nn.Linear(1024, 128),
        nn.GELU(),
        nn.Linear(128, 64),
        nn.GELU(),
        nn.Linear(64, 16),
        nn.GELU(),
        nn.Linear(16, 1),
    )


class CycleReward:
    """Differentiable, unbounded score; only differences within one prompt, or one picture, mean something.

    Args:
        variant: "combo", or "i2t" and "t2i", which saw only captions of one picture or only pictures of one caption.
        path: a local CycleReward-*.pth with med_config.json beside it, or their folder; they are not on the hub.
        tokenizer: folder or hub name of bert-base-uncased.
        sha256: of the file of weights.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="cyclereward",
        description="whether text and picture could be made from each other again",
        modality="image",
        higher_is_better=True,
        native_range=(float("-inf"), float("inf")),
        differentiable=True,
        preprocess="shortest side to 224, antialiased bicubic; centre crop; normalise as CLIP; prompts of 128 tokens",
        weights=(*WEIGHTS.values(), WeightFile(REPOSITORY, CONFIG, RELEASE), WeightFile(TOKENIZER, "vocab.txt")),
        licence="MIT",
        citation="Bahng, Chan et al., Cycle Consistency as Reward, arXiv 2506.02095",
        verified="tiny random weights, against the authors' code: not yet verified on real weights",
    )

    def __init__(
        self,
        variant: str = "combo",
        path: str | None = None,
        tokenizer: str = TOKENIZER,
        sha256: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if variant not in WEIGHTS:
            raise FlowAlignError(f"reward 'cyclereward': variant {variant!r}, expected {', '.join(WEIGHTS)}")
        file = WEIGHTS[variant]
        if path is None:
            raise FlowAlignError(
                f"reward 'cyclereward': its weights cannot be fetched by name; download {file.file} and {CONFIG} from "
                f"{REPOSITORY}/releases/download/{RELEASE}/ into one folder and give it as params.path"
            )
        self.blip = BLIPScores(
            file,
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
        return Scored(self.blip(media, prompts))
