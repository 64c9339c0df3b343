"""Supervised fine-tuning is flow matching at keyed sigma and noise, checked from what the policy is shown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from flowalign.algorithms.sft import SFT, SFTSettings
from flowalign.core import rng
from flowalign.types import Batch, Conditioning, Examples, Policy, Terms

SHAPE = (2, 4, 4)


class Toy(nn.Module):
    """A velocity that depends on x, sigma and text; it keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2, 2, 1)
        generator = rng.generator("toy")
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
        self.shown: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        text = cond.tensors["text"]
        self.shown.append((x.detach().clone(), sigma.detach().clone(), text.clone()))
        return torch.tanh(self.mix(x)) + (sigma + text[:, 0])[:, None, None, None] * x


def never(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
    raise AssertionError("supervised fine-tuning asked for the reference")


def examples(count: int, name: str = "examples") -> Examples:
    generator = rng.generator(name)
    return Examples(
        prompts=tuple(f"prompt {b}" for b in range(count)),
        keys=tuple(rng.key(name, b) for b in range(count)),
        cond=Conditioning({"text": torch.randn(count, 1, generator=generator)}),
        clean=torch.randn(count, *SHAPE, generator=generator),
    )


def rows(samples: Examples, index: list[int]) -> Examples:
    at = torch.tensor(index)
    return Examples(
        tuple(samples.prompts[i] for i in index),
        tuple(samples.keys[i] for i in index),
        samples.cond.select(at),
        samples.clean[at],
    )


def total(terms: Terms) -> Tensor:
    return torch.stack(list(terms.losses.values())).sum(0)


def build(**fields: float) -> SFT:
    return SFT(TypeAdapter(SFTSettings).validate_python({"name": "sft"} | fields))


def losses(samples: Examples, model: nn.Module, **fields: float) -> tuple[Tensor, Batch]:
    policy = Policy(model, never)
    algorithm = build(**fields)
    batch = algorithm.prepare(policy, samples, None)
    return total(algorithm.losses(policy, batch)), batch


def recover(samples: Examples, model: Toy, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clean, noise, x and sigma of each item, from the one call that the policy got; float64."""
    (x, sigma, text), clean = model.shown[-1], samples.clean[batch.sample].double()
    assert torch.equal(text, samples.cond.tensors["text"][batch.sample])
    s = sigma.double()[:, None, None, None]
    return clean, (x.double() - (1 - s) * clean) / s, x.double(), sigma.double()


def test_there_is_no_rollout() -> None:
    assert build().plan(0) is None
    assert build().updates == 1
    assert build(updates=3).updates == 3


def test_loss_is_flow_matching_and_so_is_its_gradient() -> None:
    samples, model = examples(16), Toy()
    loss, batch = losses(samples, model)
    assert loss.shape == (len(batch),) == (16,)
    assert torch.equal(batch.sample.sort().values, torch.arange(16))
    assert batch.weight.unique().numel() == 1
    assert float(batch.weight[0]) > 0
    clean, noise, x, sigma = recover(samples, model, batch)
    exact = Toy().double()
    v = exact(x, sigma, Conditioning({"text": samples.cond.tensors["text"][batch.sample].double()}))
    expected = (v - (noise - clean)).pow(2).mean((1, 2, 3))
    # The recovered noise is known to 1e-7 / sigma, and sigma may be as low as .03.
    np.testing.assert_allclose(loss.detach().numpy(), expected.detach().numpy(), rtol=1e-4)
    got = torch.autograd.grad(loss.mean(), list(model.parameters()))
    for one, other in zip(got, torch.autograd.grad(expected.mean(), list(exact.parameters())), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4 * float(other.abs().max()), rtol=0)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.7)])
def test_sigma_is_logit_normal_and_noise_is_standard_normal(mean: float, std: float) -> None:
    count = 3000
    samples, model = examples(count, "many"), Toy()
    _, batch = losses(samples, model, sigma_mean=mean, sigma_std=std)
    clean, noise, _, sigma = recover(samples, model, batch)
    logit = torch.logit(sigma)
    # Five standard errors of each.
    assert abs(float(logit.mean()) - mean) < 5 * std / count**0.5
    assert abs(float(logit.std()) - std) < 5 * std / (2 * count) ** 0.5
    elements = noise.numel()
    assert abs(float(noise.mean())) < 5 / elements**0.5
    assert abs(float(noise.var()) - 1) < 5 * (2 / elements) ** 0.5
    assert abs(float((noise * clean).mean())) < 5 / elements**0.5  # independent of the data
    levels = noise.pow(2).mean((1, 2, 3))
    correlation = float(torch.corrcoef(torch.stack([levels, logit]))[0, 1])
    assert abs(correlation) < 5 / count**0.5  # and of sigma
    assert (
        sigma.unique().numel() > 0.99 * count
    )  # its own for every example; float32 leaves room for a few coincidences


def test_keys_decide_whatever_the_split_and_order() -> None:
    samples = examples(12)
    whole_loss, whole = losses(samples, Toy())
    whole_loss = whole_loss[whole.sample.argsort()]
    order = [7, 2, 11, 0, 5, 1, 9, 3, 10, 4, 8, 6]
    torch.manual_seed(99)  # the global generator is not asked
    parts = []
    for part in (order[:5], order[5:6], order[6:]):
        loss, batch = losses(rows(samples, part), Toy())
        parts.append(loss[batch.sample.argsort()])
    torch.testing.assert_close(torch.cat(parts), whole_loss[order], atol=1e-6, rtol=1e-5)


def test_items_may_be_split_for_the_backward_pass() -> None:
    samples, model = examples(12), Toy()
    policy, algorithm = Policy(model, never), build()
    batch = algorithm.prepare(policy, samples, None)
    whole = total(algorithm.losses(policy, batch))
    parts = torch.cat([total(algorithm.losses(policy, batch.select(part))) for part in torch.arange(12).split(5)])
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)


def test_other_keys_give_other_draws() -> None:
    samples = examples(4)
    other = Examples(samples.prompts, tuple(key + 1 for key in samples.keys), samples.cond, samples.clean)
    first, second = Toy(), Toy()
    losses(samples, first)
    losses(other, second)
    assert not torch.isclose(first.shown[-1][1], second.shown[-1][1]).any()


def test_loss_vanishes_at_the_true_velocity() -> None:
    """Data of a single point c: x = (1 - sigma) c + sigma noise, so noise - c = (x - c) / sigma."""
    samples = examples(8)
    point = samples.clean[:1]
    samples = Examples(samples.prompts, samples.keys, samples.cond, point.expand(8, *SHAPE).clone())

    class True_(nn.Module):
        def forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            return (x - point) / sigma[:, None, None, None]

    loss, _ = losses(samples, True_())
    assert float(loss.detach().max()) < 1e-9  # the square of a rounding, 1e-7 / sigma
    assert float(losses(samples, Toy())[0].detach().min()) > 0.1


def test_items_and_metrics_carry_no_gradient() -> None:
    model = Toy()
    policy, algorithm = Policy(model, never), build()
    batch = algorithm.prepare(policy, examples(4), None)
    assert not any(item.requires_grad for item in batch.items.values())
    terms = algorithm.losses(policy, batch)
    assert not any(value.requires_grad for value in terms.metrics.values())
    assert all(value.shape == (4,) and value.dtype == torch.float32 for value in terms.losses.values())


def test_training_reaches_the_data() -> None:
    """Two hundred steps on a single point teach a linear velocity the point: v = (x - c) / sigma at its best."""
    point = torch.tensor([0.8, -0.5])[None, :, None, None]

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Parameter(torch.zeros(1, 2, 1, 1))

        def forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            return (x - self.c) / sigma[:, None, None, None]

    model, algorithm = Linear(), build()
    policy, optimizer = Policy(model, never), torch.optim.Adam(model.parameters(), lr=0.05)
    for iteration in range(100):
        samples = examples(8, f"iteration {iteration}")
        samples = Examples(samples.prompts, samples.keys, samples.cond, point.expand(8, *SHAPE).clone())
        batch = algorithm.prepare(policy, samples, None)
        optimizer.zero_grad()
        total(algorithm.losses(policy, batch)).mean().backward()
        optimizer.step()
    # The loss is (c - point)^2 mean(1 / sigma^2) without noise of its own, so the point is found.
    torch.testing.assert_close(model.c.detach(), point, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"updates": 0}, "updates"),
        ({"sigma_std": -1.0}, "sigma_std"),
        ({"sigma_std": 0.0}, "sigma_std"),
        ({"batch_size": 0}, "batch_size"),
        ({"sigma_mean": float("nan")}, "sigma_mean"),
        ({"sigma_men": 0.1}, "sigma_men"),
    ],
)
def test_impossible_settings_are_refused_by_name(fields: dict[str, float], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        build(**fields)
