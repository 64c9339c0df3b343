"""VideoAlign on tiny random weights in the published form, against numbers of the authors' own steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowalign.rewards import qwen2_vl
from flowalign.rewards.qwen2_vl import Qwen2VLScores
from flowalign.types import FlowAlignError
from reward_models.videoalign.fixture import tiny
from reward_models.videoalign.reward import (
    PIXELS,
    PREFIX,
    SCORES,
    TOKENS,
    VideoAlign,
    frames_seen,
    head,
    template,
)
from tests.rewards.pictures import images

PROMPTS = ["a red cat {on} a sofa", "two dogs’ “house”"]
AUTHORS = {
    "vq": [-1.8587837, -1.8796614],
    "mq": [0.6686919, 0.6631371],
    "ta": [-1.085107, -1.0697572],
    "overall": [-2.2751989, -2.2862816],
}
"""Of the authors' model class, frames and question with transformers 4.45.2, its processor and chat, on this fixture
(LoRA merged in float64) and 5 frames of 336 x 336 at 16 a second, in float32 but for the angles of rotations."""
EXACT_ANGLES = [-2.2767792, -2.2810214]
"""Overall without rounding the angles."""


def videos() -> torch.Tensor:
    return torch.stack([images(336, 336, *range(1, 6)), images(336, 336, *range(6, 11))])


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("videoalign"), "videoalign")


@pytest.fixture(scope="module")
def reward(params):
    return VideoAlign(**params)


@pytest.fixture(scope="module")
def scored(reward):
    return reward(videos(), PROMPTS)


def test_scores_are_those_of_the_authors_code(scored) -> None:
    assert {name: pytest.approx(value.tolist(), abs=1e-5) for name, value in scored.subscores.items()} == AUTHORS
    assert all(abs(got - other) > 1e-3 for got, other in zip(scored.score.tolist(), EXACT_ANGLES, strict=True))


def test_overall_is_the_sum_and_any_can_be_the_score(params, scored) -> None:
    parts = scored.subscores
    assert torch.equal(scored.score, parts["overall"])
    assert (parts["overall"] - parts["vq"] - parts["mq"] - parts["ta"]).abs().max() < 1e-6
    for name in SCORES:
        chosen = VideoAlign(**params, score=name)(videos()[:1, :2], PROMPTS[:1])
        assert torch.equal(chosen.score, chosen.subscores[name])
        assert set(chosen.subscores) == set(SCORES)


def test_a_head_that_says_the_authors_means_scores_zero(params) -> None:
    reward = VideoAlign(**params)

    class Says(torch.nn.Module):
        def __init__(self, values) -> None:
            super().__init__()
            self.values = torch.tensor(values)
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, hidden):
            return self.values.expand(hidden.shape[0], -1)[..., None]

    for answer, wanted in (((3.6757, 1.1646, 2.8105), 0.0), ((3.6757 + 2.2476, 1.1646 + 1.3811, 2.8105 + 2.5121), 1.0)):
        reward.scores.model.head = Says(answer)
        found = reward(videos()[:1, :, :, :56, :56], PROMPTS[:1]).subscores
        assert [float(found[name]) for name in SCORES] == pytest.approx([3 * wanted, wanted, wanted, wanted], abs=1e-6)


@pytest.mark.parametrize(
    ("count", "fps", "wanted"),
    [
        (1, 16, []),
        (2, 16, [0, 1]),
        (3, 16, [0, 2]),
        (4, 16, [0, 1, 2, 3]),
        (5, 16, [0, 1, 3, 4]),  # 1.33 and 2.67
        (33, 16, [0, 11, 21, 32]),  # 4.125 frames: 4
        (81, 16, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),  # 10.125 frames: 10
        (40, 16, [0, 13, 26, 39]),  # 5 frames, halved and rounded to even: 4
        (10, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (9, 1, [0, 1, 2, 3, 5, 6, 7, 8]),  # 18 frames are asked for, 8 are an even number that exists
    ],
)
def test_two_frames_a_second_are_seen(count, fps, wanted) -> None:
    assert frames_seen(count, fps) == wanted


def test_no_more_than_768_frames_are_seen() -> None:
    seen = frames_seen(2001, 2.0)
    assert len(seen) == 768 and seen[0] == 0 and seen[-1] == 2000 and len(set(seen)) == 768


def test_frame_sizes_stay_between_the_published_limits() -> None:
    for sides, wanted in {(480, 832): (336, 588), (720, 1280): (336, 588), (336, 336): (336, 336)}.items():
        assert qwen2_vl.target_size(*sides, *PIXELS) == wanted
    assert qwen2_vl.target_size(64, 64, *PIXELS) == (336, 336)  # 100352 ** .5 = 316.8, up


def test_a_single_frame_is_nan_with_its_reason(reward) -> None:
    scored = reward(videos()[:, :1], PROMPTS)
    assert scored.score.isnan().all() and all(value.isnan().all() for value in scored.subscores.values())
    assert [one["reason"] for one in scored.details] == ["the video has 1 frame, expected 2 or more"] * 2


def test_a_prompt_that_spells_a_token_hinders_no_other(reward, scored) -> None:
    mixed = reward(videos(), [f"a {TOKENS[2]}", PROMPTS[1]])
    assert mixed.valid.tolist() == [False, True] and "spells a token" in mixed.details[0]["reason"]
    assert (mixed.score[1] - scored.score[1]).abs() < 1e-5
    assert all(reward.scores.question(f"a {token}", 2) is None for token in (*TOKENS, "<|video_pad|>"))
    assert reward.scores.question("a <|image_pad|>", 2) is not None  # stands for nothing in a question about a video


def test_published_precision_stays_near(params) -> None:
    half = VideoAlign(**params | {"precision": "bf16"})
    kinds = {weight.dtype for weight in half.scores.model.language_model.parameters()}
    found = half(videos()[:1], PROMPTS[:1])
    assert kinds == {torch.bfloat16} and found.score.dtype == torch.float32
    for name, value in found.subscores.items():
        assert float(value) == pytest.approx(AUTHORS[name][0], abs=0.1) and float(value) != AUTHORS[name][0]


def test_gradients_reach_the_frames_that_are_seen(reward) -> None:
    shown = videos()[:1].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(reward(shown, PROMPTS[:1]).score.sum(), shown)
    norms = gradient.flatten(2).norm(dim=2)[0]
    assert (norms > 1e-3).tolist() == [True, True, False, True, True] and norms[2] == 0


def test_the_frame_rate_counts(params) -> None:
    slow = VideoAlign(**params, fps=1.0)
    video = torch.cat([videos()[:1], videos()[1:]], 1)
    fast = VideoAlign(**params)(video, PROMPTS[:1]).score
    four = VideoAlign(**params)(video[:, [0, 3, 6, 9]], PROMPTS[:1]).score
    assert torch.equal(fast, four) and (slow(video, PROMPTS[:1]).score - fast).abs() > 1e-3


def merged(params, scale: float) -> Qwen2VLScores:
    """The same network without a LoRA: its product is in the weights."""
    state = torch.load(Path(params["path"]) / "model.pth", weights_only=True)
    plain = {}
    for key, value in state.items():
        if "lora_" in key:
            continue
        before = key.removesuffix("base_layer.weight")
        if before != key:
            up, down = (state[f"{before}lora_{side}.default.weight"].double() for side in "BA")
            value = (value.double() + scale * up @ down).float()
        plain[key.removeprefix(PREFIX).replace("base_layer.", "")] = value
    return Qwen2VLScores(
        plain,
        head,
        base=params["base"],
        tokens=TOKENS,
        template=template(),
        pixels=PIXELS,
        modality="video",
        precision="fp32",
        device="cpu",
        name="videoalign",
    )


def test_the_lora_counts_twice_its_product(params, reward) -> None:
    video = videos()[:1, :2]
    raw = reward.scores(video, PROMPTS[:1])[0]
    assert (merged(params, 128 / 64)(video, PROMPTS[:1])[0] - raw).abs().max() < 1e-5
    assert (merged(params, 1.0)(video, PROMPTS[:1])[0] - raw).abs().max() > 1e-2


def test_the_question_is_whole() -> None:
    question = template()
    assert [question.count(token) for token in (*TOKENS, "{text_prompt}", "{")] == [1] * 5
    assert question.startswith("\nYou are tasked with evaluating a generated video")
    assert question.endswith("{text_prompt}\nPlease provide the ratings of Text Alignment: <|TA_reward|>\nEND\n")
    places = [question.index(token) for token in TOKENS]
    assert places == sorted(places) and question.count("**  \n") == 3  # two spaces, as it was tuned with


def test_parameters_out_of_range_are_refused(params) -> None:
    with pytest.raises(FlowAlignError, match=r"score is 'quality', expected one of overall, vq, mq, ta"):
        VideoAlign(**params, score="quality")
    for fps in (0.0, -1.0, float("nan")):
        with pytest.raises(FlowAlignError, match=r"fps is .*above 0"):
            VideoAlign(**params, fps=fps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop(f"{PREFIX}model.layers.1.mlp.up_proj.lora_B.default.weight"),
            r"'videoalign'.*up_proj\.lora_B\.default\.weight is missing",
        ),
        (lambda state: state.pop(f"{PREFIX}rm_head.weight"), r"'videoalign'.*head\.weight is missing"),
        (
            lambda state: state.update({f"{PREFIX}visual.blocks.0.attn.qkv.lora_A.default.weight": torch.zeros(4, 32)}),
            r"'videoalign'.*visual\.blocks\.0\.attn\.qkv\.lora_A\.default\.weight is unknown",
        ),
        (lambda state: state.clear(), r"'videoalign'.*the weights 0"),
    ],
)
def test_weights_that_do_not_fit_are_named(params, tmp_path, change, message) -> None:
    state = torch.load(Path(params["path"]) / "model.pth", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(FlowAlignError, match=message) as caught:
        VideoAlign(**params | {"path": str(tmp_path)})
    assert "\n" not in str(caught.value)
