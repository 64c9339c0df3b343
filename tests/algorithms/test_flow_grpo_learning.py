"""Flow-GRPO on a toy: divergence from the reference, learning, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowalign.core import combination, guidance, losses, rng
from flowalign.types import Conditioning, Policy
from tests.algorithms.toy import (
    GROUPS,
    KL_FORMS,
    Toy,
    build,
    collect,
    frozen,
    perturbed,
    prepared,
    score,
    total,
)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("form", KL_FORMS)
def test_kl_is_exactly_zero_at_the_reference_and_has_a_gradient_away_from_it(form: str, scale: float) -> None:
    model = Toy()
    constant = score(torch.full((8,), 0.5))  # no advantage: the policy term vanishes
    algorithm, policy, _, batch = prepared(model, constant, kl=form, kl_weight=0.5, guidance=scale)
    assert float(total(algorithm.losses(policy, batch)).detach().abs().max()) == 0.0
    perturbed(model, 0.05)
    loss = total(algorithm.losses(policy, batch))
    assert bool((loss > 0).all())
    gradients = torch.autograd.grad(loss.mean(), list(model.parameters()))
    assert all(float(gradient.abs().max()) > 1e-6 for gradient in gradients)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("form", ["v", "transition"])
def test_kl_by_hand(form: str, scale: float) -> None:
    """kl_weight times mean (v - v_ref)^2, or times J^2 / (2 s^2) of it, with guided velocities on both sides."""
    model, weight, a = Toy(), 0.3, 0.7
    constant = score(torch.full((8,), 0.5))
    fields = {"kl": form, "kl_weight": weight, "guidance": scale, "window_range": (1, 4)}
    algorithm, policy, samples, batch = prepared(model, constant, **fields)
    perturbed(model, 0.05)
    trajectory = samples.trajectory
    got = total(algorithm.losses(policy, batch)).detach()
    columns = []
    for k in range(trajectory.steps.shape[1]):
        at = trajectory.steps[:, k]
        sigma, step = trajectory.sigmas[at], trajectory.sigmas[at] - trajectory.sigmas[at + 1]
        with torch.no_grad():
            current, reference = (
                guidance.classifier_free(v, scale)(trajectory.states[:, k, 0], sigma, samples.cond)
                for v in (policy.current, policy.reference)
            )
        distance = (current - reference).pow(2).mean((1, 2, 3))
        factor = step * (1 + a**2 / 2) ** 2 * (1 - sigma) / (2 * a**2 * sigma) if form == "transition" else 1.0
        columns.append(weight * factor * distance)
    # The same numbers whatever the order of items: sort the items of each sample.
    expected = torch.stack(columns, 1).sort(1).values
    for b in range(len(GROUPS)):
        torch.testing.assert_close(got[batch.sample == b].sort().values, expected[b], atol=1e-8, rtol=1e-3)


# ---- learning


class GaussianPolicy(nn.Module):
    """The exact velocity of data N(mean, .25) with a trainable mean for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(2, 1, 1))

    def forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        s = sigma[:, None, None, None]
        residual = (x - (1 - s) * self.mean) / ((1 - s) ** 2 * 0.25 + s**2)
        return s * residual - (self.mean + (1 - s) * 0.25 * residual)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": "full"},
        {"window": "random", "window_size": 3, "kl": "v", "kl_weight": 1e-3},
        {"window": "full", "kernel": "cps", "level": 0.8},
    ],
)
def test_a_few_iterations_raise_the_reward(fields: dict[str, Any]) -> None:
    """Reward: minus the distance of the samples' channel means to (.6, -.6); the policy starts from means of 0."""
    target = torch.tensor([0.6, -0.6])

    def reward(final: Tensor) -> Tensor:
        return -(final.mean((2, 3)) - target).abs().sum(1)

    model = GaussianPolicy()
    algorithm, policy = build(clip_range=0.02, **fields), Policy(model, frozen(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    groups = torch.arange(4).repeat_interleave(12)
    history = []
    for iteration in range(8):
        samples = collect(algorithm, policy, groups, iteration)
        scores = score(reward(samples.trajectory.final), groups)
        history.append(float(combination.total(scores).mean()))
        batch = algorithm.prepare(policy, samples, scores)
        order = torch.randperm(len(groups), generator=rng.generator("split", iteration))
        for part in order.chunk(algorithm.updates):
            items = batch.select(torch.isin(batch.sample, part).nonzero().flatten())
            loss = (items.weight * total(algorithm.losses(policy, items))).sum() / items.weight.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    # At the start the distance is about 1.2; 48 samples of 16 pixels each tell means to .02. Half of it must be gone.
    assert history[0] < -1.0
    assert history[-1] > history[0] + 0.4
    assert bool((model.mean.detach().flatten().sign() == target.sign()).all())


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"window_range": (0, 12)}, "window_range"),
        ({"window_range": (-1, 3)}, "window_range"),
        ({"window_range": (3, 3)}, r"window_range|window_size"),
        ({"window_size": 0}, "window_size"),
        ({"window_size": 5, "window_range": (0, 4)}, r"window_size|window_range"),
        ({"level": 0.0}, "level"),
        ({"level": -0.5}, "level"),
        ({"kernel": "ode"}, "kernel"),
        ({"kernel": "heun"}, "kernel"),
        ({"kl": "v", "kl_weight": 0.0}, "kl"),
        ({"kl": "none", "kl_weight": 0.1}, "kl"),
        ({"kl": "v", "kl_weight": -0.1}, "kl_weight"),
        ({"clip_range": 0.0}, "clip_range"),
        ({"clip_range": -1e-4}, "clip_range"),
        ({"advantage_clip": 0.0}, "advantage_clip"),
        ({"updates": 0}, "updates"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 1, "window": "full"}, "num_steps"),
        ({"guidance": float("nan")}, "guidance"),
        ({"clip_rnage": 1e-4}, "clip_rnage"),
    ],
)
def test_impossible_settings_are_refused_by_name(fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        build(**fields)


def test_loss_terms_use_the_shared_mathematics() -> None:
    """`losses.kl` and the algorithm agree on the estimators that a hand derivation of velocities does not reach."""
    model = Toy()
    algorithm, policy, _, batch = prepared(model, score(torch.full((8,), 0.5)), kl="k3", kl_weight=2.0)
    perturbed(model, 0.05)
    # The rollout policy is the reference, so replay gives log p - log p_ref itself.
    delta = algorithm.replay(policy, batch).detach().double()
    got = total(algorithm.losses(policy, batch)).detach().double()
    torch.testing.assert_close(got, 2 * ((-delta).exp() + delta - 1), atol=1e-6, rtol=1e-3)
    assert losses.Evaluation._fields == ("gaussian", "velocity", "log_prob")
