"""Pictures for people: samples with their captions, and before beside after."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowalign.models.base import Model
from flowalign.models.lora import WeightSets
from flowalign.training import evaluate
from flowalign.training.settings import TrainingSettings
from flowalign.training.source import Source

INK, MUTED, PAPER, FRAME = (32, 33, 36), (110, 114, 120), (255, 255, 255), (208, 211, 216)
RIGHT, WRONG = (38, 156, 78), (212, 58, 52)
SIDE = 128
"""Smallest height of a picture in a grid; smaller ones are scaled up by a whole number."""
GAP, PADDING, BADGE = 6, 18, 18


@dataclass(frozen=True)
class Cell:
    """Pictures that belong together, side by side over one caption.

    Args:
        images: (3, H, W) in [0, 1], all of one size.
        caption: wrapped below.
        marks: right (green tick), wrong (red cross) or None, one per picture.
        labels: small text above each picture.
    """

    images: Sequence[Tensor]
    caption: str
    marks: Sequence[bool | None] = ()
    labels: Sequence[str] = ()


def grid(
    images: Tensor,
    captions: Sequence[str],
    marks: Sequence[bool | None] | None = None,
    columns: int = 4,
    title: str = "",
) -> Image.Image:
    """Pictures with their captions.

    Args:
        images: (B, 3, H, W) or media (B, F, 3, H, W), whose first frame is shown; in [0, 1].
    """
    pictures = first_frames(images)
    cells = [Cell([pictures[i]], captions[i], [] if marks is None else [marks[i]]) for i in range(pictures.shape[0])]
    return compose(cells, columns, title)


def before_after(
    path: str | Path,
    prompts: Sequence[str],
    before: Tensor,
    after: Tensor,
    before_ok: Sequence[bool],
    after_ok: Sequence[bool],
    *,
    columns: int = 4,
    title: str = "",
) -> None:
    """Writes a PNG in which every prompt has its picture before and after training, from the same noise, side by side.

    Args:
        before, after: as `grid`'s images.
        before_ok, after_ok: whether the picture shows what the prompt asks.
    """
    old, new = first_frames(before), first_frames(after)
    cells = [
        Cell([old[i], new[i]], prompts[i], [bool(before_ok[i]), bool(after_ok[i])], ["before", "after"])
        for i in range(len(prompts))
    ]
    save(compose(cells, columns, title), path)


def first_frames(images: Tensor) -> Tensor:
    """(B, 3, H, W) of media or images."""
    return images[:, 0] if images.ndim == 5 else images


def save(image: Image.Image, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def compose(cells: Sequence[Cell], columns: int = 4, title: str = "") -> Image.Image:
    """Lays cells out in rows of ``columns``; a row is as high as its longest caption needs."""
    if not cells:
        raise ValueError("compose: no cells, expected at least one picture")
    columns = min(columns, len(cells))
    drawn = [_draw_cell(cell) for cell in cells]
    width = max(cell.width for cell in drawn)
    rows = [drawn[i : i + columns] for i in range(0, len(drawn), columns)]
    heights = [max(cell.height for cell in row) for row in rows]
    top = PADDING + (_line_height(_font(20)) + PADDING if title else 0)
    size = (PADDING + columns * (width + PADDING), top + sum(height + PADDING for height in heights))
    page = Image.new("RGB", size, PAPER)
    if title:
        ImageDraw.Draw(page).text((size[0] / 2, PADDING), title, INK, _font(20), anchor="ma")
    y = top
    for row, height in zip(rows, heights, strict=True):
        for column, cell in enumerate(row):
            page.paste(cell, (PADDING + column * (width + PADDING), y))
        y += height + PADDING
    return page


def _draw_cell(cell: Cell) -> Image.Image:
    pictures = [_enlarge(image) for image in cell.images]
    width = sum(p.width for p in pictures) + GAP * (len(pictures) - 1)
    font, small = _font(15), _font(12)
    lines = _wrap(cell.caption, font, width)
    above = BADGE + 4 if any(mark is not None for mark in cell.marks) else _line_height(small) + 4 if cell.labels else 0
    height = above + pictures[0].height + 8 + len(lines) * _line_height(font)
    canvas = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(canvas)
    x = 0
    for i, picture in enumerate(pictures):
        if cell.labels:
            draw.text((x + picture.width / 2, above / 2), cell.labels[i], MUTED, small, anchor="mm")
        canvas.paste(picture, (x, above))
        mark = cell.marks[i] if cell.marks else None
        box = (x, above, x + picture.width - 1, above + picture.height - 1)
        color = FRAME if mark is None else RIGHT if mark else WRONG
        draw.rectangle(box, outline=color, width=1 if mark is None else 2)
        if mark is not None:
            # Beside the picture, not on it, where it might hide an object.
            _badge(canvas, (box[2] + 1 - BADGE, 1), mark)
        x += picture.width + GAP
    for i, line in enumerate(lines):
        draw.text((width / 2, above + pictures[0].height + 8 + i * _line_height(font)), line, INK, font, anchor="ma")
    return canvas


def _badge(canvas: Image.Image, corner: tuple[int, int], right: bool) -> None:
    """A disc with a tick or a cross: colour alone would not tell everyone. Drawn large and reduced, for smooth "
    "edges."""
    scale = 8
    side = BADGE * scale
    disc = Image.new("RGBA", (side, side))
    draw = ImageDraw.Draw(disc)
    draw.ellipse((0, 0, side - 1, side - 1), (*PAPER, 255))
    draw.ellipse((scale, scale, side - 1 - scale, side - 1 - scale), (*(RIGHT if right else WRONG), 255))
    strokes = (
        [[(0.28, 0.52), (0.44, 0.68), (0.73, 0.35)]]
        if right
        else [
            [(0.34, 0.34), (0.66, 0.66)],
            [(0.34, 0.66), (0.66, 0.34)],
        ]
    )
    for stroke in strokes:
        points = [(x * side, y * side) for x, y in stroke]
        draw.line(points, (*PAPER, 255), width=2 * scale + scale // 2, joint="curve")
    reduced = disc.resize((BADGE, BADGE), Image.Resampling.LANCZOS)
    canvas.paste(reduced, corner, reduced)


def picture(image: Tensor) -> Image.Image:
    """(3, H, W) in [0, 1] as a picture of bytes; nan is grey."""
    array = (image.detach().float().nan_to_num(0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(array.permute(1, 2, 0).cpu().numpy())


def _enlarge(image: Tensor) -> Image.Image:
    small = picture(image)
    factor = max(1, round(SIDE / small.height))
    return small.resize((small.width * factor, small.height * factor), Image.Resampling.BICUBIC)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _line_height(font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    return round((font.getbbox("Ag")[3]) * 1.3)


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, most: int = 4) -> list[str]:
    """Lines that fit; a word that is too long is cut, and so is a text of more than ``most`` lines."""
    lines: list[str] = []
    for word in text.split():
        candidate = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(candidate) <= width:
            lines[-1] = candidate
        else:
            while font.getlength(word) > width and len(word) > 2:
                word = word[:-2] + "…"
            lines.append(word)
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1] + " …"]
    return lines


def write(
    output: Path,
    iteration: int,
    model: Model,
    source: Source,
    weights: WeightSets,
    training: TrainingSettings,
    device: torch.device,
) -> None:
    """Writes previews/ITERATION.png: fixed prompts from fixed noise, with the averaged weights where there are any."""
    texts, sigmas, scale = source.preview(training.preview_prompts)
    averaged = training.ema_decay is not None
    with weights.use("ema") if averaged else nullcontext():
        media = evaluate.sample(
            model,
            texts,
            [0] * len(texts),
            sigmas=sigmas,
            guidance_scale=scale,
            size=source.size,
            batch_size=training.rollout_batch_size,
            device=device,
        )
    title = f"{iteration}: {'ema' if averaged else 'current'} weights"
    save(grid(media, texts, title=title), output / "previews" / f"{iteration:06d}.png")
