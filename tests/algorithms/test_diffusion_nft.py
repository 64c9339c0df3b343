"""DiffusionNFT on a toy: what it learns from, its gradient by hand, and that it raises a reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from flowalign.algorithms.base import KeepsWeights
from flowalign.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTSettings
from flowalign.core import schedule
from flowalign.types import Conditioning, Examples, Policy
from tests.algorithms.forward import apart, built, collect, column, gradient, prepared, shown
from tests.algorithms.toy import EPS, REWARDS, SHAPE, SHIFT, Toy, frozen, perturbed, score


def build(**fields: Any) -> DiffusionNFT:
    defaults = {
        "name": "diffusion_nft",
        "num_steps": 6,
        "noisings": 3,
        "kl_weight": 0.0,
        "advantage_std": "group",
        "old_policy": "on_policy",
    }
    return built(DiffusionNFT, DiffusionNFTSettings, defaults, SHIFT, fields)


def test_items_are_endpoints_noised_to_different_levels_of_the_grid() -> None:
    algorithm, model = build(), Toy()
    policy, batch = prepared(algorithm, model)
    assert len(batch) == 8 * 3
    final = collect(algorithm, policy).trajectory.final.repeat_interleave(3, 0)
    grid = schedule.diffusers_shift(6, SHIFT)[:5]
    for levels in batch.items["sigma"].view(8, 3):
        assert len(set(levels.tolist())) == 3
        assert torch.isin(levels, grid).all()
    sigma = batch.items["sigma"].view(-1, 1, 1, 1)
    noise = (batch.items["x"] - (1 - sigma) * final) / sigma
    torch.testing.assert_close(batch.items["target"], noise - final, atol=1e-5, rtol=1e-5)
    # 768 standard normal draws: mean within 4 / sqrt(768), spread within 4 / sqrt(2 * 768).
    assert abs(float(noise.mean())) < 0.15
    assert abs(float(noise.std()) - 1) < 0.11


def test_items_depend_on_the_keys_and_not_on_the_batch() -> None:
    algorithm, model = build(), Toy()
    policy, whole = prepared(algorithm, model)
    part, scores = collect(algorithm, policy, (0, 1, 2, 3)), score()
    first = algorithm.prepare(policy, part, replace(scores, local=torch.arange(4)))
    for name in ("sigma", "advantage"):
        assert torch.equal(first.items[name], whole.items[name][:12])
    assert torch.allclose(first.items["x"], whole.items["x"][:12], atol=1e-6)


def test_only_the_noisiest_levels_are_learnt_from_where_asked() -> None:
    algorithm = build(noisings=2, noisy_levels=2)
    _, batch = prepared(algorithm, Toy())
    drawn = batch.items["sigma"].view(8, 2).sort(1, descending=True).values
    assert torch.equal(drawn, algorithm.sigmas[:2].expand(8, 2))


def advantage_by_hand(noisings: int = 3) -> torch.Tensor:
    rewards = REWARDS.double().view(2, 4)
    spread = rewards.std(1, correction=0, keepdim=True) + EPS
    return column(((rewards - rewards.mean(1, keepdim=True)) / spread).flatten().repeat_interleave(noisings))


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("old_policy", ["on_policy", "slow"])
def test_gradient_by_hand(beta: float, old_policy: str) -> None:
    """At v = v_old the gradient in v is 2 A (v_old - Y) sigma^2 / (w d), whatever b: spec 4, derived there."""
    algorithm, model = build(nft_beta=beta, old_policy=old_policy), Toy()
    policy, batch = prepared(algorithm, model)
    target, v = batch.items["target"].double(), shown(policy.current, batch)
    sigma, advantage = column(batch.items["sigma"]), advantage_by_hand()
    weight = (sigma * (target - v)).abs().mean((1, 2, 3), keepdim=True)
    expected = 2 * advantage * (v - target) * sigma**2 / (weight * v[0].numel())
    torch.testing.assert_close(gradient(algorithm, policy, batch), expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_gradient_by_hand_where_the_old_policy_lags(beta: float) -> None:
    """a sigma^2 2 / d (r (v+ - Y) / w+ - (1 - r) (v- - Y) / w-), since v+ and v- change by b and -b with v."""
    algorithm, policy = build(nft_beta=beta, old_policy="ocr", advantage_clip=3.0), apart()
    batch = algorithm.prepare(policy, collect(algorithm, policy), score())
    target, v, old = batch.items["target"].double(), shown(policy.current, batch), shown(policy.behaviour, batch)
    sigma, r = column(batch.items["sigma"]), (advantage_by_hand() / 6 + 0.5).clamp(0, 1)
    pull = []
    for sign in (1, -1):
        off = old + sign * beta * (v - old) - target
        pull.append(off / (sigma * off).abs().mean((1, 2, 3), keepdim=True))
    expected = 3 * sigma**2 * 2 / v[0].numel() * (r * pull[0] - (1 - r) * pull[1])
    torch.testing.assert_close(gradient(algorithm, policy, batch), expected, atol=1e-5, rtol=1e-3)
    assert float((v - old).abs().mean()) > 0.05, "the old policy is another one"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", lambda a: a),
        ("positive_only", lambda a: a * (a > 0)),
        ("negative_only", lambda a: a * (a < 0)),
        ("one_only", lambda a: 1.0 * (a > 0)),
        ("binary", lambda a: 1.0 * (a > 0) - 1.0 * (a < 0)),
    ],
)
def test_what_of_the_advantage_counts(mode: str, expected: Any) -> None:
    """On-policy, the gradient is proportional to what counts of the advantage."""
    policy, batch = prepared(build(), Toy())
    whole, advantage = gradient(build(), policy, batch), advantage_by_hand()
    got = gradient(build(advantage_mode=mode), policy, batch)
    torch.testing.assert_close(got, whole * expected(advantage) / advantage, atol=1e-5, rtol=1e-3)


def test_the_old_policy_follows_by_the_published_schedules() -> None:
    on_policy, slow, ocr = (build(old_policy=name) for name in ("on_policy", "slow", "ocr"))
    assert isinstance(slow, KeepsWeights)
    assert on_policy.decays(0) == on_policy.decays(1000) == {}, "the weights in training themselves"
    assert build(updates=2).decays(7) == {"behaviour": 0.0}, "but not from the second update on"
    slowing = [slow.decays(i)["behaviour"] for i in (0, 99, 498, 499, 9999)]
    assert slowing == pytest.approx([0.001, 0.1, 0.499, 0.5, 0.5])
    halting = [ocr.decays(i)["behaviour"] for i in (0, 74, 75, 174, 207, 208, 9999)]
    assert halting == pytest.approx([0, 0, 0.0075, 0.75, 0.9975, 0.999, 0.999])
    twice = build(old_policy="slow", updates=2)
    assert twice.decays(0)["behaviour"] == pytest.approx(0.002), "optimiser steps, not iterations"
    assert DiffusionNFTSettings(name="diffusion_nft").old_policy == "slow", "the published default"


def test_equal_rewards_teach_nothing_and_unscored_samples_neither() -> None:
    algorithm, model = build(), Toy()
    policy = Policy(model, frozen(model))
    rollout = collect(algorithm, policy)
    rewards = REWARDS.clone()
    rewards[:4] = 0.5
    rewards[5] = torch.nan
    weight = algorithm.prepare(policy, rollout, score(rewards)).weight.view(8, 3)
    assert (weight[:4] == 0).all()
    assert (weight[5] == 0).all()
    assert (weight[[4, 6, 7]] == 1).all()


def test_kl_is_zero_at_the_reference_and_has_its_weight_away_from_it() -> None:
    algorithm, model = build(kl_weight=0.3), Toy()
    policy, batch = prepared(algorithm, model)
    assert float(algorithm.losses(policy, batch).losses["kl"].detach().abs().max()) == 0
    moved = perturbed(model, 0.1)
    terms = algorithm.losses(Policy(moved, frozen(model)), batch)
    cond = batch.cond.select(batch.sample)
    gap = moved(batch.items["x"], batch.items["sigma"], cond) - model(batch.items["x"], batch.items["sigma"], cond)
    torch.testing.assert_close(terms.losses["kl"], 0.3 * gap.square().flatten(1).mean(1))


def test_metrics_say_how_far_the_weights_are_apart() -> None:
    algorithm, policy = build(old_policy="slow", kl_weight=1.0), apart()
    batch = algorithm.prepare(policy, collect(algorithm, policy), score())
    metrics = algorithm.losses(policy, batch).metrics
    v = shown(policy.current, batch)
    for name, other in (("old_deviation", policy.behaviour), ("kl", policy.reference)):
        expected = (v - shown(other, batch)).square().mean((1, 2, 3))
        torch.testing.assert_close(metrics[name].double(), expected, atol=1e-7, rtol=1e-4)
        assert not metrics[name].requires_grad


def test_a_few_iterations_raise_the_reward() -> None:
    """Reward: nearness of the endpoint's mean to 1."""
    algorithm, model = build(), Toy()
    policy = Policy(model, frozen(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    means = []
    for iteration in range(40):
        rollout = collect(algorithm, policy, tuple(range(8 * iteration, 8 * iteration + 8)))
        rewards = -(rollout.trajectory.final.flatten(1).mean(1) - 1).abs()
        means.append(float(rewards.mean()))
        batch = algorithm.prepare(policy, rollout, score(rewards))
        terms = algorithm.losses(policy, batch)
        loss = (terms.losses["policy"] * batch.weight).sum() / batch.weight.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1


def test_impossible_settings_and_foreign_samples_are_refused() -> None:
    with pytest.raises(ValidationError, match="noisings: 6"):
        build(noisings=6)
    with pytest.raises(ValidationError, match="noisings: 3 different levels out of 2"):
        build(noisings=3, noisy_levels=2)
    with pytest.raises(ValidationError, match="noisy_levels: 6"):
        build(noisy_levels=6)
    for name, value in (("updates", 0), ("old_policy", "lagged"), ("nft_beta", 0), ("advantage_mode", "ones")):
        with pytest.raises(ValidationError, match=name):
            build(**{name: value})
    algorithm, model = build(), Toy()
    examples = Examples(("p",), (0,), Conditioning({"text": torch.zeros(1, 1)}), torch.zeros(1, *SHAPE))
    with pytest.raises(TypeError, match="diffusion_nft learns from a scored Rollout"):
        algorithm.prepare(Policy(model, frozen(model)), examples, None)
