"""Renders of the signs world: anti-aliased drawings of signs, many of them, or a data set on disk.

Typefaces are those that every installation has: Aileron, which comes with Pillow, and Caladea, which is beside this
file (fonts/README.md). The same version of Pillow gives the same pixels; its FreeType may round glyphs otherwise in
another.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from flowalign.data.worlds import signs

_FONTS = Path(__file__).parent / "fonts"
_FINE = 4  # drawn so many times larger, then averaged
_CANVAS = signs.SIZE * _FINE


class Typeface(NamedTuple):
    """How letters look.

    Args:
        file: of ``fonts/``; None is Pillow's own Aileron.
        stroke: how much bolder, in parts of the size.
        slant: horizontal shift of the top, in parts of the height.
        width: of letters, relative to the file's.
    """

    file: str | None
    stroke: float = 0.0
    slant: float = 0.0
    width: float = 1.0


TYPEFACES: dict[str, Typeface] = {
    "sans": Typeface(None, stroke=0.008),
    "sans bold": Typeface(None, stroke=0.035),
    "sans condensed": Typeface(None, stroke=0.025, width=0.8),
    "sans slanted": Typeface(None, stroke=0.02, slant=0.2),
    "serif": Typeface("Caladea-Bold.ttf"),
    "serif italic": Typeface("Caladea-BoldItalic.ttf"),
}


@lru_cache(maxsize=256)
def _font(file: str | None, size: int) -> ImageFont.FreeTypeFont:
    if file is not None:
        return ImageFont.truetype(_FONTS / file, size, layout_engine=ImageFont.Layout.BASIC)
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def _lettering(lines: list[str], face: Typeface, size: int) -> Image.Image:
    """Centred lines as a mask, cropped to the ink; ``size`` in pixels."""
    font, stroke, height = _font(face.file, size), round(face.stroke * size), round(1.12 * size)
    wide = max(math.ceil(font.getlength(line)) for line in lines) + 2 * stroke + size
    mask = Image.new("L", (wide, height * (len(lines) + 1)))
    draw = ImageDraw.Draw(mask)
    for row, line in enumerate(lines):
        draw.text((wide / 2, height * (row + 1)), line, fill=255, font=font, anchor="ms", stroke_width=stroke)
    if face.slant:
        extra = math.ceil(face.slant * mask.height)
        shear = (1.0, face.slant, -face.slant * mask.height, 0.0, 1.0, 0.0)
        mask = mask.transform((wide + extra, mask.height), Image.Transform.AFFINE, shear, Image.Resampling.BICUBIC)
    mask = mask.crop(mask.getbbox())
    return mask.resize((round(mask.width * face.width), mask.height), Image.Resampling.BOX)


def _fitted(lines: list[str], face: Typeface, width: float, height: float) -> Image.Image:
    """The largest lettering within ``width`` x ``height`` pixels."""
    trial = _lettering(lines, face, 100)
    size = math.floor(100 * min(width / trial.width, height / trial.height))
    return _lettering(lines, face, size)


def _sign(lines: list[str], rng: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """Masks of a plate with its edge, and of what is drawn on it, both (_CANVAS, _CANVAS)."""
    face = list(TYPEFACES.values())[rng.integers(len(TYPEFACES))]
    fill = rng.uniform(0.85, 1.0)
    letters = _fitted(lines, face, fill * 0.78 * _CANVAS, (0.28 if len(lines) == 1 else 0.5) * fill * _CANVAS)
    pad_x, pad_y = (round(value * _CANVAS) for value in (rng.uniform(0.055, 0.07), rng.uniform(0.07, 0.14)))
    wide, high = letters.width + 2 * pad_x, letters.height + 2 * pad_y
    tilt = float(rng.uniform(-2.5, 2.5))
    sine, cosine = abs(math.sin(math.radians(tilt))), math.cos(math.radians(tilt))
    # The tilted plate leaves a pixel free at every side.
    half_x, half_y = (wide * cosine + high * sine) / 2 + _FINE, (high * cosine + wide * sine) / 2 + _FINE
    middle_x, middle_y = (half + rng.uniform(0.2, 0.8) * (_CANVAS - 2 * half) for half in (half_x, half_y))
    x, y = round(middle_x - wide / 2), round(middle_y - high / 2)
    plate, drawn = Image.new("L", (_CANVAS, _CANVAS)), Image.new("L", (_CANVAS, _CANVAS))
    radius = round(rng.choice([0.0, 0.2, 0.5]) * pad_y)
    ImageDraw.Draw(plate).rounded_rectangle((x, y, x + wide, y + high), radius, fill=255)
    if rng.random() < 0.5:
        inset = _FINE
        box = (x + inset, y + inset, x + wide - inset, y + high - inset)
        ImageDraw.Draw(drawn).rounded_rectangle(box, max(radius - inset, 0), outline=255, width=_FINE)
    drawn.paste(letters, (x + pad_x, y + pad_y))
    plate, drawn = (mask.rotate(tilt, Image.Resampling.BICUBIC, center=(middle_x, middle_y)) for mask in (plate, drawn))
    return plate, drawn


def render(spec: signs.SignSpec, rng: np.random.Generator) -> signs.FloatArray:
    """Draw a sign, anti-aliased, on a light, nearly grey wall.

    Args:
        spec: a sign of the grammar.
        rng: source of randomness: wall, typeface, size, place, tilt, border, small changes of colour, and the colour
            of the letters where the caption leaves it open.
    Returns:
        RGB image (64, 64, 3) in [0, 1].
    """
    wall = np.clip(rng.uniform(0.80, 0.90) + rng.uniform(-0.02, 0.02, 3), 0.0, 1.0)
    image = np.broadcast_to(wall.astype(np.float32), (signs.SIZE, signs.SIZE, 3)).copy()
    legible = signs.LETTERS[spec.color]
    ink = spec.ink or legible[rng.integers(len(legible))]
    masks = _sign(spec.text.split(" "), rng)
    for mask, name in zip(masks, (spec.color, ink), strict=True):
        color = np.clip(np.asarray(signs.COLORS[name]) + rng.normal(0.0, 0.015, 3), 0.0, 1.0).astype(np.float32)
        coverage = np.asarray(mask.reduce(_FINE), np.float32)[..., None] / 255.0
        image += coverage * (color - image)
    return image


def render_many(n: int, seed: int, split: signs.Split = "train") -> tuple[npt.NDArray[np.uint8], list[str]]:
    """Many captioned renders, each from its own generator keyed by (seed, index).

    Args:
        n: how many.
        seed: same arguments, same renders; a longer run begins with the shorter one.
        split: "train" or "held_out".
    Returns:
        Images (n, 64, 64, 3) uint8 and their captions.
    Raises:
        ValueError: the split is unknown.
    """
    images = np.empty((n, signs.SIZE, signs.SIZE, 3), np.uint8)
    texts = []
    for index in range(n):
        rng = np.random.default_rng([seed, index])
        spec = signs.sample_spec(rng, split=split)
        images[index] = np.round(render(spec, rng) * 255.0)
        texts.append(signs.caption(spec))
    return images, texts


def write_folder(path: str | Path, n: int, seed: int, split: signs.Split = "train") -> None:
    """Write the common dataset folder: PNG files and ``metadata.jsonl`` with {"file_name", "text"} a line.

    Args:
        path: folder, made if absent.
        n: number of images.
        seed: same arguments, same folder.
        split: "train" or "held_out".
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    images, texts = render_many(n, seed, split)
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as lines:
        for index, (image, text) in enumerate(zip(images, texts, strict=True)):
            name = f"{index:06d}.png"
            Image.fromarray(image).save(folder / name)
            lines.write(json.dumps({"file_name": name, "text": text}) + "\n")
