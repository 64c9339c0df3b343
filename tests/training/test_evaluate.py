"""Paired evaluation and its interval."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from flowalign.core import rng, schedule
from flowalign.data.prompts import Prompt
from flowalign.rewards.combine import WeightedReward
from flowalign.training.evaluate import evaluate, paired_bootstrap, sample, velocity_of
from flowalign.types import FlowAlignError
from tests.training.toy import PROMPTS, ColorReward, ToyModel

ASKED = [Prompt(text) for text in PROMPTS[:4]]


def scores(model, **changes):
    values = {"num_steps": 4, "size": (32, 32), **changes}
    return evaluate(model, ASKED, [0, 7], [WeightedReward("color", ColorReward())], **values)


def test_samples_are_euler_steps_from_keyed_noise() -> None:
    model = ToyModel()
    result = scores(model)
    assert result.prompt.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and result.seed.tolist() == [0, 7] * 4
    assert result.media.shape == (8, 1, 3, 32, 32)
    sigmas = schedule.diffusers_shift(4, 3.0)
    for i in (0, 3, 6):
        text = PROMPTS[int(result.prompt[i])]
        x = torch.randn(1, 3, 4, 4, generator=rng.generator("evaluate", int(result.seed[i]), text))
        for a, b in pairwise(sigmas):
            with torch.no_grad():
                x = x + (b - a) * model.velocity(model.transformer, x, a[None], model.encode([text]))
        assert torch.allclose(model.decode(x)[0], result.media[i], atol=1e-5)
    expected = ColorReward()(result.media, [PROMPTS[i] for i in result.prompt.tolist()]).score
    assert torch.allclose(result.values["color"], expected)
    assert torch.isfinite(result.subscores["color/brightness"]).all()


def test_evaluations_are_paired_and_do_not_depend_on_the_batch_size() -> None:
    one, two = scores(ToyModel()), scores(ToyModel(), batch_size=3)
    assert torch.allclose(one.media, two.media, atol=1e-5)
    other = scores(ToyModel(seed=1))
    assert not torch.allclose(one.media, other.media, atol=1e-2)
    guided = scores(ToyModel(), guidance_scale=3.0)
    assert not torch.allclose(one.media, guided.media, atol=1e-3)
    model = ToyModel()
    swapped = scores(model, velocity=velocity_of(model, ToyModel(seed=1).transformer))
    assert torch.allclose(swapped.media, other.media, atol=1e-6)
    alone = sample(ToyModel(), [PROMPTS[2]], [7], sigmas=schedule.diffusers_shift(4, 3.0), size=(32, 32))
    assert torch.allclose(alone[0], one.media[5], atol=1e-5)


def test_the_interval_is_that_of_a_clustered_normal() -> None:
    """Prompt effects N(0.1, 0.2^2) shared by both seeds, seed noise N(0, 0.05^2), 400 prompts."""
    generator = np.random.default_rng(0)
    prompts, seeds = 400, 2
    effect = generator.normal(0.1, 0.2, prompts).repeat(seeds)
    before = torch.from_numpy(generator.normal(0.5, 0.3, prompts * seeds))
    after = before + torch.from_numpy(effect + generator.normal(0, 0.05, prompts * seeds))
    groups = torch.arange(prompts).repeat_interleave(seeds)
    found = paired_bootstrap(before, after, groups)
    means = (after - before).view(prompts, seeds).mean(1)
    error = float(means.std(correction=0)) / prompts**0.5
    assert found.mean == pytest.approx(float(means.mean()))
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.06 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.06 * error)
    singly = paired_bootstrap(before, after, torch.arange(prompts * seeds))
    assert singly.high - singly.low < 0.8 * (found.high - found.low)  # too sure by about sqrt(2)
    assert paired_bootstrap(before, after, groups) == found != paired_bootstrap(before, after, groups, seed=1)


def test_unequal_groups_and_invalid_pairs() -> None:
    nan = float("nan")
    before = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0])
    after = torch.tensor([1.0, 1.0, 1.0, 0.0, nan])
    found = paired_bootstrap(before, after, [0, 0, 0, 1, 1])
    assert found.mean == pytest.approx(0.75)  # weighted by pairs, without the invalid one
    assert (found.low, found.high) == (0.0, 1.0)
    constant = paired_bootstrap(torch.zeros(6), torch.full((6,), 0.5), [0, 0, 1, 1, 2, 2])
    assert constant == (0.5, 0.5, 0.5)
    with pytest.raises(FlowAlignError, match="1 prompts"):
        paired_bootstrap(before, after, [0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="expected"):
        paired_bootstrap(before, after[:3], [0, 0, 0, 1, 1][:3])
