"""Several rewards on the same samples: one column each, checked, and none of them ever guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowalign.rewards.base import Reward, Scored
from flowalign.rewards.judge import Judge, Media, as_judge
from flowalign.types import FlowAlignError, Metadata


@dataclass(frozen=True)
class WeightedReward:
    """A reward as a recipe names it.

    Args:
        weight: its share in the total, not negative; 0 for one that is only logged or only a gate.
        gate: a sample with a raw score worse than this counts as the worst of its group; None = no gate.
    """

    name: str
    reward: Reward | Judge
    weight: float = 1.0
    gate: float | None = None


@dataclass(frozen=True)
class Columns:
    """All rewards of B samples: {name: (B,) float32, nan = invalid}, and {"name/sub-score": (B,)}; on the CPU.

    Args:
        reasons: {name: why the first sample without a score has none}, where the reward says.
    """

    values: Mapping[str, Tensor]
    subscores: Mapping[str, Tensor]
    reasons: Mapping[str, str] = field(default_factory=dict)


def weights(rewards: Sequence[WeightedReward]) -> dict[str, float]:
    """{name: weight in the total}; negative where less is better, so that the total is always to be raised."""
    return {r.name: r.weight if r.reward.spec.higher_is_better else -r.weight for r in rewards}


def gated(rewards: Sequence[WeightedReward], values: Mapping[str, Tensor]) -> Tensor | None:
    """(N,) bool: samples that fail a gate; None where no reward is one. A sample without a score is invalid anyhow."""
    failed = [
        values[r.name] < r.gate if r.reward.spec.higher_is_better else values[r.name] > r.gate
        for r in rewards
        if r.gate is not None
    ]
    return torch.stack(failed).any(0) if failed else None


def check_names(rewards: Sequence[WeightedReward]) -> None:
    """Refuses a list that names a reward twice."""
    names = [r.name for r in rewards]
    if len(set(names)) != len(names):
        raise FlowAlignError(f"rewards: {', '.join(names)} holds a name twice; name each reward once")


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
    check_names(rewards)
    return columns({r.name: as_judge(r.reward)(media, prompts, metadata) for r in rewards})


def columns(scored: Mapping[str, Scored]) -> Columns:
    """Answers of rewards, by name, side by side."""
    reasons = {}
    for name, one in scored.items():
        said = (d["reason"] for d, valid in zip(one.details, one.valid, strict=False) if not valid and d.get("reason"))
        if reason := next(said, None):
            reasons[name] = str(reason)
    return Columns(
        {name: one.score for name, one in scored.items()},
        {f"{name}/{key}": value for name, one in scored.items() for key, value in one.subscores.items()},
        reasons,
    )


def check_invalid_share(
    values: Mapping[str, Tensor],
    prompts: Sequence[str],
    limit: float,
    reasons: Mapping[str, str] | None = None,
) -> float:
    """The share of samples that some reward could not score.

    Args:
        values: {name: (N,)}.
        prompts: of the N samples, for the message.
        limit: share of each reward above which the run must not go on.
        reasons: see `Columns`.

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
            why = f" ({reasons[name]})" if reasons and name in reasons else ""
            raise FlowAlignError(
                f"reward {name!r}: {int(missing.sum())} of {len(prompts)} samples could not be scored ({share:.0%}, "
                f"more than max_invalid {limit:.0%}), first for {', '.join(map(repr, first))}{why}; mend the reward or "
                "the prompts, or raise training.max_invalid"
            )
    return float(invalid.float().mean()) if len(prompts) else 0.0
