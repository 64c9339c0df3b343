"""RAM, Reinforce Adjoint Matching: the KL-regularised optimum by regression on endpoints (2605.10759).

Raising E[r] - KL(p | p_ref) tilts the reference: p* ~ p_ref exp(r). Its velocity is that of the reference plus a
correction, which RAM estimates from noised endpoints of its own samples, with the target noise - clean = Y:

    loss = mean (v - sg[v_ref + m A (Y - v_old)])^2,    sigma ~ p(sigma) proportional to sigma^alpha

A is the reward, centred within its group and divided by the spread of all; v_old draws the endpoints and follows v. The
fixed point v_ref + m Cov(A, Y | x) is the tilt to first order in m A, and exact for Gaussian data and a linear reward.

``target: self`` has v in the place of v_old, as the paper's equation 17 does; the authors' code has v_old.
``reference_every`` goes beyond the paper: S stages of strength m, after each of which v becomes v_ref, are S Euler
steps along the path of tilts; they approach p_ref exp(S m A), where a single stage of strength S m is biased.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from flowalign.core import advantages, losses, noising, path, schedule
from flowalign.types import (
    Batch,
    Decay,
    Examples,
    NonNegativeFloat,
    Policy,
    PositiveFloat,
    PositiveInt,
    Rollout,
    RolloutPlan,
    Scores,
    Terms,
    WeightSet,
    settings,
)


@settings
class RAMSettings:
    """Hyper-parameters; the defaults are those of the authors' code for SD3.5-M, as re-implementations report them.

    Args:
        num_steps, schedule: of the rollout.
        guidance: classifier-free guidance of the rollout; what is learnt from are conditional velocities. 1 = off.
        target: which velocity stands in the correction, see the module.
        reward_multiplier: m; the pull to the reference is 1 / m of the reward's.
        normalise: divide the loss by m, so that its size does not depend on it; equal under Adam but for clipping.
        noisings: levels at which each endpoint is learnt from.
        sigma_power: alpha; 0 = uniform.
        decay_rate, decay_cap: of v_old, d = min(decay_rate step, decay_cap) once per rollout; a cap of 0 = no lag.
        reference_every: iterations of a stage, see the module; null = one stage.
        advantage_clip: null = none.
        updates: optimiser steps per rollout.
    """

    name: Literal["ram"]
    num_steps: PositiveInt = 20
    schedule: schedule.ScheduleName = "diffusers"
    guidance: PositiveFloat = 4.5
    target: Literal["old", "self"] = "old"
    reward_multiplier: PositiveFloat = 100.0
    normalise: bool = False
    noisings: PositiveInt = 8
    sigma_power: NonNegativeFloat = 1.0
    decay_rate: NonNegativeFloat = 0.01
    decay_cap: Decay = 0.9
    reference_every: PositiveInt | None = None
    advantage_clip: PositiveFloat | None = None
    advantage_std: advantages.AdvantageStd = "global"
    updates: PositiveInt = 1

    def __post_init__(self) -> None:
        if self.num_steps < 2:
            raise ValueError(f"num_steps: {self.num_steps} step draws nothing but the mean of all data; use >= 2")
        if self.target == "self" and self.lags:
            raise ValueError(
                f"target: 'self' is for endpoints of the weights in training, but decay_cap {self.decay_cap:g} and "
                f"updates {self.updates} draw them by older ones; use target old, or decay_cap 0 and updates 1"
            )
        if self.decay_cap > 0 and self.decay_rate == 0:
            raise ValueError(f"decay_rate: 0 never reaches decay_cap {self.decay_cap:g}; raise it or set the cap to 0")

    @property
    def lags(self) -> bool:
        """Whether v_old ever differs from v."""
        return self.decay_cap > 0 or self.updates > 1


class RAM:
    """See the module. ``shift`` is the timestep shift of the model's scheduler."""

    def __init__(self, settings: RAMSettings, shift: float) -> None:
        self.settings = settings
        self.sigmas = schedule.sigmas(settings.schedule, settings.num_steps, shift)

    @property
    def updates(self) -> int:
        return self.settings.updates

    def plan(self, iteration: int) -> RolloutPlan:
        return RolloutPlan(sigmas=self.sigmas, guidance=self.settings.guidance)

    def decays(self, iteration: int) -> Mapping[WeightSet, float]:
        s, kept = self.settings, dict[WeightSet, float]()
        if s.lags:
            kept["behaviour"] = schedule.lag((iteration + 1) * s.updates, s.decay_rate, s.decay_cap)
        if s.reference_every is not None:
            kept["reference"] = 0.0 if (iteration + 1) % s.reference_every == 0 else 1.0
        return kept

    def prepare(self, policy: Policy, samples: Rollout | Examples, scores: Scores | None) -> Batch:
        s = self.settings
        clip = math.inf if s.advantage_clip is None else s.advantage_clip
        # Where all samples of a prompt are equally good, the reference is the target.
        return noising.endpoints(s.name, samples, scores, self._levels, std=s.advantage_std, clip=clip, ties=True)

    def _levels(self, generator: torch.Generator) -> Tensor:
        return schedule.power_law(generator, self.settings.noisings, self.settings.sigma_power)

    def losses(self, policy: Policy, batch: Batch) -> Terms:
        s, items = self.settings, batch.items
        shown = items["x"], items["sigma"], batch.cond.select(batch.sample)
        velocity, reference = policy.current(*shown), policy.reference(*shown)
        # On-policy, v_old is v itself and need not be computed again.
        old = policy.behaviour(*shown) if s.lags else velocity.detach()
        strength = s.reward_multiplier * path.expand(items["advantage"], velocity)
        target = reference + strength * (items["target"] - old)
        loss = losses.mean_square(velocity - target)
        metrics = {
            "target_norm": losses.mean_square(target).sqrt(),
            "reference_deviation": losses.mean_square(velocity.detach() - reference),
        }
        if s.lags:
            metrics["old_deviation"] = losses.mean_square(velocity.detach() - old)
        return Terms({"policy": loss / s.reward_multiplier if s.normalise else loss}, metrics)
