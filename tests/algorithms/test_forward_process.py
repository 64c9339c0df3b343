"""One formula behind RAM, DiffusionNFT and AWM: their gradients differ in the quadratic pull alone.

For items (x, t, Y) with advantage A, the gradients in v are those of these forms, per latent element:

    AWM, uniform            A |v - Y|^2 + b |v - v_ref|^2 + b' |v - v_anchor|^2
    RAM, self target        |v - v_ref|^2 + m A |v - Y|^2
    RAM, old target         |v - v_ref|^2 + 2 m A <v, v_old - Y>
    NFT, constant weight    b a |v - v_old|^2 + 2 A <v, v_old - Y>, times t^2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign.algorithms import diffusion_nft
from flowalign.algorithms.awm import AWM, AWMSettings
from flowalign.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTSettings
from flowalign.algorithms.ram import RAM, RAMSettings
from flowalign.types import Batch, Policy
from tests.algorithms.forward import apart, built, collect, column, gradient, shown
from tests.algorithms.toy import SHIFT, score


def ram(**fields: Any) -> RAM:
    return built(RAM, RAMSettings, {"name": "ram", "num_steps": 6, "guidance": 1, "noisings": 3}, SHIFT, fields)


def awm(**fields: Any) -> AWM:
    # The advantage as it is, like RAM's.
    defaults = {"name": "awm", "num_steps": 6, "noisings": 3, "weighting": "uniform", "advantage_max": 5.0}
    return built(AWM, AWMSettings, defaults, SHIFT, fields)


def nft(**fields: Any) -> DiffusionNFT:
    defaults = {"name": "diffusion_nft", "num_steps": 6, "noisings": 3, "kl_weight": 0.0}
    return built(DiffusionNFT, DiffusionNFTSettings, defaults, SHIFT, fields)


def of_form(form: Callable[..., Tensor], policy: Policy, batch: Batch) -> Tensor:
    """The gradient of a form in v, summed over items, by automatic differentiation in double."""
    v = shown(policy.current, batch).requires_grad_()
    others = (shown(p, batch) for p in (policy.reference, policy.behaviour, policy.anchor))
    advantage, target = column(batch.items["advantage"]), batch.items["target"].double()
    form(v, *others, advantage, target).mean((1, 2, 3)).sum().backward()
    assert v.grad is not None
    return v.grad


FORMS: list[tuple[Any, Callable[..., Tensor]]] = [
    (
        awm(kl_weight=0.3, anchor_weight=0.6),
        lambda v, ref, old, anchor, a, y: a * (v - y) ** 2 + 0.3 * (v - ref) ** 2 + 0.6 * (v - anchor) ** 2,
    ),
    (
        ram(target="self", decay_cap=0.0, reward_multiplier=4.0),
        lambda v, ref, old, anchor, a, y: (v - ref) ** 2 + 4 * a * (v - y) ** 2,
    ),
    (
        ram(reward_multiplier=4.0),
        lambda v, ref, old, anchor, a, y: (v - ref) ** 2 + 2 * 4 * a * v * (old - y),
    ),
]


@pytest.mark.parametrize(("algorithm", "form"), FORMS, ids=["awm", "ram-self", "ram-old"])
def test_gradients_are_those_of_the_forms(algorithm: Any, form: Callable[..., Tensor]) -> None:
    policy = apart()
    batch = algorithm.prepare(policy, collect(algorithm, policy), score())
    expected = of_form(form, policy, batch)
    assert float(expected.abs().mean()) > 0.01
    torch.testing.assert_close(gradient(algorithm, policy, batch), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_gradient_of_nft_without_its_adaptive_weight(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A floor far above every error makes the weight a constant."""
    floor = 64.0
    monkeypatch.setattr(diffusion_nft, "SMALLEST_WEIGHT", floor)
    algorithm, policy = nft(nft_beta=beta, advantage_clip=3.0), apart()
    batch = algorithm.prepare(policy, collect(algorithm, policy), score())
    expected = of_form(
        lambda v, ref, old, anchor, a, y: beta * 3 * (v - old) ** 2 + 2 * a * v * (old - y), policy, batch
    )
    expected = column(batch.items["sigma"]) ** 2 / floor * expected
    got = gradient(algorithm, policy, batch)
    torch.testing.assert_close(got * floor, expected * floor, atol=1e-5, rtol=1e-5)


def test_awm_with_a_pull_of_one_over_m_is_ram_with_the_self_target() -> None:
    """b = 1 / m: the same gradient up to the factor m, on the same items."""
    m, policy = 7.0, apart()
    one, other = awm(kl_weight=1 / m, anchor_weight=0.0), ram(target="self", decay_cap=0.0, reward_multiplier=m)
    batch = one.prepare(policy, collect(one, policy), score())
    torch.testing.assert_close(m * gradient(one, policy, batch), gradient(other, policy, batch), atol=1e-5, rtol=1e-5)


def test_on_policy_all_three_have_one_linear_term() -> None:
    """At v = v_old = v_ref = v_anchor every pull vanishes: 2 A (v - Y) / d, times m (RAM) or t^2 / w (NFT)."""
    start = apart().reference
    policy = Policy(start, start)
    base = ram(reward_multiplier=1.0)
    batch = base.prepare(policy, collect(base, policy), score())
    v, target, t = shown(start, batch), batch.items["target"].double(), column(batch.items["sigma"])
    expected = 2 * column(batch.items["advantage"]) * (v - target) / v[0].numel()
    weight = t**2 / (t * (v - target)).abs().mean((1, 2, 3), keepdim=True)
    for algorithm, factor in (
        (base, 1),
        (ram(reward_multiplier=3.0), 3),
        (ram(reward_multiplier=3.0, normalise=True), 1),
        (awm(kl_weight=0.5, anchor_weight=2.0), 1),
        (nft(nft_beta=0.4, kl_weight=0.7), weight),
    ):
        torch.testing.assert_close(gradient(algorithm, policy, batch), factor * expected, atol=1e-5, rtol=1e-4)
