"""Keyed noise levels and noise."""

from __future__ import annotations

import pytest
import torch

from flowalign.core import noising, rng


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
