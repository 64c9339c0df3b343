"""SOAR: self-correction on the model's own rollout states (2604.12617), learnt from captioned images without rewards.

Supervised fine-tuning shows the model states on the straight path only; when sampling it meets its own errors. SOAR
takes one guided Euler step off the path, noises the result again towards the SAME noise and asks for the velocity that
still lands on the original image. With (clean, noise) the sample, x = (1 - sigma) clean + sigma noise at the unshifted
level u, sigma = shift(u):

    sigma_1 = shift(max(u - 1 / rollout_steps, 0)),   x_1 = sg[x + (sigma_1 - sigma) v_guided(x, sigma)]
    for each point:  a ~ U[0, 1],  sigma' = sigma_1 + a (1 - sigma_1),  x' = (1 - a) x_1 + a noise
    loss = (sum |v(x) - (noise - clean)|^2 + aux_weight sum |v(x') - (x' - clean) / sigma'|^2) / (B + aux_weight P)

over B images and P points; |.|^2 is the mean over latent elements. Without points this is supervised fine-tuning, bit
for bit. The target differs from noise - clean by

    -(sigma - sigma_1)(1 - sigma') / ((1 - sigma_1) sigma') (v_guided - (noise - clean)),

whose factor exceeds 1 only near sigma' = 0, where a tiny error of the step would dominate the loss: points below
``sigma_floor`` are left out.

Deviations from the authors' code: the model sees sigma' itself, where theirs rounds it to a grid of 1,000; latents are
the encoder's mean; the floor is ours.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowalign.core import guidance, kernels, losses, noising, path, rng, schedule
from flowalign.core.kernels import Gaussian
from flowalign.core.noising import Draw
from flowalign.types import (
    Batch,
    Conditioning,
    Examples,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Policy,
    PositiveFloat,
    PositiveInt,
    Rollout,
    Scores,
    Terms,
    settings,
)

PathKernel = Literal["simple", "sde", "flow", "cps"]


@settings
class SOARSettings:
    """Hyper-parameters; the defaults are the authors' for SD3.5-M.

    Args:
        batch_size: images per iteration over all ranks.
        sigma_mean, sigma_std: u = sigmoid(sigma_mean + sigma_std z).
        shift: of the noise levels; null = that of the model's scheduler.
        guidance: of the rollout step, above 1: a step without guidance moves along the posterior mean, and learning to
            return from there blurs.
        guidance_distilled: the weights have guidance built in, so that the step is taken with guidance 1.
        negative: text that guidance steers away from.
        rollout_steps: the step has length 1 / rollout_steps in u.
        points: N, states to return from per rollout.
        aux_weight: of a point, relative to an image.
        paths: rollouts per image: the first follows the ODE, the others are drawn from ``path_kernel``.
        path_kernel: "simple" adds noise to the Euler step, "sde" noises the predicted image afresh, "flow" and "cps"
            are the transitions of `kernels`.
        path_level: noise level of the path kernel; "sde" has none.
        sigma_floor: points of lower noise are left out.
    """

    name: Literal["soar"]
    batch_size: PositiveInt = 32
    sigma_mean: float = 0.0
    sigma_std: PositiveFloat = 1.0
    shift: PositiveFloat | None = None
    guidance: PositiveFloat = 4.5
    guidance_distilled: bool = False
    negative: str = ""
    rollout_steps: PositiveInt = 40
    points: NonNegativeInt = 6
    aux_weight: NonNegativeFloat = 1.0
    paths: PositiveInt = 1
    path_kernel: PathKernel = "simple"
    path_level: PositiveFloat = 0.5
    sigma_floor: Fraction = 0.02
    updates: PositiveInt = 1

    def __post_init__(self) -> None:
        if self.guidance_distilled and self.guidance != 1:
            raise ValueError(
                f"guidance: {self.guidance} on top of guidance that is built into the weights; set it to 1, or set "
                "guidance_distilled to false"
            )
        if self.corrects and not self.guidance_distilled and self.guidance <= 1:
            raise ValueError(
                f"guidance: {self.guidance} rolls out without guidance, which makes pictures blurry; use the guidance "
                "that the model is sampled with, such as 4.5, or set guidance_distilled to true where it is built into "
                "the weights"
            )
        if not 0 < self.sigma_floor < 1:
            raise ValueError(
                f"sigma_floor: {self.sigma_floor}; expected a noise level between 0, where the target is singular, and "
                "1, where no point is left"
            )
        if self.path_kernel == "cps" and self.path_level > 1:
            raise ValueError(f"path_level: {self.path_level} is more than all noise of a cps step; use at most 1")

    @property
    def corrects(self) -> bool:
        """Whether there is anything beyond supervised fine-tuning."""
        return self.points > 0 and self.aux_weight > 0


class SOAR:
    """Learns from data alone; see the module. ``shift`` is the timestep shift of the model's scheduler."""

    def __init__(self, settings: SOARSettings, shift: float) -> None:
        self.settings, self.shift = settings, settings.shift or shift

    @property
    def updates(self) -> int:
        return self.settings.updates

    @property
    def guidance(self) -> float:
        return self.settings.guidance

    @property
    def negative(self) -> str | None:
        return self.settings.negative if self.settings.corrects and self.guidance != 1 else None

    def plan(self, iteration: int) -> None:
        return None

    def prepare(self, policy: Policy, samples: Rollout | Examples, scores: Scores | None) -> Batch:
        if not isinstance(samples, Examples):
            raise TypeError("soar learns from Examples, got a Rollout")
        s, clean = self.settings, samples.clean
        sources = [rng.generator(key, "sft") for key in samples.keys]  # the levels and noises of algorithms/sft.py
        draw = noising.logit_normal(
            sources, clean.shape[1:], mean=s.sigma_mean, std=s.sigma_std, shift=self.shift, device=clean.device
        )
        x = path.interpolate(clean, draw.noise, draw.sigma)
        if s.corrects:
            with torch.no_grad():
                velocity = guidance.classifier_free(policy.current, s.guidance)(x, draw.sigma, samples.cond).float()
        else:
            velocity = torch.zeros_like(x)
        start = _Start(clean, draw, x, velocity)
        image, zeros = torch.arange(clean.shape[0], device=clean.device), torch.zeros_like(draw.sigma)
        base = {"x": x, "sigma": draw.sigma, "target": start.target, "target_gap": zeros, "corrects": zeros}
        cond = Conditioning(samples.cond.tensors)  # only the rollout is guided
        parts = [Batch(base, image, cond, torch.ones_like(draw.sigma))]
        for number in range(s.paths if s.corrects else 0):
            keyed = [rng.generator(key, "soar", number) for key in samples.keys]
            parts.append(self._points(start, cond, number, keyed))
        return _joined(parts)

    def _points(self, start: _Start, cond: Conditioning, number: int, sources: list[torch.Generator]) -> Batch:
        """The points of rollout ``number``: N for each image, one after the other."""
        s, (clean, draw, x, velocity) = self.settings, start
        level = (draw.level - 1 / s.rollout_steps).clamp(min=0)
        after = schedule.shift_sigma(level, self.shift)
        kept = torch.ones_like(level)
        if number == 0:
            state = x - path.expand(draw.sigma - after, x) * velocity
        else:
            cap = float(schedule.shift_sigma(torch.tensor(1 - 1 / s.rollout_steps), self.shift))
            gaussian = rollout_step(s.path_kernel, x, velocity, draw.sigma, after, level=s.path_level, sigma_cap=cap)
            state = gaussian.mean + gaussian.std * rng.normal(sources, x.shape[1:], x.device)
            kept = (level > 0).float()  # as the authors do: a step that ends without noise is not stochastic
        back = torch.stack([torch.rand(s.points, generator=g) for g in sources]).flatten().to(x.device)
        image = torch.arange(x.shape[0], device=x.device).repeat_interleave(s.points)
        sigma = after[image] + back * (1 - after[image])
        points = path.interpolate(state[image], draw.noise[image], back)
        target = (points - clean[image]) / path.expand(sigma.clamp(min=s.sigma_floor), points)
        items = {
            "x": points,
            "sigma": sigma,
            "target": target,
            "target_gap": losses.mean_square(target - start.target[image]),
            "corrects": torch.ones_like(sigma),
        }
        return Batch(items, image, cond, s.aux_weight * kept[image] * (sigma >= s.sigma_floor))

    def losses(self, policy: Policy, batch: Batch) -> Terms:
        items = batch.items
        velocity = policy.current(items["x"], items["sigma"], batch.cond.select(batch.sample))
        error = losses.flow_matching(velocity, items["target"])
        # Shares of one mean over images and points, so that their sum is the loss of the paper.
        terms = {"flow_matching": error * (1 - items["corrects"]), "correction": error * items["corrects"]}
        return Terms(terms, {"target_gap": items["target_gap"]})


