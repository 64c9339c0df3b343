"""Stable Diffusion 3 and 3.5 (2403.03206) by the modules of diffusers' own pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from flowalign.models.verbosity import quiet
from flowalign.types import Conditioning, FlowAlignError

TIMESTEPS = 1000
"""The transformer was trained on timestep = 1000 sigma."""
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
SEQUENCE_LENGTH = 256
"""Tokens of the T5 text encoder by default, as in the pipeline's own call."""


class SD3:
    """Adapter of `StableDiffusion3Pipeline`; satisfies `models.base.Model`.

    It computes in the dtype of the frozen weights, exactly as the pipeline does; a caller that wants the fp32 adapter
    of a bf16 model to run in bf16 too puts `torch.autocast` around `velocity`.

    Args:
        pipe: a loaded `StableDiffusion3Pipeline`. Its modules are frozen and put into eval mode.
        max_sequence_length: tokens of the T5 text encoder, or zero tokens in its place where the pipeline has none.
    """

    family = "sd3"
    # The joint attention, as Flow-GRPO (2505.05470) trains it; not the second, image-only attention of SD3.5 medium.
    lora_targets = tuple(f"attn.{name}" for name in ATTENTION)

    def __init__(self, pipe: Any, max_sequence_length: int | None = None) -> None:
        self._pipe = pipe
        self.max_sequence_length = max_sequence_length or SEQUENCE_LENGTH
        self.transformer: nn.Module = self._pipe.transformer
        self.shift = float(self._pipe.scheduler.config.shift)
        for module in self._pipe.components.values():
            if isinstance(module, nn.Module):
                module.eval().requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_sequence_length: int | None = None,
        text_encoder_3: bool = True,
    ) -> SD3:
        """Loads a diffusers folder or hub name.

        Args:
            dtype: of all weights.
            max_sequence_length: None = 256, as in the pipeline's own call.
            text_encoder_3: False leaves the T5 text encoder out, which takes most of SD3's memory; zeros stand for it.

        Raises:
            FlowAlignError: a file of the pipeline is missing or broken.
        """
        try:
            index = StableDiffusion3Pipeline.load_config(str(path))
            # diffusers loads a pipeline that was saved without a T5 only where the call says so too.
            if not text_encoder_3 or index.get("text_encoder_3", [None])[0] is None:
                parts: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
            else:
                parts = {}
            load: Any = StableDiffusion3Pipeline.from_pretrained
            with quiet():
                pipe = load(str(path), torch_dtype=dtype, **parts)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise FlowAlignError(
                f"model {str(path)!r}: diffusers cannot load it ({reason}); expected a whole Stable Diffusion 3 "
                "pipeline: fetch it again"
            ) from None
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
        config: Any = self.transformer.config
        factor = int(self._pipe.vae_scale_factor)
        unit = factor * int(config.patch_size)
        largest = unit * int(config.pos_embed_max_size or 1_000_000)
        if any(side < unit or side % unit or side > largest for side in (height, width)):
            near = [min(max(unit, round(side / unit) * unit), largest) for side in (height, width)]
            raise FlowAlignError(
                f"model: height {height} and width {width}; expected multiples of {unit} up to {largest}, such as "
                f"{near[0]} and {near[1]}"
            )
        return (int(config.in_channels), height // factor, width // factor)

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
        dtype = self._pipe.transformer.dtype  # of the base: ``transformer`` may be wrapped
        output: Tensor = transformer(
            hidden_states=x.to(dtype),
            timestep=sigma.float() * TIMESTEPS,
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
        latents: Tensor = (mean.float() - vae.config.shift_factor) * vae.config.scaling_factor
        return latents

    def pipeline(self) -> Any:
        """The diffusers pipeline around these very modules."""
        return self._pipe
