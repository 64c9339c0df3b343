"""Flow-GRPO on a toy: its plan, its batch, its loss before and after an update."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from flowalign.algorithms.flow_grpo import FlowGRPO, FlowGRPOSettings
from flowalign.core import rng, schedule
from flowalign.types import Conditioning, Policy, Scores
from tests.algorithms.toy import (
    EPS,
    GROUPS,
    REWARDS,
    SHIFT,
    Toy,
    advantages,
    build,
    collect,
    frozen,
    perturbed,
    prepared,
    score,
    total,
)


@pytest.mark.parametrize("name", ["linear_shift", "diffusers"])
def test_plan_says_what_the_settings_say(name: str) -> None:
    plan = build(
        num_steps=8,
        schedule=name,
        kernel="dance",
        level=0.3,
        guidance=2.5,
        share_noise=True,
        log_prob="unscaled",
        storage="bfloat16",
    ).plan(0)
    assert torch.equal(plan.sigmas, schedule.sigmas(name, 8, SHIFT))
    assert (plan.kernel, plan.level, plan.guidance, plan.share_noise) == ("dance", 0.3, 2.5, True)
    assert (plan.log_prob, plan.storage) == ("unscaled", torch.bfloat16)
    assert build().plan(0).storage == torch.float32
    assert build().plan(0).share_noise is False


def test_published_defaults() -> None:
    plan = FlowGRPO(FlowGRPOSettings(name="flow_grpo"), shift=SHIFT).plan(0)
    assert (len(plan.sigmas), plan.kernel, plan.level) == (11, "flow", 0.7)
    assert torch.equal(plan.sigmas, schedule.diffusers_shift(10, SHIFT))
    assert FlowGRPO(FlowGRPOSettings(name="flow_grpo"), shift=SHIFT).updates == 2


def test_full_window_has_every_step_but_the_last_for_every_group() -> None:
    plan = build(window="full").plan(3)
    for group in range(5):
        window = plan.window(rng.generator("window", group))
        assert window.trained.tolist() == [0, 1, 2, 3, 4]
        assert window.stochastic.tolist() == [0, 1, 2, 3, 4]


def test_random_windows_are_shared_within_a_group_and_differ_between_groups() -> None:
    plan = build(window="random", window_size=2, window_range=(1, 5)).plan(0)
    drawn = []
    for group in range(40):
        one, other = (plan.window(rng.generator("window", group)) for _ in range(2))
        assert torch.equal(one.trained, other.trained)
        assert torch.equal(one.stochastic, one.trained)
        drawn.append(tuple(one.trained.tolist()))
    assert set(drawn) == {(1, 2), (2, 3), (3, 4)}  # each is missed by 40 draws with a chance of 1e-7


def test_random_window_over_all_steps_is_the_full_one() -> None:
    full = prepared(window="full")
    wide = prepared(window="random", window_size=5, window_range=(0, 5))
    assert torch.equal(full[2].trajectory.states, wide[2].trajectory.states)
    losses_full, losses_wide = total(full[0].losses(full[1], full[3])), total(wide[0].losses(wide[1], wide[3]))
    assert torch.equal(losses_full, losses_wide)


# ---- credit


@pytest.mark.parametrize(("window", "count"), [("random", 2), ("full", 5)])
def test_batch_has_one_item_for_each_recorded_step(window: str, count: int) -> None:
    _, _, samples, batch = prepared(window=window, window_size=2)
    assert len(batch) == len(GROUPS) * count
    assert torch.equal(batch.sample.sort().values, torch.arange(len(GROUPS)).repeat_interleave(count))
    assert batch.weight.shape == (len(batch),)
    assert batch.weight.dtype == torch.float32
    assert len(batch.cond) == len(GROUPS)
    assert torch.equal(batch.cond.tensors["text"], samples.cond.tensors["text"])
    for tensor in batch.items.values():
        assert tensor.shape[0] == len(batch)
        assert not tensor.requires_grad


@pytest.mark.parametrize("std", ["group", "global"])
def test_loss_before_the_update_is_minus_the_advantage(std: str) -> None:
    algorithm, policy, _, batch = prepared(advantage_std=std)
    expected = advantages(REWARDS, GROUPS, std)[batch.sample.numpy()]
    got = total(algorithm.losses(policy, batch)).detach().numpy()
    np.testing.assert_allclose(got, -expected, atol=5e-6)  # the ratio is 1 to 1e-6 in another batch size
    assert abs(np.average(got, weights=batch.weight.numpy()) + expected.mean()) < 5e-6


def test_advantages_are_clipped() -> None:
    groups = torch.zeros(32, dtype=torch.int64)
    rewards = torch.zeros(32)
    rewards[5] = 1.0  # its z-score is sqrt(31) = 5.57
    for clip, expected in ((5.0, 5.0), (2.0, 2.0), (6.0, (1 - 1 / 32) / (31**0.5 / 32 + EPS))):
        model = Toy()
        algorithm, policy = build(advantage_clip=clip, window_size=1), Policy(model, frozen(model))
        batch = algorithm.prepare(policy, collect(algorithm, policy, groups), score(rewards, groups))
        got = total(algorithm.losses(policy, batch))
        assert -got[batch.sample == 5].item() == pytest.approx(expected, abs=2e-5)


def test_groups_without_spread_weigh_nothing() -> None:
    rewards = REWARDS.clone()
    rewards[GROUPS == 0] = 0.1
    algorithm, policy, _, batch = prepared(scores=score(rewards))
    constant = GROUPS[batch.sample] == 0
    assert batch.weight[constant].tolist() == [0.0] * int(constant.sum())
    assert bool((batch.weight[~constant] > 0).all())
    assert batch.weight[~constant].unique().numel() == 1
    assert bool((total(algorithm.losses(policy, batch))[constant] == 0).all())


def test_unscored_samples_teach_nothing() -> None:
    rewards = REWARDS.clone()
    rewards[2] = float("nan")
    algorithm, policy, _, batch = prepared(scores=score(rewards), advantage_std="group")
    assert bool((batch.weight[batch.sample == 2] == 0).all())
    loss = total(algorithm.losses(policy, batch)).detach()
    assert bool(torch.isfinite(loss).all())
    kept = [0, 1, 3, 4, 5, 6, 7]
    expected = advantages(REWARDS[kept], GROUPS[kept], "group")
    for row, advantage in zip(kept, expected, strict=True):
        np.testing.assert_allclose(loss[batch.sample == row].numpy(), -advantage, atol=5e-6)


@pytest.mark.parametrize("std", ["group", "global"])
def test_statistics_come_from_the_samples_of_all_ranks(std: str) -> None:
    """This rank holds every second sample of a global order of 16, in another order than that of its rollout."""
    generator = rng.generator("global")
    rewards, groups = torch.rand(16, generator=generator), torch.arange(16) % 2
    local = torch.tensor([14, 1, 4, 7, 0, 3, 10, 5])
    model = Toy()
    algorithm, policy = build(advantage_std=std), Policy(model, frozen(model))
    samples = collect(algorithm, policy, groups[local])
    batch = algorithm.prepare(policy, samples, Scores({"toy": rewards}, {"toy": 1.0}, groups, local))
    expected = advantages(rewards, groups, std)[local.numpy()][batch.sample.numpy()]
    np.testing.assert_allclose(total(algorithm.losses(policy, batch)).detach().numpy(), -expected, atol=5e-6)


def test_rewards_are_summed_by_weight_before_they_are_normalised() -> None:
    other = REWARDS.flip(0) ** 2
    scores = Scores({"a": REWARDS, "b": other}, {"a": 0.25, "b": 2.0}, GROUPS, torch.arange(8))
    algorithm, policy, _, batch = prepared(scores=scores)
    expected = advantages(0.25 * REWARDS + 2 * other, GROUPS, "global")[batch.sample.numpy()]
    np.testing.assert_allclose(total(algorithm.losses(policy, batch)).detach().numpy(), -expected, atol=5e-6)


# ---- the ratio and its gradient


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kernel", "level", "form"),
    [("flow", 0.7, "gaussian"), ("dance", 0.3, "gaussian"), ("sage", 0.5, "gaussian"), ("cps", 0.8, "unscaled")],
)
def test_replay_before_the_update_gives_a_ratio_of_one(
    kernel: str, level: float, form: str, storage: str, scale: float
) -> None:
    fields = {"kernel": kernel, "level": level, "log_prob": form, "storage": storage, "guidance": scale}
    algorithm, policy, _, batch = prepared(window_size=2, **fields)
    assert float(algorithm.replay(policy, batch).detach().exp().sub(1).abs().max()) <= 1e-6  # all steps in one batch
    algorithm, policy, _, batch = prepared(window_size=1, **fields)
    ordered = batch.select(batch.sample.argsort())  # one step of each sample: the very batch of the rollout
    assert torch.equal(algorithm.replay(policy, ordered).detach(), torch.zeros(len(GROUPS)))


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("window", ["random", "full"])
def test_gradient_before_the_update_is_minus_advantage_times_the_gradient_of_log_p(window: str, scale: float) -> None:
    """The flow kernel written out in float64, beside the batch that the algorithm made."""
    model = Toy()
    algorithm, policy, samples, batch = prepared(model, window=window, guidance=scale, advantage_std="group")
    loss = total(algorithm.losses(policy, batch))
    got = torch.autograd.grad((batch.weight * loss).sum() / batch.weight.sum(), list(model.parameters()))

    exact = copy.deepcopy(model).double()
    trajectory, a = samples.trajectory, torch.tensor(0.7).double()
    weighted = []
    advantage = torch.from_numpy(advantages(REWARDS, GROUPS, "group"))
    grid = trajectory.sigmas.double()
    assert samples.cond.negative is not None
    positive, negative = samples.cond.tensors["text"].double(), samples.cond.negative["text"].double()
    for k in range(trajectory.steps.shape[1]):
        sigma, sigma_next = grid[trajectory.steps[:, k]], grid[trajectory.steps[:, k] + 1]
        x, after = trajectory.states[:, k, 0].double(), trajectory.states[:, k, 1].double()
        v = exact(x, sigma, Conditioning({"text": positive}))
        if scale != 1:
            uncond = exact(x, sigma, Conditioning({"text": negative}))
            v = uncond + scale * (v - uncond)
        s, step = sigma[:, None, None, None], (sigma - sigma_next)[:, None, None, None]
        g2 = a**2 * s / (1 - torch.where(s == 1, grid[1], s))
        mean = x * (1 - g2 * step / (2 * s)) - v * step * (1 + g2 * (1 - s) / (2 * s))
        log_p = -((after - mean) ** 2 / (2 * g2 * step)).mean((1, 2, 3))
        weighted.append(-advantage * log_p)
    expected = torch.autograd.grad(torch.stack(weighted).mean(), list(exact.parameters()))
    for one, other in zip(got, expected, strict=True):
        size = float(other.abs().max())
        assert size > 1e-3
        # z = (x' - mean) / s loses 1e-6 in float32; signs cancel between items, so relative to the largest entry.
        torch.testing.assert_close(one.double(), other, atol=2e-4 * size, rtol=0)


def test_clip_acts_after_a_step() -> None:
    model, clip = Toy(), 1e-3
    algorithm, policy, _, batch = prepared(model, window="full", clip_range=clip)
    perturbed(model, 0.02)
    terms = algorithm.losses(policy, batch)
    ratio = algorithm.replay(policy, batch).exp()
    advantage = torch.from_numpy(advantages(REWARDS, GROUPS, "global")).float()[batch.sample]
    clipped = ((ratio > 1 + clip) & (advantage > 0)) | ((ratio < 1 - clip) & (advantage < 0))
    assert 0 < int(clipped.sum()) < len(batch)
    bound = 1 + clip * advantage.sign()
    by_hand = torch.where(clipped, -advantage * bound, -advantage * ratio)
    torch.testing.assert_close(total(terms), by_hand, atol=1e-5, rtol=0)
    got = torch.autograd.grad(total(terms).sum(), list(model.parameters()))
    free = torch.autograd.grad((-advantage * ratio)[~clipped].sum(), list(model.parameters()))
    for one, other in zip(got, free, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()), rtol=0)


def test_a_split_of_the_batch_gives_the_same_losses() -> None:
    model = Toy()
    algorithm, policy, _, batch = prepared(model, window="full", kl="v", kl_weight=0.1)
    perturbed(model, 0.01)
    whole = total(algorithm.losses(policy, batch))
    order = torch.randperm(len(batch), generator=rng.generator("order"))
    parts = torch.cat([total(algorithm.losses(policy, batch.select(part))) for part in order.split(7)])
    torch.testing.assert_close(parts, whole[order], atol=2e-5, rtol=0)


def test_metrics_have_no_gradient_and_one_value_for_each_item() -> None:
    algorithm, policy, _, batch = prepared(kl="transition", kl_weight=0.04)
    terms = algorithm.losses(policy, batch)
    assert terms.metrics
    for value in [*terms.metrics.values(), *terms.losses.values()]:
        assert value.shape == (len(batch),)
        assert value.dtype == torch.float32
    assert not any(value.requires_grad for value in terms.metrics.values())
    assert all(value.requires_grad for value in terms.losses.values())


# ---- the distance to the reference
