"""A tiny policy, and rollouts and scores for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from flowalign.algorithms.flow_grpo import FlowGRPO, FlowGRPOSettings
from flowalign.core import guidance, rng, sampling
from flowalign.types import Batch, Conditioning, Policy, Rollout, Scores, Terms

SHAPE, SHIFT, EPS = (2, 4, 4), 3.0, 1e-4
KL_FORMS = ["transition", "flow_grpo", "x", "v", "k2", "k3"]
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
REWARDS = torch.tensor([0.1, 0.9, 0.4, 0.3, 0.8, 0.2, 0.25, 0.7])


class Toy(nn.Module):
    """A nonlinear velocity that mixes pixels and depends on sigma and text."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2, 2, 3, padding=1)
        generator = rng.generator("toy")
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))

    def forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        gain = 0.5 + 0.3 * sigma + cond.tensors["text"][:, 0]
        return torch.tanh(self.mix(x)) + gain[:, None, None, None] * x


def frozen(model: nn.Module) -> Callable[..., Tensor]:
    twin = copy.deepcopy(model)

    def velocity(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        with torch.no_grad():
            return twin(x, sigma, cond)

    return velocity


def perturbed(model: nn.Module, size: float) -> nn.Module:
    generator = rng.generator("perturbation")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))
    return model


def build(**fields: Any) -> FlowGRPO:
    """Through pydantic, as a recipe does."""
    defaults = {
        "name": "flow_grpo",
        "num_steps": 6,
        "schedule": "linear_shift",
        "window": "random",
        "window_range": (0, 4),
    }
    return FlowGRPO(TypeAdapter(FlowGRPOSettings).validate_python(defaults | fields), shift=SHIFT)


def collect(algorithm: FlowGRPO, policy: Policy, groups: Tensor = GROUPS, iteration: int = 0) -> Rollout:
    plan = algorithm.plan(iteration)
    keys = tuple(rng.key(iteration, b) for b in range(len(groups)))
    generators = [rng.generator(key) for key in keys]
    text = 0.1 * torch.randn(len(groups), 1, generator=rng.generator("text"))
    cond = Conditioning({"text": text}, {"text": torch.zeros(len(groups), 1)})
    with torch.no_grad():
        trajectory = sampling.integrate(
            guidance.classifier_free(policy.current, plan.guidance),
            rng.normal(generators, SHAPE),
            cond,
            plan.sigmas,
            kernel=plan.kernel,
            level=plan.level,
            windows=[plan.window(rng.generator("window", iteration, g)) for g in groups.tolist()],
            noise=lambda: rng.normal(generators, SHAPE),
            storage=plan.storage,
            log_prob_form=plan.log_prob,
        )
    media = torch.zeros(len(groups), 1, 3, 8, 8)
    return Rollout(tuple(f"prompt {g}" for g in groups.tolist()), groups, keys, cond, trajectory, media)


def score(rewards: Tensor = REWARDS, groups: Tensor = GROUPS) -> Scores:
    return Scores({"toy": rewards}, {"toy": 1.0}, groups, torch.arange(len(groups)))


def prepared(
    model: nn.Module | None = None, scores: Scores | None = None, **fields: Any
) -> tuple[FlowGRPO, Policy, Rollout, Batch]:
    model = model or Toy()
    algorithm, policy = build(**fields), Policy(model, frozen(model))
    samples = collect(algorithm, policy)
    return algorithm, policy, samples, algorithm.prepare(policy, samples, scores or score())


def total(terms: Terms) -> Tensor:
    return torch.stack(list(terms.losses.values())).sum(0)


def advantages(rewards: Tensor, groups: Tensor, std: str, clip: float = 5.0) -> np.ndarray:
    value, label = rewards.double().numpy(), groups.numpy()
    result = np.zeros(len(value))
    for name in np.unique(label):
        rows = label == name
        spread = value[rows].std() if std == "group" else value.std()
        result[rows] = (value[rows] - value[rows].mean()) / (spread + EPS)
    return np.clip(result, -clip, clip)


# ---- the plan
