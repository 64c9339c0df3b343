"""Flow-DPO: direct preference optimisation on velocities (VideoAlign, 2501.13918; Diffusion-DPO, 2311.12908).

The better and the worse of two samples of one prompt are noised with the SAME noise to the SAME level; the model learns
to denoise the better one more willingly than the reference does, compared with the worse one:

    e = mean |v(x_sigma, sigma, prompt) - (noise - clean)|^2
    loss = -log sigmoid(-(b / 2) ((e_better - e_better_reference) - (e_worse - e_worse_reference)))

Online, the pairs are the best and the worst sample of each group by its rewards; offline they come from files. The
noise that a velocity implies is x + (1 - sigma) v, so that Diffusion-DPO's errors of the noise are (1 - sigma)^2 times
these: the "derived" b falls with (1 - sigma)^2, a weak pull to the reference where noise is high, which its authors saw
hacked. A constant b is their choice and the default.

A falling loss does not mean that better samples become more likely: the errors of both may rise (2511.19049), so
``better_error`` is logged beside the implicit accuracy.

Deviation: VideoAlign learns from people's preferences alone; the online form is the DPO baseline of Flow-GRPO's authors
(2505.05470), with the frozen reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowalign.core import advantages, combination, losses, noising, path, rng, schedule
from flowalign.types import (
    Batch,
    Conditioning,
    Examples,
    Policy,
    PositiveFloat,
    PositiveInt,
    Rollout,
    RolloutPlan,
    Scores,
    Terms,
    settings,
)


@settings
class PreferenceSettings:
    """What online and offline Flow-DPO share; the defaults are those used for SD3.5-M.

    Args:
        beta: b, for errors that are means over latent elements; larger stays closer to the reference.
        beta_form: "constant", or "derived": b (1 - sigma)^2.
        sigma_mean, sigma_std: sigma = sigmoid(sigma_mean + sigma_std z), then shifted.
        shift: of the noise levels; null = that of the model's scheduler.
        noisings: levels and noises at which each pair is compared.
        updates: optimiser steps per iteration.
    """

    beta: PositiveFloat = 100.0
    beta_form: Literal["constant", "derived"] = "constant"
    sigma_mean: float = 0.0
    sigma_std: PositiveFloat = 1.0
    shift: PositiveFloat | None = None
    noisings: PositiveInt = 1
    updates: PositiveInt = 1


@settings
class FlowDPOSettings(PreferenceSettings):
    """Online: ``num_steps``, ``schedule`` and ``guidance`` are those of the rollout; learning is never guided."""

    name: Literal["flow_dpo"]
    num_steps: PositiveInt = 40
    schedule: schedule.ScheduleName = "diffusers"
    guidance: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        if self.num_steps < 2:
            raise ValueError("num_steps: 1 jumps from noise to pictures that are not worth a comparison; use >= 2")


@settings
class OfflineFlowDPOSettings(PreferenceSettings):
    """Offline: ``batch_size`` pairs per iteration over all ranks."""

    name: Literal["flow_dpo_offline"]
    batch_size: PositiveInt = 32


class FlowDPO:
    """See the module. ``shift`` is the timestep shift of the model's scheduler."""

    def __init__(self, settings: FlowDPOSettings | OfflineFlowDPOSettings, shift: float) -> None:
        self.settings = settings
        self.shift, self.model_shift = settings.shift or shift, shift

    @property
    def updates(self) -> int:
        return self.settings.updates

    def plan(self, iteration: int) -> RolloutPlan | None:
        s = self.settings
        if isinstance(s, OfflineFlowDPOSettings):
            return None
        sigmas = schedule.sigmas(s.schedule, s.num_steps, self.model_shift)
        return RolloutPlan(sigmas=sigmas, guidance=s.guidance, whole_groups=True)

    def prepare(self, policy: Policy, samples: Rollout | Examples, scores: Scores | None) -> Batch:
        if isinstance(self.settings, OfflineFlowDPOSettings):
            if not isinstance(samples, Examples) or samples.worse is None:
                raise TypeError("flow_dpo_offline learns from preferences, got a Rollout or Examples without worse")
            every = torch.arange(len(samples.keys), device=samples.clean.device)
            pairs = Pairs(every, samples.clean, samples.worse, torch.ones_like(every, dtype=torch.float32))
        else:
            if not isinstance(samples, Rollout) or scores is None:
                raise TypeError("flow_dpo learns from a scored Rollout, got examples or no scores")
            pairs = best_and_worst(samples, scores)
        return self._noised(pairs, samples.keys, samples.cond)

    def _noised(self, pairs: Pairs, keys: Sequence[int], cond: Conditioning) -> Batch:
        s, device = self.settings, pairs.better.device
        # By the better sample's key, whichever the process and the place in the batch.
        sources = [rng.generator(keys[i], "flow_dpo", k) for i in pairs.sample.tolist() for k in range(s.noisings)]
        _, sigma, noise = noising.logit_normal(
            sources, pairs.better.shape[1:], mean=s.sigma_mean, std=s.sigma_std, shift=self.shift, device=device
        )
        pair = torch.arange(pairs.sample.shape[0], device=device).repeat_interleave(s.noisings)
        items = {"sigma": sigma}
        for name, clean in (("better", pairs.better[pair]), ("worse", pairs.worse[pair])):
            items[f"x_{name}"] = path.interpolate(clean, noise, sigma)
            items[f"target_{name}"] = path.velocity(clean, noise)
        return Batch(items, pairs.sample[pair], Conditioning(cond.tensors), pairs.weight[pair])

    def losses(self, policy: Policy, batch: Batch) -> Terms:
        s, items = self.settings, batch.items
        own = batch.cond.select(batch.sample)
        cond = Conditioning.cat([own, own])
        x, target = (torch.cat([items[f"{name}_better"], items[f"{name}_worse"]]) for name in ("x", "target"))
        sigma = torch.cat([items["sigma"], items["sigma"]])
        better, worse = losses.flow_matching(policy.current(x, sigma, cond), target).chunk(2)
        with torch.no_grad():
            reference = losses.flow_matching(policy.reference(x, sigma, cond), target)
        reference_better, reference_worse = reference.chunk(2)
        margin = (worse - reference_worse) - (better - reference_better)
        beta = s.beta * (1 - items["sigma"]).square() if s.beta_form == "derived" else s.beta
        loss = losses.preference(margin, beta)
        metrics = {
            "implicit_accuracy": (margin.detach().sign() + 1) / 2,  # 1/2 where neither is favoured
            "better_error": better.detach(),
            "worse_error": worse.detach(),
            "better_error_change": better.detach() - reference_better,
        }
        return Terms({"preference": loss}, metrics)


