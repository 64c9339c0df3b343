"""A linear head on Qwen2-VL 2B, tuned on people's choices between generated videos; see card.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.rewards.qwen2_vl import LoRA, Qwen2VLScores, with_reasons
from flowalign.rewards.weights import locate, read
from flowalign.types import FlowAlignError, Metadata

WEIGHTS = WeightFile("KlingTeam/VideoReward", "checkpoint-11352/model.pth")
BASE = "Qwen/Qwen2-VL-2B-Instruct"
TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
MEAN, STD = (3.6757, 1.1646, 2.8105), (2.2476, 1.3811, 2.5121)
"""Of visual quality, motion quality and text alignment on the authors' data; part of the published scores."""
SCORES = ("overall", "vq", "mq", "ta")
PIXELS = (128 * 28 * 28, 256 * 28 * 28)
"""Least and most of a frame."""
RATE = 2.0
"""Frames a second that the judge sees."""
LEAST_FRAMES, MOST_FRAMES = 4, 768
PREFIX = "base_model.model."
"""Of every published weight: the file is a whole model inside peft's."""
RANK, LORA_SCALE = 64, 128 / 64


def template() -> str:
    """The published question; a part of the checkpoint's input, word for word."""
    return Path(__file__).with_name("template.txt").read_text(encoding="utf-8")


def head(width: int) -> nn.Linear:
    """One number, asked for three times."""
    return nn.Linear(width, 1, bias=False)


def frames_seen(count: int, fps: float) -> list[int]:
    """Which of ``count`` frames the judge sees: an even number, evenly spaced, the first and the last among them.

    Two frames a second, but at least 4 where there are as many. None at all of a single frame, which the authors' code
    refuses.
    """
    most = min(MOST_FRAMES, count) // 2 * 2
    wanted = round(min(max(count / fps * RATE, LEAST_FRAMES), most) / 2) * 2
    # torch's float32 steps and rounding of halves, as published.
    found: list[int] = torch.linspace(0, count - 1, wanted).round().long().tolist()
    return found


class VideoAlign:
    """Differentiable scores of about -3 to 3 each; 0 is a middling video of the authors' data.

    Args:
        path: a local model.pth, or the folder that holds it; None fetches it (5 GB).
        base: folder or hub name of Qwen2-VL's configuration and tokenizer; its weights are not needed.
        score: which is the score: "vq" visual quality, "mq" motion quality, "ta" text alignment, or "overall", their
            sum. The others are sub-scores.
        fps: frames a second of the videos, which says how many of them the judge sees.
        precision: of all but the head: "bf16" as published, or "fp32".
        sha256: of a local model.pth.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="videoalign",
        description="visual quality, motion quality and text alignment of a video as people see them, and their sum",
        modality="video",
        higher_is_better=True,
        native_range=(float("-inf"), float("inf")),
        differentiable=True,
        preprocess=(
            "2 frames a second, at least 4, an even number; each to at most 448 x 448 pixels in its own proportions, "
            "sides multiples of 28, antialiased bicubic; normalise as CLIP; no video codec; the published question; "
            "positions along one axis; rotary frequencies in bfloat16"
        ),
        weights=(WEIGHTS, WeightFile(BASE, "config.json"), WeightFile(BASE, "tokenizer.json")),
        licence="Apache-2.0 (weights), MIT (question)",
        citation="Liu et al., Improving Video Generation with Human Feedback, arXiv 2501.13918",
        verified="tiny random weights: not yet verified on real weights",
    )

    def __init__(
        self,
        path: str | None = None,
        base: str = BASE,
        score: str = "overall",
        fps: float = 16.0,
        precision: str = "bf16",
        sha256: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        name = self.spec.name
        if score not in SCORES:
            raise FlowAlignError(f"reward {name!r}: score is {score!r}, expected one of {', '.join(SCORES)}")
        if not (math.isfinite(fps) and fps > 0):
            raise FlowAlignError(f"reward {name!r}: fps is {fps}, expected the frame rate of the videos, above 0")
        self.score, self.fps = score, float(fps)
        state = read(locate(WEIGHTS, path, name, sha256), name)
        state = {key.removeprefix(PREFIX): state.pop(key) for key in list(state)}
        rank = next((value.shape[0] for key, value in state.items() if key.endswith("lora_A.default.weight")), RANK)
        self.scores = Qwen2VLScores(
            state,
            head,
            base=base,
            tokens=TOKENS,
            template=template(),
            pixels=PIXELS,
            modality="video",
            precision=precision,
            device=device,
            name=name,
            lora=LoRA(rank, LORA_SCALE),
        )

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.scores.to(device)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores, with gradients to the frames that are seen.

        Sub-scores "overall", "vq", "mq" and "ta", each normalised as published.
        """
        check_media(media, prompts, self.spec.name)
        seen = frames_seen(media.shape[1], self.fps)
        if seen:
            found, reasons = self.scores(media[:, seen], prompts)
            raw = found[..., 0]
        else:
            raw = torch.full((len(prompts), len(TOKENS)), torch.nan, device=self.scores.device)
            reasons = [f"the video has {media.shape[1]} frame, expected 2 or more"] * len(prompts)
        normal = (raw - raw.new_tensor(MEAN)) / raw.new_tensor(STD)
        scores = dict(zip(SCORES, (normal.sum(1), *normal.unbind(1)), strict=True))
        return Scored(scores[self.score], scores, with_reasons(reasons))
