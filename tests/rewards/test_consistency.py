"""Consistency of videos: the formula by hand, and the features against the libraries' own preparation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPModel, ViTImageProcessor, ViTModel

from flowalign.rewards import contract
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError
from reward_models.consistency import fixture
from reward_models.consistency.reward import BackgroundConsistency, SubjectConsistency, consistency

VIDEOS = contract.default_example("video").media


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    names = ("subject-consistency", "background-consistency")
    return {name: fixture.tiny(tmp_path_factory.mktemp(name), name)["path"] for name in names}


def test_the_formula_on_vectors_in_a_plane() -> None:
    angles = torch.tensor([[0.0, 60.0, 180.0], [0.0, 0.0, 0.0]]) * math.pi / 180
    features = torch.stack([angles.cos(), angles.sin()], -1)
    # Frame 2: cos 60 to both. Frame 3: cos 120 < 0 to the one before and cos 180 < 0 to the first, so 0.
    assert torch.allclose(consistency(features), torch.tensor([0.25, 1.0]), atol=1e-6)


def bytes_of(frames: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(np.uint8(f.permute(1, 2, 0).mul(255).round())) for f in frames]


def test_features_are_those_of_the_libraries_own_preparation(paths) -> None:
    frames = VIDEOS[0]
    path = paths["subject-consistency"]
    pixels = ViTImageProcessor.from_pretrained(path)(bytes_of(frames), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        model = ViTModel.from_pretrained(path, add_pooling_layer=False).eval()
        expected = torch.nn.functional.normalize(model(pixels).last_hidden_state[:, 0], dim=-1)
        judge = SubjectConsistency(path)
        got = judge.features(frames)
        judge.mean = (0.5, 0.5, 0.5)
        wrong = judge.features(frames)
    # They round to bytes, twice, and a tiny network of large random weights multiplies that.
    assert (got - expected).abs().max() < 1e-2 < 2e-2 < (wrong - expected).abs().max()

    path = paths["background-consistency"]
    pixels = CLIPImageProcessor.from_pretrained(path)(bytes_of(frames), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        features = CLIPModel.from_pretrained(path).eval().get_image_features(pixels).pooler_output
    features = torch.nn.functional.normalize(features, dim=-1)
    expected = [
        (max(0.0, float(features[i] @ features[i - 1])) + max(0.0, float(features[i] @ features[0]))) / 2
        for i in range(1, len(frames))
    ]
    got = BackgroundConsistency(path)(VIDEOS[:1], [""]).score
    assert float(got) == pytest.approx(np.mean(expected), abs=5e-3)


@pytest.mark.parametrize("kind", [SubjectConsistency, BackgroundConsistency])
def test_what_stands_still_is_consistent_and_one_frame_has_no_score(paths, kind) -> None:
    judge = Judge(kind(paths[kind.spec.name]))
    still = VIDEOS[:, :1].expand(-1, 4, -1, -1, -1).contiguous()
    assert torch.allclose(judge(still, [""] * 4).score, torch.ones(4), atol=1e-5)
    assert (judge(VIDEOS, [""] * 4).score < 0.99).all()
    single = judge(VIDEOS[:, :1], [""] * 4)
    assert not single.valid.any() and "only one" in single.details[0]["reason"]


@pytest.mark.parametrize("size", [(40, 24), (24, 96), (5, 7)])
def test_any_size_is_scored(paths, size) -> None:
    media = torch.nn.functional.interpolate(VIDEOS.flatten(0, 1), size).unflatten(0, VIDEOS.shape[:2])
    for kind in (SubjectConsistency, BackgroundConsistency):
        assert Judge(kind(paths[kind.spec.name]))(media, [""] * 4).valid.all()


@pytest.mark.parametrize("kind", [SubjectConsistency, BackgroundConsistency])
def test_missing_weights_give_one_sentence(tmp_path, kind) -> None:
    with pytest.raises(FlowAlignError, match="cannot be loaded") as caught:
        kind(str(tmp_path / "none"))
    assert "\n" not in str(caught.value)
