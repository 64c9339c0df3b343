"""RAM on a toy: its endpoints, levels, target and weight sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from flowalign.algorithms.base import KeepsWeights
from flowalign.algorithms.ram import RAM, RAMSettings
from flowalign.core import rng
from flowalign.types import Conditioning, Examples, Policy
from tests.algorithms.forward import apart, built, collect, column, prepared, shown
from tests.algorithms.toy import EPS, GROUPS, REWARDS, SHAPE, SHIFT, Toy, frozen, score


def build(**fields: Any) -> RAM:
    defaults = {"name": "ram", "num_steps": 6, "noisings": 3, "guidance": 1, "reward_multiplier": 2.0}
    return built(RAM, RAMSettings, defaults, SHIFT, fields)


def advantage_by_hand(rewards: torch.Tensor = REWARDS) -> torch.Tensor:
    """Centred in each group, divided by the spread of all."""
    value = rewards.double().view(2, 4)
    return ((value - value.mean(1, keepdim=True)) / (value.std(correction=0) + EPS)).flatten()


def test_defaults_are_the_published_ones() -> None:
    settings = RAMSettings(name="ram")
    assert (settings.target, settings.reward_multiplier, settings.noisings, settings.sigma_power) == ("old", 100, 8, 1)
    assert (settings.decay_rate, settings.decay_cap, settings.advantage_clip, settings.updates) == (0.01, 0.9, None, 1)
    assert (settings.num_steps, settings.guidance, settings.normalise) == (20, 4.5, False)


def test_rollouts_are_guided_where_asked_and_what_is_learnt_is_not() -> None:
    algorithm, policy = build(guidance=3.0), apart()
    assert algorithm.plan(0).guidance == 3.0
    rows = []

    def watched(x: torch.Tensor, sigma: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        rows.append((x.shape[0], cond.negative))
        return policy.behaviour(x, sigma, cond)

    guided = collect(algorithm, replace(policy, behaviour=watched))
    assert {n for n, _ in rows} == {16}, "both branches in one pass"
    batch = algorithm.prepare(policy, guided, score())
    rows.clear()
    algorithm.losses(replace(policy, behaviour=watched), batch)
    assert [n for n, _ in rows] == [24]


def test_levels_follow_the_power_law_and_keys() -> None:
    algorithm = build(noisings=500, sigma_power=1.0)
    policy, batch = prepared(algorithm, Toy())
    square = batch.items["sigma"].double().square().sort().values
    deviation = (square - torch.arange(4000).double() / 4000).abs().max()
    assert float(deviation) < 2.2 / 4000**0.5  # sigma^2 is uniform; Kolmogorov, a chance of 1e-4
    part = algorithm.prepare(policy, collect(algorithm, policy, (0, 1)), replace(score(), local=torch.arange(2)))
    assert torch.equal(part.items["sigma"], batch.items["sigma"][:1000])
    final = collect(algorithm, policy).trajectory.final
    sigma = batch.items["sigma"].view(-1, 1, 1, 1)
    recovered = batch.items["x"] - sigma * batch.items["target"]
    torch.testing.assert_close(recovered, final[batch.sample], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", ["old", "self"])
@pytest.mark.parametrize("normalise", [False, True])
def test_loss_by_hand(target: str, normalise: bool) -> None:
    lag = {} if target == "old" else {"decay_cap": 0.0}
    algorithm, policy = build(target=target, normalise=normalise, **lag), apart()
    batch = algorithm.prepare(policy, collect(algorithm, policy), score())
    v, reference, old = (shown(p, batch) for p in (policy.current, policy.reference, policy.behaviour))
    pull = 2 * column(advantage_by_hand().repeat_interleave(3))
    aim = reference + pull * (batch.items["target"].double() - (old if target == "old" else v))
    terms = algorithm.losses(policy, batch)
    expected = (v - aim).square().mean((1, 2, 3)) / (2 if normalise else 1)
    torch.testing.assert_close(terms.losses["policy"].double(), expected, atol=1e-6, rtol=1e-4)
    metrics = {
        "target_norm": aim.square().mean((1, 2, 3)).sqrt(),
        "reference_deviation": (v - reference).square().mean((1, 2, 3)),
    }
    if target == "old":
        metrics["old_deviation"] = (v - old).square().mean((1, 2, 3))
    assert terms.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(terms.metrics[name].double(), value, atol=1e-6, rtol=1e-4)
        assert not terms.metrics[name].requires_grad


def test_a_constant_reward_has_no_loss_and_no_gradient_at_the_start() -> None:
    """Exactly none: the correction is 0 and the reference is the model itself. The items stay, to pull to it later."""
    model, algorithm = Toy(), build(reward_multiplier=1000.0)
    policy, batch = prepared(algorithm, model, score(torch.full((8,), 0.1)))
    loss = algorithm.losses(policy, batch).losses["policy"]
    assert loss.abs().max() == 0 and batch.weight.min() == 1
    loss.sum().backward()
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())


def test_rewards_are_centred_within_their_group() -> None:
    """An offset of each group changes no group's gradient, up to the spread of all rewards that divides them."""
    algorithm, policy = build(), apart()
    rollout = collect(algorithm, policy)
    shifted = REWARDS + torch.where(GROUPS == 0, 5.0, -3.0)
    plain, moved = (algorithm.prepare(policy, rollout, score(r)).items["advantage"] for r in (REWARDS, shifted))
    torch.testing.assert_close(plain.double(), advantage_by_hand().repeat_interleave(3), atol=1e-5, rtol=1e-5)
    scale = (float(REWARDS.double().std(correction=0)) + EPS) / (float(shifted.double().std(correction=0)) + EPS)
    torch.testing.assert_close(moved, plain * scale, atol=1e-5, rtol=1e-3)
    for group in range(2):
        assert abs(float(plain.view(2, 12)[group].sum())) < 1e-5


