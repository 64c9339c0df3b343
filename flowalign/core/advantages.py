"""From rewards to credit: how much better a sample did than the other samples of its prompt."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

AdvantageStd = Literal["group", "global"]
ZERO_VARIANCE_TOLERANCE = 1e-6


def group(rewards: Tensor, groups: Tensor, std: AdvantageStd = "group", eps: float = 1e-4) -> Tensor:
    """``(R - mean of the group) / (std + eps)`` (GRPO, 2402.03300; per prompt as in Flow-GRPO, 2505.05470).

    Args:
        rewards: (N,); nan = could not be scored: it enters no statistic and gets advantage 0.
        groups: (N,) int64; equal numbers mark one group.
        std: population standard deviation of each group, or of all rewards together.
        eps: added to the standard deviation, in units of the reward.

    Returns:
        (N,) float32. A group whose rewards are all equal (see `zero_variance`) gets exactly 0.
    """
    if std not in ("group", "global"):
        raise ValueError(f"advantages.group: std {std!r}; expected 'group' or 'global'")
    s = _statistics(rewards, groups)
    if std == "global":
        known = rewards[s.valid].double()
        scale = known.std(correction=0) if known.numel() else s.std.new_zeros(())
    else:
        scale = s.std
    advantage = s.centred / (scale + eps)
    return torch.where(zero_variance(rewards, groups), torch.zeros_like(advantage), advantage).float()


def zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """(N,) bool: samples of a group whose valid rewards are equal up to rounding, hence without signal.

    The tolerance is 1e-6 of the group's mean, or of 1 where that is smaller: a constant group may have a tiny standard
    deviation in float32, so that comparing with 0 misses it. A group with fewer than two valid rewards counts too.
    """
    s = _statistics(rewards, groups)
    return s.std <= ZERO_VARIANCE_TOLERANCE * s.mean.abs().clamp(min=1)


class _Statistics(NamedTuple):
    """Of the valid rewards of each sample's own group; all (N,), float64 but for ``valid``."""

    valid: Tensor
    mean: Tensor
    centred: Tensor  # reward - mean; 0 where invalid
    std: Tensor  # population


def _statistics(rewards: Tensor, groups: Tensor) -> _Statistics:
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError(
            f"advantages: rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)}; expected (N,) both"
        )
    valid = torch.isfinite(rewards)
    unique, index = torch.unique(groups, return_inverse=True)

    def mean_of(value: Tensor) -> Tensor:
        total = torch.zeros(unique.shape[0], dtype=torch.float64, device=rewards.device)
        return (total.index_add(0, index, value) / total.index_add(0, index, valid.double()).clamp(min=1))[index]

    value = torch.where(valid, rewards, torch.zeros_like(rewards)).double()
    mean = mean_of(value)
    centred = torch.where(valid, value - mean, torch.zeros_like(value))
    return _Statistics(valid, mean, centred, mean_of(centred.square()).sqrt())
