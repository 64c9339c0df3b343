"""What judges of the CLIP family do to pixels, against torchvision and Hugging Face, and against usual mistakes."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as vision
from transformers import CLIPImageProcessor

from flowalign.rewards.clip import preprocess, preprocess_padded
from tests.rewards.pictures import images, pil

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
EXACT = 1e-6
"""HPSv2's transform resizes tensors, as ours does."""
ROUNDED = 0.02
"""Mean, in normalised units: Hugging Face resizes bytes and rounds twice, by 0.5 / 255 / 0.27 = 0.007 at most each."""
SIZES = {  # of a picture: after fitting it into 224 x 224, and the bars above and left of it, by hand
    (300, 300): ((224, 224), (0, 0)),
    (300, 533): ((126, 224), (49, 0)),  # 126.08
    (533, 300): ((224, 126), (0, 49)),
    (21, 50): ((94, 224), (65, 0)),  # 94.08
    (224, 160): ((224, 160), (0, 32)),
    (3, 448): ((2, 224), (111, 0)),  # 1.5, to the even number
    (224, 224): ((224, 224), (0, 0)),
}


def reference(height: int, width: int, *, bicubic=True, antialias=True, rescale=1.0, bars_first=True) -> torch.Tensor:
    """HPSv2's transform of a PIL picture, step by step in torchvision."""
    (to_height, to_width), (top, left) = SIZES[height, width]
    tensor = vision.to_tensor(pil(height, width)) * rescale
    mode = InterpolationMode.BICUBIC if bicubic else InterpolationMode.BILINEAR
    tensor = vision.resize(tensor, [to_height, to_width], mode, antialias=antialias)
    bars = [left, top, 224 - to_width - left, 224 - to_height - top]
    if not bars_first:
        return vision.pad(vision.normalize(tensor, MEAN, STD), bars)[None]
    return vision.normalize(vision.pad(tensor, bars), MEAN, STD)[None]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_hpsv2_pads_as_published(height: int, width: int) -> None:
    ours = preprocess_padded(images(height, width), 224, MEAN, STD)
    assert ours.shape == (1, 3, 224, 224)
    assert (ours - reference(height, width)).abs().max() <= EXACT


MISTAKES = {
    "antialias off": {"antialias": False},
    "bilinear": {"bicubic": False},
    "rescaled twice": {"rescale": 1 / 255},
    "bars of the mean colour": {"bars_first": False},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen_in_hpsv2(mistake: str) -> None:
    wrong = reference(300, 533, **MISTAKES[mistake])
    difference = (preprocess_padded(images(300, 533), 224, MEAN, STD) - wrong).abs()
    assert difference.max() > 0.05 and difference.mean() > 1000 * EXACT


def test_cropping_in_place_of_padding_is_seen_in_hpsv2() -> None:
    cropped = preprocess(images(300, 533), 224, MEAN, STD)
    assert (cropped - reference(300, 533)).abs().mean() > 0.1
    square = preprocess(images(300, 300), 224, MEAN, STD)
    # Of a square picture there is nothing to crop or to pad; only overshoot is clamped.
    assert (square - reference(300, 300)).abs().mean() < ROUNDED


def test_a_line_keeps_a_pixel() -> None:
    assert torch.isfinite(preprocess_padded(images(1, 640), 32, MEAN, STD)).all()


def hugging_face(height: int, width: int, **settings) -> torch.Tensor:
    return CLIPImageProcessor(**settings)([pil(height, width)], return_tensors="pt")["pixel_values"]


@pytest.mark.parametrize(("height", "width"), [(300, 300), (300, 533), (533, 300), (50, 21), (224, 224), (225, 640)])
def test_clip_crops_as_the_hugging_face_processor(height: int, width: int) -> None:
    ours = preprocess(images(height, width), 224, MEAN, STD)
    assert (ours - hugging_face(height, width)).abs().mean() <= ROUNDED


def test_mistakes_are_seen_in_clip() -> None:
    square, wide = images(300, 300), images(300, 533)
    aliased = vision.resize(square, [224, 224], InterpolationMode.BICUBIC, antialias=False)
    wrong = {
        "antialias off": vision.normalize(aliased, MEAN, STD) - hugging_face(300, 300),
        "bilinear": hugging_face(300, 300, resample=2) - hugging_face(300, 300),
        "padded": preprocess_padded(wide, 224, MEAN, STD) - hugging_face(300, 533),
        "rescaled twice": CLIPImageProcessor()(square, return_tensors="pt")["pixel_values"] - hugging_face(300, 300),
    }
    distances = {name: float(difference.abs().mean()) for name, difference in wrong.items()}
    assert min(distances.values()) > 2 * ROUNDED, distances
    assert distances["rescaled twice"] > 1  # what comes of floats in [0, 1] given to the processor as they are


@pytest.mark.parametrize(("height", "width"), [(5, 9), (9, 4), (3, 3), (12, 7)])
def test_the_gradient_of_padding_is_that_of_finite_differences(height: int, width: int) -> None:
    picture = images(height, width).double().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: preprocess_padded(x, 6, MEAN, STD), picture, eps=1e-4, atol=1e-6)


def test_a_padded_picture_has_gradient_everywhere_and_a_cropped_one_in_the_middle_only() -> None:
    for prepare, seen in ((preprocess_padded, 48), (preprocess, 32)):
        picture = (images(32, 48) * 0.5 + 0.25).requires_grad_(True)
        (gradient,) = torch.autograd.grad(prepare(picture, 32, MEAN, STD).square().sum(), picture)
        columns = gradient.abs().amax((0, 1, 2)) > 0
        assert int(columns.sum()) == seen
        assert columns[24 - seen // 2 : 24 + seen // 2].all()
