"""The exact verifier of the shapes world: what an image shows, and whether that is what its caption asks.

An image is explained pixel by pixel as ``background + coverage * (colour - background)``; pixels of one colour that
touch form an object, whose shape is the template that its mask, stretched to the template's box, overlaps most.

``strict`` follows GenEval (arXiv 2310.11513) but for one point: it also refuses extra objects. GenEval accepts "a red
circle" on an image with a red circle and a blue square; here the image must show what was asked and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import ndimage
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flowalign.data.worlds import shapes, shapes_render

FloatArray = npt.NDArray[np.float32]
SUB_SCORES = ("object", "color", "count", "position")
UNKNOWN = "unknown"

_PALETTE = np.array(list(shapes.COLORS.values()), np.float32)
_COLOR_NAMES = (*shapes.COLORS, UNKNOWN)
_CONTRAST = 0.2  # RGB distance to the background from which a pixel can belong to an object
_COVERAGE = 0.5  # share of the object's colour from which a pixel belongs to it
_RESIDUAL = 0.25  # RGB distance to the nearest palette mixture beyond which a colour is unknown
_SPECK = 14  # pixels; smaller components are noise (the smallest object has 90)
_TRIANGLE = shapes.SHAPES.index("triangle")
_GRID = 24  # side to which masks are stretched before they are compared
_ACCEPT = 0.80  # least confidence of a known shape
_FULL = 0.90  # confidence that earns the whole partial credit for a shape
_AXIS = 6.0  # pixels by which an object must lie to the side for a relation to hold


@dataclass(frozen=True)
class Detection:
    """One object found in an image.

    ``color`` and ``shape`` are names of the world or "unknown"; ``x``, ``y`` is the centre of mass in pixels (y grows
    downwards); ``area`` is in pixels; ``confidences`` maps every shape to how well the object fits it, in [0, 1].
    """

    color: str
    shape: str
    x: float
    y: float
    area: int
    confidences: dict[str, float]

    @property
    def confidence(self) -> float:
        """Fit of the best shape, in [0, 1]."""
        return max(self.confidences.values())


@dataclass(frozen=True)
class Verdict:
    """Scores of B images, all float32 of shape (B,); nan where an image is not finite.

    ``strict`` is 0 or 1; ``soft`` lies in [0, 1] and is 1 only where ``strict`` is. ``skills`` maps each of
    ``SUB_SCORES`` to values in [0, 1], nan where the caption does not ask for it. ``details`` lists the objects
    found in each image.
    """

    strict: FloatArray
    soft: FloatArray
    skills: dict[str, FloatArray]
    details: list[list[Detection]]


def verify(images: Tensor | npt.NDArray[Any], captions: Sequence[str]) -> Verdict:
    """Score images against captions of the shapes world.

    Args:
        images: (B, 3, 64, 64), or (B, F, 3, 64, 64) with F = 1, floating point RGB in [0, 1].
        captions: B captions of the grammar of ``shapes.parse``.
    Returns:
        The verdict.
    Raises:
        ValueError: Wrong type, shape or range, other than B captions, or a caption outside the grammar.
    """
    specs = [shapes.parse(text) for text in captions]
    pixels = _pixels(images, len(specs))
    finite = np.asarray(np.isfinite(pixels).all(axis=(1, 2, 3)))
    found = detect(np.where(finite[:, None, None, None], pixels, np.float32(1.0)))
    rows = np.full((len(specs), 2 + len(SUB_SCORES)), np.nan, np.float32)
    for index in np.flatnonzero(finite):
        rows[index] = _score(specs[index], found[index])
    skills = {name: rows[:, 2 + column] for column, name in enumerate(SUB_SCORES)}
    return Verdict(rows[:, 0], rows[:, 1], skills, found)


def _pixels(images: Tensor | npt.NDArray[Any], count: int) -> FloatArray:
    """Check the media contract; (B, 64, 64, 3) float32."""
    tensor = torch.as_tensor(images).detach().cpu()
    if not tensor.is_floating_point():
        raise ValueError(f"images have dtype {tensor.dtype}, expected floating point in [0, 1]: divide bytes by 255.")
    if tensor.ndim == 5 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.ndim != 4 or tuple(tensor.shape[1:]) != (3, shapes.SIZE, shapes.SIZE):
        raise ValueError(f"images have shape {tuple(tensor.shape)}, expected (B, 3, 64, 64) or (B, 1, 3, 64, 64).")
    if len(tensor) != count:
        raise ValueError(f"got {len(tensor)} images for {count} captions, expected as many.")
    pixels: FloatArray = tensor.float().permute(0, 2, 3, 1).numpy()
    if count and (np.nanmin(pixels) < -1e-3 or np.nanmax(pixels, where=np.isfinite(pixels), initial=0.0) > 1.001):
        raise ValueError(f"images reach from {np.nanmin(pixels):.3g} to {np.nanmax(pixels):.3g}, expected [0, 1].")
    return pixels


# ---------------------------------------------------------------- what an image shows


def detect(pixels: FloatArray) -> list[list[Detection]]:
    """Find the objects of images.

    Args:
        pixels: (B, 64, 64, 3) RGB in [0, 1], finite.
    Returns:
        For each image its objects, in order of colour and then of place.
    """
    objects: list[list[Detection]] = [[] for _ in pixels]
    if not len(pixels):
        return objects
    labels, coverage = _color_labels(pixels)
    planes = labels[:, None] == np.arange(1, len(_COLOR_NAMES) + 1, dtype=np.int8)[:, None, None]
    image_of, color_of = np.nonzero(planes.sum((2, 3)) >= _SPECK)
    stack = planes[image_of, color_of]
    # One call for all planes; the structure joins diagonal neighbours but not neighbouring planes.
    structure = np.zeros((3, 3, 3), bool)
    structure[1] = True
    components, count = ndimage.label(stack, structure)
    areas = np.bincount(components.ravel(), minlength=count + 1)
    boxes = ndimage.find_objects(components)
    kept = [index for index in range(1, count + 1) if areas[index] >= _SPECK]
    if not kept:
        return objects
    # Each object with one pixel of surroundings, where its anti-aliased edge goes on; other objects are blanked.
    crops, origins = [], []
    for index in kept:
        plane, rows, columns = boxes[index - 1]
        top, left = max(rows.start - 1, 0), max(columns.start - 1, 0)
        part = (slice(top, rows.stop + 1), slice(left, columns.stop + 1))
        image = image_of[plane.start]
        own = components[plane.start][part] == index
        crops.append(np.where(own | (labels[image][part] == 0), coverage[image][part], np.float32(0.0)))
        origins.append((image, color_of[plane.start], top, left, own))
    confidences = _shape_confidences(crops, [origin[-1] for origin in origins])
    for index, (image, color, top, left, own), confidence in zip(kept, origins, confidences, strict=True):
        y, x = (float(where.mean()) + 0.5 for where in np.nonzero(own))
        best = int(confidence.argmax())
        detection = Detection(
            color=_COLOR_NAMES[color],
            shape=shapes.SHAPES[best] if confidence[best] >= _ACCEPT else UNKNOWN,
            x=x + left,
            y=y + top,
            area=int(areas[index]),
            confidences=dict(zip(shapes.SHAPES, confidence.tolist(), strict=True)),
        )
        objects[image].append(detection)
    return objects


def _color_labels(pixels: FloatArray) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """Labels and coverage, both (B, 64, 64).

    Labels are 0 for background, 1 + index of the palette colour, 1 + len(palette) for unknown colours; coverage is the
    share of the object's colour in [0, 1], also below the share from which a pixel is labelled.
    """
    border = np.concatenate([pixels[:, 0], pixels[:, -1], pixels[:, 1:-1, 0], pixels[:, 1:-1, -1]], 1)
    background = np.median(border, 1).astype(np.float32)
    offset = pixels - background[:, None, None]
    labels, coverage = np.zeros(pixels.shape[:3], np.int8), np.zeros(pixels.shape[:3], np.float32)
    candidate = np.einsum("bhwc,bhwc->bhw", offset, offset) > _CONTRAST**2
    image = np.nonzero(candidate)[0]
    offset = offset[candidate]  # (N, 3); the few pixels that are not background
    axis = _PALETTE - background[:, None]  # (B, 6, 3)
    length = np.maximum(np.einsum("bkc,bkc->bk", axis, axis), 1e-6)
    share = np.clip(np.einsum("nc,nkc->nk", offset, axis[image]) / length[image], 0.0, 1.0)
    residual = np.linalg.norm(offset[:, None] - share[..., None] * axis[image], axis=-1)
    best = residual.argmin(1)
    rows = np.arange(len(best))
    unknown = residual[rows, best] > _RESIDUAL
    coverage[candidate] = np.where(unknown, 1.0, share[rows, best])
    known = np.where(share[rows, best] > _COVERAGE, best + 1, 0)
    labels[candidate] = np.where(unknown, len(_PALETTE) + 1, known)
    return labels, coverage


@lru_cache(maxsize=1)
def _templates() -> tuple[FloatArray, FloatArray]:
    """Masks (T, GRID * GRID) of the templates, each filling its box, and the boxes' ratios of height to width (T,).

    Templates are the four shapes in order, then triangles without the top tenth and fifth: an autoencoder blunts the
    apex, which is thinner than a pixel.
    """
    fine = (np.arange(480, dtype=np.float32) + 0.5) / 200.0 - 1.2
    drawn = [shapes_render.signed_distance(shape, fine[None, :], fine[:, None], 1.0) <= 0 for shape in shapes.SHAPES]
    triangle = drawn[_TRIANGLE]
    drawn += [triangle & (fine[:, None] > -0.9 + 1.8 * cut) for cut in (0.1, 0.2)]
    masks, ratios = zip(*(_stretch(inside.astype(np.float32), inside) for inside in drawn), strict=True)
    return np.stack(masks).astype(np.float32), np.array(ratios, np.float32)


def _stretch(crop: FloatArray, own: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], float]:
    """Resample an object to (GRID, GRID) so that it fills the square; (flat mask, height / width of its box).

    The box is found to a fraction of a pixel: a row that is .7 covered at most ends .7 of a pixel inside it.
    """
    resampled, extent = crop, []
    for axis in (0, 1):
        inside = np.flatnonzero(own.any(1 - axis))
        profile = np.pad(crop.max(1 - axis), 1)
        low = inside[0] + 1.0 - profile[inside[0] + 1] - profile[inside[0]]
        high = inside[-1] + profile[inside[-1] + 1] + profile[inside[-1] + 2]
        centres = low + (np.arange(_GRID) + 0.5) * (high - low) / _GRID - 0.5
        weights = np.maximum(1.0 - np.abs(centres[:, None] - np.arange(crop.shape[axis])), 0.0)  # linear interpolation
        resampled = weights @ resampled if axis == 0 else resampled @ weights.T
        extent.append(float(high - low))
    return resampled.ravel() > _COVERAGE, extent[0] / extent[1]


def _shape_confidences(crops: Sequence[FloatArray], own: Sequence[npt.NDArray[np.bool_]]) -> FloatArray:
    """(N, 4): overlap (IoU) with each shape's best template, lowered where the box is much flatter or taller."""
    templates, ratios = _templates()
    masks, heights = zip(*map(_stretch, crops, own), strict=True)
    stretched = np.stack(masks).astype(np.float32)
    common = stretched @ templates.T
    overlap = common / (stretched.sum(1, keepdims=True) + templates.sum(1) - common)
    measured = np.array(heights, np.float32)[:, None]
    likeness = np.minimum(measured / ratios, ratios / measured)
    # Edges are found to about a pixel, 10 % of a small object: no penalty up to there.
    fit = np.asarray(overlap * np.minimum(1.0, likeness / 0.9), np.float32)
    fit[:, _TRIANGLE] = np.maximum(fit[:, _TRIANGLE], fit[:, len(shapes.SHAPES) :].max(1))
    return fit[:, : len(shapes.SHAPES)]


