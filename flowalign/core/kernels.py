"""One denoising step as a Gaussian ``x' ~ N(mean, std^2)``: the kernels of the Flow-GRPO family.

All but cps are steps of the reverse-time SDE that has the marginals of the probability-flow ODE for any diffusion,

    mean = x - v delta + 1/2 s^2 score,     s^2 = variance of the step,     delta = sigma - sigma',

and differ in s^2 only:

    ode    0
    flow   a^2 sigma / (1 - sigma) delta                                  Flow-GRPO, 2505.05470
    dance  eta^2 delta                                                    DanceGRPO, 2505.07818
    sage   eta^2 (ln((1 - sigma') / (1 - sigma)) - delta)                 SAGE-GRPO: the integral of flow's diffusion
    cps    std = sigma' sin(eta pi / 2), mean = (1 - sigma') clean + sqrt(sigma'^2 - std^2) noise   Flow-CPS, 2509.05952

cps keeps the noise energy sigma'^2 exactly, but not the marginals of spread-out data.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowalign.core import path
from flowalign.types import KernelName, LogProbForm

SAGE_SIGMA_MARGIN = 3e-3


class Gaussian(NamedTuple):
    """A diagonal Gaussian with one standard deviation per sample."""

    mean: Tensor  # (B, C, *S)
    std: Tensor  # (B, 1, ..., 1)


def transition(
    kind: KernelName,
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    level: float | Tensor,
    sigma_cap: float,
) -> Gaussian:
    """The step from ``sigma`` to ``sigma_next``, in float32 or the wider dtype of ``x``.

    Args:
        x, velocity: (B, C, *S).
        sigma: (B,) in (0, 1].
        sigma_next: (B,) in [0, sigma).
        level: a for flow, eta for the others; a number or (B,); 0 makes every kernel the ode step.
        sigma_cap: second entry of the grid, which stands in for sigma = 1 where a kernel is singular there.

    Returns:
        Mean (B, C, *S) and std (B, 1, ..., 1).

    Raises:
        ValueError: a sigma out of order or out of range, or a negative level.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, velocity = x.to(dtype), velocity.to(dtype)
    sigma, sigma_next, level = _levels(sigma, sigma_next, level, dtype)
    if kind == "cps":
        std = sigma_next * torch.sin(level * (math.pi / 2))
        noise_share = _cps_noise_share(sigma_next, std)
        clean = path.clean_from_velocity(x, velocity, sigma)
        noise = path.noise_from_velocity(x, velocity, sigma)
        mean = (1 - path.expand(sigma_next, x)) * clean + path.expand(noise_share, x) * noise
        return Gaussian(mean, path.expand(std, x))
    variance = _sde_variance(kind, sigma, sigma_next, level, sigma_cap)
    pull = variance / (2 * sigma)
    drift = (sigma - sigma_next) + pull * (1 - sigma)
    mean = (1 - path.expand(pull, x)) * x - path.expand(drift, x) * velocity
    return Gaussian(mean, path.expand(variance.sqrt(), x))


def jacobian(kind: KernelName, sigma: Tensor, sigma_next: Tensor, *, level: float | Tensor, sigma_cap: float) -> Tensor:
    """``d mean / d velocity``, a scalar per sample: (B,). Arguments as in `transition`."""
    sigma, sigma_next, level = _levels(sigma, sigma_next, level, torch.promote_types(sigma.dtype, torch.float32))
    if kind == "cps":
        noise_share = _cps_noise_share(sigma_next, sigma_next * torch.sin(level * (math.pi / 2)))
        return -sigma * (1 - sigma_next) + (1 - sigma) * noise_share
    variance = _sde_variance(kind, sigma, sigma_next, level, sigma_cap)
    return -(sigma - sigma_next) - variance * (1 - sigma) / (2 * sigma)


def log_prob(gaussian: Gaussian, x: Tensor, form: LogProbForm = "gaussian") -> Tensor:
    """Log-density of ``x``, as the MEAN over non-batch dimensions, (B,) float32.

    The mean keeps the ratio of two policies near 1 at any resolution; the sum would let it explode. ``unscaled`` is
    ``-mean((x - mean)^2)``, the form of Flow-CPS's code, to which its published clip range belongs.

    Raises:
        ValueError: form "gaussian" where a std is 0, i.e. a deterministic step, which has no density.
    """
    if form not in ("gaussian", "unscaled"):
        raise ValueError(f"log_prob: form {form!r}; expected 'gaussian' or 'unscaled'")
    square = (x.detach().float() - gaussian.mean.float()).square().flatten(1).mean(1)
    if form == "unscaled":
        return -square
    std = gaussian.std.float().flatten()
    if bool((std <= 0).any()):
        raise ValueError(
            "log_prob: std is 0 for a sample: a deterministic step has no density; record stochastic steps"
        )
    return -square / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)


def _levels(sigma: Tensor, sigma_next: Tensor, level: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    sigma, sigma_next = sigma.to(dtype), sigma_next.to(dtype)
    level = torch.as_tensor(level, dtype=dtype, device=sigma.device).expand_as(sigma)
    if not bool(((sigma > 0) & (sigma <= 1) & (sigma_next >= 0) & (sigma_next < sigma)).all()):
        raise ValueError(
            f"transition: sigma {sigma.tolist()} to {sigma_next.tolist()}; expected 1 >= sigma > sigma_next >= 0"
        )
    if not bool((level >= 0).all()):
        raise ValueError(f"transition: level {level.tolist()}; expected a noise level >= 0")
    return sigma, sigma_next, level


def _sde_variance(kind: str, sigma: Tensor, sigma_next: Tensor, level: Tensor, sigma_cap: float) -> Tensor:
    """s^2 of the step, (B,)."""
    delta = sigma - sigma_next
    if kind == "ode":
        return torch.zeros_like(delta)
    if kind == "dance":
        return level.square() * delta
    if kind == "flow":
        below_one = torch.where(sigma == 1, torch.full_like(sigma, sigma_cap), sigma)
        return level.square() * sigma / (1 - below_one) * delta
    if kind == "sage":
        # The released margin of 3e-3 alone makes the variance negative when the first step of the grid is shorter than
        # it; half of that step is always safe, and equal to the release on grids of 20 steps or fewer.
        margin = min(SAGE_SIGMA_MARGIN, (1 - sigma_cap) / 2)
        logarithm = torch.log((1 - sigma_next) / (1 - sigma.clamp(max=1 - margin)))
        return level.square() * (logarithm - delta).clamp(min=0)
    raise ValueError(f"transition: unknown kernel {kind!r}; expected one of ode, flow, dance, cps, sage")


def _cps_noise_share(sigma_next: Tensor, std: Tensor) -> Tensor:
    return (sigma_next.square() - std.square()).clamp(min=0).sqrt()