def test_advantages_are_clipped_only_where_asked_and_unscored_samples_weigh_nothing() -> None:
    rewards = torch.zeros(64)
    rewards[3], rewards[5] = 1.0, torch.nan
    groups = torch.zeros(64, dtype=torch.int64)
    policy = apart()
    for clip, largest in ((None, (1 - 1 / 63) / ((62**0.5) / 63 + EPS)), (2.0, 2.0)):
        algorithm = build(advantage_clip=clip, noisings=1)
        rollout = replace(collect(algorithm, policy, tuple(range(8))), group=groups[:8])
        batch = algorithm.prepare(policy, rollout, replace(score(rewards, groups), local=torch.arange(8)))
        assert float(batch.items["advantage"].max()) == pytest.approx(largest, rel=1e-5)
        assert batch.weight.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


def test_weight_sets() -> None:
    lagged = build()
    assert isinstance(lagged, KeepsWeights)
    decays = [lagged.decays(i)["behaviour"] for i in (0, 1, 49, 89, 90, 5000)]
    assert decays == pytest.approx([0.01, 0.02, 0.5, 0.9, 0.9, 0.9])
    assert build(updates=2).decays(0)["behaviour"] == pytest.approx(0.02), "optimiser steps"
    assert build(decay_cap=0.0).decays(3) == {}
    assert build(decay_cap=0.0, updates=2).decays(3) == {"behaviour": 0.0}
    staged = build(decay_cap=0.0, reference_every=3)
    assert [staged.decays(i)["reference"] for i in range(7)] == [1, 1, 0, 1, 1, 0, 1]


def test_large_multipliers_stay_finite() -> None:
    algorithm, policy = build(reward_multiplier=1e6), apart()
    batch = algorithm.prepare(policy, collect(algorithm, policy), score())
    loss = algorithm.losses(policy, batch).losses["policy"]
    assert loss.dtype == torch.float32 and bool(torch.isfinite(loss).all())


def test_a_few_iterations_raise_the_reward() -> None:
    """Reward: nearness of the endpoint's mean to 1; the old policy and the reference are kept as the trainer does."""
    algorithm, model = build(reward_multiplier=30.0, noisings=8), Toy()
    reference, behaviour = frozen(model), Toy()
    policy = Policy(model, reference, frozen(behaviour))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    means = []
    for iteration in range(40):
        rollout = collect(algorithm, policy, tuple(rng.key(iteration, b) for b in range(8)))
        rewards = -(rollout.trajectory.final.flatten(1).mean(1) - 1).abs()
        means.append(float(rewards.mean()))
        batch = algorithm.prepare(policy, rollout, score(rewards))
        loss = (algorithm.losses(policy, batch).losses["policy"] * batch.weight).sum() / batch.weight.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            decay = algorithm.decays(iteration)["behaviour"]
            for old, new in zip(behaviour.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 1 - decay)
        policy = Policy(model, reference, frozen(behaviour))
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"reward_multiplier": 0}, "reward_multiplier"),
        ({"reward_multiplier": -1.0}, "reward_multiplier"),
        ({"decay_cap": 1.0}, "decay_cap"),
        ({"decay_rate": 0.0}, "decay_rate: 0 never reaches decay_cap 0.9"),
        ({"target": "self"}, "target: 'self' is for endpoints of the weights in training, but decay_cap 0.9"),
        ({"target": "self", "decay_cap": 0.0, "updates": 2}, "updates 2"),
        ({"num_steps": 1}, "num_steps: 1 step"),
        ({"noisings": 0}, "noisings"),
        ({"sigma_power": -0.5}, "sigma_power"),
        ({"reference_every": 0}, "reference_every"),
        ({"guidance": 0.0}, "guidance"),
        ({"advantage_clip": 0.0}, "advantage_clip"),
    ],
)
def test_impossible_settings_are_refused_by_name(fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValidationError, match=culprit):
        build(**fields)


def test_foreign_samples_are_refused() -> None:
    examples = Examples(("p",), (0,), Conditioning({"text": torch.zeros(1, 1)}), torch.zeros(1, *SHAPE))
    with pytest.raises(TypeError, match="ram learns from a scored Rollout"):
        build().prepare(apart(), examples, None)
