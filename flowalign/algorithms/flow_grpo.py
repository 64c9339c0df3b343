"""Flow-GRPO: policy gradients through stochastic denoising steps (Liu et al., 2505.05470).

Every denoising step of a stochastic window is an action with a Gaussian density. Samples of one prompt are compared
with each other; steps of those that did better than their group become more likely:

    A_i = (R_i - mean_group) / (std + 1e-4),    r = exp(log p(x'|x) - log p_old(x'|x))
    loss = max(-A r, -A clip(r, 1 - c, 1 + c)) + kl_weight KL(current, reference)

Deviation from the authors' code: in a full window the last step is deterministic; rewards see no residual noise.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowalign.core import advantages, combination, guidance, kernels, losses, sampling, schedule
from flowalign.core.losses import Evaluation
from flowalign.types import (
    Batch,
    Examples,
    KernelName,
    LogProbForm,
    NonNegativeFloat,
    NonNegativeInt,
    Policy,
    PositiveFloat,
    PositiveInt,
    Rollout,
    RolloutPlan,
    Scores,
    StepWindow,
    Terms,
    VelocityFn,
    settings,
)

STORAGE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@settings
class FlowGRPOSettings:
    """Hyper-parameters; the defaults are those of Flow-GRPO on SD3.5-M but for guidance, which is off.

    Args:
        num_steps: denoising steps of a rollout; fewer than at inference.
        schedule: "diffusers" is the SD3 pipeline's own grid, "linear_shift" shifts once.
        kernel, level: the stochastic transition and its noise level (a = 0.7 for SD3).
        window: "full" trains every step but the last; "random" trains ``window_size`` consecutive steps at a random
            place in ``window_range`` [low, high), the same for all samples of a prompt (Flow-GRPO-Fast).
        guidance: classifier-free guidance of rollouts and of training alike; 1 = off.
        clip_range: of the ratio; see `losses.clipped_surrogate`.
        advantage_std: "global" divides by the spread of all rewards of the iteration, "group" by the prompt's own.
        kl, kl_weight: form and weight of the pull to the reference, see `losses.kl`; both or neither.
        updates: optimiser steps per rollout; the first is on-policy.
    """

    name: Literal["flow_grpo"]
    num_steps: PositiveInt = 10
    schedule: schedule.ScheduleName = "diffusers"
    kernel: KernelName = "flow"
    level: PositiveFloat = 0.7
    window: Literal["full", "random"] = "full"
    window_size: PositiveInt = 2
    window_range: tuple[NonNegativeInt, PositiveInt] = (0, 5)
    guidance: PositiveFloat = 1.0
    share_noise: bool = False
    clip_range: PositiveFloat = 1e-4
    advantage_clip: PositiveFloat = 5.0
    advantage_std: advantages.AdvantageStd = "global"
    kl: Literal["none", "transition", "flow_grpo", "x", "v", "k2", "k3"] = "none"
    kl_weight: NonNegativeFloat = 0.0
    log_prob: LogProbForm = "gaussian"
    storage: Literal["float32", "bfloat16"] = "float32"
    updates: PositiveInt = 2

    def __post_init__(self) -> None:
        low, high = self.window_range
        if self.num_steps < 2:
            raise ValueError(
                f"num_steps: {self.num_steps} leaves no step to train, since the last one never is; use >= 2"
            )
        if self.window == "random" and high > self.num_steps:
            raise ValueError(f"window_range: [{low}, {high}) ends beyond the {self.num_steps} steps; lower its end")
        if self.window == "random" and low + self.window_size > min(high, self.num_steps - 1):
            raise ValueError(
                f"window_size: {self.window_size} steps do not fit window_range [{low}, {high}) of {self.num_steps}"
                " steps, the last of which is never trained; lower window_size or widen window_range"
            )
        if self.kernel == "ode":
            raise ValueError("kernel: 'ode' is deterministic and has no density to train; use flow, dance, cps or sage")
        if self.level <= 0:
            raise ValueError(
                f"level: {self.level} makes the trained steps deterministic; expected a noise level above 0"
            )
        if self.kernel == "cps" and self.level >= 1:
            raise ValueError(f"level: {self.level} replaces all noise at each cps step; expected a level in (0, 1)")
        if self.clip_range <= 0:
            raise ValueError(f"clip_range: {self.clip_range}; expected a number above 0")
        if (self.kl == "none") != (self.kl_weight == 0):
            raise ValueError(
                f"kl_weight: {self.kl_weight} with kl {self.kl!r}; expected a form and a weight above 0, or neither"
            )


class FlowGRPO:
    """See the module. ``shift`` is the timestep shift of the model's scheduler."""

    def __init__(self, settings: FlowGRPOSettings, shift: float) -> None:
        self.settings = settings
        self.sigmas = schedule.sigmas(settings.schedule, settings.num_steps, shift)

    @property
    def updates(self) -> int:
        return self.settings.updates

    def window(self, generator: torch.Generator) -> StepWindow:
        s = self.settings
        if s.window == "full":
            return schedule.full_window(s.num_steps)
        return schedule.random_window(s.num_steps, s.window_size, *s.window_range, generator)

    def plan(self, iteration: int) -> RolloutPlan:
        s = self.settings
        return RolloutPlan(
            sigmas=self.sigmas,
            kernel=s.kernel,
            level=s.level,
            window=self.window,
            guidance=s.guidance,
            share_noise=s.share_noise,
            log_prob=s.log_prob,
            storage=STORAGE[s.storage],
        )

    def prepare(self, policy: Policy, samples: Rollout | Examples, scores: Scores | None) -> Batch:
        if not isinstance(samples, Rollout) or scores is None:
            raise TypeError("flow_grpo learns from a scored Rollout, got examples or no scores")
        s, trajectory = self.settings, samples.trajectory
        device = trajectory.states.device
        credit = combination.credit(scores, s.advantage_std, s.advantage_clip, device)
        count, recorded = trajectory.steps.shape
        sample = torch.arange(count, device=device).repeat_interleave(recorded)
        steps = trajectory.steps.flatten().cpu()
        items = {
            "x": trajectory.states[:, :, 0].flatten(0, 1),
            "x_next": trajectory.states[:, :, 1].flatten(0, 1),
            "sigma": trajectory.sigmas[steps].to(device),
            "sigma_next": trajectory.sigmas[steps + 1].to(device),
            "log_prob": trajectory.log_probs.flatten(),
            "advantage": credit.advantage[sample],
        }
        return Batch(items, sample, samples.cond, credit.weight[sample])

    def losses(self, policy: Policy, batch: Batch) -> Terms:
        s, items = self.settings, batch.items
        current = self._evaluate(policy.current, batch)
        log_ratio = current.log_prob - items["log_prob"]
        terms = {"policy": losses.clipped_surrogate(log_ratio, items["advantage"], s.clip_range)}
        ratio = log_ratio.detach().exp()
        metrics = {
            "ratio": ratio,
            "ratio_deviation": (ratio - 1).abs(),
            "clip_fraction": ((ratio - 1).abs() > s.clip_range).float(),
        }
        if s.kl != "none":
            with torch.no_grad():
                reference = self._evaluate(policy.reference, batch)
            divergence = losses.kl(s.kl, current, reference, items["sigma"] - items["sigma_next"])
            terms["kl"] = s.kl_weight * divergence
            metrics["kl"] = divergence.detach()
        return Terms(terms, metrics)

    def replay(self, policy: Policy, batch: Batch) -> Tensor:
        """Log-ratio (n,) of the current weights to those that drew the samples: 0 before the first update."""
        return self._evaluate(policy.current, batch).log_prob - batch.items["log_prob"]

    def _evaluate(self, velocity: VelocityFn, batch: Batch) -> Evaluation:
        s, items = self.settings, batch.items
        gaussian, v = sampling.replay_transition(
            guidance.classifier_free(velocity, s.guidance),
            items["x"],
            items["sigma"],
            items["sigma_next"],
            batch.cond.select(batch.sample),
            kernel=s.kernel,
            level=s.level,
            sigma_cap=float(self.sigmas[1]),
        )
        return Evaluation(gaussian, v, kernels.log_prob(gaussian, items["x_next"].float(), s.log_prob))
