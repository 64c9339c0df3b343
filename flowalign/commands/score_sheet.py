"""The best and the worst files of a run on one sheet, to see what a reward likes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from flowalign.commands.score_listing import SHEET, Row
from flowalign.data import media
from flowalign.types import FlowAlignError

EACH = 8
"""Files shown of the best, and of the worst."""
SIDE, GAP, MARGIN = 192, 16, 28
INK, MUTED, PAPER, SHADE, EDGE = (32, 33, 36), (110, 114, 120), (255, 255, 255), (244, 245, 247), (208, 211, 216)


@dataclass(frozen=True)
class Choice:
    """What a sheet shows: the best first, and the worst first."""

    best: tuple[Row, ...]
    worst: tuple[Row, ...]
    scored: int


def sheet_path(table: Path) -> Path:
    """Where the contact sheet of a table lies."""
    return table.with_name(table.stem + SHEET)


def choose(rows: Sequence[Row], reward: str, higher_is_better: bool) -> Choice:
    """The best and the worst EACH, none of them in both; equal scores stay in the order of ``rows``."""
    scored = [row for row in rows if row.has(reward)]
    scored.sort(key=lambda row: -row.scores[reward] if higher_is_better else row.scores[reward])
    best = min(EACH, (len(scored) + 1) // 2)
    worst = min(EACH, len(scored) - best)
    return Choice(tuple(scored[:best]), tuple(reversed(scored[len(scored) - worst :])), len(scored))


def write_sheet(
    path: Path, choice: Choice, reward: str, *, fps: float | None = None, max_megapixels: float = media.MAX_MEGAPIXELS
) -> None:
    """A PNG of pictures, and of the middle frames of videos, with scores and names."""
    bands = [("best", choice.best), *([("worst", choice.worst)] if choice.worst else [])]
    columns = min(EACH // 2, max(len(rows) for _, rows in bands))
    width = 2 * MARGIN + columns * (SIDE + GAP) - GAP
    title, heading, cell = 56, 34, SIDE + 52
    height = MARGIN + title + sum(heading + -(-len(rows) // columns) * (cell + GAP) for _, rows in bands)
    page = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((MARGIN, MARGIN), _fit(reward, _font(20), width - 2 * MARGIN), INK, _font(20))
    draw.text((MARGIN, MARGIN + 28), f"{choice.scored} files scored", MUTED, _font(13))
    y = MARGIN + title
    for name, rows in bands:
        draw.text((MARGIN, y + 4), name, INK, _font(16))
        y += heading
        for i, row in enumerate(rows):
            corner = (MARGIN + (i % columns) * (SIDE + GAP), y + (i // columns) * (cell + GAP))
            _draw(page, corner, row, reward, fps, max_megapixels)
        y += -(-len(rows) // columns) * (cell + GAP)
    unfinished = path.with_name(f".{path.name}.unfinished")
    page.save(unfinished, format="PNG", optimize=True)
    os.replace(unfinished, path)


def _draw(
    page: Image.Image, corner: tuple[int, int], row: Row, reward: str, fps: float | None, max_megapixels: float
) -> None:
    """One file: its picture as large as fits, the score, and the name below."""
    x, y = corner
    draw = ImageDraw.Draw(page)
    draw.rectangle((x, y, x + SIDE - 1, y + SIDE - 1), SHADE)
    try:
        frame = media.middle_frame(row.path, fps, max_megapixels)
    except FlowAlignError:  # it was there when it was scored
        draw.text((x + SIDE / 2, y + SIDE / 2), "no longer readable", MUTED, _font(13), anchor="mm")
    else:
        pixels = (frame * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
        picture = Image.fromarray(pixels)
        scale = SIDE / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        picture = picture.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC)
        page.paste(picture, (x + (SIDE - size[0]) // 2, y + (SIDE - size[1]) // 2))
        if media.is_video(row.path):
            draw.polygon([(x + 8, y + 8), (x + 8, y + 22), (x + 20, y + 15)], PAPER, INK)
    draw.rectangle((x, y, x + SIDE - 1, y + SIDE - 1), outline=EDGE)
    draw.text((x, y + SIDE + 7), f"{row.scores[reward]:.4g}", INK, _font(15))
    draw.text((x, y + SIDE + 28), _fit(row.file, _font(12), SIDE), MUTED, _font(12))


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """The end of a text that is too long: names of one folder differ there."""
    if font.getlength(text) <= width:
        return text
    while len(text) > 1 and font.getlength("…" + text) > width:
        text = text[1:]
    return "…" + text


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
