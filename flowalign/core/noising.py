"""Clean latents at keyed noise levels: what every regression on the forward process learns from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowalign.core import rng, schedule


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
