"""The straight path between clean and noise, and the quantities that a velocity stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowalign.core import path, rng

SHAPES = [(3, 4), (3, 2, 4, 4), (3, 2, 2, 4, 4)]
SIGMA = torch.tensor([0.1, 0.5, 0.9])


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=rng.generator(name))


@pytest.mark.parametrize("shape", SHAPES)
def test_round_trips(shape: tuple[int, ...]) -> None:
    clean, noise = draw("clean", shape), draw("noise", shape)
    x = path.interpolate(clean, noise, SIGMA)
    v = path.velocity(clean, noise)
    assert x.shape == v.shape == clean.shape
    # Three float32 operations on numbers of about 3.
    torch.testing.assert_close(path.clean_from_velocity(x, v, SIGMA), clean, atol=2e-6, rtol=0)
    torch.testing.assert_close(path.noise_from_velocity(x, v, SIGMA), noise, atol=2e-6, rtol=0)


def test_by_hand_and_per_sample_sigma() -> None:
    clean, noise = torch.tensor([[2.0], [2.0]]), torch.tensor([[-4.0], [-4.0]])
    sigma = torch.tensor([0.25, 0.5])
    assert path.velocity(clean, noise).tolist() == [[-6.0], [-6.0]]
    assert path.interpolate(clean, noise, sigma).tolist() == [[0.5], [-1.0]]


def test_ends() -> None:
    clean, noise = draw("clean", (2, 3, 4, 4)), draw("noise", (2, 3, 4, 4))
    assert torch.equal(path.interpolate(clean, noise, torch.ones(2)), noise)
    assert torch.equal(path.interpolate(clean, noise, torch.zeros(2)), clean)


def test_velocity_is_the_derivative_of_the_path() -> None:
    clean, noise = draw("clean", (3, 5)).double(), draw("noise", (3, 5)).double()
    step = 1e-3
    moved = path.interpolate(clean, noise, SIGMA.double() + step) - path.interpolate(
        clean, noise, SIGMA.double() - step
    )
    # The path is linear in sigma: the difference quotient is exact up to rounding, also when computed in float32.
    torch.testing.assert_close(moved / (2 * step), path.velocity(clean, noise), atol=1e-3, rtol=0, check_dtype=False)


@pytest.mark.parametrize("sigma", [0.02, 0.3, 0.77, 1.0])
def test_score_of_gaussian_data(sigma: float) -> None:
    """x_sigma ~ N((1-s) m, (1-s)^2 V + s^2), and its exact velocity is E[noise - clean | x]."""
    mean, variance = 0.7, 0.25
    x = 2 * draw("x", (1, 64))
    total = (1 - sigma) ** 2 * variance + sigma**2
    residual = (x - (1 - sigma) * mean) / total
    velocity = sigma * residual - (mean + (1 - sigma) * variance * residual)
    score = path.score_from_velocity(x, velocity, torch.tensor([sigma]))
    # noise is a difference of numbers of about 5 that rounding blurs by 1e-6, divided by sigma.
    torch.testing.assert_close(score, -residual, atol=2e-6 / sigma, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_expand_broadcasts_over_all_but_the_batch(shape: tuple[int, ...]) -> None:
    like = draw("like", shape)
    wide = path.expand(SIGMA, like)
    assert torch.equal(torch.broadcast_to(wide, shape).flatten(1)[:, -1], SIGMA)
    assert torch.equal(wide * like, torch.stack([s * row for s, row in zip(SIGMA, like, strict=True)]))
