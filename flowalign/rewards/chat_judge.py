"""Scores read in what a vision-language model says of pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from flowalign.rewards.base import RewardSpec, Scored
from flowalign.rewards.chat import SHOWN, Answer, ChatClient, Question
from flowalign.rewards.judge import FramePolicy
from flowalign.types import FlowAlignError

NUMBER = r"(-?\d+(?:\.\d+)?)(?![.,]?\d|\s*%|[A-Za-z])"
"""A group that holds one plain number: neither the 4 of "45" nor of "4,5", nor a percentage."""


def read_number(text: str, pattern: re.Pattern[str], low: float, high: float) -> float:
    """The one number that ``pattern``'s group finds in an answer.

    Raises:
        ValueError: none is found, several differ, it is no number, lies outside [low, high], or is "of" another most
            than ``high``, as in "4/10"; one sentence says which.
    """
    found: set[float] = set()
    for match in pattern.finditer(text):
        try:
            value = float(match.group(1))
        except (TypeError, ValueError):
            raise ValueError(f"the answer gives {match.group(1)!r} as its score, which is no number") from None
        most = re.match(r"\s*/\s*(\d+(?:\.\d+)?)", text[match.end(1) :])
        if most is not None and float(most.group(1)) != high:
            raise ValueError(f"the answer gives {value:g} of {most.group(1)}, expected of {high:g}")
        found.add(value)
    if not found:
        raise ValueError(f"the answer gives no score: {pattern.pattern!r} is not found in it")
    if len(found) > 1:
        raise ValueError(f"the answer gives several scores: {', '.join(f'{value:g}' for value in sorted(found))}")
    (value,) = found
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"the answer gives {value:g}, outside [{low:g}, {high:g}]")
    return value


def pictures(media: Tensor, resize: int | None = None) -> list[npt.NDArray[np.uint8]]:
    """(N, 3, H, W) in [0, 1] to N pictures (H, W, 3) in bytes.

    Args:
        resize: side of a square that they are stretched to, bicubic, whatever their shape; None = as they are.
    """
    rounded = (media.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    if resize is None:
        return list(rounded)
    size = (resize, resize)
    return [np.asarray(Image.fromarray(one).resize(size, Image.Resampling.BICUBIC)) for one in rounded]


def scored(answers: Sequence[Answer], read: Callable[[str], Mapping[str, float]], subscores: Sequence[str]) -> Scored:
    """Scores read in answers; nan, with the reason and the answer in details, where there is none.

    Args:
        read: an answer to {"score": ..., sub-score: ...}; raises ValueError where it holds no score.
        subscores: names of all that ``read`` may give; nan where it leaves one out.
    """
    columns = {name: torch.full((len(answers),), torch.nan) for name in ("score", *subscores)}
    details: list[dict[str, Any]] = []
    for i, answer in enumerate(answers):
        if answer.text is None:
            details.append({"reason": answer.reason})
            continue
        detail: dict[str, Any] = {"answer": answer.text[:SHOWN]}
        try:
            for name, value in read(answer.text).items():
                columns[name][i] = value
        except ValueError as error:
            detail["reason"] = f"{error}{' (it was cut off at max_tokens)' if answer.cut else ''}"
        details.append(detail)
    return Scored(columns.pop("score"), columns, tuple(details))


def frames_together(spec: RewardSpec, max_frames: int | None) -> int | None:
    """How many frames one question shows at most: of a judge of videos ``max_frames`` or 8, of pictures None.

    Raises:
        FlowAlignError: ``max_frames`` is less than 1, or given to a judge of pictures.
    """
    if spec.modality == "image":
        if max_frames is not None:
            raise FlowAlignError(
                f"reward {spec.name!r}: max_frames is for videos, use '{spec.name}-video' or leave it out"
            )
        return None
    if max_frames is not None and max_frames < 1:
        raise FlowAlignError(f"reward {spec.name!r}: max_frames {max_frames!r}, expected 1 or more")
    return max_frames or 8


def judge(
    client: ChatClient,
    media: Tensor,
    texts: Sequence[str],
    read: Callable[[str], Mapping[str, float]],
    subscores: Sequence[str],
    *,
    resize: int | None = None,
    together: int | None = None,
) -> Scored:
    """Scores of media (B, F, 3, H, W) in [0, 1] by the answers to B texts about them.

    Args:
        read, subscores: see `scored`.
        resize: see `pictures`.
        together: frames of a video that are shown in one question, evenly spaced where there are more; None asks about
            every frame on its own, and the score is their mean.
    """
    count = media.shape[1]
    if together is not None:
        index = FramePolicy(f"uniform:{together}").frames(count)
        shown = pictures(media[:, index].flatten(0, 1), resize)
        groups = [tuple(shown[i : i + len(index)]) for i in range(0, len(shown), len(index))]
        return scored(client.ask([Question(*pair) for pair in zip(groups, texts, strict=True)]), read, subscores)
    singles = zip(pictures(media.flatten(0, 1), resize), (text for text in texts for _ in range(count)), strict=True)
    found = scored(client.ask([Question((picture,), text) for picture, text in singles]), read, subscores)
    if count == 1:
        return found
    details = [found.details[i : i + count] for i in range(0, len(found.details), count)]
    return Scored(
        found.score.view(-1, count).mean(1),
        {name: value.view(-1, count).mean(1) for name, value in found.subscores.items()},
        tuple(next((one for one in frames if "reason" in one), frames[0]) for frames in details),
    )
