"""AWM on a toy: its levels, its weightings, its gradient by hand, its two pulls, and that it raises a reward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from flowalign.algorithms.awm import AWM, AWMSettings, log_likelihood
from flowalign.algorithms.base import KeepsWeights
from flowalign.core import rng
from flowalign.types import Conditioning, Examples, Policy
from tests.algorithms.forward import apart, built, collect, column, gradient, prepared, shown
from tests.algorithms.toy import EPS, REWARDS, SHAPE, SHIFT, Toy, frozen, score

WEIGHTINGS = ["uniform", "t", "t2", "huber", "ghuber"]


def build(**fields: Any) -> AWM:
    defaults = {"name": "awm", "num_steps": 6, "fraction": 1.0, "noisings": 3, "kl_weight": 0.0, "anchor_weight": 0.0}
    return built(AWM, AWMSettings, defaults, SHIFT, fields)


def advantage_by_hand() -> torch.Tensor:
    """Of each item, with the spread of all rewards, clipped at 5 and scaled to at most 1."""
    value = REWARDS.double().view(2, 4)
    return column(((value - value.mean(1, keepdim=True)) / (value.std(correction=0) + EPS) / 5).flatten())


def test_defaults_are_the_published_ones() -> None:
    s = AWMSettings(name="awm")
    assert (s.num_steps, s.noisings, s.levels, s.weighting, s.ghuber_power) == (14, 6, (1, 12), "ghuber", 0.25)
    assert (s.clip_range, s.advantage_clip, s.advantage_max, s.advantage_std) == (1.0, 5.0, 1.0, "global")
    assert (s.anchor_weight, s.anchor_rate, s.anchor_cap, s.kl_form, s.updates) == (1.0, 0.001, 0.3, "uniform", 1)


@pytest.mark.parametrize(("first", "parts"), [(False, [{1}, {2}, {3, 4}]), (True, [{0}, {1, 2}, {3, 4}])])
def test_levels_are_one_of_each_part_of_the_grid(first: bool, parts: list[set[int]]) -> None:
    algorithm = build(first_level=first, fraction=0.9)
    _, batch = prepared(algorithm, Toy())
    grid = {float(value): i for i, value in enumerate(algorithm.sigmas)}
    for levels in batch.items["sigma"].view(8, 3).tolist():
        assert all(grid[level] in part for level, part in zip(levels, parts, strict=True))
    assert {grid[level] for level in batch.items["sigma"].tolist()} == set().union(*parts)


def test_weightings_by_hand() -> None:
    """Values of the formulae of the authors' code at e = 0.09, sigma = 0.5; the constants make 0 of e = 0."""
    error, sigma = torch.tensor([0.09, 0.0], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    expected = {
        "uniform": -0.09,
        "t": -0.045,
        "t2": -0.0225,
        "huber": -0.5 * (0.3 - 1e-5),
        "ghuber": -0.5 / 0.25 * (math.sqrt(0.3) - math.sqrt(math.sqrt(1e-10))),
    }
    for name in WEIGHTINGS:
        got = log_likelihood(name, error, sigma, 0.25)
        assert float(got[0]) == pytest.approx(expected[name], rel=1e-6)
        assert float(got[1]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_gradient_by_hand(weighting: str) -> None:
    """-A d log p / dv, where d e / dv = 2 (v - Y) / d."""
    algorithm = build(weighting=weighting)
    policy, batch = prepared(algorithm, Toy())
    v, target, t = shown(policy.current, batch), batch.items["target"].double(), column(batch.items["sigma"])
    e = (v - target).square().mean((1, 2, 3), keepdim=True)
    slope = {"uniform": 1 + 0 * t, "t": t, "t2": t**2, "huber": t / (2 * e.sqrt()), "ghuber": t * e**-0.75}
    advantage = advantage_by_hand().repeat_interleave(3, 0)
    expected = advantage * slope[weighting] * 2 * (v - target) / v[0].numel()
    torch.testing.assert_close(gradient(algorithm, policy, batch), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("clip_range", [1.0, 1e-5])
def test_the_ratio_clip_is_inert_on_policy(clip_range: float) -> None:
    """The ratio is exactly 1 and stands inside every clip range: the loss is -A, and its gradient that of log p."""
    wide, narrow = build(clip_range=1e9), build(clip_range=clip_range)
    policy, batch = prepared(wide, Toy())
    loss = narrow.losses(policy, batch).losses["policy"].detach()
    expected = -advantage_by_hand().flatten().repeat_interleave(3)
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(gradient(narrow, policy, batch), gradient(wide, policy, batch))


@pytest.mark.parametrize("form", ["uniform", "elbo"])
def test_both_pulls_by_hand(form: str) -> None:
    algorithm, policy = build(kl_weight=0.2, anchor_weight=0.7, kl_form=form, first_level=True), apart()
    batch = algorithm.prepare(policy, collect(algorithm, policy), score())
    terms, v = algorithm.losses(policy, batch), shown(policy.current, batch)
    t = batch.items["sigma"].double()
    assert float(t.max()) == 1, "where the variance is capped"
    spread = 0.7 * (t / (1 - t.clamp(max=0.99))).sqrt()
    scale = 1 / (2 * spread**2) if form == "elbo" else torch.ones_like(t)
    for name, weight, other in (("kl", 0.2, policy.reference), ("anchor", 0.7, policy.anchor)):
        square = scale * (v - shown(other, batch)).square().mean((1, 2, 3))
        torch.testing.assert_close(terms.losses[name].double(), weight * square, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(terms.metrics[name].double(), square, atol=1e-6, rtol=1e-4)
    assert terms.metrics["matching_error"].requires_grad is False


def test_what_has_no_weight_is_not_computed() -> None:
    def never(x: torch.Tensor, sigma: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        raise AssertionError("asked for without need")

    model, algorithm = Toy(), build()
    policy = Policy(model, never, anchor=never)
    batch = algorithm.prepare(policy, collect(algorithm, policy), score())
    assert set(algorithm.losses(policy, batch).losses) == {"policy"}
    assert algorithm.decays(0) == {}


@pytest.mark.parametrize(("weight", "kept"), [(0.0, 0.0), (0.1, 1.0)])
def test_groups_of_equal_rewards_are_learnt_from_only_where_something_pulls(weight: float, kept: float) -> None:
    rewards = REWARDS.clone()
    rewards[:4], rewards[5] = 0.5, torch.nan
    policy = apart()
    for name in ("kl_weight", "anchor_weight"):
        algorithm = build(**{name: weight})
        batch = algorithm.prepare(policy, collect(algorithm, policy), score(rewards))
        assert batch.weight.view(8, 3)[:, 0].tolist() == [kept] * 4 + [1, 0, 1, 1]
        assert float(batch.items["advantage"].view(8, 3)[:4].abs().max()) == 0


def test_a_constant_reward_has_no_gradient_at_the_start() -> None:
    model, algorithm = Toy(), build(kl_weight=1.0, anchor_weight=1.0)
    policy, batch = prepared(algorithm, model, score(torch.full((8,), 0.3)))
    assert float(gradient(algorithm, policy, batch).abs().max()) == 0


def test_the_anchor_follows_by_the_published_schedule() -> None:
    algorithm = build(anchor_weight=1.0)
    assert isinstance(algorithm, KeepsWeights)
    decays = [algorithm.decays(i)["anchor"] for i in (0, 99, 299, 300, 9999)]
    assert decays == pytest.approx([0.001, 0.1, 0.3, 0.3, 0.3])
    assert "behaviour" not in algorithm.decays(0), "the weights in training draw the samples"


def test_a_few_iterations_raise_the_reward() -> None:
    """Reward: nearness of the endpoint's mean to 1."""
    algorithm, model = build(kl_weight=1e-3), Toy()
    policy = Policy(model, frozen(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    means = []
    for iteration in range(40):
        rollout = collect(algorithm, policy, tuple(rng.key(iteration, b) for b in range(8)))
        rewards = -(rollout.trajectory.final.flatten(1).mean(1) - 1).abs()
        means.append(float(rewards.mean()))
        batch = algorithm.prepare(policy, rollout, score(rewards))
        loss = sum(algorithm.losses(policy, batch).losses.values(), torch.zeros(()))
        optimizer.zero_grad()
        ((loss * batch.weight).sum() / batch.weight.sum()).backward()
        optimizer.step()
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"noisings": 6}, "noisings: 6 different levels out of 5"),
        ({"num_steps": 1}, "noisings: 3 different levels out of 0"),
        ({"fraction": 0.5}, "noisings: 3 different levels out of 2"),
        ({"fraction": 0.0}, "fraction"),
        ({"updates": 2}, "updates"),
        ({"clip_range": 0}, "clip_range"),
        ({"ghuber_power": 0.0}, "ghuber_power"),
        ({"weighting": "t3"}, "weighting"),
        ({"anchor_cap": 1.0}, "anchor_cap"),
        ({"kl_weight": -1.0}, "kl_weight"),
        ({"advantage_max": 0.0}, "advantage_max"),
    ],
)
def test_impossible_settings_are_refused_by_name(fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValidationError, match=culprit):
        build(**fields)


def test_foreign_samples_are_refused() -> None:
    examples = Examples(("p",), (0,), Conditioning({"text": torch.zeros(1, 1)}), torch.zeros(1, *SHAPE))
    with pytest.raises(TypeError, match="awm learns from a scored Rollout"):
        build().prepare(apart(), examples, None)
