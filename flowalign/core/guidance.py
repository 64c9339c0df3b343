"""Classifier-free guidance as a velocity made of a velocity."""

from __future__ import annotations

import torch
from torch import Tensor

from flowalign.types import Conditioning, VelocityFn


def classifier_free(velocity: VelocityFn, scale: float) -> VelocityFn:
    """``v_neg + scale (v_cond - v_neg)`` in one batched call (Ho & Salimans, 2207.12598).

    A scale of 1 is no guidance and returns ``velocity`` itself. The negative branch comes first, as in diffusers.

    Raises:
        ValueError: when called with a conditioning that carries no negative.
    """
    if scale == 1:
        return velocity

    def guided(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        if cond.negative is None:
            raise ValueError(
                f"guidance {scale}: the conditioning has no negative; encode the prompts with a negative prompt "
                "(an empty one will do) or set guidance to 1"
            )
        both = Conditioning.cat([Conditioning(cond.negative), Conditioning(cond.tensors)])
        negative, positive = velocity(torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return negative + scale * (positive - negative)

    return guided
