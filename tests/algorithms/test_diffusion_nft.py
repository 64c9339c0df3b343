"""DiffusionNFT on a toy: what it learns from, its gradient by hand, and that it raises a reward."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from flowalign.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTSettings
from flowalign.core import rng, sampling, schedule
from flowalign.types import Batch, Conditioning, Examples, Policy, Rollout
from tests.algorithms.toy import EPS, GROUPS, REWARDS, SHAPE, SHIFT, Toy, frozen, perturbed, score


def build(**fields: object) -> DiffusionNFT:
    defaults = {"name": "diffusion_nft", "num_steps": 6, "noisings": 3, "kl_weight": 0.0, "advantage_std": "group"}
    return DiffusionNFT(TypeAdapter(DiffusionNFTSettings).validate_python(defaults | fields), shift=SHIFT)


def collect(algorithm: DiffusionNFT, policy: Policy, keys: tuple[int, ...] = tuple(range(8))) -> Rollout:
    plan = algorithm.plan(0)
    assert plan.window is None
    cond = Conditioning({"text": torch.zeros(len(keys), 1)})
    noise = rng.normal([rng.generator("x", k) for k in keys], SHAPE)
    with torch.no_grad():
        trajectory = sampling.integrate(policy.current, noise, cond, plan.sigmas)
    media = torch.zeros(len(keys), 1, 3, 4, 4)
    return Rollout(("p",) * len(keys), GROUPS[: len(keys)], keys, cond, trajectory, media)


def prepared(algorithm: DiffusionNFT, model: Toy) -> tuple[Policy, Batch]:
    policy = Policy(model, frozen(model))
    return policy, algorithm.prepare(policy, collect(algorithm, policy), score())


def test_items_are_endpoints_noised_to_different_levels_of_the_grid() -> None:
    algorithm, model = build(), Toy()
    policy, batch = prepared(algorithm, model)
    assert len(batch) == 8 * 3
    final = collect(algorithm, policy).trajectory.final
    assert torch.equal(batch.items["clean"], final.repeat_interleave(3, 0))
    grid = schedule.diffusers_shift(6, SHIFT)[:5]
    for levels in batch.items["sigma"].view(8, 3):
        assert len(set(levels.tolist())) == 3
        assert torch.isin(levels, grid).all()
    sigma = batch.items["sigma"].view(-1, 1, 1, 1)
    noise = (batch.items["x"] - (1 - sigma) * batch.items["clean"]) / sigma
    # 768 standard normal draws: mean within 4 / sqrt(768), spread within 4 / sqrt(2 * 768).
    assert abs(float(noise.mean())) < 0.15
    assert abs(float(noise.std()) - 1) < 0.11


def test_items_depend_on_the_keys_and_not_on_the_batch() -> None:
    algorithm, model = build(), Toy()
    policy, whole = prepared(algorithm, model)
    rollout = collect(algorithm, policy, tuple(range(8)))
    part = collect(algorithm, policy, (0, 1, 2, 3))
    scores = score()
    first = algorithm.prepare(policy, part, type(scores)(scores.values, scores.weights, scores.group, torch.arange(4)))
    assert rollout.keys[:4] == part.keys
    for name in ("sigma", "advantage"):
        assert torch.equal(first.items[name], whole.items[name][:12])
    assert torch.allclose(first.items["x"], whole.items["x"][:12], atol=1e-6)


def test_only_the_noisiest_levels_are_learnt_from_where_asked() -> None:
    algorithm = build(noisings=2, noisy_levels=2)
    _, batch = prepared(algorithm, Toy())
    drawn = batch.items["sigma"].view(8, 2).sort(1, descending=True).values
    assert torch.equal(drawn, algorithm.sigmas[:2].expand(8, 2))


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_gradient_by_hand(beta: float) -> None:
    """At v = v_old the gradient in v is 2 A (v_old - Y) sigma^2 / (w d), whatever b: spec 4, derived there."""
    algorithm, model = build(nft_beta=beta), Toy()
    policy, batch = prepared(algorithm, model)
    seen = []

    def watched(x: torch.Tensor, sigma: torch.Tensor, cond: Conditioning) -> torch.Tensor:
        velocity = policy.current(x, sigma, cond).detach().requires_grad_()
        seen.append(velocity)
        return velocity

    algorithm.losses(Policy(watched, policy.reference), batch).losses["policy"].sum().backward()
    (velocity,) = seen
    assert velocity.grad is not None
    x, clean = batch.items["x"].double(), batch.items["clean"].double()
    sigma, v = batch.items["sigma"].double().view(-1, 1, 1, 1), velocity.detach().double()
    rewards = REWARDS.double().view(2, 4)
    spread = rewards.std(1, correction=0, keepdim=True) + EPS
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten().repeat_interleave(3).view(-1, 1, 1, 1)
    target = (x - clean) / sigma
    weight = ((x - sigma * v) - clean).abs().flatten(1).mean(1).view(-1, 1, 1, 1)
    expected = 2 * advantage * (v - target) * sigma**2 / (weight * v[0].numel())
    torch.testing.assert_close(velocity.grad.double(), expected, atol=1e-5, rtol=1e-3)


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
    with pytest.raises(ValidationError, match="updates"):
        build(updates=2)
    algorithm, model = build(), Toy()
    examples = Examples(("p",), (0,), Conditioning({"text": torch.zeros(1, 1)}), torch.zeros(1, *SHAPE))
    with pytest.raises(TypeError, match="scored Rollout"):
        algorithm.prepare(Policy(model, frozen(model)), examples, None)
