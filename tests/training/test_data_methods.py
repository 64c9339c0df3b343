"""SOAR and Flow-DPO through the real loop: what they are given, and runs that equal each other bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowalign.algorithms.flow_dpo import FlowDPO, FlowDPOSettings, OfflineFlowDPOSettings
from flowalign.algorithms.sft import SFT, SFTSettings
from flowalign.algorithms.soar import SOAR, SOARSettings
from flowalign.core import rng
from flowalign.data.pairs import PairData, keyed_batch, load_pairs, load_preferences
from flowalign.data.prompts import Prompt, PromptData
from flowalign.data.worlds import shapes_render
from flowalign.rewards.combine import WeightedReward
from flowalign.training import checkpoint, learn
from flowalign.training.metrics import Clock
from flowalign.training.source import source_of
from flowalign.training.trainer import train
from flowalign.types import Conditioning, FlowAlignError, Policy
from tests.training.toy import PROMPTS, ColorReward, ToyModel, optimizer, training

SHIFT = 3.0


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> PairData:
    folder = tmp_path_factory.mktemp("pairs")
    shapes_render.write_folder(folder, 8, seed=0)
    return PairData(load_pairs(folder, height=32, width=32), 4)


@pytest.fixture(scope="module")
def preferences(tmp_path_factory) -> PairData:
    folder = tmp_path_factory.mktemp("preferences")
    shapes_render.write_preferences(folder, 8, seed=0)
    better, worse = load_preferences(folder, height=32, width=32)
    return PairData(better, 4, worse)


PROMPT_DATA = PromptData([Prompt(text) for text in PROMPTS], per_iteration=4, group_size=4)


def soar(**fields: Any) -> SOAR:
    return SOAR(SOARSettings(name="soar", batch_size=4, guidance=2.0, **fields), shift=SHIFT)


def online(**fields: Any) -> FlowDPO:
    return FlowDPO(FlowDPOSettings(name="flow_dpo", num_steps=4, **fields), shift=SHIFT)


def offline(**fields: Any) -> FlowDPO:
    return FlowDPO(OfflineFlowDPOSettings(name="flow_dpo_offline", batch_size=4, **fields), shift=SHIFT)


def run(workers, output, algorithm, data, *, lr=1e-2, resume=None, **changes):
    model = ToyModel()
    result = train(
        model,
        algorithm,
        data,
        [WeightedReward("color", ColorReward())] if isinstance(data, PromptData) else [],
        optimizer=optimizer(lr=lr),
        training=training(output, **{"iterations": 2, **changes}),
        workers=workers,
        lora=False,
        size=(32, 32),
        resume=resume,
    )
    return model, result


def equal(one: ToyModel, other: ToyModel) -> bool:
    pairs = zip(one.transformer.parameters(), other.transformer.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("off", [{"aux_weight": 0.0}, {"points": 0}])
@pytest.mark.parametrize("shift", [1.0, SHIFT])
def test_soar_without_points_ends_with_the_weights_of_supervised_fine_tuning(
    workers, tmp_path, pairs, off, shift
) -> None:
    plain = SFT(SFTSettings(name="sft", batch_size=4, shift=shift))
    one, first = run(workers, tmp_path / "sft", plain, pairs, micro_batch_size=3)
    other, second = run(workers, tmp_path / "soar", soar(shift=shift, **off), pairs, micro_batch_size=3)
    assert equal(one, other) and not equal(one, ToyModel())
    for a, b in zip(first.history, second.history, strict=True):
        assert a["loss/flow_matching"] == b["loss/flow_matching"] and a["grad_norm"] == b["grad_norm"]
    corrected, _ = run(workers, tmp_path / "corrected", soar(shift=shift), pairs)
    assert not equal(corrected, one)


def test_the_size_of_batches_does_not_matter_to_soar(workers, tmp_path, pairs) -> None:
    one, _ = run(workers, tmp_path / "a", soar(paths=2), pairs, rollout_batch_size=100, micro_batch_size=100)
    two, _ = run(workers, tmp_path / "b", soar(paths=2), pairs, rollout_batch_size=3, micro_batch_size=5)
    for p, q in zip(one.transformer.parameters(), two.transformer.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=0)


def test_examples_carry_the_negative_that_a_method_asks_for(workers, tmp_path, pairs) -> None:
    for algorithm, text in ((soar(negative="blurry"), "blurry"), (soar(points=0), None)):
        model = ToyModel()
        source = source_of(
            model, Policy(None, None), algorithm, pairs, [], workers, training(tmp_path), (32, 32)  # type: ignore[arg-type]
        )  # fmt: skip
        cond = source.draw(0, Clock(workers.device)).samples.cond
        if text is None:
            assert cond.negative is None
        else:
            assert cond.negative is not None
            assert torch.equal(cond.negative["text"], model.encode([text] * 4).tensors["text"])
        assert source.preview(3)[2] == 2.0


def test_examples_of_preferences_carry_the_worse_image_of_the_same_caption(workers, tmp_path, preferences) -> None:
    model = ToyModel()
    source = source_of(
        model, Policy(None, None), offline(), preferences, [], workers, training(tmp_path), (32, 32)  # type: ignore[arg-type]
    )  # fmt: skip
    assert preferences.worse is not None
    for iteration in range(2):
        samples = source.draw(iteration, Clock(workers.device)).samples
        index = keyed_batch(8, 4, iteration, seed=0)
        assert samples.prompts == tuple(preferences.pairs.texts[i] for i in index)
        assert torch.equal(samples.clean, model.encode_media(preferences.pairs.images(index)))
        assert torch.equal(samples.worse, model.encode_media(preferences.worse.images(index)))


def test_only_as_many_rows_at_a_time_as_memory_holds() -> None:
    rows = []

    def velocity(x, sigma, cond):
        rows.append(x.shape[0])
        return x * sigma[:, None] + cond.tensors["text"]

    policy = learn.in_chunks(Policy(velocity, velocity), 3)
    x, text = torch.randn(2, 8, 5, generator=rng.generator("chunks"))
    sigma = torch.rand(8, generator=rng.generator("levels"))
    for one in (policy.current, policy.reference, policy.behaviour, policy.anchor):
        assert torch.equal(one(x, sigma, Conditioning({"text": text})), x * sigma[:, None] + text)
    assert rows == [3, 3, 2] * 4


@pytest.mark.parametrize("kind", ["soar", "online", "offline"])
def test_one_and_one_iteration_equal_two_bit_for_bit(workers, tmp_path, pairs, preferences, kind: str) -> None:
    make, data = {
        "soar": (lambda: soar(paths=2), pairs),
        "online": (lambda: online(noisings=2, updates=2), PROMPT_DATA),
        "offline": (offline, preferences),
    }[kind]
    whole, _ = run(workers, tmp_path / "whole", make(), data)
    _, first = run(workers, tmp_path / "part", make(), data, iterations=1)
    again, _ = run(workers, tmp_path / "part", make(), data, resume=first.checkpoint)
    assert first.checkpoint != checkpoint.latest(tmp_path / "part")
    assert equal(whole, again) and not equal(whole, ToyModel())


def test_online_preference_learning_says_what_it_compares(workers, tmp_path) -> None:
    _, result = run(workers, tmp_path, online(noisings=2), PROMPT_DATA)
    first, second = result.history
    assert first["loss/preference"] == pytest.approx(0.693147, abs=1e-5) and first["implicit_accuracy"] == 0.5
    assert second["implicit_accuracy"] not in (0, 0.5, 1) and second["better_error_change"] != 0
    assert {"better_error", "worse_error", "reward_mean"} <= second.keys()


def test_offline_preference_learning_raises_the_implicit_accuracy(workers, tmp_path, preferences) -> None:
    _, result = run(workers, tmp_path, offline(beta=500.0), preferences, iterations=20, lr=1e-2)
    accuracy = [record["implicit_accuracy"] for record in result.history]
    assert accuracy[0] == 0.5 and sum(accuracy[-10:]) / 10 > 0.7
    assert "reward_mean" not in result.history[0]


def test_groups_without_a_difference_are_skipped(workers, tmp_path) -> None:
    class Constant(ColorReward):
        def __call__(self, media, prompts, metadata=None):
            scored = super().__call__(media, prompts, metadata)
            return type(scored)(torch.ones_like(scored.score))

    model = ToyModel()
    result = train(
        model,
        online(),
        PROMPT_DATA,
        [WeightedReward("constant", Constant())],
        optimizer=optimizer(),
        training=training(tmp_path, iterations=2),
        workers=workers,
        lora=False,
        size=(32, 32),
    )
    assert [r["skipped_updates"] for r in result.history] == [1, 1]
    assert equal(model, ToyModel())


def test_groups_that_do_not_split_over_updates_are_refused(workers, tmp_path) -> None:
    with pytest.raises(FlowAlignError, match="per_iteration 4 groups do not split evenly over 3 updates"):
        run(workers, tmp_path, online(updates=3), PROMPT_DATA)
