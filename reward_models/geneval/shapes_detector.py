"""The shapes world seen with GenEval's eyes: its exact segmentation as a detector, its captions as metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.data.worlds import shapes, shapes_verifier
from flowalign.types import FlowAlignError, Metadata
from reward_models.geneval.rules import Detection

_AREAS = {"circle": math.pi, "square": 3.0976, "triangle": 1.8, "cross": 2.3616}
"""Of a shape of radius 1, by the geometry of `shapes_render.signed_distance`."""
_REACHES = {"circle": (1.0, 1.0), "square": (0.88, 0.88), "triangle": (1.0, 0.9), "cross": (1.0, 1.0)}
"""Half the width and height of its box."""
_FALL = 0.3
"""A triangle's centre of mass lies so much below the middle of its box."""
_TAGS = {
    "single": "single_object",
    "color": "colors",
    "counting": "counting",
    "position": "position",
    "binding": "color_attr",
}


class ShapesDetector:
    """Every object of 64x64 renders of the shapes world, exactly. A shape that is none of the world's is "unknown".

    Confidence is 1: whether an object is a known shape is decided by the verifier's own limit, which is no probability.
    """

    labels: Sequence[str] = (*shapes.SHAPES, shapes_verifier.UNKNOWN)
    colours: Sequence[str] | None = tuple(shapes.COLORS)

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """``device`` is not used: the verifier is numpy, wherever the pictures are."""

    def __call__(self, media: Tensor) -> list[list[Detection]]:
        """(B, 3, 64, 64) in [0, 1] to the objects of each picture.

        Raises:
            FlowAlignError: pictures of another size.
        """
        if tuple(media.shape[1:]) != (3, shapes.SIZE, shapes.SIZE):
            height, width = media.shape[-2:]
            raise FlowAlignError(
                f"geneval: pictures of {height}x{width} came, expected {shapes.SIZE}x{shapes.SIZE}; detector 'shapes' "
                "sees renders of the shapes world only, use 'mask2former' for others"
            )
        pixels = media.detach().float().clamp(0, 1).cpu().permute(0, 2, 3, 1).numpy()
        return [[_detection(one) for one in found] for found in shapes_verifier.detect(pixels)]

    def metadata(self, prompt: str) -> Metadata:
        """What a caption of the world asks for, in GenEval's terms; any object that it does not name is excluded.

        Raises:
            ValueError: the caption is outside the world's grammar, or names one shape in two colours, which clauses of
                one class each cannot say.
        """
        spec = shapes.parse(prompt)
        if spec.skill == "counting":
            wanted = [_clause(spec.objects[0], len(spec.objects))]
        else:
            wanted = [_clause(obj, 1) for obj in spec.objects]
        named = [clause["class"] for clause in wanted]
        if len(set(named)) != len(named):
            raise ValueError(
                f"caption {prompt!r} names the shape {named[0]!r} twice, which GenEval's metadata cannot say"
            )
        if spec.relation is not None:
            first, second = wanted
            wanted = [second, {**first, "position": [spec.relation, 0]}]
        others = [{"class": label, "count": 1} for label in self.labels if label not in named]
        return {"tag": _TAGS[spec.skill], "include": wanted, "exclude": others}


def _clause(obj: shapes.Obj, count: int) -> dict[str, Any]:
    color = {} if obj.color is None else {"color": obj.color}
    return {"class": obj.shape, "count": count, **color}


def _detection(one: shapes_verifier.Detection) -> Detection:
    """The verifier tells area and centre of mass; the box follows from the shape's geometry."""
    if one.shape == shapes_verifier.UNKNOWN:
        half_width = half_height = math.sqrt(one.area) / 2
        middle = one.y
    else:
        radius = math.sqrt(one.area / _AREAS[one.shape])
        half_width, half_height = (radius * reach for reach in _REACHES[one.shape])
        middle = one.y - (_FALL * radius if one.shape == "triangle" else 0.0)
    box = (one.x - half_width, middle - half_height, one.x + half_width, middle + half_height)
    return Detection(one.shape, 1.0, box, colour=one.color)
