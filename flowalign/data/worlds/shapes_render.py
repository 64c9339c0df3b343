"""Renders of the shapes world: anti-aliased drawings of scenes, many of them, or a data set on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from flowalign.data.worlds import shapes

_MARGIN = 2.0  # pixels between an object and the border
_GAP = 3.0  # pixels between the bounding boxes of two objects
_RADII = {1: (10.0, 14.0), 2: (9.0, 12.0), 3: (8.0, 10.0), 4: (7.5, 9.0)}  # number of objects -> radius range in pixels


def signed_distance(
    shape: str, x: npt.NDArray[np.floating], y: npt.NDArray[np.floating], radius: float
) -> shapes.FloatArray:
    """Signed distance to a shape's edge, negative inside (exact but for corners, where it is a lower bound).

    Args:
        shape: One of ``SHAPES``.
        x: Offset from the centre to the right, in pixels.
        y: Offset from the centre downwards, in pixels, broadcastable with ``x``.
        radius: Half the width of the bounding box in pixels (squares are drawn at .88 of it, to look equally large).
    Returns:
        Distances in pixels, of the broadcast shape.
    """
    distance: npt.NDArray[np.floating]
    if shape == "circle":
        distance = np.hypot(x, y) - radius
    elif shape == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - 0.88 * radius
    elif shape == "triangle":
        # Upward isosceles: apex (0, -.9 r), base from (-r, .9 r) to (r, .9 r).
        slant = (1.8 * np.abs(x) - (y + 0.9 * radius)) / np.hypot(1.8, 1.0)
        distance = np.maximum(slant, y - 0.9 * radius)
    else:
        near, far = np.minimum(np.abs(x), np.abs(y)), np.maximum(np.abs(x), np.abs(y))
        distance = np.maximum(far - radius, near - 0.36 * radius)
    return np.asarray(distance, np.float32)


def _acceptable(spec: shapes.SceneSpec, centres: shapes.FloatArray, radii: shapes.FloatArray) -> bool:
    """Boxes apart, the stated relation clear, and no held-out relation in a training scene."""
    offsets = np.abs(centres[:, None] - centres[None]).max(-1) - radii[:, None] - radii[None]
    if np.any(offsets[np.triu_indices(len(radii), 1)] < _GAP):
        return False
    if spec.skill not in ("position", "binding"):
        return True
    # A triangle's centre of mass, by which relations are judged, lies .3 r below the middle of its box.
    fall = [0.3 * radius if obj.shape == "triangle" else 0.0 for obj, radius in zip(spec.objects, radii, strict=True)]
    dx, dy = float(centres[0, 0] - centres[1, 0]), float(centres[0, 1] + fall[0] - centres[1, 1] - fall[1])
    if spec.relation is not None:
        small, large = sorted((abs(dx), abs(dy)))
        return shapes.holds(spec.relation, dx, dy) and large > 1.3 * small + 2.0
    first, second = spec.objects
    shown = next((relation for relation in shapes.RELATIONS if shapes.holds(relation, dx, dy)), None)
    # A tie between the axes shows no relation; a held-out scene may show what it likes.
    return shown is None or shapes.is_held_out(spec) or not shapes.relation_held_out(first.shape, shown, second.shape)


def _place(spec: shapes.SceneSpec, rng: np.random.Generator) -> tuple[shapes.FloatArray, shapes.FloatArray]:
    """Centres (n, 2) as (x, y) and radii (n,), in pixels, by rejection."""
    count = len(spec.objects)
    while True:
        radii = rng.uniform(*_RADII[count], count).astype(np.float32)
        low = radii[:, None] + _MARGIN
        centres = (low + rng.random((64, count, 2)) * (shapes.SIZE - 2 * low)).astype(np.float32)
        for candidate in centres:
            if _acceptable(spec, candidate, radii):
                return candidate, radii


def _free_color(shape: str, rng: np.random.Generator) -> str:
    names = [name for name in shapes.COLORS if (name, shape) not in shapes.RARE_PAIRS]
    return names[rng.integers(len(names))]


_PIXELS = np.arange(shapes.SIZE, dtype=np.float32) + 0.5


def render(spec: shapes.SceneSpec, rng: np.random.Generator) -> shapes.FloatArray:
    """Draw a scene, anti-aliased, on a light, nearly grey background.

    Where the caption leaves the colour open, any but that of a rare pair is drawn; where it leaves the arrangement
    open, a training scene never shows a held-out relation. Nothing touches the border or another object.

    Args:
        spec: A scene of the grammar.
        rng: Source of randomness: background, places, sizes, small changes of colour.
    Returns:
        RGB image (64, 64, 3) in [0, 1].
    """
    background = np.clip(rng.uniform(0.88, 0.98) + rng.uniform(-0.02, 0.02, 3), 0.0, 1.0)
    image = np.broadcast_to(background.astype(np.float32), (shapes.SIZE, shapes.SIZE, 3)).copy()
    centres, radii = _place(spec, rng)
    for obj, (x, y), radius in zip(spec.objects, centres, radii, strict=True):
        color = np.asarray(shapes.COLORS[obj.color or _free_color(obj.shape, rng)]) + rng.normal(0.0, 0.015, 3)
        distance = signed_distance(obj.shape, _PIXELS[None, :] - x, _PIXELS[:, None] - y, float(radius))
        coverage = np.clip(0.5 - distance, 0.0, 1.0)[..., None]
        image += coverage * (np.clip(color, 0.0, 1.0).astype(np.float32) - image)
    return image


def render_many(
    n: int, seed: int, split: shapes.Split = "train", weights: Mapping[str, float] | None = None
) -> tuple[npt.NDArray[np.uint8], list[str]]:
    """Many captioned renders, each from its own generator keyed by (seed, index).

    Args:
        n: How many.
        seed: Same arguments, same renders; a longer run begins with the shorter one.
        split: "train" or "held_out".
        weights: Skill -> relative frequency; uniform over the split's skills if None.
    Returns:
        Images (n, 64, 64, 3) uint8 and their captions.
    Raises:
        ValueError: The split is unknown, or a skill with positive weight has no scenes in it.
    """
    if weights is None:
        weights = {skill: 1.0 for skill in shapes.SKILLS if shapes.has_scenes(skill, split)}
    names, total = list(weights), sum(weights.values())
    images = np.empty((n, shapes.SIZE, shapes.SIZE, 3), np.uint8)
    texts = []
    for index in range(n):
        rng = np.random.default_rng([seed, index])
        spec = shapes.sample_spec(rng, str(rng.choice(names, p=[weights[name] / total for name in names])), split)
        images[index] = np.round(render(spec, rng) * 255.0)
        texts.append(shapes.caption(spec))
    return images, texts


def write_folder(path: str | Path, n: int, seed: int, split: shapes.Split = "train") -> None:
    """Write the common dataset folder: PNG files and ``metadata.jsonl`` with {"file_name", "text"} a line.

    Args:
        path: Folder, made if absent.
        n: Number of images.
        seed: Same arguments, same folder.
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


def write_preferences(path: str | Path, n: int, seed: int, split: shapes.Split = "train") -> None:
    """Write a folder of preferences: a render of a caption against one of the scene with an attribute changed.

    PNG files and ``metadata.jsonl`` with {"prompt", "better", "worse"} a line. Each preference has its own generator
    keyed by (seed, index); skills are uniform.

    Args:
        path: Folder, made if absent.
        n: Number of preferences.
        seed: Same arguments, same folder.
        split: "train" or "held_out".
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as lines:
        for index in range(n):
            rng = np.random.default_rng([seed, index])
            spec = shapes.sample_spec(rng, split=split)
            names = {}
            for label, shown in (("better", spec), ("worse", shapes.alter(spec, rng))):
                names[label] = f"{index:06d}_{label}.png"
                Image.fromarray(np.round(render(shown, rng) * 255.0).astype(np.uint8)).save(folder / names[label])
            lines.write(json.dumps({"prompt": shapes.caption(spec), **names}) + "\n")