class _Start(NamedTuple):
    """Where the rollouts of B images begin."""

    clean: Tensor
    draw: Draw
    x: Tensor
    velocity: Tensor  # guided

    @property
    def target(self) -> Tensor:
        return path.velocity(self.clean, self.draw.noise)


def rollout_step(
    kind: PathKernel,
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    level: float,
    sigma_cap: float,
) -> Gaussian:
    """A stochastic rollout step from ``sigma`` to ``sigma_next``, both (B,); see `kernels.transition`.

        simple    mean = x - (sigma - sigma') v, std = level sqrt(sigma - sigma')
        sde       mean = (1 - sigma') (x - sigma v), std = sigma'
    """
    if kind == "simple":
        delta = sigma - sigma_next
        return Gaussian(x - path.expand(delta, x) * velocity, level * path.expand(delta.sqrt(), x))
    if kind == "sde":
        image = path.clean_from_velocity(x, velocity, sigma)
        return Gaussian((1 - path.expand(sigma_next, x)) * image, path.expand(sigma_next, x))
    return kernels.transition(kind, x, velocity, sigma, sigma_next, level=level, sigma_cap=sigma_cap)


def _joined(parts: list[Batch]) -> Batch:
    """Items of all parts in order; the conditioning is that of the same samples in each."""
    items = {name: torch.cat([part.items[name] for part in parts]) for name in parts[0].items}
    sample, weight = torch.cat([part.sample for part in parts]), torch.cat([part.weight for part in parts])
    return Batch(items, sample, parts[0].cond, weight)
