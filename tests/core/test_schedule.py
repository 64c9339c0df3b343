"""Sigma grids against their closed form and diffusers' own scheduler; step windows; densities over sigma."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowalign.core import rng, schedule

FLOAT32_EPS = 1.2e-7
GRIDS = [(1, 1.0), (2, 3.0), (7, 1.0), (10, 1.0), (10, 3.0), (10, 5.0), (25, 3.0), (28, 3.0), (40, 5.0), (200, 3.0)]


@pytest.mark.parametrize(("num_steps", "shift"), GRIDS)
def test_linear_shift_is_the_closed_form(num_steps: int, shift: float) -> None:
    u = np.array([1 - i / num_steps for i in range(num_steps + 1)])
    expected = shift * u / (1 + (shift - 1) * u)
    got = schedule.linear_shift(num_steps, shift)
    assert got.dtype == torch.float32
    assert got.shape == (num_steps + 1,)
    # A few float32 roundings of numbers of at most 1.
    np.testing.assert_allclose(got.numpy(), expected, atol=4 * FLOAT32_EPS, rtol=0)


def test_linear_shift_by_hand() -> None:
    # N = 2, shift 3: u = .5 gives 1.5 / 2.
    assert schedule.linear_shift(2, 3.0).tolist() == [1.0, 0.75, 0.0]
    assert schedule.linear_shift(4, 1.0).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(("num_steps", "shift"), GRIDS[1:])
def test_diffusers_shift_is_what_the_diffusers_scheduler_uses(num_steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    got = schedule.diffusers_shift(num_steps, shift)
    assert got.dtype == torch.float32
    assert got.shape == (num_steps + 1,)
    # The same numbers up to the order of float32 and float64 roundings.
    torch.testing.assert_close(got, scheduler.sigmas, atol=2 * FLOAT32_EPS, rtol=0)


def test_diffusers_shift_of_stable_diffusion_3_in_ten_steps() -> None:
    published = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]
    np.testing.assert_allclose(schedule.diffusers_shift(10, 3.0).numpy(), published, atol=5.1e-5, rtol=0)  # 4 decimals


@pytest.mark.parametrize("name", ["linear_shift", "diffusers"])
@pytest.mark.parametrize(("num_steps", "shift"), GRIDS[1:])
def test_every_grid_starts_at_exactly_one_ends_at_exactly_zero_and_descends(
    name: str, num_steps: int, shift: float
) -> None:
    grid = schedule.sigmas(name, num_steps, shift)
    assert float(grid[0]) == 1.0
    assert float(grid[-1]) == 0.0
    assert bool((grid[1:] < grid[:-1]).all())


def test_sigmas_chooses_by_name() -> None:
    assert torch.equal(schedule.sigmas("linear_shift", 10, 3.0), schedule.linear_shift(10, 3.0))
    assert torch.equal(schedule.sigmas("diffusers", 10, 3.0), schedule.diffusers_shift(10, 3.0))
    assert not torch.allclose(schedule.linear_shift(10, 3.0), schedule.diffusers_shift(10, 3.0), atol=0.01)


def test_unknown_grid_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="karras"):
        schedule.sigmas("karras", 10, 3.0)


@pytest.mark.parametrize("name", ["linear_shift", "diffusers"])
@pytest.mark.parametrize(("num_steps", "shift"), [(0, 3.0), (-1, 3.0), (10, 0.0), (10, -1.0), (10, float("nan"))])
def test_impossible_grids_are_refused(name: str, num_steps: int, shift: float) -> None:
    with pytest.raises(ValueError, match=r"num_steps|shift"):
        schedule.sigmas(name, num_steps, shift)


@pytest.mark.parametrize("num_steps", [2, 3, 10])
def test_full_window_trains_every_step_but_the_last(num_steps: int) -> None:
    window = schedule.full_window(num_steps)
    assert window.trained.tolist() == list(range(num_steps - 1))
    assert window.stochastic.tolist() == list(range(num_steps - 1))
    assert window.trained.dtype == torch.int64


@pytest.mark.parametrize(
    ("num_steps", "size", "low", "high"),
    [(10, 2, 0, 5), (10, 3, 0, 5), (10, 1, 2, 4), (10, 4, 0, 9), (6, 2, 1, 3), (10, 9, 0, 9)],
)
def test_random_window_is_uniform_over_its_starts_and_stays_in_its_range(
    num_steps: int, size: int, low: int, high: int
) -> None:
    draws = 1500
    starts: Counter[int] = Counter()
    for i in range(draws):
        window = schedule.random_window(num_steps, size, low, high, rng.generator("window", i))
        steps = window.trained.tolist()
        assert steps == list(range(steps[0], steps[0] + size))
        assert window.stochastic.tolist() == steps
        assert low <= steps[0]
        assert steps[-1] < min(high, num_steps - 1)
        starts[steps[0]] += 1
    expected = range(low, high - size + 1)
    assert set(starts) == set(expected)
    share = 1 / len(expected)
    # Binomial standard error of each share; four and a half of them, and the draws are fixed by their keys.
    error = (share * (1 - share) / draws) ** 0.5
    for start in expected:
        assert abs(starts[start] / draws - share) <= 4.5 * error


def test_random_window_depends_on_its_generator_only() -> None:
    one, other = (schedule.random_window(10, 2, 0, 5, rng.generator("group", 3)) for _ in range(2))
    assert torch.equal(one.trained, other.trained)
    assert torch.equal(one.stochastic, other.stochastic)


@pytest.mark.parametrize(
    ("num_steps", "size", "low", "high"),
    [(10, 0, 0, 5), (10, -1, 0, 5), (10, 6, 0, 5), (10, 2, -1, 5), (10, 2, 4, 3)],
)
def test_impossible_windows_are_refused(num_steps: int, size: int, low: int, high: int) -> None:
    with pytest.raises(ValueError):
        schedule.random_window(num_steps, size, low, high, rng.generator("window"))


def test_random_window_never_has_the_last_step_even_where_its_range_does() -> None:
    for i in range(100):
        try:
            window = schedule.random_window(10, 2, 0, 10, rng.generator("last", i))
        except ValueError:
            continue  # refusing such a range keeps the promise as well
        assert 9 not in window.trained.tolist()
        assert 9 not in window.stochastic.tolist()


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.5), (-1.0, 1.5)])
def test_logit_normal_has_a_normal_logit(mean: float, std: float) -> None:
    n = 40_000
    sigma = schedule.logit_normal(rng.generator("density"), n, mean, std)
    assert sigma.shape == (n,)
    assert sigma.dtype == torch.float32
    assert bool(((sigma > 0) & (sigma < 1)).all())
    logit = torch.logit(sigma.double())
    # Five standard errors of the mean, of the standard deviation and of the third standardised moment (sqrt(15 / n)).
    assert abs(float(logit.mean()) - mean) < 5 * std / n**0.5
    assert abs(float(logit.std()) - std) < 5 * std / (2 * n) ** 0.5
    assert abs(float(((logit - mean) / std).pow(3).mean())) < 5 * (15 / n) ** 0.5
    assert torch.equal(sigma, schedule.logit_normal(rng.generator("density"), n, mean, std))


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_power_law_has_its_density(power: float) -> None:
    """P(sigma <= s) = s^(power + 1), so that sigma^(power + 1) is uniform."""
    n = 40_000
    sigma = schedule.power_law(rng.generator("power"), n, power)
    assert sigma.shape == (n,) and sigma.dtype == torch.float32
    assert bool(((sigma > 0) & (sigma <= 1)).all())
    place = sigma.double().pow(power + 1).sort().values
    deviation = float((place - torch.arange(n).double() / n).abs().max())
    assert deviation < 2.2 / n**0.5  # Kolmogorov's statistic exceeds it with a chance of 1e-4


def test_stratified_steps_take_one_of_each_part() -> None:
    drawn = Counter()
    for i in range(2000):
        steps = schedule.stratified_steps(rng.generator("strata", i), 6, 1, 12).tolist()
        drawn.update(enumerate(steps))
    parts = [[1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]  # AWM's for 14 steps
    assert set(drawn) == {(i, step) for i, part in enumerate(parts) for step in part}
    for i, part in enumerate(parts):
        for step in part:
            expected = 2000 / len(part)
            assert abs(drawn[i, step] - expected) < 5 * (expected * (1 - 1 / len(part))) ** 0.5 + 1e-9
    assert schedule.stratified_steps(rng.generator(0), 4, 2, 6).tolist() == [2, 3, 4, 5]
    for n in (0, 5):
        with pytest.raises(ValueError, match=r"of \[2, 6\); expected 1 to 4"):
            schedule.stratified_steps(rng.generator(0), n, 2, 6)


def test_lag_rises_to_its_cap() -> None:
    got = [schedule.lag(step, rate=0.01, cap=0.9) for step in (0, 1, 50, 90, 91, 10_000)]
    assert got == pytest.approx([0, 0.01, 0.5, 0.9, 0.9, 0.9])
    assert [schedule.lag(step, 0.5, 0.8, flat=3) for step in (0, 3, 4, 5)] == [0, 0, 0.5, 0.8]
