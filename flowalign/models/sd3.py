"""Stable Diffusion 3 and 3.5 (2403.03206) by the modules of diffusers' own pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from flowalign.types import Conditioning, FlowAlignError

TIMESTEPS = 1000
"""The transformer was trained on timestep = 1000 sigma."""
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
SEQUENCE_LENGTH = 256
"""Tokens of the T5 text encoder by default, as in the pipeline's own call."""


class SD3:
    """Adapter of `StableDiffusion3Pipeline`; satisfies `models.base.Model`.

    Args:
        pipe: a loaded pipeline. Its modules are frozen and put into eval mode.
        max_sequence_length: tokens of the T5 text encoder, or zero tokens in its place where the pipeline has none.
    """

    family = "sd3"
    lora_targets = ATTENTION

    def __init__(self, pipe: StableDiffusion3Pipeline, max_sequence_length: int | None = None) -> None:
        self._pipe = pipe
        self.max_sequence_length = max_sequence_length or SEQUENCE_LENGTH
        self.transformer: nn.Module = pipe.transformer
        self.shift = float(pipe.scheduler.config.shift)
        for module in (self.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
            if module is not None:
                module.eval().requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_sequence_length: int | None = None,
    ) -> SD3:
        """Loads a diffusers folder or hub name.

        Raises:
            FlowAlignError: a file of the pipeline is missing or broken.
        """
        try:
            pipe = StableDiffusion3Pipeline.from_pretrained(str(path), torch_dtype=dtype)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise FlowAlignError(f"model {str(path)!r}: diffusers cannot load it ({reason}); fetch it again") from None
        if pipe.scheduler.config.get("use_dynamic_shifting"):
            raise FlowAlignError(
                f"model {str(path)!r}: its scheduler shifts with the resolution, expected one fixed shift; set "
                "use_dynamic_shifting to false in scheduler_config.json"
            )
        pipe.set_progress_bar_config(disable=True)
        return cls(pipe.to(device), max_sequence_length)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """(C, H, W) of the latents of a picture of ``height`` x ``width`` pixels.

        Raises:
            FlowAlignError: a side that does not divide into patches, or a picture larger than the position grid.
        """
        config = self.transformer.config
        unit = self._pipe.vae_scale_factor * config.patch_size
        largest = unit * config.pos_embed_max_size
        if height < unit or width < unit or height % unit or width % unit or max(height, width) > largest:
            near = [min(max(unit, round(side / unit) * unit), largest) for side in (height, width)]
            raise FlowAlignError(
                f"model: height {height} and width {width}; expected multiples of {unit} up to {largest}, such as "
                f"{near[0]} and {near[1]}"
            )
        factor = self._pipe.vae_scale_factor
        return (config.in_channels, height // factor, width // factor)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative: str | None = None) -> Conditioning:
        """Embeddings (B, L, D) and pooled (B, P), exactly as the pipeline computes them."""
        positive, negative_embeds, pooled, negative_pooled = self._pipe.encode_prompt(
            list(prompts),
            None,
            None,
            do_classifier_free_guidance=negative is not None,
            negative_prompt=None if negative is None else [negative] * len(prompts),
            max_sequence_length=self.max_sequence_length,
        )
        tensors = {"embeds": positive, "pooled": pooled}
        if negative is None:
            return Conditioning(tensors)
        return Conditioning(tensors, {"embeds": negative_embeds, "pooled": negative_pooled})

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Velocity (B, C, H, W) float32 at ``sigma`` (B,)."""
        dtype = self._pipe.transformer.dtype
        output: Tensor = transformer(
            hidden_states=x.to(dtype),
            timestep=sigma * TIMESTEPS,
            encoder_hidden_states=cond.tensors["embeds"].to(dtype),
            pooled_projections=cond.tensors["pooled"].to(dtype),
            return_dict=False,
        )[0]
        return output.float()

    def decode(self, latents: Tensor) -> Tensor:
        """(B, C, H, W) to media (B, 1, 3, 8 H, 8 W) float32 in [0, 1] (a factor of 8 in SD3's own VAE)."""
        vae = self._pipe.vae
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        image: Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return (image.float() / 2 + 0.5).clamp(0, 1)[:, None]

    def encode_media(self, media: Tensor) -> Tensor:
        """Media (B, 1, 3, H, W) in [0, 1] to clean latents (B, C, H, W) float32, the mean of the encoder.

        Raises:
            ValueError: more than one frame.
        """
        if media.ndim != 5 or media.shape[1] != 1:
            raise ValueError(f"sd3.encode_media: media has shape {tuple(media.shape)}, expected (B, 1, 3, H, W)")
        vae = self._pipe.vae
        mean: Tensor = vae.encode((media[:, 0] * 2 - 1).to(vae.dtype)).latent_dist.mean
        return (mean.float() - vae.config.shift_factor) * vae.config.scaling_factor

    def pipeline(self) -> Any:
        """The diffusers pipeline around these very modules."""
        return self._pipe
