"""A vision-language model behind an OpenAI-compatible endpoint, asked in one's own words; see card.md."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flowalign.rewards.base import RewardSpec, Scored, check_media
from flowalign.rewards.chat import ChatClient
from flowalign.rewards.chat_judge import NUMBER, frames_together, judge, read_number
from flowalign.types import FlowAlignError, Metadata

if TYPE_CHECKING:
    import httpx

TEMPLATE = """A generator was asked for this {kind}:

{prompt}

Look at what it made. Say in at most three sentences what fits the request and what does not, and whether anything is \
malformed. Then write one last line of the form

Score: N

where N is a number from 0 (nothing of the request is there) to 10 (all of it is there, and flawless)."""
PATTERN = rf"(?i)\bscore\**\s*:\s*\**\s*{NUMBER}"


class VLMJudge:
    """Raw scores of pictures in [low, high].

    Args:
        url, model: endpoint up to the version, as in "http://127.0.0.1:8000/v1", and the model as it is called there.
        template: the question, with {prompt} where the prompt goes.
        pattern: regular expression whose only group is the score in an answer.
        low, high: least and greatest score; one outside is invalid.
        resize: side of a square that pictures are stretched to; None sends them as they are.
        api_key_env: name of the environment variable that holds the key.
        timeout: seconds that an answer may take, repetitions included.
        retries, concurrency, max_tokens, transport: see `ChatClient`.
        max_frames: of a video; None = 8. Pictures have none.
        device: not used; the model is elsewhere.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="vlm-judge",
        description="any vision-language model, asked in one's own words over an endpoint",
        modality="image",
        higher_is_better=True,
        native_range=(-math.inf, math.inf),
        differentiable=False,
        preprocess="bytes, as PNG; stretched to a square only where resize says so",
        licence="that of the model asked",
        citation="none: the question is one's own",
        verified="client and parser: exact, against a server on the loopback; a score is as good as the model asked",
        extra="server",
    )
    kind: ClassVar[str] = "picture"

    def __init__(
        self,
        url: str,
        model: str,
        template: str | None = None,
        pattern: str = PATTERN,
        low: float = 0.0,
        high: float = 10.0,
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
        self.template = TEMPLATE.replace("{kind}", self.kind) if template is None else template
        if "{prompt}" not in self.template:
            raise FlowAlignError(f"reward {name!r}: the template has no {{prompt}}; write it where the prompt goes")
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise FlowAlignError(
                f"reward {name!r}: pattern {pattern!r} is no regular expression ({error}); quote it in the recipe"
            ) from None
        if self.pattern.groups != 1:
            raise FlowAlignError(
                f"reward {name!r}: pattern {pattern!r} has {self.pattern.groups} groups, expected one around the "
                "score; write (?:...) for others"
            )
        if not low < high:
            raise FlowAlignError(f"reward {name!r}: low {low!r} and high {high!r}, expected low below high")
        self.low, self.high, self.resize = low, high, resize
        self.together = frames_together(self.spec, max_frames)
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
        return judge(self.client, media, texts, self.read, (), resize=self.resize, together=self.together)

    def read(self, answer: str) -> dict[str, float]:
        """The score in an answer.

        Raises:
            ValueError: it is missing, ambiguous or outside [low, high].
        """
        return {"score": read_number(answer, self.pattern, self.low, self.high)}


class VLMJudgeVideo(VLMJudge):
    """Raw scores of videos in [low, high]."""

    spec: ClassVar[RewardSpec] = replace(
        VLMJudge.spec,
        name="vlm-judge-video",
        description="any vision-language model, asked about the frames of a video in one's own words over an endpoint",
        modality="video",
        preprocess="evenly spaced frames in bytes, as PNG; stretched to a square only where resize says so",
    )
    kind: ClassVar[str] = "video, of which these are frames in their order"
