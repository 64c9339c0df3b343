"""Mask2Former (Cheng et al., arXiv 2112.01527) of transformers as GenEval's detector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flowalign.types import FlowAlignError
from reward_models.geneval.rules import THRESHOLD, Detection

WEIGHTS = "facebook/mask2former-swin-small-coco-instance"
NAMES = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
}
"""COCO's names, and those of older label files, to GenEval's where they differ."""
_CANDIDATES = 100
"""Most (query, class) pairs of a picture, as in the reference's instance inference."""


class Mask2Former:
    """Objects of COCO's 80 classes with their masks.

    GenEval's own detector is mmdet's training of the same architecture: scores differ slightly.

    Args:
        path: folder or hub name of weights and processor.
        floor: least confidence worth a mask.

    Raises:
        FlowAlignError: either cannot be loaded.
    """

    colours: Sequence[str] | None = None

    def __init__(self, path: str = WEIGHTS, device: torch.device | str = "cpu", floor: float = THRESHOLD) -> None:
        from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor

        try:
            model: Any = Mask2FormerForUniversalSegmentation.from_pretrained(path, dtype=torch.float32)
            self.processor: Any = Mask2FormerImageProcessor.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise FlowAlignError(
                f"reward 'geneval': {path!r} cannot be loaded ({str(error).splitlines()[0]}); check the connection, or "
                "give a local folder as params.path"
            ) from None
        self.model = model.to(device).eval().requires_grad_(False)
        self.device, self.floor = torch.device(device), floor
        names: Mapping[int, str] = self.model.config.id2label
        self.labels: Sequence[str] = tuple(NAMES.get(names[i], names[i]) for i in range(len(names)))

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.device = torch.device(device)
        self.model.to(self.device)

    @torch.no_grad()
    def __call__(self, media: Tensor) -> list[list[Detection]]:
        """(B, 3, H, W) float32 in [0, 1] to the objects of each picture that reach the floor, most confident first."""
        # In bytes, which the processor scales by 1/255: it would scale floats in [0, 1] too.
        pictures = (media.float().clamp(0, 1) * 255).round().to(torch.uint8).cpu()
        inputs = self.processor(images=list(pictures), return_tensors="pt")
        outputs = self.model(
            pixel_values=inputs["pixel_values"].to(self.device), pixel_mask=inputs["pixel_mask"].to(self.device)
        )
        padded = tuple(inputs["pixel_values"].shape[-2:])
        found = []
        for classes, masks, shown in zip(
            outputs.class_queries_logits, outputs.masks_queries_logits, inputs["pixel_mask"], strict=True
        ):
            resized = int(shown.any(1).sum()), int(shown.any(0).sum())
            sizes = (padded, resized, tuple(media.shape[-2:]))
            found.append(instances(classes.float(), masks.float(), sizes, self.labels, self.floor))
        return found


def instances(
    class_logits: Tensor, mask_logits: Tensor, sizes: Sequence[tuple[int, ...]], labels: Sequence[str], floor: float
) -> list[Detection]:
    """The objects of one picture, as the reference's instance inference finds them.

    The 100 most probable (query, class) pairs; a mask is where its logits are positive; the confidence is the class's
    probability times the mean of the mask's probabilities inside it. transformers' own post-processing gives each
    pixel to one object at most and resizes masks by way of 384x384: other counts and boxes.

    Args:
        class_logits: (Q, C + 1), the last for "no object".
        mask_logits: (Q, h, w).
        sizes: (H, W) of the padded input, of the resized picture in its upper left corner, and of the picture.
        floor: least confidence.
    """
    padded, resized, original = sizes
    probabilities = class_logits.softmax(-1)[:, :-1]
    scores, order = probabilities.flatten().topk(min(_CANDIDATES, probabilities.numel()))
    order = order[scores > floor]  # the confidence is a part of the probability: the others cannot reach the floor
    queries, classes = order // probabilities.shape[1], order % probabilities.shape[1]
    found = []
    for query, label in zip(queries.tolist(), classes.tolist(), strict=True):
        logits = functional.interpolate(mask_logits[query][None, None], padded, mode="bilinear", align_corners=False)
        logits = logits[..., : resized[0], : resized[1]]
        logits = functional.interpolate(logits, original, mode="bilinear", align_corners=False)[0, 0]
        mask = logits > 0
        inside = float(logits.sigmoid()[mask].sum() / (mask.sum() + 1e-6))
        score = float(probabilities[query, label]) * inside
        if score > floor:
            rows, columns = (torch.nonzero(mask.any(1 - axis)).flatten() for axis in (0, 1))
            box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
            found.append(Detection(labels[label], score, box, mask.cpu().numpy()))
    return sorted(found, key=lambda one: -one.score)
