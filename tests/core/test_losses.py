"""Losses by hand: the clipped surrogate in its four quadrants, the KL forms of the specification, flow matching."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from flowalign.core import kernels, losses, rng
from flowalign.core.kernels import Gaussian

FORMS = ["transition", "flow_grpo", "x", "v", "k2", "k3"]
SIGMA, SIGMA_NEXT = torch.tensor([0.9, 0.6, 0.3]), torch.tensor([0.8, 0.4, 0.2])
LEVEL = 0.7


def draw(name: str) -> Tensor:
    return torch.randn(3, 2, 4, 4, generator=rng.generator("losses", name))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.5, 2.0, -2.4),  # better and already more likely: clipped at 1.2
        (0.5, 2.0, -1.0),  # better but less likely: not clipped
        (1.5, -2.0, 3.0),  # worse but more likely: not clipped
        (0.5, -2.0, 1.6),  # worse and already less likely: clipped at .8
        (1.1, 2.0, -2.2),  # inside the range
        (0.9, -2.0, 1.8),
        (1.0, 2.0, -2.0),
        (1.3, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, expected: float) -> None:
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = losses.clipped_surrogate(log_ratio, torch.tensor([advantage]), 0.2)
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    clipped = (ratio > 1.2 and advantage > 0) or (ratio < 0.8 and advantage < 0)
    assert float(gradient) == pytest.approx(0.0 if clipped else -advantage * ratio, abs=1e-6)


def test_clipped_surrogate_at_ratio_one_is_minus_the_advantage_and_so_is_its_gradient() -> None:
    advantage = torch.tensor([1.5, -0.3, 0.0, 5.0])
    log_ratio = torch.zeros(4, requires_grad=True)
    loss = losses.clipped_surrogate(log_ratio, advantage, 1e-4)
    assert torch.equal(loss, -advantage)
    loss.sum().backward()
    assert log_ratio.grad is not None
    assert torch.equal(log_ratio.grad, -advantage)


def test_clipped_surrogate_resolves_the_tiny_range_of_flow_models() -> None:
    log_ratio, advantage = torch.tensor([3e-4, 0.5e-4, -3e-4, -0.5e-4]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    got = losses.clipped_surrogate(log_ratio, advantage, 1e-4) + advantage
    np.testing.assert_allclose(got.numpy(), [-1e-4, -0.5e-4, -1e-4, -0.5e-4], atol=2e-7)  # float32 near 1


def evaluation(name: str, requires_grad: bool = False) -> tuple[losses.Evaluation, Tensor]:
    """A policy's view of the same three steps, with z of the current policy as the recorded noise."""
    v = (draw("v") + (0 if name == "reference" else 0.1) * draw("difference")).requires_grad_(requires_grad)
    gaussian = kernels.transition("flow", draw("x"), v, SIGMA, SIGMA_NEXT, level=LEVEL, sigma_cap=0.95)
    base = kernels.transition("flow", draw("x"), draw("v"), SIGMA, SIGMA_NEXT, level=LEVEL, sigma_cap=0.95)
    after = base.mean + base.std * draw("z")
    return losses.Evaluation(gaussian, v, kernels.log_prob(gaussian, after)), v


def derive(form: str) -> np.ndarray:
    """The table of the specification, from the velocities alone; float64."""
    step = (SIGMA - SIGMA_NEXT).double().numpy()
    sigma = SIGMA.double().numpy()
    g2 = LEVEL**2 * sigma / (1 - sigma)
    difference = 0.1 * draw("difference").double().numpy()
    dims = (1, 2, 3)
    slope = -step * (1 + LEVEL**2 / 2)
    delta_mean = slope[:, None, None, None] * difference
    s = np.sqrt(g2 * step)
    z = draw("z").double().numpy()
    if form == "transition":
        return np.square(delta_mean).mean(dims) / (2 * s**2)
    if form == "flow_grpo":
        return np.square(delta_mean).mean(dims) / (2 * g2)
    if form == "x":
        return np.square(delta_mean).mean(dims)
    if form == "v":
        return np.square(difference).mean(dims)
    # x' = reference mean + s z, so log p - log p_ref = mean(z dmu) / s - mean(dmu^2) / (2 s^2).
    delta = (z * delta_mean).mean(dims) / s - np.square(delta_mean).mean(dims) / (2 * s**2)
    return 0.5 * delta**2 if form == "k2" else np.exp(-delta) + delta - 1


