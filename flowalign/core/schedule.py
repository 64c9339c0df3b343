"""Grids of noise levels, densities over them, and which steps of a grid are stochastic."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowalign.types import StepWindow

ScheduleName = Literal["linear_shift", "diffusers"]


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """``shift sigma / (1 + (shift - 1) sigma)``: shift > 1 moves a grid towards noise (Esser et al., 2403.03206)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def linear_shift(num_steps: int, shift: float) -> Tensor:
    """Evenly spaced levels from 1 to 0, shifted once.

    Args:
        num_steps: N >= 1.
        shift: > 0; 1 leaves the grid linear.

    Returns:
        (N + 1,) float32, descending from 1 to 0.
    """
    _check(num_steps, shift)
    return shift_sigma(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift).float()


def diffusers_shift(num_steps: int, shift: float) -> Tensor:
    """The grid of diffusers' ``FlowMatchEulerDiscreteScheduler(shift=shift).set_timesteps(num_steps)``.

    It shifts twice: once for the 1,000 training levels, whose ends bound the grid, and once more for the grid itself.
    Its last level before 0 is therefore tiny (.0089 for shift 3, N = 10). SD3 pipelines sample on it.

    Returns:
        (N + 1,) float32, descending from 1 to 0.
    """
    _check(num_steps, shift)
    lowest = shift_sigma(torch.tensor(1 / 1000, dtype=torch.float32), shift).double()
    start = torch.ones(1, dtype=torch.float64)
    inner = torch.linspace(1, float(lowest), num_steps, dtype=torch.float64) if num_steps > 1 else start
    return torch.cat([shift_sigma(inner, shift), torch.zeros(1, dtype=torch.float64)]).float()


def sigmas(name: ScheduleName, num_steps: int, shift: float) -> Tensor:
    """The grid called ``name``; see `linear_shift` and `diffusers_shift`."""
    grids = {"linear_shift": linear_shift, "diffusers": diffusers_shift}
    if name not in grids:
        raise ValueError(f"schedule: unknown name {name!r}; expected one of {', '.join(grids)}")
    return grids[name](num_steps, shift)


def _check(num_steps: int, shift: float) -> None:
    if num_steps < 1 or not shift > 0:
        raise ValueError(f"schedule: num_steps={num_steps}, shift={shift}; expected num_steps >= 1 and shift > 0")


def full_window(num_steps: int) -> StepWindow:
    """All steps but the last, whose transition ends at sigma = 0 where its density degenerates."""
    steps = torch.arange(num_steps - 1)
    return StepWindow(steps, steps)


def random_window(num_steps: int, size: int, low: int, high: int, generator: torch.Generator) -> StepWindow:
    """``size`` consecutive steps within [low, high), never the last step of the grid (Flow-GRPO-Fast).

    The start is uniform over all places where the window fits. One generator per group: members of a group must share
    their window, or their rewards are not comparable.
    """
    high = min(high, num_steps - 1)
    if size < 1 or low < 0 or low + size > high:
        raise ValueError(
            f"random_window: size={size} does not fit into steps [{low}, {high}) of a {num_steps}-step grid whose "
            "last step is never stochastic; lower the size or widen the range"
        )
    start = low + int(torch.randint(high - size - low + 1, (1,), generator=generator))
    steps = torch.arange(start, start + size)
    return StepWindow(steps, steps)


def logit_normal(generator: torch.Generator, n: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """n levels ``sigmoid(mean + std z)`` in (0, 1), the training density of SD3 (2403.03206, section 3.1)."""
    return torch.sigmoid(mean + std * torch.randn(n, generator=generator))


def power_law(generator: torch.Generator, n: int, power: float) -> Tensor:
    """n levels in (0, 1] of density proportional to ``sigma^power``, power > -1: ``U^(1 / (1 + power))``."""
    return (1 - torch.rand(n, generator=generator)).pow(1 / (1 + power))


def stratified_steps(generator: torch.Generator, n: int, low: int, high: int) -> Tensor:
    """n different steps of [low, high), ascending: one, uniform, from each of n parts as equal as whole numbers allow.

    Raises:
        ValueError: more than there are.
    """
    if not 1 <= n <= high - low:
        raise ValueError(f"stratified_steps: {n} different steps of [{low}, {high}); expected 1 to {high - low}")
    edges = low + torch.arange(n + 1) * (high - low) // n
    return edges[:-1] + (torch.rand(n, generator=generator) * edges.diff()).long()


def lag(step: int, rate: float, cap: float, flat: int = 0) -> float:
    """Decay of weights that follow those in training: 0 until ``flat``, then ``rate`` more each step, up to ``cap``."""
    return min(max(step - flat, 0) * rate, cap)
