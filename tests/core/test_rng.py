"""Keyed randomness: a draw depends on its key and on nothing else."""

from __future__ import annotations

import pytest
import torch

from flowalign.core import rng


def test_key_is_the_same_on_every_machine_for_ever() -> None:
    # blake2b, 8 bytes, big end first, of "int:1:0;str:5:noise;int:1:7;", halved; a change would change every run.
    assert rng.key(0, "noise", 7) == 1923382679706432167
    assert rng.key() == 8238016292129134938


def test_draw_of_a_generator_is_fixed() -> None:
    drawn = torch.randn(3, generator=rng.generator(0, "noise", 7))
    torch.testing.assert_close(drawn, torch.tensor([-0.5599414706, 0.4582618177, -0.1477726102]), atol=1e-6, rtol=0)


def test_keys_fit_a_torch_seed() -> None:
    keys = [rng.key("range", i) for i in range(2000)]
    assert min(keys) >= 0
    assert max(keys) < 2**63
    assert len(set(keys)) == len(keys)
    assert max(keys) > 2**61  # the whole range is in use: the chance that 2000 uniform keys all miss it is (1/4)**2000


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1,), ("1",)),
        (("a", "b"), ("ab",)),
        ((1, 2), (2, 1)),
        ((1, 23), (12, 3)),
        ((0,), ()),
        ((1,), (1, "")),
        ((1,), (-1,)),
        (("a\x1fstr:b",), ("a", "b")),
        (("a;str:1:b",), ("a", "b")),
    ],
)
def test_different_parts_give_different_keys(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> None:
    assert rng.key(*one) != rng.key(*other)


def test_draws_do_not_depend_on_the_order_of_calls_nor_on_the_global_generator() -> None:
    names = ["a", "b", "c"]
    forward = {name: torch.randn(4, generator=rng.generator(3, name)) for name in names}
    torch.manual_seed(123)
    torch.randn(7)
    state = torch.get_rng_state()
    backward = {name: torch.randn(4, generator=rng.generator(3, name)) for name in reversed(names)}
    assert torch.equal(torch.get_rng_state(), state)
    for name in names:
        assert torch.equal(forward[name], backward[name])
    assert not torch.equal(forward["a"], forward["b"])


def test_normal_takes_the_next_draw_of_each_generator_whatever_the_batch_split() -> None:
    shape = (2, 3, 5)
    whole = [rng.generator("sample", i) for i in range(4)]
    first, second = rng.normal(whole, shape), rng.normal(whole, shape)
    assert first.shape == (4, *shape)
    assert first.dtype == torch.float32
    assert not torch.equal(first, second)
    left, right = [rng.generator("sample", i) for i in (0, 1)], [rng.generator("sample", i) for i in (2, 3)]
    assert torch.equal(first, torch.cat([rng.normal(left, shape), rng.normal(right, shape)]))
    assert torch.equal(second, torch.cat([rng.normal(left, shape), rng.normal(right, shape)]))


def test_normal_has_the_moments_of_a_standard_normal() -> None:
    drawn = rng.normal([rng.generator("moments", i) for i in range(100)], (1000,))
    # 1e5 draws: standard errors .0032 of the mean and .0045 of the variance; five of them.
    assert abs(float(drawn.mean())) < 0.016
    assert abs(float(drawn.var()) - 1) < 0.0225
