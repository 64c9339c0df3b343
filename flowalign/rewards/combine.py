"""Several rewards on the same samples: one column each, checked, and none of them ever guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowalign.rewards.base import Reward, check_media
from flowalign.types import FlowAlignError, Metadata


@dataclass(frozen=True)
class WeightedReward:
    """A reward as a recipe names it; ``weight`` > 0 is its share in the total."""

    name: str
    reward: Reward
    weight: float = 1.0


@dataclass(frozen=True)
class Columns:
    """All rewards of B samples: {name: (B,) float32, nan = invalid}, and {"name/sub-score": (B,)}; on the CPU."""

    values: Mapping[str, Tensor]
    subscores: Mapping[str, Tensor]


def weights(rewards: Sequence[WeightedReward]) -> dict[str, float]:
    """{name: weight in the total}; negative where less is better, so that the total is always to be raised."""
    return {r.name: r.weight if r.reward.spec.higher_is_better else -r.weight for r in rewards}


@torch.no_grad()
def score(
    rewards: Sequence[WeightedReward],
    media: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Metadata] | None = None,
    batch_size: int = 32,
) -> Columns:
    """Scores B samples with every reward, ``batch_size`` at a time, without gradients.

    Media that are not finite are invalid (nan) for every reward and are not shown to it.

    Args:
        media: (B, F, 3, H, W) in [0, 1].

    Raises:
        ValueError: media outside its contract, or a reward that returns other than (B,) numbers.
    """
    check_media(media, prompts, "rewards")
    names = [r.name for r in rewards]
    if len(set(names)) != len(names):
        raise FlowAlignError(f"rewards: {', '.join(names)} holds a name twice; name each reward once")
    count = media.shape[0]
    finite = torch.isfinite(media).flatten(1).all(1).cpu()
    rows = finite.nonzero().flatten()
    values: dict[str, Tensor] = {}
    subscores: dict[str, Tensor] = {}
    for r in rewards:
        values[r.name] = torch.full((count,), torch.nan)
        for chunk in torch.split(rows, batch_size):
            chosen = [prompts[i] for i in chunk.tolist()]
            extra = None if metadata is None else [metadata[i] for i in chunk.tolist()]
            scored = r.reward(media[chunk.to(media.device)], chosen, extra)
            values[r.name][chunk] = _column(scored.score, len(chosen), r.name)
            for key, value in scored.subscores.items():
                column = subscores.setdefault(f"{r.name}/{key}", torch.full((count,), torch.nan))
                column[chunk] = _column(value, len(chosen), f"{r.name}/{key}")
    return Columns(values, subscores)


def _column(value: Tensor, count: int, name: str) -> Tensor:
    """(count,) float32 on the CPU; infinities are no scores either."""
    if value.shape != (count,):
        raise ValueError(
            f"reward {name!r}: returned shape {tuple(value.shape)} for {count} samples, expected ({count},)"
        )
    column = value.detach().float().cpu()
    return torch.where(torch.isfinite(column), column, torch.full_like(column, torch.nan))


def check_invalid_share(values: Mapping[str, Tensor], prompts: Sequence[str], limit: float) -> float:
    """The share of samples that some reward could not score.

    Args:
        values: {name: (N,)}.
        prompts: of the N samples, for the message.
        limit: share of each reward above which the run must not go on.

    Raises:
        FlowAlignError: above the limit; names the reward and the first prompts.
    """
    invalid = torch.zeros(len(prompts), dtype=torch.bool)
    for name, value in values.items():
        missing = ~torch.isfinite(value)
        invalid |= missing
        share = float(missing.float().mean()) if len(prompts) else 0.0
        if share > limit:
            first = list(dict.fromkeys(prompts[i] for i in missing.nonzero().flatten().tolist()))[:3]
            raise FlowAlignError(
                f"reward {name!r}: {int(missing.sum())} of {len(prompts)} samples could not be scored ({share:.0%}, "
                f"more than max_invalid {limit:.0%}), first for {', '.join(map(repr, first))}; mend the reward or the "
                "prompts, or raise training.max_invalid"
            )
    return float(invalid.float().mean()) if len(prompts) else 0.0
