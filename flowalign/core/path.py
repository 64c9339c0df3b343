"""The straight path ``x = (1 - sigma) clean + sigma noise`` and the quantities that a velocity determines on it."""

from __future__ import annotations

from torch import Tensor


def expand(sigma: Tensor, like: Tensor) -> Tensor:
    """(B,) viewed as (B, 1, ..., 1) to broadcast against ``like`` (B, C, *S)."""
    return sigma.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def interpolate(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """``(1 - sigma) clean + sigma noise``; clean and noise (B, C, *S), sigma (B,)."""
    s = expand(sigma, clean)
    return (1 - s) * clean + s * noise


def velocity(clean: Tensor, noise: Tensor) -> Tensor:
    """``dx / dsigma = noise - clean``."""
    return noise - clean


def clean_from_velocity(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """``x - sigma v``: the posterior mean of the clean sample when v is the exact field."""
    return x - expand(sigma, x) * v


def noise_from_velocity(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """``x + (1 - sigma) v``: the posterior mean of the noise."""
    return x + (1 - expand(sigma, x)) * v


def score_from_velocity(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """``grad log p_sigma(x) = -noise / sigma``; sigma in (0, 1]."""
    return -noise_from_velocity(x, v, sigma) / expand(sigma, x)
