"""PickScore and CLIPScore on tiny random weights, against an independent computation."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

from flowalign.rewards import registry
from flowalign.rewards.clip import preprocess
from flowalign.types import FlowAlignError

SIZE = 32
PROMPTS = ["a red cat", "two dogs and a very " + "long " * 40 + "sentence", "café"]


def pictures(n=3, height=32, width=35):  # the two ways to crop differ
    """Byte-valued pictures with structure at several scales."""
    y, x = np.mgrid[0:height, 0:width] / 10
    base = np.stack([np.sin(x * (i + 1)) * np.cos(y) for i in range(3)], -1)
    stack = np.stack([base * (0.5 + 0.5 * i) + i for i in range(n)])
    return ((stack - stack.min()) / (stack.max() - stack.min()) * 255).round().astype(np.uint8)


def media_of(arrays):
    return torch.from_numpy(arrays).permute(0, 3, 1, 2)[:, None].float() / 255


@pytest.mark.parametrize(("height", "width"), [(40, 56), (64, 33), (32, 32), (21, 50), (97, 64), (32, 35), (39, 32)])
def test_preprocessing_is_that_of_the_hugging_face_processor(weights, height: int, width: int) -> None:
    processor = CLIPImageProcessor.from_pretrained(weights)
    arrays = pictures(2, height, width)
    theirs = processor([Image.fromarray(a) for a in arrays], return_tensors="pt")["pixel_values"]
    ours = preprocess(media_of(arrays)[:, 0], SIZE, processor.image_mean, processor.image_std, "transformers")
    assert ours.shape == theirs.shape == (2, 3, SIZE, SIZE)
    # They round to bytes after each of two passes, half a byte each, and we do not; a shift by one pixel is 10 bytes.
    difference = (ours - theirs).abs() * 255 * min(processor.image_std)
    assert difference.max() <= 1.2 and difference.mean() <= 0.4


def test_the_crop_of_torchvision_is_another_one(weights) -> None:
    processor = CLIPImageProcessor.from_pretrained(weights)
    arrays = pictures(2, 32, 35)
    theirs = processor([Image.fromarray(a) for a in arrays], return_tensors="pt")["pixel_values"]
    other = preprocess(media_of(arrays)[:, 0], SIZE, processor.image_mean, processor.image_std, "torchvision")
    assert (other - theirs).abs().max() * 255 * min(processor.image_std) > 5


@pytest.mark.parametrize("name", ["pickscore", "clipscore"])
def test_scores_equal_an_independent_computation(weights, name: str) -> None:
    reward = registry.create(name, path=str(weights), processor=str(weights))
    arrays = pictures()
    scores = reward(media_of(arrays), PROMPTS).score
    model, tokenizer = CLIPModel.from_pretrained(weights).eval(), CLIPTokenizer.from_pretrained(weights)
    pixels = CLIPImageProcessor.from_pretrained(weights)([Image.fromarray(a) for a in arrays], return_tensors="pt")
    tokens = tokenizer(PROMPTS, padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.no_grad():
        logits = model(pixel_values=pixels["pixel_values"], **tokens).logits_per_image.diagonal()
        scale = model.logit_scale.exp()
    # The processor rounds to bytes; the temperature, 14, would magnify that.
    cosines = scores / scale if name == "pickscore" else scores
    assert torch.allclose(cosines, logits / scale, atol=3e-3)
    assert scores.dtype == torch.float32 and scores.std() > 1e-3
    if name == "clipscore":
        assert (scores.abs() <= 1).all()


def test_the_gradient_to_pixels_is_that_of_finite_differences(weights) -> None:
    reward = registry.create("pickscore", path=str(weights), processor=str(weights))
    media = (media_of(pictures(1)) * 0.8 + 0.1).requires_grad_(True)
    (gradient,) = torch.autograd.grad(reward(media, PROMPTS[:1], grad=True).score.sum(), media)
    assert not any(p.requires_grad for p in reward.reward.clip.model.parameters())
    direction = torch.randn(media.shape, generator=torch.Generator().manual_seed(0))
    step = 1e-2
    with torch.no_grad():
        up, down = (reward(media + sign * step * direction * 0.1, PROMPTS[:1]).score for sign in (1, -1))
    numeric = float(up - down) / (2 * step * 0.1)
    analytic = float((gradient * direction).sum())
    assert analytic == pytest.approx(numeric, rel=2e-2)
    assert abs(analytic) > 1e-2


def test_a_video_scores_the_mean_of_its_frames_and_batches_do_not_mix(weights) -> None:
    reward = registry.create("clipscore", path=str(weights))
    frames = media_of(pictures(3))
    singles = torch.stack([reward(frames[i : i + 1], PROMPTS[:1]).score[0] for i in range(3)])
    video = reward(frames.transpose(0, 1), PROMPTS[:1]).score
    assert torch.allclose(video, singles.mean()[None], atol=1e-6)
    batch = reward(frames, PROMPTS).score
    assert torch.allclose(batch[1], reward(frames[1:2], PROMPTS[1:2]).score[0], atol=1e-6)


@pytest.mark.parametrize("name", ["pickscore", "clipscore"])
def test_weights_wait_elsewhere_and_come_back(weights, name: str) -> None:
    fixed = registry.create(name, path=str(weights), processor=str(weights))
    moving = registry.create(name, "cpu", 32, "mean", True, path=str(weights), processor=str(weights))
    assert torch.equal(moving(media_of(pictures()), PROMPTS).score, fixed(media_of(pictures()), PROMPTS).score)


def test_a_tokenizer_of_nothing_is_refused(weights, tmp_path) -> None:
    for file in weights.iterdir():
        if "token" not in file.name and file.name not in ("vocab.json", "merges.txt"):
            shutil.copy(file, tmp_path)
    with pytest.raises(FlowAlignError, match="has 2 tokens, the model"):
        registry.create("clipscore", path=str(tmp_path))


def test_missing_weights_give_one_sentence(tmp_path) -> None:
    with pytest.raises(FlowAlignError, match=r"'clipscore'.*cannot be loaded") as caught:
        registry.create("clipscore", path=str(tmp_path / "none"))
    assert "\n" not in str(caught.value)
