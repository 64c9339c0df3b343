"""AWM, Advantage Weighted Matching: the policy gradient with the flow-matching loss as log-likelihood (2509.25050).

Endpoints are drawn by the ODE, scored and noised again; with Y = noise - clean and e = mean (v - Y)^2, the error stands
for a negative log-likelihood:

    log p = -e | -sigma e | -sigma^2 e | -sigma sqrt(e) | -sigma e^q / q            uniform | t | t2 | huber | ghuber
    loss = max(-A r, -A clip(r, 1 - c, 1 + c)) + b mean (v - v_ref)^2 + b' mean (v - v_anchor)^2

It is strictly on-policy: one update per rollout, so that r = exp(log p - log p_old) is 1 and its gradient is that of
log p. v_anchor follows v and holds single updates back. The roots of huber and ghuber are smoothed at e = 0.

Deviations from the authors' code: endpoints come from Euler steps where they use a higher-order solver; no iteration is
skipped at the start. Their two ways of averaging the ratio over noisings have the same gradient at r = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from flowalign.core import advantages, losses, noising, schedule
from flowalign.types import (
    Batch,
    Decay,
    Examples,
    Fraction,
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

SMOOTHING = 1e-10
"""Added to e under a root, as in the authors' code."""
SPREAD, HIGHEST_SIGMA = 0.7, 0.99
"""Of the "elbo" form: the transition noise of Flow-GRPO with a = 0.7, capped as there."""


@settings
class AWMSettings:
    """Hyper-parameters; the defaults are the authors' for SD3.5-M and GenEval.

    Args:
        num_steps, schedule: of the rollout.
        noisings: levels at which each endpoint is learnt from: one from each of as many equal parts of the grid.
        fraction: of the grid, from its noisy end, that is learnt from.
        first_level: whether sigma = 1, where x is noise alone, is learnt from.
        weighting, ghuber_power: form of log p, and q of "ghuber".
        clip_range: c; without effect while updates are on-policy.
        advantage_clip, advantage_max: advantages are clipped to the first, which is then scaled to the second.
        kl_weight, anchor_weight: b and b'.
        kl_form: of both; "uniform" as above, "elbo" divided by twice the variance of a transition.
        anchor_rate, anchor_cap: of v_anchor, d = min(anchor_rate step, anchor_cap) once per rollout.
        updates: optimiser steps per rollout: one, because the ratio is to the weights that are updated.
    """

    name: Literal["awm"]
    num_steps: PositiveInt = 14
    schedule: schedule.ScheduleName = "diffusers"
    noisings: PositiveInt = 6
    fraction: Annotated[Fraction, Gt(0)] = 0.9
    first_level: bool = False
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
    ghuber_power: Annotated[float, Gt(0), Le(1)] = 0.25
    clip_range: PositiveFloat = 1.0
    advantage_clip: PositiveFloat = 5.0
    advantage_max: PositiveFloat = 1.0
    advantage_std: advantages.AdvantageStd = "global"
    kl_weight: NonNegativeFloat = 0.003
    anchor_weight: NonNegativeFloat = 1.0
    kl_form: Literal["uniform", "elbo"] = "uniform"
    anchor_rate: NonNegativeFloat = 0.001
    anchor_cap: Decay = 0.3
    updates: Annotated[int, Ge(1), Le(1)] = 1  # a Literal would take true for 1

    def __post_init__(self) -> None:
        low, high = self.levels
        if high - low < self.noisings:
            raise ValueError(
                f"noisings: {self.noisings} different levels out of {max(high - low, 0)}; lower it, or raise num_steps "
                "or fraction"
            )

    @property
    def levels(self) -> tuple[int, int]:
        """First and last + 1 of the levels of the grid that are learnt from."""
        return 0 if self.first_level else 1, int(self.num_steps * self.fraction)


class AWM:
    """See the module. ``shift`` is the timestep shift of the model's scheduler."""

    def __init__(self, settings: AWMSettings, shift: float) -> None:
        self.settings = settings
        self.sigmas = schedule.sigmas(settings.schedule, settings.num_steps, shift)

    @property
    def updates(self) -> int:
        return self.settings.updates

    def plan(self, iteration: int) -> RolloutPlan:
        return RolloutPlan(sigmas=self.sigmas)

    def decays(self, iteration: int) -> Mapping[WeightSet, float]:
        s = self.settings
        return {"anchor": schedule.lag(iteration + 1, s.anchor_rate, s.anchor_cap)} if s.anchor_weight else {}

    def prepare(self, policy: Policy, samples: Rollout | Examples, scores: Scores | None) -> Batch:
        s = self.settings
        pulls = s.kl_weight > 0 or s.anchor_weight > 0
        return noising.endpoints(
            s.name, samples, scores, self._levels, std=s.advantage_std, clip=s.advantage_clip, ties=pulls
        )

    def _levels(self, generator: torch.Generator) -> Tensor:
        return self.sigmas[schedule.stratified_steps(generator, self.settings.noisings, *self.settings.levels)]

    def losses(self, policy: Policy, batch: Batch) -> Terms:
        s, items = self.settings, batch.items
        shown = items["x"], items["sigma"], batch.cond.select(batch.sample)
        velocity = policy.current(*shown)
        error = losses.flow_matching(velocity, items["target"])
        log_prob = log_likelihood(s.weighting, error, items["sigma"], s.ghuber_power)
        advantage = items["advantage"] * (s.advantage_max / s.advantage_clip)
        terms = {"policy": losses.clipped_surrogate(log_prob - log_prob.detach(), advantage, s.clip_range)}
        metrics = {"matching_error": error.detach()}
        for name, weight, other in (("kl", s.kl_weight, policy.reference), ("anchor", s.anchor_weight, policy.anchor)):
            if weight:
                divergence = self._divergence(velocity - other(*shown), items["sigma"])
                terms[name] = weight * divergence
                metrics[name] = divergence.detach()
        return Terms(terms, metrics)

    def _divergence(self, difference: Tensor, sigma: Tensor) -> Tensor:
        square = losses.mean_square(difference)
        if self.settings.kl_form == "uniform":
            return square
        variance = SPREAD**2 * sigma / (1 - sigma.clamp(max=HIGHEST_SIGMA))
        return square / (2 * variance)


def log_likelihood(weighting: str, error: Tensor, sigma: Tensor, power: float) -> Tensor:
    """What the module calls log p, (n,); ``error`` is e (n,) >= 0 and ``power`` is q."""
    if weighting == "uniform":
        return -error
    if weighting == "t":
        return -sigma * error
    if weighting == "t2":
        return -sigma.square() * error
    q, scale = (0.5, 1.0) if weighting == "huber" else (power, power)
    at_zero: float = SMOOTHING**q
    return -sigma * ((error + SMOOTHING).pow(q) - at_zero) / scale
