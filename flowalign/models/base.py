"""What a model adapter is: everything that flowalign needs to know about one family of generators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowalign.types import Conditioning


class Model(Protocol):
    """A text-to-image or text-to-video generator behind one interface; latents (B, C, *S) unpacked, float32."""

    family: str
    transformer: nn.Module
    lora_targets: tuple[str, ...]
    shift: float  # timestep shift of the pipeline's own scheduler

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> Model:
        """Loads a diffusers folder or hub name."""
        ...

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """(C, *S) for a picture of this size in pixels."""
        ...

    def encode(self, prompts: Sequence[str], negative: str | None = None) -> Conditioning:
        """Text to conditioning (without gradients); with ``negative`` text for guidance when it is not None."""
        ...

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Velocity of ``transformer`` (the model's own, or the same one wrapped), (B, C, *S) float32."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to media (B, F, 3, H, W) float32 in [0, 1]; differentiable."""
        ...

    def encode_media(self, media: Tensor) -> Tensor:
        """Media (B, F, 3, H, W) in [0, 1] to clean latents (B, C, *S): the mean of the encoder."""
        ...

    def pipeline(self) -> Any:
        """The diffusers pipeline made of these very modules, for saving and for comparison."""
        ...
