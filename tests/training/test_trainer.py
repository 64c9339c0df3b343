"""The loop: it learns, writes what it should, resumes bit for bit, and stops for good reasons."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from flowalign.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTSettings
from flowalign.algorithms.flow_grpo import FlowGRPO, FlowGRPOSettings
from flowalign.algorithms.ram import RAM, RAMSettings
from flowalign.algorithms.sft import SFT, SFTSettings
from flowalign.data.pairs import PairData, load_pairs
from flowalign.data.prompts import Prompt, PromptData
from flowalign.data.worlds import shapes_render
from flowalign.rewards.combine import WeightedReward
from flowalign.training import checkpoint
from flowalign.training.trainer import train
from flowalign.types import FlowAlignError, Terms
from tests.training.toy import PROMPTS, ColorReward, ToyModel, optimizer, training

DATA = PromptData([Prompt(text) for text in PROMPTS], per_iteration=4, group_size=4)


def grpo(**changes):
    values = {
        "num_steps": 4,
        "window": "random",
        "window_size": 2,
        "window_range": (0, 3),
        "clip_range": 1e-2,
        **changes,
    }
    return FlowGRPO(FlowGRPOSettings(name="flow_grpo", **values), shift=3.0)


def run(workers, output, *, algorithm=None, data=DATA, model=None, rewards=None, resume=None, lr=1e-2, **changes):
    model = model or ToyModel()
    values = {"ema_decay": 0.9, "rollout_batch_size": 8, "micro_batch_size": 8, **changes}
    result = train(
        model,
        algorithm or grpo(),
        data,
        [WeightedReward("color", ColorReward())] if rewards is None else rewards,
        optimizer=optimizer(lr=lr),
        training=training(output, **values),
        workers=workers,
        lora=False,
        size=(32, 32),
        recipe_text="a: recipe",
        resume=resume,
    )
    return model, result


def test_the_reward_rises(workers, tmp_path) -> None:
    _, result = run(workers, tmp_path, algorithm=grpo(clip_range=0.1), iterations=24, lr=3e-2)
    rewards = [record["reward_mean"] for record in result.history]
    start, end = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert end > start + 3 * result.history[0]["reward_std"] / 16**0.5, (start, end)


def test_what_a_run_writes(workers, tmp_path) -> None:
    _, result = run(
        workers, tmp_path, iterations=4, checkpoint_every=2, preview_every=2, preview_prompts=3, log=("tensorboard",)
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    expected = {
        "reward_mean", "reward_std", "reward/color_mean", "reward/color_std", "subscore/color/brightness",
        "invalid_share", "zero_variance_share", "ratio", "ratio_deviation_max", "clip_fraction", "loss/policy",
        "grad_norm", "images_per_second", "seconds", "seconds/rollout", "seconds/score", "seconds/learn", "nfe",
        "skipped_updates",
    }  # fmt: skip
    assert expected <= set(lines[0])
    assert lines[0]["nfe"] == 4 * 16 and lines[0]["skipped_updates"] == 0
    assert "seconds/replay_check" in lines[0] and "seconds/replay_check" not in lines[1]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["000002", "000004"]
    assert result.checkpoint == tmp_path / "checkpoints" / "000004"
    assert (result.checkpoint / "recipe.yaml").read_text() == "a: recipe"
    assert sorted(p.name for p in (tmp_path / "previews").iterdir()) == ["000002.png", "000004.png"]
    Image.open(tmp_path / "previews" / "000002.png").verify()
    assert list((tmp_path / "tensorboard").iterdir())
    assert result.iteration == 4 and result.images_per_second > 0 and len(result.history) == 4


def test_the_first_update_is_on_policy_and_the_second_is_not(workers, tmp_path) -> None:
    _, one = run(workers, tmp_path / "one", algorithm=grpo(updates=1), iterations=2)
    assert all(record["ratio_deviation_max"] < 1e-5 for record in one.history)
    _, two = run(workers, tmp_path / "two", algorithm=grpo(updates=2), iterations=2)
    assert all(record["ratio_deviation_max"] > 1e-4 for record in two.history)


class Keeps(DiffusionNFT):
    """Every weight set that a method may keep; the reference is renewed after the third iteration."""

    def decays(self, iteration):
        return {"behaviour": 0.5, "anchor": 0.9, "reference": 0.0 if iteration == 2 else 1.0}

    def losses(self, policy, batch):
        terms = super().losses(policy, batch)
        shown = batch.items["x"], batch.items["sigma"], batch.cond.select(batch.sample)
        pull = (policy.current(*shown) - policy.anchor(*shown)).square().flatten(1).mean(1)
        return Terms({**terms.losses, "anchor": pull}, terms.metrics)


def keeps():
    return Keeps(DiffusionNFTSettings(name="diffusion_nft", num_steps=4, noisings=2, kl_weight=0.1), shift=3.0)


KEPT = {"keeps": {"behaviour", "anchor", "reference"}, "ram": {"behaviour", "reference"}}


@pytest.mark.parametrize("kind", ["flow_grpo", "sft", "keeps", "ram"])
def test_two_and_two_iterations_equal_four_bit_for_bit(workers, tmp_path, kind: str) -> None:
    data = DATA
    if kind == "sft":
        shapes_render.write_folder(tmp_path / "data", 10, seed=0)
        data = PairData(load_pairs(tmp_path / "data", height=64, width=64), 4)

    def algorithm():
        if kind == "keeps":
            return keeps()
        if kind == "ram":
            return RAM(RAMSettings(name="ram", num_steps=4, noisings=2, decay_rate=0.3, reference_every=3), shift=3.0)
        return SFT(SFTSettings(name="sft", batch_size=4)) if kind == "sft" else grpo(kl="v", kl_weight=0.1)

    whole, straight = run(workers, tmp_path / "whole", algorithm=algorithm(), data=data, iterations=4)
    _, first = run(workers, tmp_path / "part", algorithm=algorithm(), data=data, iterations=2)
    assert first.checkpoint == checkpoint.latest(tmp_path / "part")
    again, second = run(
        workers, tmp_path / "part", algorithm=algorithm(), data=data, iterations=4, resume=first.checkpoint
    )
    for p, q in zip(whole.transformer.parameters(), again.transformer.parameters(), strict=True):
        assert torch.equal(p, q)
    a, b = checkpoint.load(straight.checkpoint), checkpoint.load(second.checkpoint)
    assert a.sets.keys() == b.sets.keys() == {"ema"} | KEPT.get(kind, set())
    pairs = [(a.trainable, b.trainable), (a.optimizer, b.optimizer), *((a.sets[k], b.sets[k]) for k in a.sets)]
    for x, y in pairs:
        assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
    assert (a.iteration, a.steps) == (b.iteration, b.steps)
    records = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "part")
    ]
    assert len(records[1]) == 4
    for one, two in zip(*records, strict=True):
        timing = ("seconds", "images_per_second")
        assert all(two[k] == v for k, v in one.items() if not k.startswith(timing))


def test_weight_sets_follow_by_their_decays(workers, tmp_path) -> None:
    """One run, checkpointed after each iteration, against the recursion."""
    drawn = []

    class Watched(Keeps):
        def prepare(self, policy, samples, scores):
            shown = torch.full((1, 3, 4, 4), 0.3), torch.full((1,), 0.7), samples.cond.select(torch.tensor([0]))
            velocities = (policy.current, policy.behaviour, policy.anchor, policy.reference)
            drawn.append([v(*shown).clone() for v in velocities])
            return super().prepare(policy, samples, scores)

    algorithm, model = Watched(keeps().settings, shift=3.0), ToyModel()
    expected = {name: _weights(model) for name in ("behaviour", "anchor", "reference")}
    run(workers, tmp_path, algorithm=algorithm, model=model, iterations=4, checkpoint_every=1, ema_decay=None)
    for iteration in range(4):
        state = checkpoint.load(tmp_path / "checkpoints" / f"{iteration + 1:06d}")
        for name, decay in algorithm.decays(iteration).items():
            expected[name] = {k: decay * v + (1 - decay) * state.trainable[k] for k, v in expected[name].items()}
            for k, v in expected[name].items():
                torch.testing.assert_close(state.sets[name][k], v, atol=1e-6, rtol=1e-5)
    assert all(torch.equal(drawn[0][0], v) for v in drawn[0]), "all are the same at the start"
    current, behaviour, anchor, reference = drawn[3]
    assert torch.equal(current, reference), "renewed at the end of the iteration before"
    assert not torch.equal(current, behaviour) and not torch.equal(behaviour, anchor)


def _weights(model):
    return {k: p.detach().clone() for k, p in model.transformer.named_parameters()}


def test_results_do_not_depend_on_batch_sizes(workers, tmp_path) -> None:
    one, _ = run(workers, tmp_path / "a", iterations=2, rollout_batch_size=16, micro_batch_size=16)
    two, _ = run(workers, tmp_path / "b", iterations=2, rollout_batch_size=3, micro_batch_size=5)
    for p, q in zip(one.transformer.parameters(), two.transformer.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-4)


def test_the_reference_pulls(workers, tmp_path) -> None:
    free, _ = run(workers, tmp_path / "free", iterations=6)
    held, result = run(workers, tmp_path / "held", algorithm=grpo(kl="v", kl_weight=10.0), iterations=6)
    start = ToyModel()

    def moved(model):
        pairs = zip(model.transformer.parameters(), start.transformer.parameters(), strict=True)
        return sum(float((p - q).detach().square().sum()) for p, q in pairs)

    assert moved(held) < moved(free)
    assert result.history[0]["kl"] >= 0 and result.history[-1]["kl"] > 0


def test_supervised_loss_falls(workers, tmp_path) -> None:
    shapes_render.write_folder(tmp_path / "data", 8, seed=0)
    data = PairData(load_pairs(tmp_path / "data", height=64, width=64), 8)
    algorithm = SFT(SFTSettings(name="sft", batch_size=8))
    _, result = run(workers, tmp_path / "out", algorithm=algorithm, data=data, rewards=[], iterations=40, lr=2e-2)
    losses = [record["loss/flow_matching"] for record in result.history]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert "reward_mean" not in result.history[0]


def test_an_iteration_without_signal_changes_nothing(workers, tmp_path) -> None:
    class Constant(ColorReward):
        def __call__(self, media, prompts, metadata=None):
            scored = super().__call__(media, prompts, metadata)
            return type(scored)(torch.ones_like(scored.score))

    model, result = run(workers, tmp_path, rewards=[WeightedReward("constant", Constant())], iterations=2)
    assert [r["skipped_updates"] for r in result.history] == [2, 2]
    assert [r["zero_variance_share"] for r in result.history] == [1, 1]
    for p, q in zip(model.transformer.parameters(), ToyModel().transformer.parameters(), strict=True):
        assert torch.equal(p, q)


def test_mistakes_are_refused_in_one_sentence(workers, tmp_path) -> None:
    pairs = PairData(load_pairs(_folder(tmp_path), height=32, width=32), 5)
    sft = SFT(SFTSettings(name="sft", updates=2))
    cases = [
        ({"data": pairs}, "samples from prompts, but a dataset came"),
        ({"algorithm": sft}, "learns from a dataset, but prompts came"),
        (
            {"algorithm": sft, "data": pairs},
            "batch_size: 5 images do not split evenly over 2 updates x 1 processes.* 4 or 6",
        ),
        ({"rewards": []}, "rewards: none came"),
        ({"data": PromptData(DATA.prompts, 3, 3)}, "per_iteration 2 or 4"),
    ]
    for i, (arguments, words) in enumerate(cases):
        with pytest.raises(FlowAlignError, match=words) as caught:
            run(workers, tmp_path / str(i), **arguments)
        assert "\n" not in str(caught.value)


def _folder(tmp_path):
    shapes_render.write_folder(tmp_path / "pairs", 6, seed=0)
    return tmp_path / "pairs"


def test_output_of_another_run_and_finished_runs_are_refused(workers, tmp_path) -> None:
    _, result = run(workers, tmp_path, iterations=1)
    with pytest.raises(FlowAlignError, match="holds 000001"):
        run(workers, tmp_path, iterations=1)
    with pytest.raises(FlowAlignError, match="1 iterations are done"):
        run(workers, tmp_path, iterations=1, resume=result.checkpoint)
    with pytest.raises(FlowAlignError, match=r"it has ema, but this run keeps none \(training.ema_decay None\)"):
        run(workers, tmp_path, iterations=2, ema_decay=None, resume=result.checkpoint)
    with pytest.raises(FlowAlignError, match="it has ema, but this run keeps anchor, behaviour, ema, reference"):
        run(workers, tmp_path, iterations=2, algorithm=keeps(), resume=result.checkpoint)


def test_the_replay_check_runs_first(workers, tmp_path) -> None:
    class Wrong(FlowGRPO):
        def prepare(self, policy, samples, scores):
            batch = super().prepare(policy, samples, scores)
            batch.items["sigma"].mul_(0.99)
            return batch

    settings = FlowGRPOSettings(name="flow_grpo", num_steps=4)
    model = ToyModel()
    with pytest.raises(FlowAlignError, match="wrong step index"):
        run(workers, tmp_path, model=model, algorithm=Wrong(settings, shift=3.0))
    for p, q in zip(model.transformer.parameters(), ToyModel().transformer.parameters(), strict=True):
        assert torch.equal(p, q)