# ---------------------------------------------------------------- what the caption asks


def _score(spec: shapes.SceneSpec, found: Sequence[Detection]) -> tuple[float, ...]:
    """(strict, soft, *SUB_SCORES) of one image."""
    wanted = spec.objects
    exact = np.array([[_matches(ask, got) for got in found] for ask in wanted], float).reshape(len(wanted), len(found))
    rows, columns = linear_sum_assignment(exact, maximize=True)
    hits = exact[rows, columns].sum()
    complete = len(found) == len(wanted) and hits == len(wanted)
    shaped = sum(min(_count(wanted, shape), _count(found, shape)) for shape in {ask.shape for ask in wanted})
    position = float("nan")
    if spec.relation is not None:
        pair = [found[column] for row, column in zip(rows, columns, strict=True) if exact[row, column]]
        dx, dy = (pair[0].x - pair[1].x, pair[0].y - pair[1].y) if len(pair) == 2 else (0.0, 0.0)
        position = float(shapes.holds(spec.relation, dx, dy, threshold=_AXIS))
    return (
        float(complete and position != 0.0),
        _soft(spec, found),
        shaped / len(wanted),
        float("nan") if wanted[0].color is None else hits / len(wanted),
        float(len(found) == len(wanted)) if spec.skill == "counting" else float("nan"),
        position,
    )


