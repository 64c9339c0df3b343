"""Several rewards on the same samples: one column each, checked, and none of them ever guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowalign.rewards.base import Reward
from flowalign.rewards.judge import Judge, Media, as_judge
from flowalign.types import FlowAlignError, Metadata


@dataclass(frozen=True)
class WeightedReward:
    """A reward as a recipe names it; ``weight`` > 0 is its share in the total."""

    name: str
    reward: Reward | Judge
    weight: float = 1.0


@dataclass(frozen=True)
class Columns:
    """All rewards of B samples: {name: (B,) float32, nan = invalid}, and {"name/sub-score": (B,)}; on the CPU."""

    values: Mapping[str, Tensor]
    subscores: Mapping[str, Tensor]


def weights(rewards: Sequence[WeightedReward]) -> dict[str, float]:
    """{name: weight in the total}; negative where less is better, so that the total is always to be raised."""
    return {r.name: r.weight if r.reward.spec.higher_is_better else -r.weight for r in rewards}


def score(
    rewards: Sequence[WeightedReward],
    media: Media,
    prompts: Sequence[str],
    metadata: Sequence[Metadata] | None = None,
) -> Columns:
    """Scores B samples with every reward, without gradients; see `Judge` for what cannot be scored.

    Args:
        media: (B, F, 3, H, W) in [0, 1], or B tensors (F, 3, H, W) of different sizes.

    Raises:
        ValueError: media outside its contract, or a reward that returns other than (B,) numbers.
    """
    names = [r.name for r in rewards]
    if len(set(names)) != len(names):
        raise FlowAlignError(f"rewards: {', '.join(names)} holds a name twice; name each reward once")
    values: dict[str, Tensor] = {}
    subscores: dict[str, Tensor] = {}
    for r in rewards:
        scored = as_judge(r.reward)(media, prompts, metadata)
        values[r.name] = scored.score
        subscores |= {f"{r.name}/{key}": value for key, value in scored.subscores.items()}
    return Columns(values, subscores)


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
