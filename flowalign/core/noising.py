"""Clean latents noised again to random levels: what the methods of the forward process learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowalign.core import advantages, combination, path, rng, schedule
from flowalign.types import Batch, Examples, Rollout, Scores

Levels = Callable[[torch.Generator], Tensor]
"""From the generator of a sample to its K noise levels, (K,) float32 in (0, 1]."""


class Noised(NamedTuple):
    """B samples at K levels each, as n = B K items, those of a sample one after the other.

    Args:
        items: "x" (n, C, *S), the noised sample; "sigma" (n,); "target" (n, C, *S), its velocity noise - clean.
        sample: (n,) int64, the sample of each item.
    """

    items: dict[str, Tensor]
    sample: Tensor


def noised(clean: Tensor, keys: Sequence[int], purpose: str, levels: Levels) -> Noised:
    """``x = (1 - sigma) clean + sigma noise`` with levels and noise that depend on a sample's key and nothing else.

    Args:
        clean: (B, C, *S).
        keys: the random key of each sample.
        purpose: draws of another purpose are independent of these.
    """
    sources = [rng.generator(key, purpose) for key in keys]
    drawn = torch.stack([levels(source) for source in sources])
    count, sigma = drawn.shape[1], drawn.flatten().to(clean.device)
    noise = rng.normal(sources, (count, *clean.shape[1:]), clean.device).flatten(0, 1)
    sample = torch.arange(clean.shape[0], device=clean.device).repeat_interleave(count)
    start = clean[sample]
    x, target = path.interpolate(start, noise, sigma), path.velocity(start, noise)
    return Noised({"x": x, "sigma": sigma, "target": target}, sample)


def endpoints(
    method: str,
    samples: Rollout | Examples,
    scores: Scores | None,
    levels: Levels,
    *,
    std: advantages.AdvantageStd,
    clip: float,
    ties: bool,
) -> Batch:
    """The ends of scored trajectories as items "x", "sigma", "target" (see `noised`) and "advantage" (n,).

    Args:
        method: its name, for keys and errors.
        std, clip: see `combination.credit`.
        ties: whether groups of equal scores, of advantage 0, are items too: they are of use to a loss that pulls to
            other weights.

    Raises:
        TypeError: examples, or a rollout without scores.
    """
    if not isinstance(samples, Rollout) or scores is None:
        raise TypeError(f"{method} learns from a scored Rollout, got examples or no scores")
    clean = samples.trajectory.final
    credit = combination.credit(scores, std, clip, clean.device)
    made = noised(clean, samples.keys, method, levels)
    weight = credit.scored if ties else credit.weight
    return Batch(
        {**made.items, "advantage": credit.advantage[made.sample]}, made.sample, samples.cond, weight[made.sample]
    )


class Draw(NamedTuple):
    """One noise level and one noise for each of B generators.

    Args:
        level: (B,) in (0, 1), before the timestep shift.
        sigma: (B,) in (0, 1), after it.
        noise: (B, C, *S) standard normal.
    """

    level: Tensor
    sigma: Tensor
    noise: Tensor


def logit_normal(
    generators: Sequence[torch.Generator],
    shape: Sequence[int],
    *,
    mean: float,
    std: float,
    shift: float,
    device: torch.device | str,
) -> Draw:
    """``sigma = shift(sigmoid(mean + std z))``, then a noise, from each generator (SD3, 2403.03206).

    Args:
        shape: (C, *S) of the noise.
        shift: timestep shift; 1 = none.
    """
    level = torch.cat([schedule.logit_normal(g, 1, mean, std) for g in generators])
    noise = rng.normal(generators, shape, device)
    return Draw(level.to(device), schedule.shift_sigma(level, shift).to(device), noise)