def _matches(ask: shapes.Obj, got: Detection) -> bool:
    """Whether a detection is a requested object; an unknown colour is nobody's."""
    return ask.shape == got.shape and (got.color == ask.color or (ask.color is None and got.color != UNKNOWN))


def _count(objects: Sequence[shapes.Obj] | Sequence[Detection], shape: str) -> int:
    return sum(obj.shape == shape for obj in objects)


def _credit(ask: shapes.Obj, got: Detection) -> float:
    """Partial credit in [0, 1] of a detection for a requested object: half for the shape, half for the colour."""
    shape = min(max((got.confidences[ask.shape] - 0.3) / (_FULL - 0.3), 0.0), 1.0)
    color = got.color != UNKNOWN if ask.color is None else got.color == ask.color
    return 0.5 * shape + 0.5 * color


def _soft(spec: shapes.SceneSpec, found: Sequence[Detection]) -> float:
    """Partial credit in [0, 1]: objects (weight 3), their number (1) and the relation (2, if the caption has one).

    Missing and extra objects both divide the objects' credit, so that neither hiding nor repeating them pays.
    """
    wanted = spec.objects
    if not found:
        return 0.0
    credit = np.array([[_credit(ask, got) for got in found] for ask in wanted])
    rows, columns = linear_sum_assignment(credit, maximize=True)
    most = max(len(wanted), len(found))
    total = 3.0 * credit[rows, columns].sum() / most + 1.0 - abs(len(wanted) - len(found)) / most
    if spec.relation is None:
        return float(total / 4.0)
    relation = 0.0
    if len(rows) == 2:
        first, second = (found[column] for column in columns)  # rows are sorted: the order of the caption
        dx, dy = first.x - second.x, first.y - second.y
        horizontal = spec.relation in ("left of", "right of")
        along, across = (dx, dy) if horizontal else (dy, dx)
        signed = along if spec.relation in ("right of", "below") else -along
        # From 0 when 12 pixels on the wrong side to 1 when clearly on the right one; _AXIS is inside the full credit.
        relation = min(max((min(signed - _AXIS, signed - abs(across)) + 12.0) / 13.0, 0.0), 1.0)
        relation *= float(credit[rows, columns].min())  # a relation of the wrong objects is worth little
    return float((total + 2.0 * relation) / 6.0)
