"""What GenEval needs of a detector, and how it tells colours where the detector does not."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flowalign.rewards.clip import CLIPFeatures, preprocess
from flowalign.types import FlowAlignError
from reward_models.geneval.rules import Detection

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
"""GenEval's."""
_TEMPLATES = ("a photo of a {colour} {label}", "a photo of a {colour}-colored {label}", "a photo of a {colour} object")
"""GenEval's; part of the metric's definition (djghosh13/geneval, MIT)."""
_SURROUNDINGS = 0.6
"""Grey (#999) that takes the place of all but the object."""
_BATCH = 16


class Detector(Protocol):
    """Finds objects.

    Attributes:
        labels: of all the classes that it knows.
        colours: that it tells itself; None leaves colours to a `ColourClassifier`.
    """

    labels: Sequence[str]
    colours: Sequence[str] | None

    def __call__(self, media: Tensor) -> list[list[Detection]]:
        """(B, 3, H, W) float32 in [0, 1] to the objects of each picture, whatever their confidence and order."""
        ...


class ColourClassifier(Protocol):
    """Tells the colours of objects.

    Attributes:
        colours: one of which it answers.
    """

    colours: Sequence[str]

    def __call__(self, picture: Tensor, found: Sequence[Detection]) -> list[str]:
        """(3, H, W) float32 in [0, 1] and objects in it to the colour of each."""
        ...


class CLIPColours:
    """The colour whose sentences are nearest to the object, cut out and set on grey, in a CLIP's space.

    Args:
        path: folder or hub name of the weights and of tokenizer and image statistics.
        name: of the reward, for messages.
    """

    colours: Sequence[str] = COLOURS

    def __init__(self, path: str, device: torch.device | str, name: str) -> None:
        self.clip = CLIPFeatures(path, None, device, name)
        self._known: dict[str, Tensor] = {}

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.clip.to(device)
        self._known.clear()

    @torch.no_grad()
    def __call__(self, picture: Tensor, found: Sequence[Detection]) -> list[str]:
        """See `ColourClassifier`."""
        told: list[str] = []
        for start in range(0, len(found), _BATCH):
            part = found[start : start + _BATCH]
            features = self.clip.images(torch.cat([self._crop(picture, one) for one in part]))
            told += [self._nearest(vector, one.label) for vector, one in zip(features, part, strict=True)]
        return told

    def _crop(self, picture: Tensor, one: Detection) -> Tensor:
        """(1, 3, S, S): the object as the CLIP sees it, but not yet normalised."""
        height, width = picture.shape[-2:]
        left, top = (min(max(round(low), 0), side - 1) for low, side in zip(one.box[:2], (width, height), strict=True))
        right, bottom = max(round(one.box[2]), left + 1), max(round(one.box[3]), top + 1)
        if one.mask is not None:
            own = torch.from_numpy(np.asarray(one.mask, bool)).to(picture.device)
            picture = torch.where(own, picture, picture.new_tensor(_SURROUNDINGS))
        crop = picture[None, :, top:bottom, left:right]
        return preprocess(crop.float(), self.clip.size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))

    def _nearest(self, vector: Tensor, label: str) -> str:
        if label not in self._known:
            texts = [text.format(colour=colour, label=label) for colour in COLOURS for text in _TEMPLATES]
            means = self.clip.texts(texts).view(len(COLOURS), len(_TEMPLATES), -1).mean(1)
            self._known[label] = functional.normalize(means, dim=-1)
        return COLOURS[int((self._known[label] @ vector).argmax())]


def coloured(picture: Tensor, found: Sequence[Detection], classifier: ColourClassifier) -> list[Detection]:
    """``found`` with their colours."""
    told = classifier(picture, found)
    return [replace(one, colour=colour) for one, colour in zip(found, told, strict=True)]


def load(detector: str, path: str | None, device: torch.device | str, floor: float, name: str) -> Detector:
    """The detector called "mask2former", "shapes" or "module:Class".

    Args:
        path: folder or hub name of its weights; None = its own default.
        floor: objects less confident do not count; told to a detector that has a parameter of this name.
        name: of the reward, for messages.

    Raises:
        FlowAlignError: the name is unknown or cannot be imported, or it takes no ``path``.
    """
    built_in = {
        "mask2former": "reward_models.geneval.mask2former:Mask2Former",
        "shapes": "reward_models.geneval.shapes_detector:ShapesDetector",
    }
    target = built_in.get(detector, detector)
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise FlowAlignError(
            f"reward {name!r}: detector {detector!r}, expected {' or '.join(map(repr, built_in))}, or your own as "
            "'module:Class'"
        )
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise FlowAlignError(
            f"reward {name!r}: detector {detector!r} cannot be imported ({error}); check module and class"
        ) from error
    accepted = inspect.signature(factory).parameters
    if path is not None and "path" not in accepted:
        raise FlowAlignError(f"reward {name!r}: detector {detector!r} has no weights; leave path out")
    given: dict[str, str | float] = {} if path is None else {"path": path}
    if "floor" in accepted:
        given["floor"] = floor
    made: Detector = factory(device=device, **given)
    return made
