"""From rewards to credit: how much better a sample did than the other samples of its prompt."""

from __future__ import annotations

from typing import Literal

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
    valid, index, count = _groups(rewards, groups)
    value = torch.where(valid, rewards, torch.zeros_like(rewards)).double()
    mean = torch.zeros_like(count).index_add_(0, index, value) / count.clamp(min=1)
    centred = torch.where(valid, value - mean[index], torch.zeros_like(value))
    if std == "global":
        known = value[valid]
        scale = known.std(correction=0) if known.numel() else value.new_zeros(())
    else:
        scale = _group_std(centred, index, count)[index]
    advantage = centred / (scale + eps)
    return torch.where(zero_variance(rewards, groups), torch.zeros_like(advantage), advantage).float()


def zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """(N,) bool: samples of a group whose valid rewards are equal up to rounding, hence without signal.

    The tolerance is 1e-6 of the group's mean, or of 1 where that is smaller: a constant group may have a tiny standard
    deviation in float32, so that comparing with 0 misses it. A group with fewer than two valid rewards counts too.
    """
    valid, index, count = _groups(rewards, groups)
    value = torch.where(valid, rewards, torch.zeros_like(rewards)).double()
    mean = torch.zeros_like(count).index_add_(0, index, value) / count.clamp(min=1)
    centred = torch.where(valid, value - mean[index], torch.zeros_like(value))
    spread = _group_std(centred, index, count)
    return (spread <= ZERO_VARIANCE_TOLERANCE * mean.abs().clamp(min=1))[index]


def _groups(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError(f"advantages: rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)}; expected (N,) both")
    valid = torch.isfinite(rewards)
    unique, index = torch.unique(groups, return_inverse=True)
    count = torch.zeros(unique.shape[0], dtype=torch.float64, device=rewards.device)
    return valid, index, count.index_add_(0, index, valid.double())


def _group_std(centred: Tensor, index: Tensor, count: Tensor) -> Tensor:
    return (torch.zeros_like(count).index_add_(0, index, centred.square()) / count.clamp(min=1)).sqrt()
