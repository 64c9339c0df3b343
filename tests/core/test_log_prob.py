"""The log-density of a recorded step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from flowalign.core import kernels, rng
from flowalign.core.kernels import Gaussian

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def draw(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng.generator("log_prob", name))


@pytest.mark.parametrize("shape", [(6,), (2, 4, 4), (2, 3, 4, 4)])
def test_closed_form_with_the_noise_that_was_drawn(shape: tuple[int, ...]) -> None:
    mean, z = draw("mean", 3, *shape), draw("z", 3, *shape)
    s = torch.tensor([0.1, 0.5, 2.0])
    std = s.view(3, *[1] * len(shape))
    got = kernels.log_prob(Gaussian(mean, std), mean + std * z)
    dims = tuple(range(1, z.ndim))
    expected = -z.double().pow(2).mean(dims) / 2 - s.double().log() - HALF_LOG_2PI
    assert got.shape == (3,)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)  # x - mean loses eps * 3 / .1 of z


def test_equals_the_density_of_torch_and_is_a_mean_not_a_sum() -> None:
    mean, x = draw("mean", 2, 3, 8, 8), draw("x", 2, 3, 8, 8)
    std = torch.tensor([0.3, 1.2]).view(2, 1, 1, 1)
    expected = torch.distributions.Normal(mean.double(), std.double()).log_prob(x.double()).mean((1, 2, 3))
    torch.testing.assert_close(kernels.log_prob(Gaussian(mean, std), x).double(), expected, atol=2e-5, rtol=1e-6)
    doubled = kernels.log_prob(Gaussian(torch.cat([mean, mean], 3), std), torch.cat([x, x], 3))
    torch.testing.assert_close(doubled, kernels.log_prob(Gaussian(mean, std), x), atol=2e-5, rtol=1e-6)


def test_unscaled_form_is_minus_the_mean_square() -> None:
    mean, x = draw("mean", 2, 3, 4, 4), draw("x", 2, 3, 4, 4)
    std = torch.tensor([0.3, 1.2]).view(2, 1, 1, 1)
    got = kernels.log_prob(Gaussian(mean, std), x, form="unscaled")
    expected = -np.square(x.double().numpy() - mean.double().numpy()).mean((1, 2, 3))
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("form", ["gaussian", "unscaled"])
def test_half_precision_is_computed_in_float32(form: str) -> None:
    mean, x = draw("mean", 2, 3, 4, 4).bfloat16(), draw("x", 2, 3, 4, 4).bfloat16()
    std = torch.tensor([0.25, 1.5]).view(2, 1, 1, 1).bfloat16()  # exact in bfloat16
    got = kernels.log_prob(Gaussian(mean, std), x, form=form)
    assert got.dtype == torch.float32
    exact = kernels.log_prob(Gaussian(mean.float(), std.float()), x.float(), form=form)
    assert torch.equal(got, exact)


def test_deterministic_step_has_no_density() -> None:
    mean = draw("mean", 2, 3, 4, 4)
    std = torch.tensor([0.3, 0.0]).view(2, 1, 1, 1)
    with pytest.raises(ValueError, match="std"):
        kernels.log_prob(Gaussian(mean, std), mean)


def test_unknown_form_is_refused() -> None:
    mean = draw("mean", 1, 2)
    with pytest.raises(ValueError, match="laplace"):
        kernels.log_prob(Gaussian(mean, torch.ones(1, 1)), mean, form="laplace")


def test_gradient_is_z_over_std_on_the_mean() -> None:
    mean, z = draw("mean", 2, 6).requires_grad_(), draw("z", 2, 6)
    std = torch.tensor([[0.2], [1.0]])
    x = (mean + std * z).detach()
    (gradient,) = torch.autograd.grad(kernels.log_prob(Gaussian(mean, std), x).sum(), mean)
    torch.testing.assert_close(gradient, z / std / 6, atol=1e-4, rtol=0)  # (x - mean) / std^2 / 6, with eps / .04 lost
