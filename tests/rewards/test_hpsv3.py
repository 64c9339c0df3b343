"""HPSv3 on tiny random weights in the published form, against numbers of the authors' own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowalign.rewards.qwen2_vl_pixels import target_size
from flowalign.rewards.weights import checksum
from flowalign.types import FlowAlignError
from reward_models.hpsv3.fixture import tiny
from reward_models.hpsv3.reward import PIXELS, HPSv3, template
from tests.rewards.pictures import media

PROMPTS = ["a red cat {on} a sofa", "two dogs’ “house”"]
AUTHORS = {"mu": [0.8873729, 0.692677], "sigma": [6.3859186, 5.0831323]}
"""Of package hpsv3 1.0.0's model class, picture loader and question with transformers 4.45.2, its processor and chat,
on this fixture and pictures of 448 x 448, in float32 but for the angles of rotations, which it has in bfloat16."""
EXACT_ANGLES = [0.8784894, 0.6872531]
"""The same without rounding the angles."""


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("hpsv3"), "hpsv3")


@pytest.fixture(scope="module")
def reward(params):
    return HPSv3(**params)


def test_scores_are_those_of_the_authors_code(reward) -> None:
    scored = reward(media(448, 448, 1, 2), PROMPTS)
    assert scored.score.tolist() == pytest.approx(AUTHORS["mu"], abs=1e-5)
    assert torch.equal(scored.score, scored.subscores["mu"])
    assert scored.subscores["sigma"].tolist() == pytest.approx(AUTHORS["sigma"], rel=1e-5)
    assert all(abs(got - other) > 1e-3 for got, other in zip(scored.score.tolist(), EXACT_ANGLES, strict=True))


def test_published_precision_stays_near(params) -> None:
    scored = HPSv3(**params | {"precision": "bf16"})(media(448, 448, 1, 2), PROMPTS)
    assert scored.score.dtype == torch.float32
    assert scored.score.tolist() == pytest.approx(AUTHORS["mu"], rel=0.1)


def test_the_question_is_whole() -> None:
    question = template()
    assert question.startswith("\nYou are tasked with evaluating a generated image")
    assert question.endswith("Please provide the overall ratings of this image: <|Reward|>\n\nEND\n")
    assert question.count("{text_prompt}") == 1 and question.count("{") == 1
    assert "**Visual Quality:**  \n" in question  # two spaces, as it was tuned with


@pytest.mark.parametrize(
    ("sides", "wanted"),
    [
        ((448, 448), (448, 448)),
        ((512, 512), (448, 448)),
        ((1024, 1024), (448, 448)),
        ((720, 1280), (336, 588)),  # 448 * 9/16 ** .5 = 336.0, 448 * (16/9) ** .5 = 597.3: both down to 28s
        ((64, 64), (448, 448)),
        ((100, 150), (392, 560)),  # 365.8 and 548.7, both up since it grows
    ],
)
def test_every_picture_gets_about_as_many_pixels(sides, wanted) -> None:
    assert target_size(*sides, PIXELS, PIXELS) == wanted


def test_frames_given_directly_are_averaged(reward) -> None:
    pair = media(60, 90, 1, 2)
    single = reward(pair, [PROMPTS[0]] * 2)
    video = reward(pair.transpose(0, 1), PROMPTS[:1])
    assert float(video.score) == pytest.approx(float(single.score.mean()), abs=1e-5)
    assert float(video.subscores["sigma"]) == pytest.approx(float(single.subscores["sigma"].mean()), rel=1e-5)


def test_what_cannot_be_scored_is_nan_with_its_reason(reward) -> None:
    scored = reward(media(448, 448, 1, 2), [PROMPTS[0], "a <|Reward|>"])
    assert scored.valid.tolist() == [True, False] and scored.subscores["sigma"].isnan().tolist() == [False, True]
    assert scored.details[0] == {} and "spells a token" in scored.details[1]["reason"]
    long = reward(torch.full((2, 1, 3, 2, 500), 0.5), PROMPTS)
    assert long.score.isnan().all() and "2 x 500" in long.details[1]["reason"]


def test_the_file_and_its_checksum_can_be_given(params, reward) -> None:
    file = Path(params["path"]) / "HPSv3.safetensors"
    again = HPSv3(**params | {"path": str(file), "sha256": checksum(file)})
    shown = media(448, 448, 1)
    assert torch.equal(again(shown, PROMPTS[:1]).score, reward(shown, PROMPTS[:1]).score)
    with pytest.raises(FlowAlignError, match=r"'hpsv3'.*sha256"):
        HPSv3(**params | {"sha256": "0" * 64})


def test_weights_without_the_unused_head_of_the_language_model_load(params, tmp_path, reward) -> None:
    state = load_file(f"{params['path']}/HPSv3.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "HPSv3.safetensors")
    shown = media(448, 448, 1)
    again = HPSv3(**params | {"path": str(tmp_path)})
    assert torch.equal(again(shown, PROMPTS[:1]).score, reward(shown, PROMPTS[:1]).score)


def test_faulty_weights_are_refused_in_one_sentence(params, tmp_path) -> None:
    with pytest.raises(FlowAlignError, match=r"'hpsv3': no file.*HPSv3\.safetensors of MizzenAI/HPSv3"):
        HPSv3(**params | {"path": str(tmp_path)})
    (tmp_path / "HPSv3.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00 damaged")
    with pytest.raises(FlowAlignError, match=r"'hpsv3'.*holds no plain weights") as caught:
        HPSv3(**params | {"path": str(tmp_path)})
    assert "\n" not in str(caught.value)
    state = load_file(f"{params['path']}/HPSv3.safetensors")
    del state["rm_head.5.weight"]
    save_file(state, tmp_path / "HPSv3.safetensors")
    with pytest.raises(FlowAlignError, match=r"'hpsv3'.*head\.5\.weight is missing"):
        HPSv3(**params | {"path": str(tmp_path)})
