"""Group advantages against a numpy derivation in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from flowalign.core import advantages, rng

EPS = 1e-4
STDS = ["group", "global"]


def derive(rewards: Tensor, groups: Tensor, std: str) -> np.ndarray:
    """A = (R - group mean) / (population std of the group or of all + eps); nan counts for nothing and gets 0."""
    value, label = rewards.double().numpy(), groups.numpy()
    finite = ~np.isnan(value)
    result = np.zeros(len(value))
    for name in np.unique(label):
        rows = (label == name) & finite
        if rows.any():
            spread = np.std(value[rows]) if std == "group" else np.std(value[finite])
            result[rows] = (value[rows] - value[rows].mean()) / (spread + EPS)
    return result


def sample(count: int = 24, members: int = 6) -> tuple[Tensor, Tensor]:
    rewards = torch.randn(count, generator=rng.generator("rewards")) * 0.3 + 0.5
    groups = torch.arange(count // members).repeat_interleave(members)
    return rewards, groups


def test_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 10.0, 10.0]), torch.tensor([0, 0, 1, 1])
    got = advantages.group(rewards, groups, std="group", eps=0.0)
    assert got.tolist() == [-1.0, 1.0, 0.0, 0.0]
    spread = np.std([1.0, 3.0, 10.0, 10.0])
    got = advantages.group(rewards, groups, std="global", eps=0.0)
    np.testing.assert_allclose(got.numpy(), [-1 / spread, 1 / spread, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("std", STDS)
def test_equals_numpy_and_has_zero_mean_in_every_group(std: str) -> None:
    rewards, groups = sample()
    got = advantages.group(rewards, groups, std=std)
    assert got.dtype == torch.float32
    assert got.shape == rewards.shape
    np.testing.assert_allclose(got.numpy(), derive(rewards, groups, std), atol=2e-6, rtol=0)  # float32 of numbers of 3
    for name in groups.unique():
        assert abs(float(got[groups == name].mean())) < 1e-6


def test_group_std_gives_unit_variance_and_global_std_does_not() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, 10.0])
    groups = torch.tensor([0, 0, 1, 1])
    by_group = advantages.group(rewards, groups, std="group")
    np.testing.assert_allclose(by_group.numpy(), [-1, 1, -1, 1], atol=3e-4)  # eps over the smaller std, .5
    by_all = advantages.group(rewards, groups, std="global")
    np.testing.assert_allclose((by_all[3] / by_all[1]).item(), 10, rtol=1e-5)


def test_eps_is_added_to_the_standard_deviation() -> None:
    rewards, groups = torch.tensor([0.0, 2e-4]), torch.tensor([0, 0])  # standard deviation 1e-4 = eps
    np.testing.assert_allclose(advantages.group(rewards, groups, std="group").numpy(), [-0.5, 0.5], rtol=1e-5)
    np.testing.assert_allclose(
        advantages.group(rewards, groups, std="group", eps=3e-4).numpy(), [-0.25, 0.25], rtol=1e-5
    )


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("constant", [0.1, 0.7, 1 / 3, -123.456, 1e4 + 0.1])
@pytest.mark.parametrize("members", [1, 3, 7, 24])
def test_constant_group_gets_exactly_zero(std: str, constant: float, members: int) -> None:
    rewards = torch.cat([torch.full((members,), constant), torch.tensor([0.0, 1.0])])
    groups = torch.cat([torch.zeros(members, dtype=torch.int64), torch.ones(2, dtype=torch.int64)])
    got = advantages.group(rewards, groups, std=std)
    assert got[:members].tolist() == [0.0] * members
    assert float(got[-1]) > 0


@pytest.mark.parametrize("std", STDS)
def test_unscored_samples_get_zero_and_do_not_count(std: str) -> None:
    rewards, groups = sample()
    rewards[[1, 2, 9]] = float("nan")
    rewards[groups == 3] = float("nan")
    got = advantages.group(rewards, groups, std=std)
    assert bool(torch.isfinite(got).all())
    assert got[[1, 2, 9]].tolist() == [0.0] * 3
    assert bool((got[groups == 3] == 0).all())
    np.testing.assert_allclose(got.numpy(), derive(rewards, groups, std), atol=2e-6, rtol=0)
    kept = ~torch.isnan(rewards)
    torch.testing.assert_close(got[kept], advantages.group(rewards[kept], groups[kept], std=std), atol=1e-6, rtol=0)


@pytest.mark.parametrize("std", STDS)
def test_nothing_scored_at_all(std: str) -> None:
    assert advantages.group(torch.full((4,), float("nan")), torch.tensor([0, 0, 1, 1]), std=std).tolist() == [0.0] * 4


@pytest.mark.parametrize("std", STDS)
def test_group_of_one_gets_exactly_zero(std: str) -> None:
    rewards, groups = torch.tensor([0.3, 0.9, 5.3]), torch.tensor([0, 0, 1])
    assert float(advantages.group(rewards, groups, std=std)[2]) == 0.0


@pytest.mark.parametrize("std", STDS)
def test_order_and_labels_do_not_matter(std: str) -> None:
    rewards, groups = sample()
    got = advantages.group(rewards, groups, std=std)
    order = torch.randperm(len(rewards), generator=rng.generator("order"))
    torch.testing.assert_close(advantages.group(rewards[order], groups[order], std=std), got[order], atol=1e-6, rtol=0)
    relabelled = torch.tensor([2**40, 3, -5, 17])[groups]
    torch.testing.assert_close(advantages.group(rewards, relabelled, std=std), got, atol=1e-6, rtol=0)


@pytest.mark.parametrize("std", STDS)
def test_small_differences_on_a_large_offset_survive(std: str) -> None:
    """The float32 sum of these rewards is only known to .004, a fiftieth of their spread: float32 means will not do."""
    steps = torch.tensor([0, 1, 2, 5, 3, 3, 7, 1, 0, 2, 9], dtype=torch.float32) / 16
    rewards = torch.cat([1e4 + steps, 1e4 + 0.5 * steps.flip(0)])
    groups = torch.arange(2).repeat_interleave(len(steps))
    got = advantages.group(rewards, groups, std=std)
    np.testing.assert_allclose(got.numpy(), derive(rewards, groups, std), atol=5e-6, rtol=0)


@pytest.mark.parametrize("std", STDS)
def test_rewards_that_differ_by_a_rounding_are_constant(std: str) -> None:
    value = torch.tensor(0.7)
    above = torch.nextafter(value, torch.tensor(1.0))
    rewards = torch.stack([value, above, value, torch.tensor(0.0), torch.tensor(1.0)])
    groups = torch.tensor([0, 0, 0, 1, 1])
    assert advantages.group(rewards, groups, std=std)[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages.zero_variance(rewards, groups).tolist() == [True, True, True, False, False]


def test_shifting_the_rewards_changes_nothing() -> None:
    rewards = torch.tensor([0.0, 0.25, 1.0, 0.5, 2.0, 4.0])  # exact in float32 also after the shift
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    for std in STDS:
        shifted = advantages.group(rewards + 4096, groups, std=std)
        torch.testing.assert_close(shifted, advantages.group(rewards, groups, std=std), atol=1e-5, rtol=0)


def test_zero_variance_marks_groups_without_anything_to_learn() -> None:
    nan = float("nan")
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.3, 5.0, 0.7, 0.7, nan, nan, nan])
    groups = torch.tensor([4, 4, 4, 1, 1, 9, 2, 2, 2, 3, 3])
    marked = advantages.zero_variance(rewards, groups)
    assert marked.dtype == torch.bool
    assert marked[:8].tolist() == [True, True, True, False, False, True, True, True]
    assert marked[9:].tolist() == [True, True]


def test_unknown_standard_deviation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="batch"):
        advantages.group(*sample(), std="batch")


def test_rewards_and_groups_must_have_one_length() -> None:
    rewards, groups = sample()
    with pytest.raises(ValueError, match="group"):
        advantages.group(rewards, groups[:-1], std="group")
