"""Deterministic samples from fixed noise, their scores, and how sure one may be of a difference between two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flowalign.core import guidance, rng, sampling, schedule
from flowalign.data.prompts import Prompt
from flowalign.models.base import Model
from flowalign.rewards import combine
from flowalign.rewards.combine import WeightedReward
from flowalign.types import Conditioning, FlowAlignError, VelocityFn


@dataclass(frozen=True)
class Evaluation:
    """N samples, seed-major within each prompt: sample i is of prompt ``prompt[i]`` and seed ``seed[i]``.

    Args:
        prompt, seed: (N,) int64.
        values: {reward: (N,) float32, nan = could not be scored}.
        subscores: {"reward/sub-score": (N,)}.
        media: (N, F, 3, H, W) float32 in [0, 1], on the CPU.
    """

    prompt: Tensor
    seed: Tensor
    values: Mapping[str, Tensor]
    subscores: Mapping[str, Tensor]
    media: Tensor


def velocity_of(model: Model, transformer: nn.Module | None = None) -> VelocityFn:
    """The model's velocity as a function; its present weights at every call."""
    module = model.transformer if transformer is None else transformer

    def velocity(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        return model.velocity(module, x, sigma, cond)

    return velocity


@torch.no_grad()
def sample(
    model: Model,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    sigmas: Tensor,
    velocity: VelocityFn | None = None,
    guidance_scale: float = 1.0,
    negative: str = "",
    size: tuple[int, int],
    batch_size: int = 32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Media (B, F, 3, H, W) on the CPU of B prompts with one seed each, by Euler steps.

    Noise is keyed by (seed, prompt text): one prompt and seed start from the same noise in every call.

    Args:
        sigmas: (T + 1,) from 1 to 0.
        velocity: None = of the model with its present weights.
        size: height and width in pixels.
    """
    field = guidance.classifier_free(velocity or velocity_of(model), guidance_scale)
    shape = model.latent_shape(*size)
    distinct = list(dict.fromkeys(prompts))
    row = {text: i for i, text in enumerate(distinct)}
    # One text at a time, as in training: an embedding must not depend on its neighbours.
    encoded = [model.encode([text], None if guidance_scale == 1 else negative).to(device) for text in distinct]
    parts = []
    for start in range(0, len(prompts), batch_size):
        texts, own = prompts[start : start + batch_size], seeds[start : start + batch_size]
        cond = Conditioning.cat([encoded[row[text]] for text in texts])
        noise = rng.normal([rng.generator("evaluate", s, t) for s, t in zip(own, texts, strict=True)], shape, device)
        parts.append(model.decode(sampling.integrate(field, noise, cond, sigmas).final).float().clamp(0, 1).cpu())
    return torch.cat(parts)


def evaluate(
    model: Model,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    rewards: Sequence[WeightedReward],
    *,
    velocity: VelocityFn | None = None,
    num_steps: int = 10,
    schedule_name: schedule.ScheduleName = "diffusers",
    guidance_scale: float = 1.0,
    negative: str = "",
    size: tuple[int, int],
    batch_size: int = 32,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Scores every prompt with every seed; two evaluations with the same prompts and seeds are paired.

    Args:
        velocity: what to evaluate; None = the model with its present weights.
        others: see `sample`.
    """
    prompt = torch.arange(len(prompts)).repeat_interleave(len(seeds))
    seed = torch.tensor(list(seeds)).repeat(len(prompts))
    chosen = [prompts[i] for i in prompt.tolist()]
    texts = [p.text for p in chosen]
    media = sample(
        model,
        texts,
        seed.tolist(),
        sigmas=schedule.sigmas(schedule_name, num_steps, model.shift),
        velocity=velocity,
        guidance_scale=guidance_scale,
        negative=negative,
        size=size,
        batch_size=batch_size,
        device=device,
    )
    columns = combine.score(rewards, media.to(device), texts, [p.metadata for p in chosen])
    return Evaluation(prompt, seed, columns.values, columns.subscores, media)


class Difference(NamedTuple):
    """A mean difference and its 95 % interval."""

    mean: float
    low: float
    high: float


def paired_bootstrap(
    before: Tensor, after: Tensor, groups: Tensor | Sequence[int], n: int = 10_000, seed: int = 0
) -> Difference:
    """Percentile bootstrap of ``mean(after - before)`` that resamples GROUPS, here prompts.

    Samples of one prompt rise and fall together; resampling them one by one would make the interval too narrow.

    Args:
        before, after: (N,) paired scores; pairs with a nan are left out.
        groups: (N,) which prompt each belongs to.
        n: resamples.

    Raises:
        FlowAlignError: fewer than two groups have a pair.
    """
    labels = np.asarray(groups if isinstance(groups, Sequence) else groups.cpu().numpy())
    if not before.shape == after.shape == labels.shape or before.ndim != 1:
        raise ValueError(
            f"paired_bootstrap: scores {tuple(before.shape)} and {tuple(after.shape)}, groups {labels.shape}; "
            "expected (N,) each"
        )
    difference = (after.double() - before.double()).cpu().numpy()
    known = np.isfinite(difference)
    _, index = np.unique(labels[known], return_inverse=True)
    counts = np.bincount(index)
    if len(counts) < 2:
        raise FlowAlignError(
            f"paired_bootstrap: {len(counts)} prompts with a score before and after; expected 2 or more"
        )
    sums = np.bincount(index, weights=difference[known])
    generator = np.random.default_rng(seed)
    means = np.empty(n)
    for start in range(0, n, 1000):  # in parts, so that memory stays small for thousands of prompts
        drawn = generator.integers(len(counts), size=(min(1000, n - start), len(counts)))
        means[start : start + len(drawn)] = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(sums.sum() / counts.sum()), float(low), float(high))
