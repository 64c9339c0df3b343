"""Every transition kernel against the table of the specification, re-derived in numpy float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from flowalign.core import kernels, rng, schedule

KINDS = ["ode", "flow", "dance", "sage", "cps"]
STOCHASTIC = KINDS[1:]
LEVELS = {"ode": 0.0, "flow": 0.7, "dance": 0.3, "sage": 0.5, "cps": 0.8}
CAP = 0.9642857  # second entry of the linear grid, N = 10, shift 3
SHAPE = (2, 4, 4)


def variance(kind: str, sigma: float, sigma_next: float, level: float, cap: float) -> float:
    """Squared standard deviation of one step."""
    step = sigma - sigma_next
    if kind == "flow":
        return level**2 * sigma / (1 - (cap if sigma == 1 else sigma)) * step
    if kind == "dance":
        return level**2 * step
    if kind == "sage":
        floor = min(3e-3, (1 - cap) / 2)
        return max(level**2 * (math.log((1 - sigma_next) / (1 - min(sigma, 1 - floor))) - step), 0.0)
    if kind == "cps":
        return (sigma_next * math.sin(level * math.pi / 2)) ** 2
    return 0.0


def derive(
    kind: str, x: np.ndarray, v: np.ndarray, sigma: float, sigma_next: float, level: float, cap: float
) -> tuple[np.ndarray, float, float]:
    """Mean, standard deviation and d mean / d velocity of one sample; all in float64."""
    s2, step = variance(kind, sigma, sigma_next, level, cap), sigma - sigma_next
    clean, noise = x - sigma * v, x + (1 - sigma) * v
    if kind == "cps":
        keep = math.sqrt(sigma_next**2 - s2)
        return (1 - sigma_next) * clean + keep * noise, math.sqrt(s2), -sigma * (1 - sigma_next) + (1 - sigma) * keep
    score = -noise / sigma
    return x - step * v + 0.5 * s2 * score, math.sqrt(s2), -step - 0.5 * s2 * (1 - sigma) / sigma


def draw(name: str, batch: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(batch, *shape, generator=rng.generator("kernels", name))


def pairs(batch: int) -> tuple[Tensor, Tensor]:
    """Random sigma in [.05, .98] and a smaller sigma_next at least .02 below it."""
    u = torch.rand(2, batch, generator=rng.generator("kernels", "pairs"))
    sigma = 0.05 + 0.93 * u[0]
    return sigma, (sigma - 0.02) * u[1]


def check_against_table(kind: str, sigma: Tensor, sigma_next: Tensor, level: float | Tensor, cap: float) -> None:
    batch = sigma.shape[0]
    x, v = draw("x", batch), draw("v", batch)
    gaussian = kernels.transition(kind, x, v, sigma, sigma_next, level=level, sigma_cap=cap)
    jacobian = kernels.jacobian(kind, sigma, sigma_next, level=level, sigma_cap=cap)
    assert gaussian.mean.shape == x.shape
    assert gaussian.std.shape[0] == batch
    std = torch.broadcast_to(gaussian.std, x.shape)
    assert jacobian.shape == (batch,)
    levels = level.double().tolist() if isinstance(level, Tensor) else [level] * batch
    for i in range(batch):
        at = (float(sigma[i]), float(sigma_next[i]), levels[i], cap)
        mean, deviation, slope = derive(kind, x[i].double().numpy(), v[i].double().numpy(), *at)
        # About ten float32 roundings of numbers of at most 10; a variance of sage is a difference of numbers near 1.
        np.testing.assert_allclose(gaussian.mean[i].numpy(), mean, atol=1e-5, rtol=1e-5, err_msg=f"{kind} {at}")
        np.testing.assert_allclose(std[i].numpy(), deviation, atol=1e-6, rtol=5e-4, err_msg=f"{kind} {at}")
        np.testing.assert_allclose(jacobian[i].item(), slope, atol=1e-6, rtol=5e-5, err_msg=f"{kind} {at}")


@pytest.mark.parametrize("kind", KINDS)
def test_table(kind: str) -> None:
    sigma, sigma_next = pairs(64)
    check_against_table(kind, sigma, sigma_next, LEVELS[kind], CAP)


@pytest.mark.parametrize("kind", KINDS)
def test_table_with_a_level_for_each_sample(kind: str) -> None:
    sigma, sigma_next = pairs(16)
    level = torch.linspace(0.0, 0.9, 16)
    check_against_table(kind, sigma, sigma_next, level, CAP)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [CAP, 0.75, 0.9983])
def test_table_at_pure_noise(kind: str, cap: float) -> None:
    sigma_next = torch.tensor([cap, cap, cap * 0.9])
    check_against_table(kind, torch.ones(3), sigma_next, LEVELS[kind], cap)


@pytest.mark.parametrize("kind", KINDS)
def test_table_at_the_last_step(kind: str) -> None:
    check_against_table(kind, torch.tensor([0.25, 0.1, 0.5]), torch.zeros(3), LEVELS[kind], CAP)


@pytest.mark.parametrize("grid", [schedule.linear_shift(10, 3.0), schedule.diffusers_shift(10, 3.0)])
@pytest.mark.parametrize("kind", STOCHASTIC)
def test_level_zero_is_the_ode_step_on_every_step_of_a_grid(kind: str, grid: Tensor) -> None:
    steps = len(grid) - 1
    x, v = draw("x", steps), draw("v", steps)
    gaussian = kernels.transition(kind, x, v, grid[:-1], grid[1:], level=0.0, sigma_cap=float(grid[1]))
    step = (grid[:-1] - grid[1:])[:, None, None, None]
    torch.testing.assert_close(gaussian.mean, x - step * v, atol=2e-6, rtol=0)  # cps gets there by other roundings
    assert float(gaussian.std.abs().max()) == 0.0


def test_ode_takes_no_noise_whatever_its_level() -> None:
    sigma, sigma_next = pairs(4)
    x, v = draw("x", 4), draw("v", 4)
    gaussian = kernels.transition("ode", x, v, sigma, sigma_next, level=0.7, sigma_cap=CAP)
    assert float(gaussian.std.abs().max()) == 0.0
    expected = x - (sigma - sigma_next)[:, None, None, None] * v
    torch.testing.assert_close(gaussian.mean, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_jacobian_is_the_derivative_of_the_mean(kind: str) -> None:
    sigma = torch.tensor([1.0, 1.0, 0.96, 0.6, 0.3, 0.05])
    sigma_next = torch.tensor([CAP, 0.8, 0.9, 0.5, 0.0, 0.01])
    level = torch.tensor([0.7, 0.2, 0.5, 0.9, 0.3, 0.8])
    x, v = draw("x", 6), draw("v", 6).requires_grad_()
    mean = kernels.transition(kind, x, v, sigma, sigma_next, level=level, sigma_cap=CAP).mean
    # The mean is linear element by element, so the gradient of its sum is the Jacobian at every element.
    (slope,) = torch.autograd.grad(mean.sum(), v)
    jacobian = kernels.jacobian(kind, sigma, sigma_next, level=level, sigma_cap=CAP)
    torch.testing.assert_close(
        slope, torch.broadcast_to(jacobian[:, None, None, None], slope.shape), atol=1e-6, rtol=1e-5
    )
    if kind == "flow":
        a = level.double()
        step = (sigma - sigma_next).double()
        expected = torch.where(sigma == 1, -step, -step * (1 + a**2 / 2))  # the closed form of the table
        torch.testing.assert_close(jacobian.double(), expected, atol=1e-6, rtol=1e-5)


def test_flow_at_pure_noise_uses_the_second_sigma_in_the_denominator_only() -> None:
    x, v = draw("x", 1), draw("v", 1)
    at = {"level": 0.7, "sigma_cap": 0.9}
    gaussian = kernels.transition("flow", x, v, torch.ones(1), torch.tensor([0.9]), **at)
    assert float(gaussian.std.flatten()[0]) == pytest.approx(0.7, rel=1e-5)  # a sqrt(1 / .1 * .1)
    torch.testing.assert_close(gaussian.mean, x * (1 - 0.49 / 2) - 0.1 * v, atol=1e-6, rtol=0)
    jacobian = kernels.jacobian("flow", torch.ones(1), torch.tensor([0.9]), **at)
    assert float(jacobian) == pytest.approx(-0.1, rel=1e-5)


@pytest.mark.parametrize(
    ("num_steps", "shift"), [(10, 3.0), (200, 3.0), (2000, 3.0), (100, 5.0), (150, 5.0), (1000, 5.0)]
)
def test_sage_is_finite_on_grids_whose_first_step_is_tiny(num_steps: int, shift: float) -> None:
    grid = schedule.linear_shift(num_steps, shift)
    x, v = draw("x", num_steps, (1,)), draw("v", num_steps, (1,))
    gaussian = kernels.transition("sage", x, v, grid[:-1], grid[1:], level=0.5, sigma_cap=float(grid[1]))
    assert bool(torch.isfinite(gaussian.mean).all())
    assert bool(torch.isfinite(gaussian.std).all())
    std = gaussian.std.flatten()
    sigma, sigma_next = float(grid[0]), float(grid[1])
    expected = math.sqrt(variance("sage", sigma, sigma_next, 0.5, sigma_next))
    assert expected > 0  # the mend gives the first step noise, it does not merely clamp it away
    assert float(std[0]) == pytest.approx(expected, rel=1e-3)  # 1 - sigma_1 keeps 4 digits or more in float32


def test_sage_clamps_a_negative_variance_to_the_ode_step() -> None:
    """sigma_next above sigma_cap: ln(.001 / .003) - .001 < 0."""
    x, v = draw("x", 1), draw("v", 1)
    at = {"level": 0.5, "sigma_cap": 0.9}
    gaussian = kernels.transition("sage", x, v, torch.ones(1), torch.tensor([0.999]), **at)
    assert float(gaussian.std.abs().max()) == 0.0
    torch.testing.assert_close(gaussian.mean, x - 0.001 * v, atol=1e-6, rtol=0)


@pytest.mark.parametrize("level", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cps_keeps_the_coefficients_of_the_path(level: float, dtype: torch.dtype) -> None:
    """Signal (1 - sigma_next), noise energy sigma_next^2 in all: read off with clean = 1 or noise = 1 alone."""
    sigma, sigma_next = (s.to(dtype) for s in pairs(32))
    s = sigma[:, None]
    ones = torch.ones(32, 1, dtype=dtype)
    signal = kernels.transition("cps", (1 - s) * ones, -ones, sigma, sigma_next, level=level, sigma_cap=CAP)
    noise = kernels.transition("cps", s * ones, ones, sigma, sigma_next, level=level, sigma_cap=CAP)
    # 1e-12 where float64 is kept, else ten float32 roundings.
    tolerance = max(1e-12, 10 * torch.finfo(signal.mean.dtype).eps)
    torch.testing.assert_close(signal.mean[:, 0].to(dtype), 1 - sigma_next, atol=tolerance, rtol=0)
    energy = noise.mean[:, 0] ** 2 + noise.std.flatten() ** 2
    torch.testing.assert_close(energy.to(dtype), sigma_next**2, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_batch_do_not_see_each_other(kind: str) -> None:
    sigma, sigma_next = pairs(6)
    level = torch.linspace(0.2, 0.9, 6)
    x, v = draw("x", 6), draw("v", 6)
    whole = kernels.transition(kind, x, v, sigma, sigma_next, level=level, sigma_cap=CAP)
    for i in range(6):
        row = slice(i, i + 1)
        one = kernels.transition(
            kind, x[row], v[row], sigma[row], sigma_next[row], level=float(level[i]), sigma_cap=CAP
        )
        torch.testing.assert_close(one.mean, whole.mean[row], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(one.std, whole.std[row], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5,), (2, 4, 4), (2, 3, 4, 4)])
def test_shapes_and_float32_from_half_precision(kind: str, shape: tuple[int, ...]) -> None:
    x, v = draw("x", 2, shape).bfloat16(), draw("v", 2, shape).bfloat16()
    sigma, sigma_next = torch.tensor([0.9, 0.4]), torch.tensor([0.8, 0.3])
    at = {"level": LEVELS[kind], "sigma_cap": CAP}
    gaussian = kernels.transition(kind, x, v, sigma, sigma_next, **at)
    assert gaussian.mean.shape == (2, *shape)
    assert gaussian.std.shape == (2, *[1] * len(shape))
    assert gaussian.mean.dtype == gaussian.std.dtype == torch.float32
    exact = kernels.transition(kind, x.float(), v.float(), sigma, sigma_next, **at)
    assert torch.equal(gaussian.mean, exact.mean)  # computed in float32, not rounded on the way


@pytest.mark.parametrize(
    ("sigma", "sigma_next"),
    [(0.5, 0.5), (0.5, 0.6), (0.0, 0.0), (1.1, 0.5), (-0.1, -0.2), (0.5, -0.1), (math.nan, 0.2), (0.5, math.nan)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_impossible_sigmas_are_refused(kind: str, sigma: float, sigma_next: float) -> None:
    first, second = torch.tensor([0.9, sigma]), torch.tensor([0.8, sigma_next])
    at = {"level": LEVELS[kind], "sigma_cap": CAP}
    with pytest.raises(ValueError):
        kernels.transition(kind, draw("x", 2), draw("v", 2), first, second, **at)
    with pytest.raises(ValueError):
        kernels.jacobian(kind, first, second, **at)


@pytest.mark.parametrize("level", [-0.1, math.nan])
@pytest.mark.parametrize("kind", STOCHASTIC)
def test_impossible_levels_are_refused(kind: str, level: float) -> None:
    with pytest.raises(ValueError):
        kernels.transition(
            kind, draw("x", 1), draw("v", 1), torch.ones(1), torch.full((1,), 0.9), level=level, sigma_cap=0.9
        )


def test_unknown_kernel_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="heun"):
        kernels.transition("heun", draw("x", 1), draw("v", 1), torch.ones(1), torch.zeros(1), level=0.1, sigma_cap=0.9)
    with pytest.raises(ValueError, match="heun"):
        kernels.jacobian("heun", torch.ones(1), torch.zeros(1), level=0.1, sigma_cap=0.9)
