"""Flow-DPO: which pairs are compared, the loss and its gradient at the reference by hand, and that it learns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from flowalign.algorithms.flow_dpo import FlowDPO, FlowDPOSettings, OfflineFlowDPOSettings, best_and_worst
from flowalign.core import rng, sampling, schedule
from flowalign.types import Batch, Conditioning, Examples, Policy, Rollout, Scores, Trajectory
from tests.algorithms.toy import GROUPS, REWARDS, SHAPE, SHIFT, Toy, frozen, perturbed, score

BETA = 50.0


def build(offline: bool = True, **fields: Any) -> FlowDPO:
    kind: Any = OfflineFlowDPOSettings if offline else FlowDPOSettings
    name = {"name": "flow_dpo_offline"} if offline else {"name": "flow_dpo", "num_steps": 6}
    return FlowDPO(TypeAdapter(kind).validate_python(name | {"beta": BETA} | fields), shift=SHIFT)


def preferences(count: int = 8, name: str = "preferences") -> Examples:
    generator = rng.generator(name)
    cond = Conditioning({"text": 0.3 * torch.randn(count, 1, generator=generator)})
    better, worse = torch.randn(2, count, *SHAPE, generator=generator)
    return Examples(("caption",) * count, tuple(rng.key(name, b) for b in range(count)), cond, better, worse)


def rollout(groups: Tensor = GROUPS, final: Tensor | None = None, name: str = "rollout") -> Rollout:
    count = len(groups)
    keys = tuple(rng.key(name, b) for b in range(count))
    final = torch.randn(count, *SHAPE, generator=rng.generator(name)) if final is None else final
    cond = Conditioning({"text": groups[:, None].float() / 10}, {"text": torch.zeros(count, 1)})
    empty = torch.zeros(count, 0)
    trajectory = Trajectory(final, empty, empty.long(), torch.tensor([1.0, 0.0]), empty)
    return Rollout(("p",) * count, groups, keys, cond, trajectory, torch.zeros(count, 1, 3, 4, 4))


def errors(model: Any, batch: Batch, which: str) -> Tensor:
    """mean |v - target|^2 of each pair's better or worse sample, in float64."""
    cond = Conditioning({"text": batch.cond.tensors["text"][batch.sample].double()})
    v = model(batch.items[f"x_{which}"].double(), batch.items["sigma"].double(), cond)
    return (v - batch.items[f"target_{which}"].double()).square().mean((1, 2, 3))


# ---- pairs


def test_both_samples_of_a_pair_get_the_same_noise_at_the_same_level() -> None:
    samples = preferences()
    batch = build(noisings=3).prepare(Policy(None, None), samples, None)  # type: ignore[arg-type]  # neither is asked
    assert len(batch) == 24 and batch.sample.tolist() == [b for b in range(8) for _ in range(3)]
    assert samples.worse is not None and (batch.weight == 1).all()
    sigma, row = batch.items["sigma"].double().view(-1, 1, 1, 1), batch.sample
    noises = [
        (batch.items[f"x_{name}"].double() - (1 - sigma) * clean[row].double()) / sigma
        for name, clean in (("better", samples.clean), ("worse", samples.worse))
    ]
    torch.testing.assert_close(noises[0], noises[1], atol=1e-5, rtol=1e-5)
    for name, clean in (("better", samples.clean), ("worse", samples.worse)):
        expected = noises[0] - clean[row].double()
        torch.testing.assert_close(batch.items[f"target_{name}"].double(), expected, atol=1e-4, rtol=1e-4)
    assert batch.items["sigma"].unique().numel() == 24  # each noising has its own level


def test_levels_are_logit_normal_with_the_shift_of_the_model_or_ones_own() -> None:
    count = 2000
    for fields, shift in (({}, SHIFT), ({"shift": 1.0}, 1.0)):
        algorithm = build(sigma_mean=0.2, sigma_std=0.6, **fields)
        samples = preferences(count, "many")
        sigma = algorithm.prepare(Policy(None, None), samples, None).items["sigma"].double()  # type: ignore[arg-type]
        logit = torch.logit(sigma) - math.log(shift)
        assert abs(float(logit.mean()) - 0.2) < 5 * 0.6 / count**0.5
        assert abs(float(logit.std()) - 0.6) < 5 * 0.6 / (2 * count) ** 0.5


