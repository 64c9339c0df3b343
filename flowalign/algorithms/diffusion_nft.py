"""DiffusionNFT: reinforcement on the forward process (Zheng et al., 2509.16117).

Endpoints are drawn by the ODE, scored and noised again; the velocity is pulled toward the endpoints of good samples and
pushed away from those of bad ones. With r = clip(A / (2 a) + 1/2, 0, 1), a the advantage's clip:

    v+ = b v + (1 - b) v_old,   v- = (1 + b) v_old - b v,   clean+- = x - sigma v+-
    loss = a (r L+ + (1 - r) L-) / b,   L+- = mean (clean+- - clean)^2 / w+-,   w+- = mean |clean+- - clean|

v_old draws the samples and follows v: v_old <- d v_old + (1 - d) v, once per rollout. At v = v_old the gradient does
not depend on b; away from it, b is the strength of a pull to v_old.

Deviation from the authors' code: endpoints come from Euler steps where they use a second-order solver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowalign.core import advantages, losses, noising, path, schedule
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
    WeightSet,
    settings,
)

SMALLEST_WEIGHT = 1e-5


class Lag(NamedTuple):
    """Of v_old; see `schedule.lag`."""

    rate: float
    cap: float
    flat: int


OLD_POLICIES = {
    "on_policy": Lag(rate=0.0, cap=0.0, flat=0),
    "slow": Lag(rate=0.001, cap=0.5, flat=0),
    "ocr": Lag(rate=0.0075, cap=0.999, flat=75),
}
"""The authors' decay types 0, 1 and 2."""


@settings
class DiffusionNFTSettings:
    """Hyper-parameters; the defaults are the authors' for SD3.5-M but for the number of noisings.

    Args:
        num_steps, schedule: of the rollout.
        noisings: random levels of the grid at which each endpoint is learnt from; the authors use all but the last.
        noisy_levels: draw them from the first, noisiest levels only, where composition is decided; null = from all but
            the last.
        old_policy: how v_old follows: "on_policy" copies v after every rollout; "slow" lags more and more, up to half;
            "ocr" copies it for 75 optimiser steps and then slows down to a thousandth within 133 more.
        nft_beta: b; smaller is a larger implied step. The authors take 0.1 for OCR and for several rewards.
        kl_weight: of mean (v - v_reference)^2.
        advantage_clip: a.
        advantage_mode: what of the advantage counts: "all"; "positive_only" or "negative_only", the rest being 0;
            "one_only", 1 where it is positive and else 0; "binary", its sign.
        updates: optimiser steps per rollout.
    """

    name: Literal["diffusion_nft"]
    num_steps: PositiveInt = 10
    schedule: schedule.ScheduleName = "diffusers"
    noisings: PositiveInt = 4
    noisy_levels: PositiveInt | None = None
    old_policy: Literal["on_policy", "slow", "ocr"] = "slow"
    nft_beta: PositiveFloat = 1.0
    kl_weight: NonNegativeFloat = 1e-4
    advantage_clip: PositiveFloat = 5.0
    advantage_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    advantage_std: advantages.AdvantageStd = "global"
    updates: PositiveInt = 1

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

    @property
    def lags(self) -> bool:
        """Whether v_old ever differs from v."""
        return self.old_policy != "on_policy" or self.updates > 1


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

    def decays(self, iteration: int) -> Mapping[WeightSet, float]:
        s = self.settings
        steps = (iteration + 1) * s.updates
        return {"behaviour": schedule.lag(steps, **OLD_POLICIES[s.old_policy]._asdict())} if s.lags else {}

    def prepare(self, policy: Policy, samples: Rollout | Examples, scores: Scores | None) -> Batch:
        s = self.settings
        return noising.endpoints(
            s.name, samples, scores, self._levels, std=s.advantage_std, clip=s.advantage_clip, ties=False
        )

    def _levels(self, generator: torch.Generator) -> Tensor:
        return self.sigmas[torch.randperm(self.settings.levels, generator=generator)[: self.settings.noisings]]

    def losses(self, policy: Policy, batch: Batch) -> Terms:
        s, items = self.settings, batch.items
        shown = items["x"], items["sigma"], batch.cond.select(batch.sample)
        velocity = policy.current(*shown)
        old = policy.behaviour(*shown) if s.lags else velocity.detach()
        preference = (_counted(items["advantage"], s.advantage_mode) / (2 * s.advantage_clip) + 0.5).clamp(0, 1)
        good = _error(items, s.nft_beta * velocity + (1 - s.nft_beta) * old)
        bad = _error(items, (1 + s.nft_beta) * old - s.nft_beta * velocity)
        terms = {"policy": s.advantage_clip * (preference * good + (1 - preference) * bad) / s.nft_beta}
        metrics = {"clean_error": good.detach()}
        if s.lags:
            metrics["old_deviation"] = losses.mean_square(velocity.detach() - old)
        if s.kl_weight:
            divergence = losses.mean_square(velocity - policy.reference(*shown))
            terms["kl"] = s.kl_weight * divergence
            metrics["kl"] = divergence.detach()
        return Terms(terms, metrics)


def _counted(advantage: Tensor, mode: str) -> Tensor:
    if mode == "positive_only":
        return advantage.clamp(min=0)
    if mode == "negative_only":
        return advantage.clamp(max=0)
    if mode == "one_only":
        return (advantage > 0).float()
    return advantage.sign() if mode == "binary" else advantage


def _error(items: Mapping[str, Tensor], velocity: Tensor) -> Tensor:
    """Square error of the predicted clean sample over its absolute error, (n,) float32.

    The weight is taken in float64 and without gradient: it equalises noise levels, it is not learnt from.
    """
    # x - sigma v less the clean sample, without the rounding of their difference.
    difference = path.expand(items["sigma"], velocity) * (items["target"] - velocity)
    weight = difference.detach().double().abs().flatten(1).mean(1).clamp(min=SMALLEST_WEIGHT)
    return losses.mean_square(difference) / weight.float()
