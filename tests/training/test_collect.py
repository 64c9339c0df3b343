"""Sampling: keyed randomness, shared windows and noise, caches, and scores in one global order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flowalign.algorithms.flow_grpo import FlowGRPO, FlowGRPOSettings
from flowalign.core import combination, rng
from flowalign.data.pairs import PairData, Pairs
from flowalign.data.prompts import KRepeatSampler, Prompt, PromptData
from flowalign.rewards.combine import WeightedReward
from flowalign.training.collect import LatentCache, PromptCache, collect, read_examples, score
from flowalign.training.evaluate import velocity_of
from flowalign.types import FlowAlignError, Policy
from tests.training.toy import PROMPTS, ColorReward, ToyModel

DATA = PromptData([Prompt(text) for text in PROMPTS], per_iteration=3, group_size=4)


def rollout(model, plan, samples, *, batch_size=4, cache=None, seed=0):
    velocity = velocity_of(model)
    return collect(
        model,
        Policy(velocity, velocity),
        plan,
        cache or PromptCache(model),
        DATA.prompts,
        samples,
        iteration=2,
        seed=seed,
        shape=(3, 4, 4),
        batch_size=batch_size,
        device="cpu",
    )


def plan_of(**changes):
    return FlowGRPO(FlowGRPOSettings(name="flow_grpo", num_steps=5, **changes), shift=3.0).plan(0)


def samples_of(world=1, rank=0):
    return KRepeatSampler(len(PROMPTS), 3, 4, world, seed=0).samples(2, rank)


def test_the_behaviour_policy_draws_the_samples() -> None:
    model, other = ToyModel(), ToyModel(seed=1)

    def never(x, sigma, cond):
        raise AssertionError("sampled with other weights")

    def drawn(policy):
        arguments = {"iteration": 2, "seed": 0, "shape": (3, 4, 4), "batch_size": 4, "device": "cpu"}
        return collect(model, policy, plan_of(), PromptCache(model), DATA.prompts, samples_of(), **arguments)

    lagged = drawn(Policy(never, never, velocity_of(other)))
    own = drawn(Policy(velocity_of(other), never))
    assert torch.equal(lagged.trajectory.states, own.trajectory.states), "left out, it is the one in training"
    assert not torch.equal(own.trajectory.states, drawn(Policy(velocity_of(model), never)).trajectory.states)


def test_a_sample_depends_on_its_key_alone() -> None:
    plan = plan_of(window="random", window_size=2)
    whole = rollout(ToyModel(), plan, samples_of(), batch_size=12)
    by_position = {s.position: i for i, s in enumerate(samples_of())}
    for batch_size in (1, 5):
        for rank in range(2):
            own = samples_of(2, rank)
            part = rollout(ToyModel(), plan, own, batch_size=batch_size)
            rows = [by_position[s.position] for s in own]
            assert part.keys == tuple(whole.keys[r] for r in rows)
            assert part.prompts == tuple(whole.prompts[r] for r in rows)
            assert torch.equal(part.trajectory.steps, whole.trajectory.steps[rows])
            assert torch.allclose(part.trajectory.states, whole.trajectory.states[rows], atol=1e-5)
            assert torch.allclose(part.media, whole.media[rows], atol=1e-5)
    assert len(set(whole.keys)) == 12
    assert not torch.allclose(rollout(ToyModel(), plan, samples_of(), seed=1).media, whole.media, atol=1e-2)


def test_the_first_state_is_the_keyed_draw() -> None:
    samples = samples_of()
    found = rollout(ToyModel(), plan_of(), samples)
    for i, s in enumerate(samples):
        expected = torch.randn((3, 4, 4), generator=rng.generator(0, 2, s.prompt, s.repeat))
        assert torch.equal(found.trajectory.states[i, 0, 0], expected)


def test_share_noise_starts_a_group_from_one_point_and_then_parts_it() -> None:
    samples = samples_of()
    found = rollout(ToyModel(), plan_of(share_noise=True), samples)
    for prompt in {s.prompt for s in samples}:
        rows = [i for i, s in enumerate(samples) if s.prompt == prompt]
        states = found.trajectory.states[rows]
        assert (states[:, 0, 0] == states[:1, 0, 0]).all()
        assert not torch.allclose(states[0, 0, 1], states[1, 0, 1], atol=1e-2)
    starts = {tuple(found.trajectory.states[i, 0, 0].flatten().tolist()) for i in range(12)}
    assert len(starts) == 3


def test_groups_share_their_window_and_differ_from_each_other() -> None:
    plan, steps = plan_of(window="random", window_size=1, window_range=(0, 4)), {}
    for iteration in range(4):
        for s in KRepeatSampler(12, 3, 4, 1, seed=0).samples(iteration, 0):
            window = plan.window(rng.generator(0, iteration, "window", s.prompt))
            steps.setdefault((iteration, s.prompt), set()).add(tuple(window.trained.tolist()))
    assert all(len(windows) == 1 for windows in steps.values())
    assert len(set.union(*steps.values())) > 1


def test_each_prompt_is_encoded_once_per_run() -> None:
    model = ToyModel()
    cache = PromptCache(model, negative="")
    for _ in range(3):
        cond = cache(["square red", "square green", "square red"], "cpu")
    assert model.encoded == ["square red", "square green"]
    assert torch.equal(cond.tensors["text"][0], cond.tensors["text"][2]) and cond.negative is not None
    small = PromptCache(model, size=1)
    small(["a", "b"], "cpu")
    small(["b"], "cpu")
    assert model.encoded[2:] == ["a", "b"]


def test_scores_stand_at_their_positions(workers) -> None:
    samples = samples_of()
    found = rollout(ToyModel(), plan_of(), samples)
    rewards = [WeightedReward("color", ColorReward(), 2.0), WeightedReward("again", ColorReward(), 1.0)]
    scores, invalid = score(rewards, found, DATA, samples, workers, max_invalid=0.0)
    direct = ColorReward()(found.media, found.prompts).score
    assert invalid == 0 and scores.local.tolist() == [s.position for s in samples]
    assert torch.allclose(scores.values["color"][scores.local], direct)
    assert torch.equal(scores.group[scores.local], found.group)
    assert torch.allclose(combination.total(scores), 3 * scores.values["color"])
    assert set(scores.subscores) == {"color/brightness", "again/brightness"}


def test_too_many_invalid_scores_stop_the_run(workers) -> None:
    samples = samples_of()
    found = rollout(ToyModel(), plan_of(), samples)
    rewards = [WeightedReward("color", ColorReward(invalid=[found.prompts[0]]))]
    scores, invalid = score(rewards, found, DATA, samples, workers, max_invalid=0.5)
    assert invalid == pytest.approx(1 / 3) and int(torch.isnan(combination.total(scores)).sum()) == 4
    with pytest.raises(FlowAlignError, match=f"'color': 4 of 12.*{found.prompts[0]}"):
        score(rewards, found, DATA, samples, workers, max_invalid=0.3)


def test_examples_are_encoded_once(workers) -> None:
    pictures = torch.rand(5, 1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    asked = []

    class Memory(Pairs):
        def images(self, indices):
            asked.extend(indices)
            return pictures[list(indices)]

    pairs = Memory((None,) * 5, tuple(f"picture {c}" for c in "abcde"), 32, 32)
    model = ToyModel()
    latents, cache = LatentCache(model, pairs), PromptCache(model)
    seen = []
    for iteration in range(5):
        examples = read_examples(PairData(pairs, 3), latents, cache, workers, iteration=iteration, seed=0)
        rows = [int(text == f"picture {c}") for text in examples.prompts for c in "abcde"]
        index = torch.tensor(rows).view(3, 5).argmax(1)
        assert torch.allclose(examples.clean, model.encode_media(pictures[index]))
        seen += index.tolist()
        assert len(set(examples.keys)) == 3
    assert sorted(asked) == list(range(5)) and [seen.count(i) for i in range(5)] == [3] * 5


def test_guidance_reaches_the_rollout() -> None:
    model = ToyModel()
    plain, guided = plan_of(), plan_of(guidance=3.0)
    cache = PromptCache(model, negative="")
    a = rollout(model, plain, samples_of(), cache=cache)
    b = rollout(model, guided, samples_of(), cache=cache)
    c = rollout(model, replace(guided, guidance=1.0), samples_of(), cache=cache)
    assert torch.equal(a.media, c.media) and not torch.allclose(a.media, b.media, atol=1e-3)
