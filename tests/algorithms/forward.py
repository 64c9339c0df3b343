"""Endpoints, items and gradients for the methods of the forward process, on a toy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.algorithms.base import Algorithm
from flowalign.core import guidance, rng, sampling
from flowalign.types import Batch, Conditioning, Policy, Rollout, Scores, VelocityFn
from tests.algorithms.toy import GROUPS, SHAPE, Toy, frozen, perturbed, score

KEYS = tuple(range(8))


def collect(algorithm: Algorithm, policy: Policy, keys: tuple[int, ...] = KEYS) -> Rollout:
    """As the trainer draws them: by the behaviour policy, along the plan."""
    plan = algorithm.plan(0)
    assert plan is not None and plan.window is None
    text = torch.zeros(len(keys), 1)
    cond = Conditioning({"text": text}, None if plan.guidance == 1 else {"text": text - 0.1})
    noise = rng.normal([rng.generator("x", k) for k in keys], SHAPE)
    velocity = guidance.classifier_free(policy.behaviour, plan.guidance)
    with torch.no_grad():
        trajectory = sampling.integrate(velocity, noise, cond, plan.sigmas)
    media = torch.zeros(len(keys), 1, 3, 4, 4)
    return Rollout(("p",) * len(keys), GROUPS[: len(keys)], keys, cond, trajectory, media)


def prepared(algorithm: Algorithm, model: nn.Module, scores: Scores | None = None) -> tuple[Policy, Batch]:
    policy = Policy(model, frozen(model))
    return policy, algorithm.prepare(policy, collect(algorithm, policy), scores or score())


def apart() -> Policy:
    """A policy whose four velocities all differ."""
    reference, behaviour, anchor, current = (perturbed(Toy(), size) for size in (0.0, 0.05, 0.1, 0.2))
    return Policy(current, frozen(reference), frozen(behaviour), frozen(anchor))


def shown(policy: VelocityFn, batch: Batch) -> Tensor:
    """The velocity of each item, in double and without gradient."""
    with torch.no_grad():
        return policy(batch.items["x"], batch.items["sigma"], batch.cond.select(batch.sample)).double()


def gradient(algorithm: Algorithm, policy: Policy, batch: Batch) -> Tensor:
    """Of the summed losses in the velocity of each item, in double."""
    seen = []

    def watched(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        seen.append(policy.current(x, sigma, cond).detach().requires_grad_())
        return seen[-1]

    losses = algorithm.losses(replace(policy, current=watched), batch).losses
    torch.stack(list(losses.values())).sum().backward()
    (velocity,) = seen  # asked for once: everything else is without gradient
    assert velocity.grad is not None
    return velocity.grad.double()


def column(value: Tensor) -> Tensor:
    """(n,) to (n, 1, 1, 1), in double."""
    return value.double().view(-1, 1, 1, 1)


def built(kind: type, settings: type, defaults: dict[str, Any], shift: float, fields: dict[str, Any]) -> Any:
    """An algorithm whose settings went through pydantic, as those of a recipe do."""
    from pydantic import TypeAdapter

    return kind(TypeAdapter(settings).validate_python(defaults | fields), shift=shift)