@pytest.mark.parametrize("form", FORMS)
def test_kl_forms_by_hand(form: str) -> None:
    (current, _), (reference, _) = evaluation("current"), evaluation("reference")
    got = losses.kl(form, current, reference, SIGMA - SIGMA_NEXT)
    assert got.shape == (3,)
    assert got.dtype == torch.float32
    assert bool((got >= 0).all())
    # Differences of means of about 2, .01 apart, in float32: 1e-5 of their size; k2 and k3 square a difference of
    # log-densities of about 1 that is known to 2e-7.
    expected = derive(form)
    tolerance = 2 * np.sqrt(2 * expected) * 1e-6 + 5e-7 if form in ("k2", "k3") else 0.0
    assert bool((np.abs(got.numpy() - expected) <= 1e-3 * expected + tolerance).all()), (got, expected)


@pytest.mark.parametrize("form", FORMS)
def test_kl_is_exactly_zero_at_the_reference_and_so_is_its_gradient(form: str) -> None:
    (current, v), (reference, _) = evaluation("reference", requires_grad=True), evaluation("reference")
    got = losses.kl(form, current, reference, SIGMA - SIGMA_NEXT)
    assert got.tolist() == [0.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(got.sum(), v)
    assert float(gradient.abs().max()) == 0.0


@pytest.mark.parametrize("form", FORMS)
def test_a_step_down_the_kl_gradient_approaches_the_reference(form: str) -> None:
    (current, v), (reference, _) = evaluation("current", requires_grad=True), evaluation("reference")
    got = losses.kl(form, current, reference, SIGMA - SIGMA_NEXT)
    (gradient,) = torch.autograd.grad(got.sum(), v)
    assert bool((gradient.flatten(1).norm(dim=1) > 0).all())
    if form in ("transition", "flow_grpo", "x", "v"):
        # Quadratic in v - v_ref: by Euler's theorem <gradient, v - v_ref> = 2 KL.
        slope = (gradient * (v - reference.velocity)).sum((1, 2, 3))
        torch.testing.assert_close(slope, 2 * got, atol=1e-9, rtol=1e-3)


@pytest.mark.parametrize("form", ["k2", "k3"])
@pytest.mark.parametrize("delta", [-2.0, -0.1, 0.3, 2.0])
def test_estimators_on_log_densities(form: str, delta: float) -> None:
    """k3 = p_ref / p - 1 - ln(p_ref / p) and its gradient 1 - p_ref / p; k2 = half the squared log-ratio."""
    log_prob = torch.tensor([delta - 1.0], requires_grad=True)
    gaussian = Gaussian(torch.zeros(1, 1), torch.ones(1, 1))
    current = losses.Evaluation(gaussian, torch.zeros(1, 1), log_prob)
    reference = losses.Evaluation(gaussian, torch.zeros(1, 1), torch.tensor([-1.0]))
    got = losses.kl(form, current, reference, torch.tensor([0.1]))
    expected = 0.5 * delta**2 if form == "k2" else math.exp(-delta) + delta - 1
    slope = delta if form == "k2" else 1 - math.exp(-delta)
    assert got.item() == pytest.approx(expected, rel=1e-4)
    got.sum().backward()
    assert log_prob.grad is not None
    assert float(log_prob.grad) == pytest.approx(slope, rel=1e-4)


def test_unknown_kl_form_is_refused_by_name() -> None:
    (current, _), (reference, _) = evaluation("current"), evaluation("reference")
    with pytest.raises(ValueError, match="k7"):
        losses.kl("k7", current, reference, SIGMA - SIGMA_NEXT)


@pytest.mark.parametrize("shape", [(5,), (2, 4, 4), (2, 3, 4, 4)])
def test_flow_matching_is_the_mean_square_of_each_sample(shape: tuple[int, ...]) -> None:
    v = torch.randn(3, *shape, generator=rng.generator("v"))
    target = torch.randn(3, *shape, generator=rng.generator("target"))
    got = losses.flow_matching(v, target)
    expected = np.square(v.double().numpy() - target.double().numpy()).reshape(3, -1).mean(1)
    assert got.shape == (3,)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)
    assert losses.flow_matching(v.bfloat16(), target).dtype == torch.float32
    assert losses.flow_matching(target, target).tolist() == [0.0] * 3


def test_flow_matching_gradient() -> None:
    v, target = draw("v").requires_grad_(), draw("target")
    losses.flow_matching(v, target).sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, 2 * (v.detach() - target) / 32, atol=1e-6, rtol=1e-5)