def test_best_and_worst_of_each_group() -> None:
    samples = rollout()
    pairs = best_and_worst(samples, score())
    final = samples.trajectory.final
    # REWARDS: .1 .9 .4 .3 | .8 .2 .25 .7
    assert pairs.sample.tolist() == [1, 4] and pairs.weight.tolist() == [1, 1]
    assert torch.equal(pairs.better, final[[1, 4]]) and torch.equal(pairs.worse, final[[0, 5]])


def test_groups_may_stand_in_any_order_and_scores_too() -> None:
    groups = torch.tensor([7, 3, 7, 3, 3, 7])
    rewards = torch.tensor([0.5, 0.1, 0.9, 0.3, 0.2, 0.7])
    order = torch.tensor([4, 0, 5, 1, 3, 2])  # local sample i stands at order[i] of the global scores
    values, everywhere = torch.empty(6), torch.empty(6, dtype=torch.int64)
    values[order], everywhere[order] = rewards, groups
    pairs = best_and_worst(rollout(groups), Scores({"toy": values}, {"toy": 2.0}, everywhere, order))
    final = rollout(groups).trajectory.final
    assert sorted(pairs.sample.tolist()) == [2, 3]
    by_best = {b: torch.equal(pairs.worse[i], final[{2: 0, 3: 1}[b]]) for i, b in enumerate(pairs.sample.tolist())}
    assert all(by_best.values())


def test_a_group_without_two_different_scores_has_no_weight() -> None:
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    nan = torch.nan
    rewards = torch.tensor([0.5, 0.5, 0.5, nan, 0.3, nan, nan, nan, nan, nan, 0.1, 0.2])
    samples = rollout(groups)
    batch = build(offline=False).prepare(Policy(None, None), samples, score(rewards, groups))  # type: ignore[arg-type]
    assert batch.weight.tolist() == [0, 0, 0, 1]
    assert int(batch.sample[3]) == 11
    assert all(torch.isfinite(value).all() for value in batch.items.values())


def test_a_gated_sample_is_the_worst_and_weights_of_rewards_count() -> None:
    values = {"a": torch.tensor([0.1, 0.2, 0.9]), "b": torch.tensor([0.9, 0.2, 0.1])}
    groups, local = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    gated = torch.tensor([False, False, True])
    pairs = best_and_worst(rollout(groups), Scores(values, {"a": 2.0, "b": 1.0}, groups, local, gated=gated))
    assert pairs.sample.tolist() == [0]  # 1.1, .6, 1.9 but gated
    assert torch.equal(pairs.worse[0], rollout(groups).trajectory.final[2])


def test_a_group_that_is_spread_over_processes_is_refused() -> None:
    scores = Scores({"toy": REWARDS}, {"toy": 1.0}, GROUPS, torch.tensor([0, 2, 4, 6]))
    with pytest.raises(ValueError, match="2 of the 4 samples of group 0 are on this rank"):
        best_and_worst(rollout(torch.tensor([0, 0, 1, 1])), scores)


def test_a_pair_depends_on_the_key_of_its_better_sample_alone() -> None:
    algorithm = build(offline=False, noisings=2)
    whole = algorithm.prepare(Policy(None, None), rollout(), score())  # type: ignore[arg-type]
    second = rollout()
    part = Rollout(
        second.prompts[4:],
        second.group[4:],
        second.keys[4:],
        second.cond.select(slice(4, 8)),
        Trajectory(second.trajectory.final[4:], *(torch.zeros(4),) * 4),
        second.media[4:],
    )
    scores = Scores({"toy": REWARDS}, {"toy": 1.0}, GROUPS, torch.arange(4, 8))
    torch.manual_seed(3)
    alone = algorithm.prepare(Policy(None, None), part, scores)  # type: ignore[arg-type]
    for name in whole.items:
        torch.testing.assert_close(alone.items[name], whole.items[name][2:], atol=1e-6, rtol=1e-6)
    assert alone.sample.tolist() == [0, 0] and whole.sample.tolist() == [1, 1, 4, 4]


# ---- the loss


