"""What every reward gets from `Judge`, against numbers that are known beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flowalign.rewards.base import Scored
from flowalign.rewards.cache import ScoreCache
from flowalign.rewards.judge import FramePolicy, Judge
from flowalign.types import FlowAlignError
from tests.training.toy import spec


class Brightness:
    """The mean of each picture, and what it was shown."""

    def __init__(self, **facts) -> None:
        self.spec, self.shown = replace(spec("brightness"), **facts), []

    def __call__(self, media, prompts, metadata=None) -> Scored:
        self.shown.append((tuple(media.shape), tuple(prompts), metadata))
        means = media.mean((1, 2, 3, 4))
        return Scored(means, {"twice": 2 * means}, tuple({"text": text} for text in prompts))


def levels(*values, frames=1, size=(4, 4)) -> torch.Tensor:
    return torch.tensor(values).view(-1, frames, 1, 1, 1).expand(-1, -1, 3, *size).contiguous()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("first", 0.1), ("middle", 0.2), ("mean", 0.4), ("min", 0.1), ("uniform:2", 0.5), ("uniform:1", 0.2)],
)
def test_a_video_is_reduced_as_asked(policy: str, expected: float) -> None:
    reward = Brightness()
    scored = Judge(reward, frames=policy)(levels(0.1, 0.2, 0.9, frames=3), ["p"])
    assert scored.score.tolist() == pytest.approx([expected])
    assert scored.subscores["twice"].tolist() == pytest.approx([2 * expected])
    assert all(shape[1] == 1 for shape, _, _ in reward.shown)


def test_uniform_frames_hold_both_ends_and_never_more_than_there_are() -> None:
    assert FramePolicy("uniform:3").frames(9) == [0, 4, 8]
    assert FramePolicy("uniform:5").frames(2) == [0, 1]


@pytest.mark.parametrize("policy", ["last", "uniform", "uniform:0", "uniform:-1", "uniform:x", "mean:2", ""])
def test_other_frame_policies_are_refused(policy: str) -> None:
    with pytest.raises(FlowAlignError, match="expected first, middle"):
        FramePolicy(policy)


def test_ragged_media_keep_their_order_prompts_and_metadata() -> None:
    values = [0.1, 0.7, 0.3, 0.9, 0.5]
    media = [levels(v, size=(4, 4) if i % 2 else (8, 4))[0] for i, v in enumerate(values)]
    reward = Brightness()
    prompts = list("abcde")
    scored = Judge(reward, batch_size=2)(media, prompts, [{"i": i} for i in range(5)])
    assert scored.score.tolist() == pytest.approx(values)
    assert [d["text"] for d in scored.details] == prompts
    assert reward.shown[0][1:] == (("a", "c"), [{"i": 0}, {"i": 2}])
    assert max(shape[0] for shape, _, _ in reward.shown) == 2


def test_what_is_not_finite_is_not_shown_and_says_why() -> None:
    media = levels(0.1, 0.2, 0.3)
    media[1, 0, 0, 0, 0] = torch.inf
    reward = Brightness()
    scored = Judge(reward)(media, ["a", "b", "c"])
    assert scored.valid.tolist() == [True, False, True]
    assert reward.shown[0][1] == ("a", "c")
    assert scored.details[1]["reason"] == "the media hold nan or infinity"
    assert torch.isnan(scored.subscores["twice"]).tolist() == [False, True, False]


def test_kept_scores_are_those_of_equal_pixels_prompt_and_judge_only() -> None:
    cache, reward = ScoreCache(), Brightness()
    judge = Judge(reward, cache=cache)
    first = judge(levels(0.1, 0.2), ["a", "b"])
    again = judge(levels(0.2, 0.1, 0.2), ["b", "a", "c"])
    assert cache.hits == 2 and reward.shown[1][1] == ("c",)
    assert again.score.tolist() == [*reversed(first.score.tolist()), first.score[1].item()]
    Judge(reward, cache=cache, digest="another")(levels(0.1), ["a"])
    judge(levels(0.1), ["a"], [{"k": 1}])
    judge(levels(0.1 + 1e-6), ["a"])
    assert cache.hits == 2
    small = ScoreCache(size=1)
    Judge(reward, cache=small)(levels(0.1, 0.2), ["a", "b"])
    Judge(reward, cache=small)(levels(0.1), ["a"])
    assert small.hits == 0


def test_what_could_not_be_scored_is_tried_again() -> None:
    class Once(Brightness):
        def __call__(self, media, prompts, metadata=None) -> Scored:
            scored = super().__call__(media, prompts, metadata)
            return scored if len(self.shown) > 1 else Scored(scored.score * torch.nan)

    judge = Judge(Once(), cache=ScoreCache())
    assert torch.isnan(judge(levels(0.5), ["a"]).score).all()
    assert judge(levels(0.5), ["a"]).score.tolist() == [0.5]


def test_a_groupwise_reward_sees_all_samples_of_a_prompt_at_once() -> None:
    reward = Brightness(scope="groupwise")
    Judge(reward, batch_size=1)(levels(0.1, 0.2, 0.3), ["a", "b", "a"])
    assert [prompts for _, prompts, _ in reward.shown] == [("a", "a"), ("b",)]


def test_gradients_only_where_declared() -> None:
    media = levels(0.1, 0.2).requires_grad_(True)
    score = Judge(Brightness())(media, ["a", "b"], grad=True).score
    (gradient,) = torch.autograd.grad(score.sum(), media)
    assert gradient.flatten().tolist() == pytest.approx([1 / 48] * 96)
    assert not Judge(Brightness())(media, ["a", "b"]).score.requires_grad
    with pytest.raises(FlowAlignError, match="has no gradient"):
        Judge(Brightness(differentiable=False))(media, ["a", "b"], grad=True)


def test_weights_are_home_only_while_they_score() -> None:
    class Movable(Brightness):
        def to(self, device) -> None:
            self.shown.append(((0, 1), (str(device),), None))

    reward = Movable()
    Judge(reward, offload="meta")(levels(0.1), ["a"])
    assert [prompts[0] for _, prompts, _ in reward.shown] == ["cpu", "meta", "a", "cpu"]
    with pytest.raises(FlowAlignError, match="leave offload out"):
        Judge(Brightness(), offload="meta")


def test_nothing_gives_nothing() -> None:
    assert Judge(Brightness())(levels(0.1)[:0], []).score.shape == (0,)
