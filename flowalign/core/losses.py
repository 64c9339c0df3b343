"""Loss terms, one value per item; who sums, weights and averages them is the learner."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flowalign.core.kernels import Gaussian

KLForm = Literal["transition", "flow_grpo", "x", "v", "k2", "k3"]


class Evaluation(NamedTuple):
    """What one policy says of n recorded steps."""

    gaussian: Gaussian
    velocity: Tensor  # (n, C, *S)
    log_prob: Tensor  # (n,)


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """``max(-A r, -A clip(r, 1 - c, 1 + c))`` with r = exp(log_ratio) (PPO, 1707.06347, eq. 7, as a loss).

    Args:
        log_ratio, advantage: (n,).
        clip_range: c > 0; 1e-6 to 1e-3 for log-densities that are means over latent elements.
    """
    ratio = log_ratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range))


def kl(form: KLForm, current: Evaluation, reference: Evaluation, step_size: Tensor) -> Tensor:
    """Divergence of the current policy from the reference at n recorded steps, (n,) float32, >= 0.

    With dm, dv the differences of means and velocities, s the std, D the difference of log-densities, averaged over
    latent elements:
        transition  dm^2 / (2 s^2), the exact KL of the two Gaussians per element
        flow_grpo   dm^2 delta / (2 s^2), as Flow-GRPO's code has it: divided by g^2 = s^2 / delta
        x           dm^2
        v           dv^2 (UniGRPO, 2603.23500): the same weight for every noise level
        k2, k3      D^2 / 2 and exp(-D) + D - 1, single-sample estimates (Schulman, 2020)

    Args:
        step_size: (n,) delta = sigma - sigma_next, used by flow_grpo only.
    """
    if form not in get_args(KLForm):
        raise ValueError(f"kl: unknown form {form!r}; expected one of {', '.join(get_args(KLForm))}")
    if form in ("k2", "k3"):
        difference = current.log_prob - reference.log_prob
        return difference.square() / 2 if form == "k2" else torch.expm1(-difference) + difference
    if form == "v":
        return mean_square(current.velocity - reference.velocity)
    square = mean_square(current.gaussian.mean - reference.gaussian.mean)
    if form == "x":
        return square
    divergence = square / (2 * current.gaussian.std.float().flatten().square())
    return divergence if form == "transition" else divergence * step_size


def flow_matching(velocity: Tensor, target: Tensor) -> Tensor:
    """Mean square of ``velocity - target`` over non-batch dimensions, (n,) float32 (2210.02747)."""
    return mean_square(velocity - target)


def preference(margin: Tensor, beta: float | Tensor) -> Tensor:
    """``-log sigmoid(beta / 2 margin)``, the logistic loss of Diffusion-DPO (2311.12908), (n,) float32.

    Args:
        margin: (n,) by how much more than the reference the current policy favours the better sample: the fall of its
            error minus that of the worse sample's, both means over latent elements.
        beta: a number or (n,); to be divided by the number of elements where a source sums errors over them.
    """
    return -torch.nn.functional.logsigmoid(beta / 2 * margin.float())


def mean_square(difference: Tensor) -> Tensor:
    """(n, ...) to (n,), in float32."""
    return difference.float().square().flatten(1).mean(1)
