"""One number to raise out of several rewards, per sample, and the credit that follows from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowalign.core import advantages
from flowalign.types import Scores


def total(scores: Scores) -> Tensor:
    """The rewards of each sample as one number, weighted and gated as ``scores`` says.

    "sum" adds what the judges answered, as the field does: the reward of the widest spread decides. "normalise" first
    centres each reward and divides it by its standard deviation within each group, as NVIDIA's GDPO does, so that
    weights mean what they say. "ranks" uses only the order of the samples of a group, in [0, 1].

    Returns:
        (N,) float32; nan where any reward is nan.
    """
    combined = weighted_sum(scores)
    if scores.combination != "sum":
        one = _normalised if scores.combination == "normalise" else ranks
        parts = [scores.weights[name] * one(value, scores.group) for name, value in scores.values.items()]
        combined = torch.stack(parts).sum(0)
    return combined if scores.gated is None else gate(combined, scores.gated, scores.group)


def weighted_sum(scores: Scores) -> Tensor:
    """Sum of the rewards by their weights, (N,) float32; nan where any reward is nan."""
    return torch.stack([scores.weights[name] * value for name, value in scores.values.items()]).sum(0)


def _normalised(values: Tensor, groups: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), advantages.group(values, groups), values)


def ranks(values: Tensor, groups: Tensor) -> Tensor:
    """Place of each value in its group, from 0 (the lowest) to 1, the mean place for equal ones.

    Args:
        values: (N,); nan stays nan and has no place.
        groups: (N,) int64.

    Returns:
        (N,) float32; 0.5 for the only value of a group.
    """
    known = torch.isfinite(values)
    rivals = (groups[:, None] == groups) & known
    below = (rivals & (values[None] < values[:, None])).sum(1)
    equal = (rivals & (values[None] == values[:, None])).sum(1)
    place = (below + (equal - 1) / 2) / (rivals.sum(1) - 1).clamp(min=1)
    alone = torch.full_like(place, 0.5)
    return torch.where(known, torch.where(rivals.sum(1) > 1, place, alone), values).float()


def gate(totals: Tensor, gated: Tensor, groups: Tensor) -> Tensor:
    """Puts samples that failed a gate below all others of their group: one standard deviation of all totals under the
    lowest, or 1 where all are equal.

    Args:
        totals: (N,); nan stays nan.
        gated: (N,) bool.
        groups: (N,) int64.
    """
    known = torch.isfinite(totals)
    if not known.any():
        return totals
    spread = float(totals[known].std(correction=0)) or 1.0
    rivals = (groups[:, None] == groups) & known
    lowest = torch.where(rivals, totals.nan_to_num(), torch.inf).amin(1)
    return torch.where(gated & known, lowest - spread, totals)


class Credit(NamedTuple):
    """Of this rank's B samples, in the order of its Rollout.

    Args:
        advantage: (B,) float32 in [-clip, clip].
        weight: (B,) float32, 0 where nothing can be learnt: no score, or a group of equal scores.
        scored: (B,) float32, 0 where there is no score.
    """

    advantage: Tensor
    weight: Tensor
    scored: Tensor


def credit(scores: Scores, std: advantages.AdvantageStd, clip: float, device: torch.device | str) -> Credit:
    """Advantages over all ranks, of which this rank gets its own on ``device``; see `advantages.group`."""
    rewards = total(scores)
    advantage = advantages.group(rewards, scores.group, std).clamp(-clip, clip)
    scored = torch.isfinite(rewards)
    signal = scored & ~advantages.zero_variance(rewards, scores.group)
    own = scores.local.to(rewards.device)
    return Credit(*(value[own].float().to(device) for value in (advantage, signal, scored)))
