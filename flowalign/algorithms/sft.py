"""Supervised fine-tuning by flow matching on captioned images (Lipman et al., 2210.02747; SD3's density, 2403.03206).

loss = mean (v(x_sigma, sigma, caption) - (noise - clean))^2,    x_sigma = (1 - sigma) clean + sigma noise
"""

from __future__ import annotations

from typing import Literal

import torch

from flowalign.core import losses, noising, schedule
from flowalign.types import (
    Batch,
    Examples,
    Policy,
    PositiveFloat,
    PositiveInt,
    Rollout,
    Scores,
    Terms,
    settings,
)


@settings
class SFTSettings:
    """``batch_size`` images per iteration over all ranks; sigma = sigmoid(sigma_mean + sigma_std z), then shifted.

    ``shift``: of the noise levels; 1 = none, and a model that samples with a shift was trained with it.
    """

    name: Literal["sft"]
    batch_size: PositiveInt = 32
    sigma_mean: float = 0.0
    sigma_std: PositiveFloat = 1.0
    shift: PositiveFloat = 1.0
    updates: PositiveInt = 1


class SFT:
    """Learns from data alone; see the module."""

    def __init__(self, settings: SFTSettings) -> None:
        self.settings = settings

    @property
    def updates(self) -> int:
        return self.settings.updates

    def plan(self, iteration: int) -> None:
        return None

    def prepare(self, policy: Policy, samples: Rollout | Examples, scores: Scores | None) -> Batch:
        if not isinstance(samples, Examples):
            raise TypeError("sft learns from Examples, got a Rollout")
        s = self.settings

        def levels(generator: torch.Generator) -> torch.Tensor:
            return schedule.shift_sigma(schedule.logit_normal(generator, 1, s.sigma_mean, s.sigma_std), s.shift)

        noised = noising.noised(samples.clean, samples.keys, "sft", levels)
        return Batch(noised.items, noised.sample, samples.cond, torch.ones_like(noised.items["sigma"]))

    def losses(self, policy: Policy, batch: Batch) -> Terms:
        cond = batch.cond.select(batch.sample)
        velocity = policy.current(batch.items["x"], batch.items["sigma"], cond)
        return Terms({"flow_matching": losses.flow_matching(velocity, batch.items["target"])})
