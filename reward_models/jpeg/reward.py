"""Size of a picture as a JPEG file; see card.md."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowalign.rewards.base import RewardSpec, Scored, check_media
from flowalign.types import FlowAlignError, Metadata

QUALITY = 95
INFINITY = float("inf")


def _spec(name: str, description: str, native_range: tuple[float, float]) -> RewardSpec:
    return RewardSpec(
        name=name,
        description=description,
        modality="image",
        higher_is_better=True,
        native_range=native_range,
        differentiable=False,
        licence="Apache-2.0",
        citation="Black et al., DDPO, arXiv 2305.13301",
        verified="exact",
        needs=(),
        preprocess=f"rounded to bytes; JPEG at quality {QUALITY}",
    )


def sizes(media: Tensor, name: str) -> Tensor:
    """(B, 1, 3, H, W) in [0, 1] to the sizes in bytes of B JPEG files, (B,) float32.

    Raises:
        FlowAlignError: more than one frame.
    """
    if media.shape[1] != 1:
        raise FlowAlignError(f"{name}: got {media.shape[1]} frames, expected one; score videos through a Judge")
    pixels = (media.detach()[:, 0].float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return torch.tensor([_size(picture) for picture in pixels], dtype=torch.float32)


def _size(picture: np.ndarray) -> int:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="JPEG", quality=QUALITY)
    return len(file.getvalue())


class JPEGIncompressibility:
    """Kilobytes (1000 bytes) of each picture as a JPEG file."""

    spec: ClassVar[RewardSpec] = _spec("jpeg-incompressibility", "how large a picture is as a JPEG", (0.0, INFINITY))

    def __init__(self, device: torch.device | str = "cpu") -> None:
        pass

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, 1, 3, H, W) in [0, 1] to B scores; prompts are not read."""
        check_media(media, prompts, self.spec.name)
        return Scored(sizes(media, self.spec.name) / 1000)


class JPEGCompressibility:
    """Minus the size of each picture as a JPEG file, in units of 500,000 bytes."""

    spec: ClassVar[RewardSpec] = _spec("jpeg-compressibility", "how small a picture is as a JPEG", (-INFINITY, 0.0))

    def __init__(self, device: torch.device | str = "cpu") -> None:
        pass

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, 1, 3, H, W) in [0, 1] to B scores; prompts are not read."""
        check_media(media, prompts, self.spec.name)
        return Scored(-sizes(media, self.spec.name) / 500_000)
