"""One total out of several rewards: each way by hand, and what gates and missing scores do to it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from flowalign.core import combination
from flowalign.types import Scores

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
NAN = math.nan


def scores(values, weights, combine="sum", gated=None) -> Scores:
    columns = {name: torch.tensor(column, dtype=torch.float32) for name, column in values.items()}
    mask = None if gated is None else torch.tensor(gated)
    return Scores(columns, weights, GROUPS, torch.arange(6), combination=combine, gated=mask)


TWO = {"wide": [0.0, 10.0, 20.0, 5.0, 5.0, 8.0], "narrow": [0.3, 0.2, 0.1, 0.0, 0.1, 0.2]}


def test_a_sum_is_weighted() -> None:
    total = combination.total(scores(TWO, {"wide": 1.0, "narrow": -2.0}))
    assert torch.allclose(total, torch.tensor([-0.6, 9.6, 19.8, 5.0, 4.8, 7.6]), atol=1e-6)


def test_normalised_rewards_weigh_what_their_weights_say() -> None:
    # Within a group {0, 10, 20} and {.3, .2, .1} are the same numbers up to scale and sign: +-sqrt(3/2) and 0. The
    # spread in the denominator gets 1e-4, which matters for the narrow one alone: .0817 -> .0818.
    total = combination.total(scores(TWO, {"wide": 1.0, "narrow": 1.0}, "normalise"))
    assert torch.allclose(total[:3], torch.zeros(3), atol=2e-3)
    # {5, 5, 8}: mean 6, deviation sqrt 2; {0, .1, .2}: mean .1, deviation .1 sqrt(2/3).
    expected = torch.tensor([-1 / math.sqrt(2) - math.sqrt(1.5), -1 / math.sqrt(2), math.sqrt(2) + math.sqrt(1.5)])
    assert torch.allclose(total[3:], expected, atol=2e-3)


def test_ranks_know_only_the_order_and_share_places() -> None:
    total = combination.total(scores(TWO, {"wide": 2.0, "narrow": 1.0}, "ranks"))
    assert torch.allclose(total, torch.tensor([0 + 1, 1 + 0.5, 2 + 0, 0.5 + 0, 0.5 + 0.5, 2 + 1]))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3)), min_size=1, max_size=12))
def test_ranks_are_those_of_scipy(pairs: list[tuple[int, int]]) -> None:
    groups, values = (torch.tensor(column) for column in zip(*pairs, strict=True))
    got = combination.ranks(values.float(), groups)
    for one in groups.unique():
        own = values[groups == one].numpy()
        places = (rankdata(own) - 1) / (len(own) - 1) if len(own) > 1 else [0.5]
        assert torch.allclose(got[groups == one], torch.tensor(places, dtype=torch.float32))


@pytest.mark.parametrize("combine", ["sum", "normalise", "ranks"])
def test_a_sample_without_a_score_has_no_total_and_moves_no_other(combine: str) -> None:
    values = {"wide": [0.0, NAN, 20.0, 5.0, 5.0, 8.0]}
    without = {"wide": [0.0, 999.0, 20.0, 5.0, 5.0, 8.0]}
    total = combination.total(scores(values, {"wide": 1.0}, combine))
    assert total.isnan().tolist() == [False, True, False, False, False, False]
    keep = torch.tensor([0, 2, 3, 4, 5])
    alone = Scores({"wide": torch.tensor(without["wide"])[keep]}, {"wide": 1.0}, GROUPS[keep], torch.arange(5))
    alone = combination.total(Scores(alone.values, alone.weights, alone.group, alone.local, combination=combine))
    assert torch.allclose(total[keep], alone)


def test_what_fails_a_gate_is_the_worst_of_its_group_by_a_spread() -> None:
    values = {"a": [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]}
    gated = [False, False, True, True, False, False]
    spread = math.sqrt(sum((v - 3) ** 2 for v in values["a"]) / 6)
    total = combination.total(scores(values, {"a": 1.0}, gated=gated))
    assert torch.allclose(total, torch.tensor([1.0, 2.0, 1 - spread, 4 - spread, 4.0, 4.0]))


def test_a_gate_tells_samples_apart_that_are_equal_otherwise() -> None:
    total = combination.total(scores({"a": [1.0] * 6}, {"a": 1.0}, gated=[True] + [False] * 5))
    assert total.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_credit_is_this_ranks_own_and_clipped() -> None:
    values = {"a": [0.0, 10.0, NAN, 7.0, 7.0, 7.0]}
    one = Scores({"a": torch.tensor(values["a"])}, {"a": 1.0}, GROUPS, torch.tensor([1, 2, 4]))
    credit = combination.credit(one, "group", 0.5, "cpu")
    assert credit.advantage.tolist() == [0.5, 0.0, 0.0]  # 1 by itself, unknown, and of a group without signal
    assert credit.weight.tolist() == [1.0, 0.0, 0.0]
    assert credit.scored.tolist() == [1.0, 0.0, 1.0]
