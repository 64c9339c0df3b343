"""Several rewards side by side: gates, reasons, and scoring while samples are still being drawn."""

from __future__ import annotations

import threading

import pytest
import torch

from flowalign.rewards import combine, contract
from flowalign.rewards.background import Background
from flowalign.rewards.base import RewardSpec, Scored
from flowalign.rewards.combine import WeightedReward
from flowalign.types import FlowAlignError


def spec_of(name: str, scope: str = "pointwise", higher: bool = True) -> RewardSpec:
    return RewardSpec(
        name=name, description="a toy", modality="image", higher_is_better=higher, native_range=(-10, 10),
        differentiable=False, licence="none", citation="none", verified="exact", scope=scope,
    )  # fmt: skip


class Brightness:
    """Mean of the picture; no score for an empty prompt. Keeps the threads that called it."""

    def __init__(self, name="brightness", higher=True) -> None:
        self.spec, self.threads = spec_of(name, higher=higher), set()

    def __call__(self, media, prompts, metadata=None) -> Scored:
        self.threads.add(threading.current_thread().name)
        score = media.mean((1, 2, 3, 4))
        empty = torch.tensor([not prompt for prompt in prompts])
        details = tuple({"reason": "the prompt is empty"} if not prompt else {} for prompt in prompts)
        return Scored(score.masked_fill(empty, torch.nan), {"red": media[:, :, 0].mean((1, 2, 3))}, details)


class Relative(Brightness):
    """Against the mean of all samples of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = spec_of("relative", "groupwise")

    def __call__(self, media, prompts, metadata=None) -> Scored:
        score = media.mean((1, 2, 3, 4))
        return Scored(score - score.mean())


EXAMPLE = contract.default_example("image")
MEDIA = EXAMPLE.media
PROMPTS = ("a", "b", "a", "")


def test_scores_in_the_background_are_those_of_the_whole_batch() -> None:
    rewards = [WeightedReward("brightness", Brightness()), WeightedReward("relative", Relative())]
    whole = combine.score(rewards, MEDIA, PROMPTS, [{}] * 4)
    background = Background(rewards)
    for _ in range(2):  # nothing is left over from a batch
        for rows in (slice(0, 1), slice(1, 4)):
            background.add(MEDIA[rows], PROMPTS[rows], [{}] * len(PROMPTS[rows]))
        parts = background.result()
        for name in ("brightness", "relative"):
            torch.testing.assert_close(parts.values[name], whole.values[name], equal_nan=True)
        torch.testing.assert_close(parts.subscores["brightness/red"], whole.subscores["brightness/red"])
        assert parts.reasons == whole.reasons == {"brightness": "the prompt is empty"}
    (own,) = {name for name in rewards[0].reward.threads if name != threading.current_thread().name}
    assert own.startswith("reward-brightness")


def test_what_a_judge_raises_in_the_background_arrives_and_leaves_nothing_behind() -> None:
    background = Background([WeightedReward("brightness", Brightness())])
    background.add(MEDIA * 255, PROMPTS, [{}] * 4)
    with pytest.raises(ValueError, match="expected \\[0, 1\\]"):
        background.result()
    background.add(MEDIA[:1], PROMPTS[:1], [{}])
    assert background.result().values["brightness"].shape == (1,)


def test_a_gate_is_passed_by_what_is_as_good_as_it() -> None:
    values = {"up": torch.tensor([0.1, 0.5, 0.9]), "down": torch.tensor([0.1, 0.1, 0.6])}
    up = WeightedReward("up", Brightness("up"), gate=0.5)
    down = WeightedReward("down", Brightness("down", higher=False), gate=0.5)
    free = WeightedReward("up", Brightness("up"))
    assert combine.gated([up], values).tolist() == [True, False, False]
    assert combine.gated([up, down], values).tolist() == [True, False, True]
    assert combine.gated([free], values) is None


def test_the_reason_of_the_first_missing_score_is_told() -> None:
    columns = combine.score([WeightedReward("brightness", Brightness())], MEDIA, PROMPTS)
    with pytest.raises(FlowAlignError, match=r"1 of 4 .* for '' \(the prompt is empty\)"):
        combine.check_invalid_share(columns.values, PROMPTS, 0.2, columns.reasons)


def test_a_reward_is_named_once() -> None:
    twice = [WeightedReward("brightness", Brightness())] * 2
    for use in (lambda: combine.score(twice, MEDIA, PROMPTS), lambda: Background(twice)):
        with pytest.raises(FlowAlignError, match="twice"):
            use()