@pytest.mark.parametrize("form", ["constant", "derived"])
def test_at_the_reference_the_loss_is_ln_2_and_the_gradient_follows_from_the_errors(form: str) -> None:
    algorithm, model = build(beta_form=form), Toy()
    policy = Policy(model, frozen(model))
    batch = algorithm.prepare(policy, preferences(), None)
    terms = algorithm.losses(policy, batch)
    loss = terms.losses["preference"]
    torch.testing.assert_close(loss, torch.full((8,), math.log(2)), atol=1e-7, rtol=0)
    assert terms.metrics["implicit_accuracy"].tolist() == [0.5] * 8
    exact = Toy().double()
    beta = BETA * (1 - batch.items["sigma"].double()) ** 2 if form == "derived" else BETA
    linear = (beta / 4 * (errors(exact, batch, "better") - errors(exact, batch, "worse"))).sum()
    expected = torch.autograd.grad(linear, list(exact.parameters()))
    for one, other in zip(torch.autograd.grad(loss.sum(), list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


def test_away_from_the_reference_by_hand() -> None:
    algorithm, model = build(), Toy()
    batch = algorithm.prepare(Policy(model, frozen(model)), preferences(), None)
    moved = perturbed(Toy(), 0.1)
    terms = algorithm.losses(Policy(moved, frozen(model)), batch)
    wide = perturbed(Toy(), 0.1).double()
    change = {w: errors(wide, batch, w) - errors(Toy().double(), batch, w) for w in ("better", "worse")}
    inside = (-BETA / 2 * (change["better"] - change["worse"])).detach()
    expected = torch.log1p(torch.exp(-inside))
    assert float(inside.abs().max()) > 0.1  # far enough for the sigmoid to bend
    torch.testing.assert_close(terms.losses["preference"].double(), expected, atol=1e-4, rtol=1e-4)
    accuracy = (change["better"] < change["worse"]).double()
    assert 0 < float(accuracy.mean()) < 1
    assert torch.equal(terms.metrics["implicit_accuracy"].double(), accuracy)
    for name, value in (("better_error", errors(wide, batch, "better")), ("better_error_change", change["better"])):
        torch.testing.assert_close(terms.metrics[name].double(), value.detach(), atol=1e-5, rtol=1e-4)
    worse = errors(wide, batch, "worse").detach()
    torch.testing.assert_close(terms.metrics["worse_error"].double(), worse, atol=1e-5, rtol=1e-4)
    assert not any(value.requires_grad for value in terms.metrics.values())


def test_swapping_better_and_worse_flips_the_gradient_at_the_reference() -> None:
    samples, gradients = preferences(), []
    assert samples.worse is not None
    swapped = Examples(samples.prompts, samples.keys, samples.cond, samples.worse, samples.clean)
    for some in (samples, swapped):
        model = Toy()
        policy, algorithm = Policy(model, frozen(model)), build()
        loss = algorithm.losses(policy, algorithm.prepare(policy, some, None)).losses["preference"].sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert float(one.abs().max()) > 1e-3
        torch.testing.assert_close(one, -other, atol=1e-5 * float(one.abs().max()), rtol=1e-4)


def test_swapping_changes_the_loss_by_what_is_inside_anywhere() -> None:
    """-log s(z) + log s(-z) = -z."""
    samples, moved, reference = preferences(), perturbed(Toy(), 0.1), frozen(Toy())
    assert samples.worse is not None
    swapped = Examples(samples.prompts, samples.keys, samples.cond, samples.worse, samples.clean)
    algorithm, policy = build(), Policy(moved, reference)
    batches = [algorithm.prepare(policy, some, None) for some in (samples, swapped)]
    one, other = (algorithm.losses(policy, batch).losses["preference"].detach() for batch in batches)
    change = [errors(perturbed(Toy(), 0.1).double(), batches[0], w) - errors(Toy().double(), batches[0], w)
              for w in ("better", "worse")]  # fmt: skip
    inside = -BETA / 2 * (change[0] - change[1])
    torch.testing.assert_close((one - other).double(), -inside.detach(), atol=1e-4, rtol=1e-4)


def test_items_may_be_split_for_the_backward_pass() -> None:
    algorithm, model = build(noisings=2), Toy()
    policy = Policy(perturbed(model, 0.05), frozen(Toy()))
    batch = algorithm.prepare(policy, preferences(6), None)
    whole = algorithm.losses(policy, batch).losses["preference"]
    parts = [algorithm.losses(policy, batch.select(part)).losses["preference"] for part in torch.arange(12).split(5)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


def test_the_prompt_of_the_pair_conditions_both() -> None:
    shown = []

    def model(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        assert cond.negative is None
        shown.append((sigma, cond.tensors["text"]))
        return torch.zeros_like(x)

    algorithm = build(offline=False)
    policy = Policy(model, model)
    batch = algorithm.prepare(policy, rollout(), score())
    algorithm.losses(policy, batch)
    expected = torch.tensor([0.0, 0.1, 0.0, 0.1])[:, None]  # group / 10, better ones first
    assert len(shown) == 2
    for sigma, text in shown:
        torch.testing.assert_close(text, expected)
        assert torch.equal(sigma[:2], sigma[2:])


# ---- learning


def test_offline_learning_raises_the_implicit_accuracy_on_pairs_that_it_never_saw() -> None:
    """Better samples are brighter: 320 training pairs teach it, 80 others show it."""

    def some(name: str) -> Examples:
        samples = preferences(80, name)
        assert samples.worse is not None
        clean = [0.3 * value + shift for value, shift in ((samples.clean, 0.5), (samples.worse, -0.5))]
        return Examples(samples.prompts, samples.keys, samples.cond, *clean)

    algorithm, model = build(beta=20.0), Toy()
    policy, optimizer = Policy(model, frozen(model)), torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(30):
        batch = algorithm.prepare(policy, some(f"train {step % 4}"), None)
        loss = algorithm.losses(policy, batch).losses["preference"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    terms = algorithm.losses(policy, algorithm.prepare(policy, some("held out"), None))
    assert float(terms.metrics["implicit_accuracy"].mean()) > 0.9
    assert float(terms.losses["preference"].detach().mean()) < 0.9 * math.log(2)


def test_online_learning_raises_the_reward() -> None:
    """Reward: nearness of the endpoint's mean to 1."""
    algorithm, model = build(offline=False, beta=20.0, noisings=4), Toy()
    policy, optimizer = Policy(model, frozen(model)), torch.optim.Adam(model.parameters(), lr=2e-2)
    plan, means = algorithm.plan(0), []
    assert plan is not None
    for iteration in range(40):
        cond = rollout().cond
        noise = rng.normal([rng.generator(iteration, b) for b in range(8)], SHAPE)
        with torch.no_grad():
            final = sampling.integrate(policy.current, noise, cond, plan.sigmas).final
        rewards = -(final.flatten(1).mean(1) - 1).abs()
        means.append(float(rewards.mean()))
        batch = algorithm.prepare(policy, rollout(final=final, name=f"iteration {iteration}"), score(rewards))
        loss = algorithm.losses(policy, batch).losses["preference"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.1


# ---- plan and settings


def test_plans() -> None:
    assert build().plan(0) is None
    plan = build(offline=False, guidance=2.5, updates=2).plan(3)
    assert plan is not None and plan.window is None and plan.guidance == 2.5 and plan.whole_groups
    torch.testing.assert_close(plan.sigmas, schedule.diffusers_shift(6, SHIFT))
    # The levels that are learnt from may be shifted otherwise; the sampler's grid is the model's.
    shifted = build(offline=False, shift=1.0).plan(0)
    assert shifted is not None and torch.equal(shifted.sigmas, plan.sigmas)
    assert build(updates=3).updates == 3


def test_foreign_samples_are_refused() -> None:
    policy: Any = Policy(None, None)  # type: ignore[arg-type]
    plain = preferences()
    with pytest.raises(TypeError, match="learns from preferences"):
        build().prepare(policy, Examples(plain.prompts, plain.keys, plain.cond, plain.clean), None)
    with pytest.raises(TypeError, match="learns from preferences"):
        build().prepare(policy, rollout(), score())
    with pytest.raises(TypeError, match="scored Rollout"):
        build(offline=False).prepare(policy, plain, None)
    with pytest.raises(TypeError, match="scored Rollout"):
        build(offline=False).prepare(policy, rollout(), None)


@pytest.mark.parametrize(
    ("offline", "fields", "culprit"),
    [
        (True, {"beta": 0.0}, "beta"),
        (True, {"beta_form": "linear"}, "beta_form"),
        (True, {"noisings": 0}, "noisings"),
        (True, {"batch_size": 0}, "batch_size"),
        (True, {"num_steps": 5}, "num_steps"),
        (True, {"shift": -1.0}, "shift"),
        (False, {"num_steps": 1}, "num_steps: 1 jumps"),
        (False, {"batch_size": 4}, "batch_size"),
        (False, {"guidance": 0.0}, "guidance"),
    ],
)
def test_impossible_settings_are_refused_by_name(offline: bool, fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValidationError, match=culprit):
        build(offline, **fields)
