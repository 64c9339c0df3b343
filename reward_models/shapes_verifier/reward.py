"""Whether a 64x64 picture of the shapes world shows what its caption asks; see card.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowalign.data.worlds import shapes, shapes_verifier
from flowalign.rewards.base import RewardSpec, Scored, check_media
from flowalign.types import FlowAlignError, Metadata


class ShapesVerifier:
    """Score in [0, 1] of each picture.

    Args:
        score: "soft" gives partial credit and is the better reward; "strict" is 0 or 1 and is the better measure.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="shapes-verifier",
        description="exact check of objects, colours, counts and positions in the shapes world",
        modality="image",
        higher_is_better=True,
        native_range=(0.0, 1.0),
        differentiable=False,
        licence="Apache-2.0",
        citation="after GenEval (Ghosh et al., arXiv 2310.11513)",
        verified="exact",
    )

    def __init__(self, score: Literal["soft", "strict"] = "soft", device: torch.device | str = "cpu") -> None:
        if score not in ("soft", "strict"):
            raise FlowAlignError(f"shapes-verifier: score {score!r}, expected 'soft' or 'strict'")
        self.score: Literal["soft", "strict"] = score

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, 1, 3, 64, 64) in [0, 1] and B captions to B scores.

        A caption outside the world's grammar and a picture of another size have no score.

        Raises:
            FlowAlignError: more than one frame.
        """
        check_media(media, prompts, "shapes-verifier")
        if media.shape[1] != 1:
            raise FlowAlignError(
                f"shapes-verifier: got {media.shape[1]} frames, expected one; score videos through a Judge"
            )
        if media.shape[3:] != (shapes.SIZE, shapes.SIZE):
            reason = (
                f"shapes-verifier judges pictures of {shapes.SIZE}x{shapes.SIZE} pixels, not of "
                f"{media.shape[3]}x{media.shape[4]}"
            )
            return Scored(torch.full((len(prompts),), torch.nan), {}, ({"reason": reason},) * len(prompts))
        problems = [_problem(text) for text in prompts]
        known = [i for i, problem in enumerate(problems) if problem is None]
        verdict = shapes_verifier.verify(media[known].detach().float().clamp(0, 1), [prompts[i] for i in known])
        columns = {"soft": verdict.soft, "strict": verdict.strict, **verdict.skills}
        full = {name: torch.full((len(prompts),), torch.nan) for name in columns}
        for name, value in columns.items():
            full[name][known] = torch.from_numpy(value)
        score = full.pop(self.score)
        return Scored(score, full, tuple({} if p is None else {"reason": p} for p in problems))


def _problem(text: str) -> str | None:
    """Why a caption cannot be judged, or None."""
    try:
        shapes.parse(text)
    except ValueError as error:
        return str(error)
    return None
