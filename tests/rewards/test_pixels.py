"""Statistics of pixels, against numbers by hand and against other code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from flowalign.rewards import contract
from flowalign.rewards.judge import Judge
from reward_models.pixels.reward import Brightness, ColourEntropy, MotionEnergy, Sharpness, TemporalFlicker

IMAGES = contract.default_example("image").media
VIDEOS = contract.default_example("video").media
PROMPTS = [""] * 4


def flat(*colours: tuple[float, float, float]) -> torch.Tensor:
    return torch.tensor(colours, dtype=torch.float32)[:, None, :, None, None].expand(-1, 1, 3, 16, 16).contiguous()


def test_brightness_weighs_the_primaries() -> None:
    media = flat((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1))
    assert torch.allclose(Brightness()(media, PROMPTS).score, torch.tensor([0.299, 0.587, 0.114, 1.0]))


def test_sharpness_is_the_variance_of_scipys_laplacian() -> None:
    got = Sharpness()(IMAGES, PROMPTS).score
    for image, value in zip(IMAGES[:, 0].numpy().astype(np.float64), got, strict=True):
        luma = np.tensordot([0.299, 0.587, 0.114], image, 1)
        assert float(value) == pytest.approx(ndimage.laplace(luma)[1:-1, 1:-1].var(), rel=1e-4)


def test_a_checkerboard_is_the_sharpest_picture() -> None:
    board = ((torch.arange(16)[:, None] + torch.arange(16)) % 2).float().expand(1, 1, 3, 16, 16)
    assert float(Sharpness()(board, [""]).score) == pytest.approx(16.0, rel=1e-4)  # +-4 in equal shares
    assert float(Sharpness()(board[..., :2], [""]).score) == 0


def test_entropy_counts_colours() -> None:
    media = flat((0.5, 0.5, 0.5)).repeat(3, 1, 1, 1, 1)
    media[1, :, :, :8] = 1.0  # half and half: 1 bit
    media[2, :, 0, :4] = 1.0  # a quarter red: the entropy of (1/4, 3/4)
    expected = [0.0, 1.0, 2 - 0.75 * math.log2(3)]
    assert torch.allclose(ColourEntropy()(media, PROMPTS[:3]).score, torch.tensor(expected))


def test_flicker_and_motion_of_a_step_by_hand() -> None:
    media = torch.zeros(1, 3, 3, 8, 8)
    media[:, 2] = 0.6  # one of two steps moves every pixel by .6
    assert float(TemporalFlicker()(media, [""]).score) == pytest.approx(1 - 0.3)
    assert float(MotionEnergy()(media, [""]).score) == pytest.approx(0.18)


def test_noise_of_single_pixels_flickers_but_does_not_move() -> None:
    noise = torch.randint(0, 2, (1, 9, 1, 64, 64), generator=torch.Generator().manual_seed(0)).float()
    media = noise.expand(-1, -1, 3, -1, -1).contiguous()
    assert float(TemporalFlicker()(media, [""]).score) == pytest.approx(0.5, abs=0.02)
    # The difference of two means of 16 coins has the variance 2 x 1/4 / 16.
    assert float(MotionEnergy()(media, [""]).score) == pytest.approx(1 / 32, rel=0.1)


@pytest.mark.parametrize("reward", [TemporalFlicker(), MotionEnergy()])
def test_one_frame_has_no_motion_and_no_score(reward) -> None:
    scored = Judge(reward)(VIDEOS[:, :1], PROMPTS)
    assert not scored.valid.any() and all("only one" in detail["reason"] for detail in scored.details)
