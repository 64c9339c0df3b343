"""Brightness, sharpness, colour entropy; temporal flicker and motion energy of videos; see card.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from flowalign.rewards.base import RewardSpec, Scored, check_media
from flowalign.types import Metadata

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in brightness (ITU-R BT.601)."""
BINS = 8
"""Of each channel in the histogram of colours."""
BLOCK = 4
"""Side in pixels of what is averaged before motion is measured: noise of single pixels is no motion."""


def _spec(
    name: str,
    description: str,
    native_range: tuple[float, float],
    *,
    modality: Literal["image", "video"] = "image",
    differentiable: bool = True,
    citation: str = "none: a textbook statistic",
) -> RewardSpec:
    return RewardSpec(
        name=name,
        description=description,
        modality=modality,
        higher_is_better=True,
        native_range=native_range,
        differentiable=differentiable,
        licence="Apache-2.0",
        citation=citation,
        verified="exact",
        needs=(),
    )


class _Pixels:
    """A statistic of pixels: `measure` is the formula."""

    spec: ClassVar[RewardSpec]

    def __init__(self, device: torch.device | str = "cpu") -> None:
        pass

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, F, 3, H, W) in [0, 1] to B scores; prompts are not read. Of images, the mean over frames."""
        check_media(media, prompts, self.spec.name)
        if self.spec.modality == "image":
            return Scored(self.measure(media.float().flatten(0, 1)).view(media.shape[:2]).mean(1))
        if media.shape[1] < 2:
            reason = {"reason": f"{self.spec.name} compares frames, and there is only one"}
            return Scored(media.new_full((len(prompts),), torch.nan, dtype=torch.float32), {}, (reason,) * len(prompts))
        return Scored(self.measure(media.float()))

    @staticmethod
    def measure(media: Tensor) -> Tensor:
        """(N, 3, H, W) images or (N, F, 3, H, W) videos to (N,) float32."""
        raise NotImplementedError


def _luma(images: Tensor) -> Tensor:
    """(N, 3, H, W) to (N, H, W)."""
    return (images * images.new_tensor(LUMA)[:, None, None]).sum(1)


class Brightness(_Pixels):
    """Mean luma, in [0, 1]."""

    spec = _spec("brightness", "a monitor: mean luma", (0.0, 1.0))

    @staticmethod
    def measure(media: Tensor) -> Tensor:
        return _luma(media).mean((1, 2))


class Sharpness(_Pixels):
    """Variance of the 4-neighbour Laplacian of luma, in [0, 16]; 0 of pictures too small to have an inner pixel."""

    spec = _spec("sharpness", "a monitor: variance of the Laplacian of luma", (0.0, 16.0))

    @staticmethod
    def measure(media: Tensor) -> Tensor:
        y = _luma(media)
        if min(y.shape[1:]) < 3:
            return (y * 0).sum((1, 2))
        sides = y[:, 1:-1, :-2] + y[:, 1:-1, 2:] + y[:, :-2, 1:-1] + y[:, 2:, 1:-1]
        return (sides - 4 * y[:, 1:-1, 1:-1]).var((1, 2), correction=0)


class ColourEntropy(_Pixels):
    """Shannon entropy in bits of the colours, counted in 8 x 8 x 8 bins, in [0, 9]."""

    spec = _spec("colour-entropy", "a monitor: entropy of colours in bits", (0.0, 9.0), differentiable=False)

    @staticmethod
    def measure(media: Tensor) -> Tensor:
        level = (media.detach() * BINS).long().clamp(0, BINS - 1)
        colour = ((level[:, 0] * BINS + level[:, 1]) * BINS + level[:, 2]).flatten(1)
        counts = torch.stack([one.bincount(minlength=BINS**3) for one in colour])
        share = counts.double() / colour.shape[1]
        return (-torch.xlogy(share, share).sum(1) / math.log(2)).clamp(0, 3 * math.log2(BINS)).float()


class TemporalFlicker(_Pixels):
    """1 - mean absolute difference of successive frames, in [0, 1]: VBench's "temporal flickering"."""

    spec = _spec(
        "temporal-flicker",
        "how little successive frames differ",
        (0.0, 1.0),
        modality="video",
        citation="Huang et al., VBench, arXiv 2311.17982",
    )

    @staticmethod
    def measure(media: Tensor) -> Tensor:
        return 1 - media.diff(dim=1).abs().mean((1, 2, 3, 4))


class MotionEnergy(_Pixels):
    """Mean square difference of successive frames after averaging over blocks of 4 x 4 pixels, in [0, 1]."""

    spec = _spec("motion-energy", "a monitor: how much moves between frames", (0.0, 1.0), modality="video")

    @staticmethod
    def measure(media: Tensor) -> Tensor:
        block = min(BLOCK, *media.shape[-2:])
        coarse = functional.avg_pool2d(media.flatten(0, 1), block)
        coarse = coarse.view(*media.shape[:2], *coarse.shape[1:])
        return coarse.diff(dim=1).square().mean((1, 2, 3, 4))
