"""RAM on Gaussian data, where the tilt and RAM's own fixed point are known in closed form.

Data of N(0, 1) have the velocity (2 t - 1) x / ((1 - t)^2 + t^2), and a velocity that is linear in x keeps all
endpoints Gaussian. What RAM learns is then found by least squares, iteration by iteration, from the very targets of its
loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign.algorithms.ram import RAM, RAMSettings
from flowalign.core import rng, sampling
from flowalign.types import Conditioning, Policy, Rollout, Scores, Trajectory, VelocityFn
from tests.algorithms.forward import built, gradient
from tests.algorithms.toy import EPS

KNOTS = 17
SAMPLES, NOISINGS = 512, 64


def place(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The knot below sigma, and the share of the way to the next one."""
    scaled = sigma.double() * (KNOTS - 1)
    below = scaled.long().clamp(max=KNOTS - 2)
    return below, scaled - below


def exact(x: Tensor, sigma: Tensor) -> Tensor:
    t = sigma.double()
    return (2 * t - 1) / ((1 - t) ** 2 + t**2) * x.double().flatten()


def linear(weights: Tensor) -> VelocityFn:
    """The velocity of the reference and a correction, whose slope and intercept (2, KNOTS) are linear between knots."""

    def velocity(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        below, share = place(sigma)
        slope, intercept = torch.lerp(weights[:, below], weights[:, below + 1], share)
        return (exact(x, sigma) + slope * x.double().flatten() + intercept).float().view(-1, 1, 1, 1)

    return velocity


def fitted(x: Tensor, sigma: Tensor, correction: Tensor) -> Tensor:
    """The weights of `linear` of least squares."""
    below, share = place(sigma)
    hat = torch.zeros(len(x), KNOTS, dtype=torch.float64)
    hat.scatter_(1, below[:, None], 1 - share[:, None]).scatter_(1, below[:, None] + 1, share[:, None])
    columns = torch.cat([hat * x.double().view(-1, 1), hat], 1)
    return torch.linalg.solve(columns.T @ columns, columns.T @ correction).view(2, KNOTS)


def endpoints(algorithm: RAM, weights: Tensor) -> Tensor:
    """From the quantiles of the noise in place of draws, so that their mean and spread carry no error."""
    start = torch.special.ndtri((torch.arange(SAMPLES).double() + 0.5) / SAMPLES)
    start = (start / start.std(correction=0)).float().view(-1, 1, 1, 1)
    cond = Conditioning({"text": torch.zeros(SAMPLES, 1)})
    return sampling.integrate(linear(weights), start, cond, algorithm.sigmas).final


def learnt(
    reward: Callable[[Tensor], Tensor], iterations: int, num_steps: int = 50, strength: float = 1.0, **fields: Any
) -> tuple[float, float]:
    """Mean and variance of the endpoints of what RAM arrives at with ``strength`` times the reward in every stage."""

    def build(multiplier: float) -> RAM:
        defaults = {
            "name": "ram", "num_steps": num_steps, "schedule": "linear_shift", "guidance": 1, "sigma_power": 0,
            "noisings": NOISINGS, "reward_multiplier": multiplier,
        }  # fmt: skip
        return built(RAM, RAMSettings, defaults, 1.0, fields)

    none = torch.zeros(SAMPLES, 0)
    current = torch.zeros(2, KNOTS, dtype=torch.float64)
    sets: dict[str, Tensor] = {"behaviour": current, "reference": current}
    for iteration in range(iterations):
        final = endpoints(build(1.0), sets["behaviour"])
        rewards = reward(final.flatten())
        # The algorithm divides by the spread; multiplied by it, m A is the centred reward itself.
        algorithm = build(strength * (float(rewards.double().std(correction=0)) + EPS))
        trajectory = Trajectory(final, none, none.long(), algorithm.sigmas, none)
        keys = tuple(rng.key(iteration, b) for b in range(SAMPLES))
        cond = Conditioning({"text": torch.zeros(SAMPLES, 1)})
        group = torch.zeros(SAMPLES, dtype=torch.int64)
        rollout = Rollout(("",) * SAMPLES, group, keys, cond, trajectory, none)
        policy = Policy(linear(current), linear(sets["reference"]), linear(sets["behaviour"]))
        batch = algorithm.prepare(policy, rollout, Scores({"r": rewards}, {"r": 1.0}, group, torch.arange(SAMPLES)))
        x, sigma = batch.items["x"], batch.items["sigma"]
        # The loss is (v - target)^2, so that its gradient tells the target.
        now = linear(current)(x, sigma, cond).double().flatten()
        target = now - gradient(algorithm, policy, batch).flatten() / 2
        current = fitted(x, sigma, target - exact(x, sigma))
        for name, decay in algorithm.decays(iteration).items():
            sets[name] = decay * sets[name] + (1 - decay) * current
    final = endpoints(build(1.0), sets["behaviour"]).double()
    return float(final.mean()), float(final.var(correction=0))


def fixed_point(num_steps: int = 50) -> float:
    """The variance s^2 that RAM reproduces for r = -x^2 / 2, from Gaussian formulae alone.

    Of endpoints of N(0, s^2), x_0 given x_t is Gaussian of mean k x_t, k = (1 - t) s^2 / D, and variance t^2 s^2 / D,
    D = (1 - t)^2 s^2 + t^2. So Cov(r, Y) = Cov(x_0^2, x_0) / 2t = k x_t t s^2 / D, and the slope of the velocity is
    that of the reference and this; its Euler steps must give s^2 again.
    """
    square, step = 0.7, 1 / num_steps
    for _ in range(200):
        factor = 1.0
        for i in range(num_steps):
            t = 1 - i * step
            spread = (1 - t) ** 2 * square + t**2
            slope = (2 * t - 1) / ((1 - t) ** 2 + t**2) + (1 - t) * square**2 * t / spread**2
            factor *= 1 - slope * step
        square = (square + factor**2) / 2
    return square


def test_a_linear_reward_shifts_the_mean_by_the_exact_tilt() -> None:
    """N(0, 1) tilted by exp(x / 2) is N(1/2, 1)."""
    mean, variance = learnt(lambda x: 0.5 * x, 8, num_steps=200, decay_rate=0.1)
    assert mean == pytest.approx(0.5, rel=0.03)
    assert variance == pytest.approx(1.0, abs=0.03)


def test_a_quadratic_reward_lands_at_the_biased_fixed_point() -> None:
    """N(0, 1) tilted by exp(-x^2 / 2) is N(0, 1/2), .474 by these Euler steps: RAM is off by a known amount."""
    mean, variance = learnt(lambda x: -x.square() / 2, 12, decay_rate=0.1)
    assert fixed_point() == pytest.approx(0.549, abs=0.001)
    assert variance == pytest.approx(fixed_point(), abs=0.01)
    assert variance == pytest.approx(0.545, abs=0.02)
    assert mean == pytest.approx(0.0, abs=0.01)


def test_stages_come_nearer_to_the_tilt() -> None:
    stages = {"strength": 1 / 8, "reference_every": 4, "decay_rate": 0.2, "decay_cap": 0.4}
    _, variance = learnt(lambda x: -x.square() / 2, 8 * 4, **stages)
    assert 0.474 < variance < 0.51
