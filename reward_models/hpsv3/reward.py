"""A perceptron on Qwen2-VL 7B, tuned on people's choices between pictures; see card.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.rewards.qwen2_vl import Qwen2VLScores, with_reasons
from flowalign.rewards.weights import locate, read
from flowalign.types import Metadata

WEIGHTS = WeightFile("MizzenAI/HPSv3", "HPSv3.safetensors")
BASE = "Qwen/Qwen2-VL-7B-Instruct"
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28
"""Of every picture, at least and at most: as near as sides that are multiples of 28 come to it."""


def template() -> str:
    """The published question; a part of the checkpoint's input, word for word."""
    return Path(__file__).with_name("template.txt").read_text(encoding="utf-8")


def head(width: int) -> nn.Sequential:
    """Mean and logarithm of the standard deviation; dropout does nothing here, but counts in the names."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


class HPSv3:
    """Differentiable, unbounded score; the authors' pictures lie roughly between -5 and 15.

    Args:
        path: a local HPSv3.safetensors, or a folder that holds it; None fetches it (17 GB).
        base: folder or hub name of Qwen2-VL's configuration and tokenizer; its weights are not needed.
        precision: of all but the head: "bf16" as published, or "fp32".
        sha256: of a local HPSv3.safetensors.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="hpsv3",
        description="which of several pictures of a prompt people would prefer, judged by a vision-language model",
        modality="image",
        higher_is_better=True,
        native_range=(float("-inf"), float("inf")),
        differentiable=True,
        preprocess=(
            "to about 448 x 448 pixels in the picture's own proportions, sides multiples of 28, antialiased bicubic; "
            "normalise as CLIP; the published question; positions along one axis; rotary frequencies in bfloat16"
        ),
        weights=(WEIGHTS, WeightFile(BASE, "config.json"), WeightFile(BASE, "tokenizer.json")),
        licence="MIT",
        citation="Ma et al., HPSv3, arXiv 2508.03789",
        verified="tiny random weights: not yet verified on real weights",
    )

    def __init__(
        self,
        path: str | None = None,
        base: str = BASE,
        precision: str = "bf16",
        sha256: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.scores = Qwen2VLScores(
            read(locate(WEIGHTS, path, self.spec.name, sha256), self.spec.name),
            head,
            base=base,
            tokens=(TOKEN,),
            template=template(),
            pixels=(PIXELS, PIXELS),
            modality="image",
            precision=precision,
            device=device,
            name=self.spec.name,
        )

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.scores.to(device)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores, the mean over frames, with gradients to ``media``.

        Sub-scores "mu", which is the score, and "sigma", the standard deviation of the choices it was tuned on.
        """
        check_media(media, prompts, self.spec.name)
        count, frames = media.shape[:2]
        asked = [prompt for prompt in prompts for _ in range(frames)]
        found, reasons = self.scores(media.flatten(0, 1)[:, None], asked)
        pairs = found[:, 0].view(count, frames, 2)
        mean = pairs[..., 0].mean(1)
        return Scored(mean, {"mu": mean, "sigma": pairs[..., 1].exp().mean(1)}, with_reasons(reasons[::frames]))
