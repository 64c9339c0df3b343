"""Pictures for people."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from flowalign.training import preview


def pictures(n=3):
    return torch.rand(n, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def pixel_colours(image):
    return {color for _, color in image.convert("RGB").getcolors(1 << 24)}


def test_before_after_shows_all_pictures_marks_and_captions(tmp_path) -> None:
    path = tmp_path / "a" / "before_after.png"
    grey = torch.full((3, 3, 64, 64), 0.5)
    prompts = ["a red circle", "two blue squares", "a green cross left of a very " + "long " * 30 + "name"]
    preview.before_after(path, prompts, grey, grey, [False, True, False], [True, True, False], title="Shapes")
    image = Image.open(path)
    width = 2 * 128 + preview.GAP
    assert image.width == preview.PADDING + 3 * (width + preview.PADDING)
    colours = pixel_colours(image)
    assert {preview.RIGHT, preview.WRONG, preview.PAPER, preview.INK, (128, 128, 128)} <= colours
    # The pictures themselves: six frames of 128 x 128, less frame and badge.
    grey_pixels = sum(n for n, c in image.convert("RGB").getcolors(1 << 24) if c == (128, 128, 128))
    assert 6 * (128 * 128 - 128 * 8 - 26 * 26) <= grey_pixels <= 6 * 128 * 128


def test_grid_of_media_without_marks() -> None:
    image = preview.grid(pictures(5), [f"caption {i}" for i in range(5)], columns=2)
    assert image.width == preview.PADDING + 2 * (128 + preview.PADDING)
    assert not {preview.RIGHT, preview.WRONG} & pixel_colours(image)


def test_large_pictures_keep_their_pixels_and_nan_is_grey() -> None:
    big = torch.zeros(1, 3, 256, 300)
    big[0, :, :128] = torch.nan
    image = preview.grid(big, ["x"])
    assert image.width == 2 * preview.PADDING + 300
    assert (128, 128, 128) in pixel_colours(image)


def test_captions_wrap_and_are_cut() -> None:
    font = preview._font(15)
    lines = preview._wrap("a red circle left of a blue square", font, 128)
    assert len(lines) > 1 and " ".join(lines) == "a red circle left of a blue square"
    assert all(font.getlength(line) <= 128 for line in lines)
    assert len(preview._wrap("word " * 200, font, 128)) == 4
    assert font.getlength(preview._wrap("x" * 300, font, 128)[0]) <= 128


def test_nothing_to_show() -> None:
    with pytest.raises(ValueError, match="no cells"):
        preview.compose([])
