"""Sampling Gaussian data, where the exact velocity and the law of every step are known in closed form.

Data N(.7, .25), linear grid with shift 3, every step stochastic, the last one too. A step is affine in x, so mean and
variance of the samples follow a recursion: m <- c m + d, V <- c^2 V + s^2.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from flowalign.core import kernels, rng, sampling, schedule
from flowalign.types import Conditioning, StepWindow

MEAN, VARIANCE = 0.7, 0.25
LEVELS = {"ode": 0.0, "flow": 0.7, "dance": 0.3, "sage": 0.5, "cps": 0.8}
# Published to three decimals.
TERMINAL_10 = {"ode": 0.137, "flow": 0.180, "dance": 0.148, "sage": 0.161, "cps": 0.099}
TERMINAL_40 = {"ode": 0.216, "flow": 0.230, "dance": 0.220, "sage": 0.224, "cps": 0.138}


def velocity(x: Tensor, sigma: Tensor, cond: Conditioning | None = None) -> Tensor:
    """E[noise - clean | x] of x = (1 - sigma) clean + sigma noise."""
    s = sigma.view(-1, *[1] * (x.ndim - 1))
    residual = (x - (1 - s) * MEAN) / ((1 - s) ** 2 * VARIANCE + s**2)
    return s * residual - (MEAN + (1 - s) * VARIANCE * residual)


@cache
def terminal(kind: str, num_steps: int, shift: float = 3.0, ode_at_end: int = 0) -> tuple[float, float]:
    """Terminal mean and variance, from the affine coefficients of each step, read off at x = 0 and x = 1."""
    grid = schedule.linear_shift(num_steps, shift).double()

    def read(name: str) -> list[list[float]]:
        means, stds = [], []
        for value in (0.0, 1.0):
            x = torch.full((num_steps, 1), value, dtype=torch.float64)
            gaussian = kernels.transition(
                name, x, velocity(x, grid[:-1]), grid[:-1], grid[1:], level=LEVELS[name], sigma_cap=float(grid[1])
            )
            means.append(gaussian.mean.double().flatten())
            stds.append(torch.broadcast_to(gaussian.std, x.shape).double().flatten())
        return torch.stack([means[1] - means[0], means[0], stds[0]], 1).tolist()

    mean, variance = 0.0, 1.0
    coefficients = read(kind)
    if ode_at_end:
        coefficients[-ode_at_end:] = read("ode")[-ode_at_end:]
    for gain, offset, std in coefficients:
        mean, variance = gain * mean + offset, gain**2 * variance + std**2
    return mean, variance


@pytest.mark.parametrize("num_steps", [10, 40, 2000])
@pytest.mark.parametrize("kind", list(LEVELS))
def test_terminal_mean_is_exact(kind: str, num_steps: int) -> None:
    # Exact in exact arithmetic; float32 kernels blur each step's mean by 1e-7, which 2000 steps may add up to 2e-4.
    assert terminal(kind, num_steps)[0] == pytest.approx(MEAN, abs=2e-6 if num_steps < 2000 else 2e-4)


@pytest.mark.parametrize("kind", list(LEVELS))
def test_terminal_variance_in_few_steps(kind: str) -> None:
    assert terminal(kind, 10)[1] == pytest.approx(TERMINAL_10[kind], abs=6e-4)  # half a last digit and rounding
    assert terminal(kind, 40)[1] == pytest.approx(TERMINAL_40[kind], abs=6e-4)


@pytest.mark.parametrize("kind", ["flow", "dance", "sage"])
def test_marginals_are_kept_in_many_steps(kind: str) -> None:
    assert terminal(kind, 2000)[1] == pytest.approx(VARIANCE, abs=2e-3)
    # The error falls as 1 / N: from 200 to 2000 steps it shrinks, and each is closer to the data than the ode.
    assert abs(terminal(kind, 2000)[1] - VARIANCE) < abs(terminal(kind, 200)[1] - VARIANCE)
    assert abs(terminal(kind, 200)[1] - VARIANCE) < abs(terminal("ode", 200)[1] - VARIANCE)


@pytest.mark.parametrize("kind", ["dance", "sage"])
def test_marginals_are_kept_when_the_last_step_is_the_ode(kind: str) -> None:
    assert terminal(kind, 2000, ode_at_end=1)[1] == pytest.approx(VARIANCE, abs=2e-3)


def test_cps_does_not_keep_the_marginals_of_spread_data() -> None:
    assert terminal("cps", 2000)[1] == pytest.approx(0.162, abs=1e-3)


@pytest.mark.parametrize("kind", list(LEVELS))
def test_integrate_draws_from_the_law_of_the_recursion(kind: str) -> None:
    num_steps, shape = 10, (8, 4, 80, 80)
    generator = rng.generator("gaussian data", kind)
    every = torch.arange(num_steps)
    windows = None if kind == "ode" else [StepWindow(every, every[:1])] * shape[0]
    trajectory = sampling.integrate(
        velocity,
        torch.randn(shape, generator=generator),
        Conditioning({"text": torch.zeros(shape[0], 1)}),
        schedule.linear_shift(num_steps, 3.0),
        kernel=kind,
        level=LEVELS[kind],
        windows=windows,
        noise=lambda: torch.randn(shape, generator=generator),
    )
    mean, variance = terminal(kind, num_steps)
    final = trajectory.final.double()
    count = final.numel()
    # Independent normal elements: standard error sqrt(V / n) of the mean, V sqrt(2 / n) of the variance; four of each.
    assert abs(float(final.mean()) - mean) < 4 * (variance / count) ** 0.5
    assert abs(float(final.var()) - variance) < 4 * variance * (2 / count) ** 0.5
    assert abs(float(final.var()) - TERMINAL_10[kind]) < 4e-3
