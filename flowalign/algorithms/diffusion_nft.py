"""DiffusionNFT: reinforcement on the forward process (Zheng et al., 2509.16117).

Endpoints are drawn by the ODE, scored and noised again; the velocity is pulled toward the endpoints of good samples and
pushed away from those of bad ones. With r = clip(A / (2 a) + 1/2, 0, 1), a the advantage's clip:

    v+ = b v + (1 - b) v_old,   v- = (1 + b) v_old - b v,   clean+- = x - sigma v+-
    loss = a (r L+ + (1 - r) L-) / b,   L+- = mean (clean+- - clean)^2 / w+-,   w+- = mean |clean+- - clean|

Deviations from the authors' code: the old policy is the one in training (their decay type 0), so that there is one
update per rollout and v_old is v itself; endpoints come from Euler steps where they use a second-order solver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from flowalign.core import advantages, combination, losses, path, rng, schedule
from flowalign.types import (
    Batch,
    Examples,
    NonNegativeFloat,
    Policy,
    PositiveFloat,
    PositiveInt,
    Rollout,
    RolloutPlan,
    Scores,
    Terms,
    settings,
)

SMALLEST_WEIGHT = 1e-5


@settings
class DiffusionNFTSettings:
    """Hyper-parameters; the defaults are the authors' for SD3.5-M but for the number of noisings.

    Args:
        num_steps, schedule: of the rollout.
        noisings: random levels of the grid at which each endpoint is learnt from; the authors use all but the last.
        noisy_levels: draw them from the first, noisiest levels only, where composition is decided; null = from all but
            the last.
        nft_beta: b; smaller is a larger implied step.
        kl_weight: of mean (v - v_reference)^2.
        advantage_clip: a.
        updates: optimiser steps per rollout: one, because the old policy is the one in training.
    """

    name: Literal["diffusion_nft"]
    num_steps: PositiveInt = 10
    schedule: schedule.ScheduleName = "diffusers"
    noisings: PositiveInt = 4
    noisy_levels: PositiveInt | None = None
    nft_beta: PositiveFloat = 1.0
    kl_weight: NonNegativeFloat = 1e-4
    advantage_clip: PositiveFloat = 5.0
    advantage_std: advantages.AdvantageStd = "global"
    updates: Literal[1] = 1

    def __post_init__(self) -> None:
        if self.noisy_levels is not None and self.noisy_levels > self.num_steps - 1:
            raise ValueError(
                f"noisy_levels: {self.noisy_levels} of a {self.num_steps}-step grid, whose last step is not learnt "
                f"from; use at most {self.num_steps - 1} or raise num_steps"
            )
        if self.noisings > self.levels:
            raise ValueError(
                f"noisings: {self.noisings} different levels out of {self.levels}; lower it, or raise num_steps or "
                "noisy_levels"
            )

    @property
    def levels(self) -> int:
        """How many levels of the grid, from the noisiest, are learnt from."""
        return self.noisy_levels or self.num_steps - 1


class DiffusionNFT:
    """See the module. ``shift`` is the timestep shift of the model's scheduler."""

    def __init__(self, settings: DiffusionNFTSettings, shift: float) -> None:
        self.settings = settings
        self.sigmas = schedule.sigmas(settings.schedule, settings.num_steps, shift)

    @property
    def updates(self) -> int:
        return self.settings.updates

    def plan(self, iteration: int) -> RolloutPlan:
        return RolloutPlan(sigmas=self.sigmas)

    def prepare(self, policy: Policy, samples: Rollout | Examples, scores: Scores | None) -> Batch:
        if not isinstance(samples, Rollout) or scores is None:
            raise TypeError("diffusion_nft learns from a scored Rollout, got examples or no scores")
        s, clean = self.settings, samples.trajectory.final
        credit = combination.credit(scores, s.advantage_std, s.advantage_clip, clean.device)
        sources = [rng.generator(key, "diffusion_nft") for key in samples.keys]
        levels = [torch.randperm(s.levels, generator=g)[: s.noisings] for g in sources]
        sigma = self.sigmas[torch.stack(levels)].flatten().to(clean.device)
        noise = torch.stack([rng.normal(sources, clean.shape[1:], clean.device) for _ in range(s.noisings)], 1)
        sample = torch.arange(clean.shape[0], device=clean.device).repeat_interleave(s.noisings)
        endpoint = clean[sample]
        items = {
            "x": path.interpolate(endpoint, noise.flatten(0, 1), sigma),
            "sigma": sigma,
            "clean": endpoint,
            "advantage": credit.advantage[sample],
        }
        return Batch(items, sample, samples.cond, credit.weight[sample])

    def losses(self, policy: Policy, batch: Batch) -> Terms:
        s, items = self.settings, batch.items
        cond = batch.cond.select(batch.sample)
        velocity = policy.current(items["x"], items["sigma"], cond)
        preference = (items["advantage"] / (2 * s.advantage_clip) + 0.5).clamp(0, 1)
        old = velocity.detach()
        good = _error(items, s.nft_beta * velocity + (1 - s.nft_beta) * old)
        bad = _error(items, (1 + s.nft_beta) * old - s.nft_beta * velocity)
        policy_loss = s.advantage_clip * (preference * good + (1 - preference) * bad) / s.nft_beta
        terms, metrics = {"policy": policy_loss}, {"clean_error": good.detach()}
        if s.kl_weight:
            with torch.no_grad():
                reference = policy.reference(items["x"], items["sigma"], cond)
            divergence = losses.mean_square(velocity - reference)
            terms["kl"] = s.kl_weight * divergence
            metrics["kl"] = divergence.detach()
        return Terms(terms, metrics)


def _error(items: Mapping[str, Tensor], velocity: Tensor) -> Tensor:
    """Square error of the predicted clean sample over its absolute error, (n,) float32.

    The weight is taken in float64 and without gradient: it equalises noise levels, it is not learnt from.
    """
    difference = path.clean_from_velocity(items["x"], velocity, items["sigma"]) - items["clean"]
    weight = difference.detach().double().abs().flatten(1).mean(1).clamp(min=SMALLEST_WEIGHT)
    return losses.mean_square(difference) / weight.float()
