"""Cosines between frames of a video: DINO features for the subject, CLIP features for the background; see card.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.rewards.clip import CLIPFeatures, normalise
from flowalign.types import FlowAlignError, Metadata

DINO = "facebook/dino-vitb16"
CLIP = "openai/clip-vit-base-patch32"


def _spec(name: str, what: str, weights: str, licence: str, preprocess: str) -> RewardSpec:
    return RewardSpec(
        name=name,
        description=f"whether the {what} of a video stays the same",
        modality="video",
        higher_is_better=True,
        native_range=(0.0, 1.0),
        differentiable=True,
        preprocess=preprocess,
        weights=(WeightFile(weights, "pytorch_model.bin"),),
        licence=licence,
        citation="Huang et al., VBench, arXiv 2311.17982",
        verified="tiny random weights: not yet verified on real weights",
        needs=(),
    )


def consistency(features: Tensor) -> Tensor:
    """Mean over frames, from the second, of the cosine to the frame before and to the first one, below 0 taken as 0.

    Args:
        features: unit vectors (B, F, D) of the frames, F > 1.

    Returns:
        (B,) in [0, 1].
    """
    later = features[:, 1:]
    before = (later * features[:, :-1]).sum(-1).clamp(0, 1)
    first = (later * features[:, :1]).sum(-1).clamp(0, 1)
    return ((before + first) / 2).mean(1)


def _score(media: Tensor, prompts: Sequence[str], name: str, features: Callable[[Tensor], Tensor]) -> Scored:
    check_media(media, prompts, name)
    if media.shape[1] < 2:
        reason = {"reason": f"{name} compares frames, and there is only one"}
        return Scored(torch.full((len(prompts),), torch.nan), {}, (reason,) * len(prompts))
    return Scored(consistency(features(media.flatten(0, 1)).view(*media.shape[:2], -1)))


class SubjectConsistency:
    """By the class token of a DINO ViT-B/16.

    Args:
        path: folder or hub name of a transformers ViT and its image processor.
    """

    spec: ClassVar[RewardSpec] = _spec(
        "subject-consistency",
        "subject",
        DINO,
        "Apache-2.0",
        "shortest side to the model's size, antialiased bilinear; not cropped; normalise",
    )

    def __init__(self, path: str = DINO, device: torch.device | str = "cpu") -> None:
        from transformers import ViTImageProcessor, ViTModel

        try:
            model: Any = ViTModel.from_pretrained(path, add_pooling_layer=False, dtype=torch.float32)
            images: Any = ViTImageProcessor.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise FlowAlignError(
                f"reward {self.spec.name!r}: {path!r} cannot be loaded ({str(error).splitlines()[0]}); check the "
                "connection, or give a local folder as params.path"
            ) from None
        self.model = model.to(device).eval().requires_grad_(False)
        self.size = int(model.config.image_size)
        self.patch = int(model.config.patch_size)
        self.mean, self.std = tuple(images.image_mean), tuple(images.image_std)
        self.device = torch.device(device)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] to B scores, with gradients to ``media``; nan of a single frame."""
        return _score(media, prompts, self.spec.name, self.features)

    def features(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) in [0, 1] to unit vectors (N, D), differentiable."""
        height, width = images.shape[-2:]
        scale = self.size / min(height, width)
        target = (max(self.patch, int(height * scale)), max(self.patch, int(width * scale)))
        images = images.to(self.device).float()
        if (height, width) != target:
            images = functional.interpolate(images, target, mode="bilinear", align_corners=False, antialias=True)
        pixels = normalise(images, self.mean, self.std)
        tokens = self.model(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state
        return functional.normalize(tokens[:, 0].float(), dim=-1)

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.model.to(device)
        self.device = torch.device(device)


class BackgroundConsistency:
    """By the image features of a CLIP ViT-B/32.

    Args:
        path: folder or hub name of a transformers CLIP with its processor.
    """

    spec: ClassVar[RewardSpec] = _spec(
        "background-consistency",
        "background",
        CLIP,
        "MIT",
        "shortest side to the model's size, antialiased bicubic; centre crop; normalise",
    )

    def __init__(self, path: str = CLIP, device: torch.device | str = "cpu") -> None:
        self.clip = CLIPFeatures(path, None, device, self.spec.name)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] to B scores, with gradients to ``media``; nan of a single frame."""
        return _score(media, prompts, self.spec.name, self.clip.images)

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.clip.to(device)