class Pairs(NamedTuple):
    """P pairs of this rank.

    Args:
        sample: (P,) int64, the sample that stands for the pair: the better one, with the prompt of both.
        better, worse: (P, C, *S) clean latents.
        weight: (P,) float32, 0 where there is nothing to compare.
    """

    sample: Tensor
    better: Tensor
    worse: Tensor
    weight: Tensor


def best_and_worst(rollout: Rollout, scores: Scores) -> Pairs:
    """One pair for each group of this rank; of no weight where fewer than two different scores are known.

    Raises:
        ValueError: a group with members on another rank, of whose latents nothing is known here.
    """
    final, local = rollout.trajectory.final, scores.local.cpu()
    rewards, groups = combination.total(scores).cpu(), scores.group.cpu()
    signal = torch.isfinite(rewards) & ~advantages.zero_variance(rewards, groups)
    own_rewards, own_signal, own_groups = rewards[local], signal[local], rollout.group.cpu()
    best, worst, weight = [], [], []
    for label in sorted(set(own_groups.tolist())):
        members = (own_groups == label).nonzero().flatten()
        total = int((groups == label).sum())
        if members.numel() != total:
            raise ValueError(
                f"flow_dpo: {members.numel()} of the {total} samples of group {label} are on this rank, expected all; "
                "draw them with a plan that has whole_groups"
            )
        known = members[own_signal[members]]
        order = known[own_rewards[known].argsort(stable=True)] if known.numel() else members
        best.append(int(order[-1]))
        worst.append(int(order[0]))
        weight.append(float(known.numel() > 0))
    better = torch.tensor(best, device=final.device)
    return Pairs(better, final[better], final[worst], torch.tensor(weight, device=final.device))
