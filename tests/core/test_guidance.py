"""Classifier-free guidance equals its two-call formula in one call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowalign.core import guidance, rng
from flowalign.types import Conditioning


class Counting:
    """A velocity that depends on x, sigma and text, and remembers the batch sizes that it was called with."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        self.calls.append(x.shape[0])
        assert sigma.shape[0] == len(cond) == x.shape[0]
        text, pooled = cond.tensors["text"], cond.tensors["pooled"]
        bias = text.sum((1, 2)) + sigma * pooled[:, 0]
        return torch.sin(x) + bias[:, None, None, None] * x


def conditioning(batch: int, *, negative: bool) -> Conditioning:
    def tensors(name: str) -> dict[str, Tensor]:
        return {
            "text": torch.randn(batch, 3, 2, generator=rng.generator(name, "text")),
            "pooled": torch.randn(batch, 4, generator=rng.generator(name, "pooled")),
        }

    return Conditioning(tensors("positive"), tensors("negative") if negative else None)


X = torch.randn(3, 2, 4, 4, generator=rng.generator("x"))
SIGMA = torch.tensor([0.9, 0.5, 0.2])


@pytest.mark.parametrize("scale", [0.0, 1.5, 4.5])
def test_equals_the_two_call_formula_in_one_call(scale: float) -> None:
    cond = conditioning(3, negative=True)
    assert cond.negative is not None
    counting = Counting()
    guided = guidance.classifier_free(counting, scale)(X, SIGMA, cond)
    assert counting.calls == [6]
    positive = Counting()(X, SIGMA, Conditioning(cond.tensors))
    negative = Counting()(X, SIGMA, Conditioning(cond.negative))
    expected = negative + scale * (positive - negative)
    # The same float32 operations on another batch size: a few roundings of numbers of about 30.
    torch.testing.assert_close(guided, expected, atol=2e-5, rtol=1e-6)


def test_scale_one_is_the_velocity_itself() -> None:
    velocity = Counting()
    assert guidance.classifier_free(velocity, 1.0) is velocity


def test_scale_zero_ignores_the_text() -> None:
    cond = conditioning(3, negative=True)
    other = Conditioning({k: v + 1 for k, v in cond.tensors.items()}, cond.negative)
    guided = guidance.classifier_free(Counting(), 0.0)
    torch.testing.assert_close(guided(X, SIGMA, cond), guided(X, SIGMA, other), atol=1e-5, rtol=0)


def test_missing_negative_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="negative"):
        guidance.classifier_free(Counting(), 2.0)(X, SIGMA, conditioning(3, negative=False))


def test_gradients_flow_to_both_halves() -> None:
    weight = torch.tensor(1.0, requires_grad=True)

    def velocity(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        return weight * cond.tensors["text"][:, :1, :1, None] * torch.ones_like(x)

    cond = conditioning(3, negative=True)
    assert cond.negative is not None
    guidance.classifier_free(velocity, 3.0)(X, SIGMA, cond).mean().backward()
    positive, negative = cond.tensors["text"][:, 0, 0], cond.negative["text"][:, 0, 0]
    torch.testing.assert_close(weight.grad, (negative + 3 * (positive - negative)).mean(), atol=1e-5, rtol=0)
