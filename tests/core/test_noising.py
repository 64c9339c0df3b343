"""Noised endpoints: on the path, keyed, and credited; keyed levels and noise."""

from __future__ import annotations

import pytest
import torch

from flowalign.core import noising, rng
from flowalign.types import Conditioning, Examples, Rollout, Scores, Trajectory

SHAPE, KEYS = (2, 4, 4), (5, 9, 2)


def clean(count: int = 3) -> torch.Tensor:
    return torch.randn(count, *SHAPE, generator=rng.generator("clean"))


def levels(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(4, generator=generator)


def rollout(count: int = 3) -> Rollout:
    none = torch.zeros(count, 0)
    trajectory = Trajectory(clean(count), none, none.long(), torch.tensor([1.0, 0.0]), none)
    cond = Conditioning({"text": torch.zeros(count, 1)})
    return Rollout(("p",) * count, torch.zeros(count), KEYS[:count], cond, trajectory, torch.zeros(count, 1, 3, 4, 4))


def test_items_lie_on_the_path_of_their_sample() -> None:
    made = noising.noised(clean(), KEYS, "test", levels)
    assert made.sample.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    sigma, start = made.items["sigma"].view(-1, 1, 1, 1), clean()[made.sample]
    assert torch.equal(made.items["sigma"][4:8], levels(rng.generator(9, "test")))
    # d x / d sigma = target, and x = clean at sigma = 0.
    torch.testing.assert_close(made.items["x"] - sigma * made.items["target"], start, atol=1e-6, rtol=1e-5)
    noise = made.items["target"] + start
    assert noise.flatten(1).unique(dim=0).shape[0] == 12, "every item has its own noise"
    assert abs(float(noise.mean())) < 4 / noise.numel() ** 0.5
    assert abs(float(noise.std()) - 1) < 4 / (2 * noise.numel()) ** 0.5


def test_draws_depend_on_the_key_and_the_purpose_alone() -> None:
    whole = noising.noised(clean(), KEYS, "test", levels)
    alone = noising.noised(clean()[1:2], KEYS[1:2], "test", levels)
    for name, value in alone.items.items():
        assert torch.equal(value, whole.items[name][4:8])
    other = noising.noised(clean()[1:2], KEYS[1:2], "other", levels)
    assert not torch.isclose(other.items["sigma"], alone.items["sigma"]).any()


@pytest.mark.parametrize("ties", [False, True])
def test_endpoints_carry_their_credit(ties: bool) -> None:
    rewards = torch.tensor([1.0, 3.0, torch.nan])
    scores = Scores({"r": rewards}, {"r": 1.0}, torch.zeros(3), torch.arange(3))
    batch = noising.endpoints("test", rollout(), scores, levels, std="group", clip=0.5, ties=ties)
    assert batch.items["advantage"].tolist() == [-0.5] * 4 + [0.5] * 4 + [0.0] * 4
    assert batch.weight.tolist() == [1.0] * 8 + [0.0] * 4, "what was not scored is never learnt from"
    even = Scores({"r": torch.ones(3)}, {"r": 1.0}, torch.zeros(3), torch.arange(3))
    batch = noising.endpoints("test", rollout(), even, levels, std="group", clip=0.5, ties=ties)
    assert batch.items["advantage"].abs().max() == 0
    assert batch.weight.tolist() == [float(ties)] * 12


def test_what_was_not_sampled_and_scored_is_refused() -> None:
    examples = Examples(("p",), (0,), Conditioning({"text": torch.zeros(1, 1)}), torch.zeros(1, *SHAPE))
    for samples in (examples, rollout()):
        with pytest.raises(TypeError, match="nft learns from a scored Rollout"):
            noising.endpoints("nft", samples, None, levels, std="group", clip=1.0, ties=False)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_levels_are_logit_normal_and_shifted_once(shift: float) -> None:
    count = 4000
    sources = [rng.generator("noising", i) for i in range(count)]
    draw = noising.logit_normal(sources, (2,), mean=0.3, std=0.8, shift=shift, device="cpu")
    logit = torch.logit(draw.level.double())
    # Five standard errors of each.
    assert abs(float(logit.mean()) - 0.3) < 5 * 0.8 / count**0.5
    assert abs(float(logit.std()) - 0.8) < 5 * 0.8 / (2 * count) ** 0.5
    # The shift k multiplies the odds of noise: sigma / (1 - sigma) = k u / (1 - u).
    torch.testing.assert_close(torch.logit(draw.sigma.double()), logit + torch.tensor(shift).log(), atol=1e-4, rtol=0)
    assert abs(float(draw.noise.mean())) < 5 / (2 * count) ** 0.5
    assert abs(float(draw.noise.var()) - 1) < 5 * (1 / count) ** 0.5


def test_a_draw_depends_on_its_own_generator() -> None:
    def draw(*names: int) -> noising.Draw:
        sources = [rng.generator("noising", n) for n in names]
        return noising.logit_normal(sources, (3, 2), mean=0.0, std=1.0, shift=2.0, device="cpu")

    whole, part = draw(1, 2, 3), draw(3, 1)
    for name in ("level", "sigma", "noise"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[[2, 0]])
