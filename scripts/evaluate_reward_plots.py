"""Plots of `evaluate_reward.py`, drawn with Pillow at twice their size and reduced, for smooth edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from flowalign.rewards.agreement import Calibration

SCALE = 2
INK, MUTED, GRID, PAPER = (32, 33, 36), (110, 114, 120), (228, 230, 233), (255, 255, 255)
BLUE, RED, WHITE = np.array([38, 96, 164]), np.array([178, 48, 40]), np.array([250, 250, 250])


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * SCALE)


def _save(page: Image.Image, path: Path) -> None:
    page.resize((page.width // SCALE, page.height // SCALE), Image.Resampling.LANCZOS).save(path, optimize=True)


def plot_calibration(path: Path, name: str, found: Calibration) -> None:
    """How often a reward is right against how sure it is, with 95 % intervals and the diagonal of a perfect fit."""
    side, left, top = 360 * SCALE, 64 * SCALE, 72 * SCALE
    page = Image.new("RGB", (left + side + 28 * SCALE, top + side + 60 * SCALE), PAPER)
    draw = ImageDraw.Draw(page)
    lowest = min([0.5, *(math.floor(b.low * 10) / 10 for b in found.bins)])

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (x - 0.5) / 0.5 * side, top + (1 - (y - lowest) / (1 - lowest)) * side

    draw.text((left, 16 * SCALE), name, INK, _font(17))
    fit = f"temperature {found.temperature:.4g}, calibration error {found.error:.3f}"
    draw.text((left, 42 * SCALE), fit, MUTED, _font(12))
    for tick in np.arange(0.5, 1.01, 0.1):
        x, _ = at(tick, lowest)
        draw.line([(x, top), (x, top + side)], GRID, SCALE)
        draw.text((x, top + side + 8 * SCALE), f"{tick:.1f}", MUTED, _font(12), anchor="ma")
    for tick in np.arange(round(lowest, 1), 1.01, 0.1):
        _, y = at(0.5, tick)
        draw.line([(left, y), (left + side, y)], GRID, SCALE)
        draw.text((left - 8 * SCALE, y), f"{tick:.1f}", MUTED, _font(12), anchor="rm")
    draw.line([at(0.5, 0.5), at(1.0, 1.0)], MUTED, SCALE)
    points = [at(b.predicted, b.observed) for b in found.bins]
    for b, (x, y) in zip(found.bins, points, strict=True):
        draw.line([(x, at(0.5, b.low)[1]), (x, at(0.5, b.high)[1])], tuple(BLUE), 2 * SCALE)
        radius = 5 * SCALE
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), tuple(BLUE))
    draw.text((left + side / 2, top + side + 32 * SCALE), "predicted", INK, _font(13), anchor="ma")
    vertical = Image.new("RGB", (side, 20 * SCALE), PAPER)
    ImageDraw.Draw(vertical).text((side / 2, 0), "observed", INK, _font(13), anchor="ma")
    page.paste(vertical.rotate(90, expand=True), (8 * SCALE, top))
    _save(page, path)


def plot_correlation(path: Path, names: Sequence[str], matrix: npt.NDArray[np.float64]) -> None:
    """Rank correlations, red for -1 to blue for 1; grey where there is none."""
    cell, gap = 72 * SCALE, 14 * SCALE
    font = _font(13)
    label = math.ceil(max(font.getlength(name) for name in names))
    page = Image.new("RGB", (label + 3 * gap + cell * len(names), label + 3 * gap + cell * len(names)), PAPER)
    draw = ImageDraw.Draw(page)
    left = top = label + 2 * gap
    for i, name in enumerate(names):
        draw.text((left - gap, top + (i + 0.5) * cell), name, INK, font, anchor="rm")
        column = Image.new("RGB", (label + gap, 20 * SCALE), PAPER)
        ImageDraw.Draw(column).text((0, 10 * SCALE), name, INK, font, anchor="lm")
        turned = column.rotate(90, expand=True)
        page.paste(turned, (round(left + (i + 0.5) * cell - turned.width / 2), top - gap - turned.height))
        for j in range(len(names)):
            value = float(matrix[i, j])
            box = (left + j * cell, top + i * cell, left + (j + 1) * cell - SCALE, top + (i + 1) * cell - SCALE)
            known = math.isfinite(value)
            share = abs(value) if known else 0.0
            colour = WHITE + share * ((BLUE if value > 0 else RED) - WHITE) if known else np.array(GRID)
            draw.rectangle(box, tuple(int(c) for c in colour))
            ink = PAPER if share > 0.55 else INK
            middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
            draw.text(middle, f"{value:.2f}" if known else "-", ink, _font(14), anchor="mm")
    _save(page, path)
