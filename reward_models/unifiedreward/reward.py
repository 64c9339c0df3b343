"""Scores from 1 to 5 of UnifiedReward, asked over an OpenAI-compatible endpoint; see card.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flowalign.rewards.base import RewardSpec, Scale, Scored, check_media
from flowalign.rewards.chat import ChatClient
from flowalign.rewards.chat_judge import NUMBER, frames_together, judge, read_number
from flowalign.types import FlowAlignError, Metadata

if TYPE_CHECKING:
    import httpx

_FOLDER = Path(__file__).parent
_FINAL = re.compile(rf"final\s+score\**\s*:\s*\**\s*{NUMBER}", re.IGNORECASE)


def _axis(name: str) -> re.Pattern[str]:
    return re.compile(rf"{name}\s+score\**\s*(?:\(1-5\))?\**\s*:\s*\**\s*{NUMBER}", re.IGNORECASE)


class UnifiedReward:
    """Raw scores from 1 to 5 of pictures.

    Args:
        url, model: endpoint up to the version, as in "http://127.0.0.1:8000/v1", and the model as it is called there.
        version: of the checkpoint's own template: "1.5" asks for one score, "2.0" for alignment, coherence and style,
            whose mean is the score. None = the first of `axes`.
        resize: side of a square that pictures are stretched to; Flow-GRPO sends 512. None sends them as they are.
        api_key_env: name of the environment variable that holds the key.
        timeout: seconds that an answer may take, repetitions included.
        retries, concurrency, max_tokens, transport: see `ChatClient`.
        max_frames: of a video; None = 8. Pictures have none.
        device: not used; the model is elsewhere.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="unifiedreward",
        description="a vision-language model tuned on human judgements, asked over an endpoint",
        modality="image",
        higher_is_better=True,
        native_range=(1.0, 5.0),
        differentiable=False,
        preprocess="bytes, as PNG; stretched to a square only where resize says so",
        scales={"flow-grpo": Scale(divisor=5.0)},
        licence="MIT",
        citation="Wang et al., UnifiedReward, arXiv 2503.05236",
        verified="client and parser: exact, against a server on the loopback; not yet verified on the real model",
        extra="server",
    )
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"1.5": (), "2.0": ("alignment", "coherence", "style")}
    """The scores that each version is asked for, besides the one of "1.5"."""
    suffix: ClassVar[str] = ""

    def __init__(
        self,
        url: str,
        model: str,
        version: str | None = None,
        resize: int | None = None,
        api_key_env: str | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        concurrency: int = 16,
        max_tokens: int = 512,
        max_frames: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        name = self.spec.name
        version = next(iter(self.axes)) if version is None else version
        if version not in self.axes:
            known = " or ".join(repr(one) for one in self.axes)
            raise FlowAlignError(f"reward {name!r}: version {version!r}, expected {known} in quotes")
        self.names, self.resize = self.axes[version], resize
        self.together = frames_together(self.spec, max_frames)
        self.template = (_FOLDER / f"template_{version}{self.suffix}.txt").read_text(encoding="utf-8")
        self.client = ChatClient(
            url,
            model,
            name,
            api_key_env=api_key_env,
            timeout=timeout,
            retries=retries,
            concurrency=concurrency,
            max_tokens=max_tokens,
            transport=transport,
        )

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] and B prompts to B scores; nan where none came.

        The frames of a video are shown in one question; several frames of a picture judge are scored one by one, and
        the score is their mean.
        """
        check_media(media, prompts, self.spec.name)
        texts = [self.template.replace("{prompt}", prompt) for prompt in prompts]
        return judge(self.client, media, texts, self.read, self.names, resize=self.resize, together=self.together)

    def read(self, answer: str) -> dict[str, float]:
        """The score and its sub-scores in an answer.

        Raises:
            ValueError: one of them is missing, ambiguous or outside [1, 5].
        """
        if not self.names:
            return {"score": read_number(answer, _FINAL, 1.0, 5.0)}
        parts = {name: read_number(answer, _axis(name), 1.0, 5.0) for name in self.names}
        return {"score": sum(parts.values()) / len(parts), **parts}


class UnifiedRewardVideo(UnifiedReward):
    """Raw scores from 1 to 5 of videos: the mean of alignment, physics and style."""

    spec: ClassVar[RewardSpec] = replace(
        UnifiedReward.spec,
        name="unifiedreward-video",
        description="a vision-language model tuned on human judgements of videos, asked over an endpoint",
        modality="video",
        preprocess="evenly spaced frames in bytes, as PNG; stretched to a square only where resize says so",
        scales={},
    )
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"2.0": ("alignment", "physics", "style")}
    suffix: ClassVar[str] = "_video"
