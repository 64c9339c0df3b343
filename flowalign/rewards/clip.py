"""What judges of the CLIP family share: differentiable preprocessing, and unit features of transformers' CLIPModel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from flowalign.types import FlowAlignError

Crop: TypeAlias = Literal["torchvision", "transformers"]
"""Whose centre crop: where three pixels more are left than a multiple of four, they take squares one pixel apart."""


def preprocess(
    images: Tensor, size: int, mean: Sequence[float], std: Sequence[float], crop: Crop = "torchvision"
) -> Tensor:
    """CLIP's own preparation in differentiable torch: shortest side to ``size``, centre crop, normalise.

    Antialiased bicubic: without antialiasing values move by up to 94/255. Clamped as a picture in bytes would be, since
    bicubic overshoots.

    Args:
        images: (N, 3, H, W) in [0, 1].
        crop: torchvision's, as in OpenAI's and open_clip's code, or that of transformers' processor.

    Returns:
        (N, 3, size, size).
    """
    height, width = images.shape[-2:]
    short = min(height, width)
    target = (int(size * height / short), int(size * width / short))
    if (height, width) != target:
        images = functional.interpolate(images, target, mode="bicubic", align_corners=False, antialias=True)
    spare = [side - size for side in target]
    top, left = (round(s / 2) if crop == "torchvision" else s // 2 for s in spare)
    images = images[..., top : top + size, left : left + size].clamp(0, 1)
    return normalise(images, mean, std)


def preprocess_padded(images: Tensor, size: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """HPSv2's own preparation in differentiable torch: longest side to ``size``, zeros around to a square, normalise.

    Padding is black since it comes before normalising. Not clamped: the published transform resizes tensors, where
    bicubic may overshoot, unlike that of `preprocess` which resizes bytes.

    Args:
        images: (N, 3, H, W) in [0, 1].

    Returns:
        (N, 3, size, size).
    """
    sides = images.shape[-2:]
    scale = size / float(max(sides))
    # In this order of operations and with Python's rounding of halves to even, as published.
    height, width = (max(1, round(side * scale)) for side in sides)
    if (height, width) != tuple(sides):
        images = functional.interpolate(
            images, (height, width), mode="bicubic", align_corners=False, antialias=True
        )
    top, left = (size - height) // 2, (size - width) // 2
    images = functional.pad(images, (left, size - width - left, top, size - height - top))
    return normalise(images, mean, std)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(N, 3, H, W) less ``mean``, over ``std``, by channel."""
    offset, scale = (
        torch.tensor(list(v), dtype=images.dtype, device=images.device)[:, None, None] for v in (mean, std)
    )
    return (images - offset) / scale


def cosines(frames: Tensor, texts: Tensor) -> Tensor:
    """Unit vectors (B, F, D) of frames and (B, D) of texts to (B,) float32: the cosine, as the mean over frames."""
    # Elementwise: a matrix of all pairs would cost B^2 and be wrong for a part of a batch.
    found: Tensor = (frames.float() * texts.float()[:, None]).sum(-1)
    return found.mean(1)


class CLIPFeatures:
    """A CLIPModel, in float32 and without gradients to its weights, and its tokenizer.

    Args:
        path: folder or hub name of the weights.
        processor: folder or hub name of tokenizer and image statistics; None = ``path``.
        name: of the reward, for messages.
        parameter: what the reward calls ``path``, for messages.

    Raises:
        FlowAlignError: either cannot be loaded, or weights are missing.
    """

    def __init__(
        self,
        path: str,
        processor: str | None,
        device: torch.device | str,
        name: str,
        parameter: str = "path",
        crop: Crop = "torchvision",
    ) -> None:
        from safetensors import SafetensorError
        from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

        source = path
        try:
            loaded: Any = CLIPModel.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
            source = processor or path
            images: Any = CLIPImageProcessor.from_pretrained(source)
            self.tokenizer: Any = CLIPTokenizer.from_pretrained(source)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise FlowAlignError(
                f"reward {name!r}: {source!r} cannot be loaded ({str(error).splitlines()[0]}); check the connection, "
                f"or give a local folder as params.{parameter} and params.processor"
            ) from None
        model, report = loaded
        if missing := sorted(report["missing_keys"]):  # transformers would leave them random, with a warning
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise FlowAlignError(
                f"reward {name!r}: {path!r} lacks {', '.join(missing[:3])}{more}; give the published weights as "
                f"params.{parameter}"
            )
        if len(self.tokenizer) != model.config.text_config.vocab_size:  # without its files, transformers makes it up
            raise FlowAlignError(
                f"reward {name!r}: the tokenizer of {source!r} has {len(self.tokenizer)} tokens, the model "
                f"{model.config.text_config.vocab_size}; give the folder of its own tokenizer as params.processor"
            )
        self.model = model.to(device).eval().requires_grad_(False)
        self.size = int(self.model.config.vision_config.image_size)
        self.mean, self.std = tuple(images.image_mean), tuple(images.image_std)
        self.device, self.crop = torch.device(device), crop

    @property
    def logit_scale(self) -> Tensor:
        """exp of the learnt temperature, a scalar."""
        scale: Tensor = self.model.logit_scale.exp()
        return scale

    def images(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) in [0, 1] to unit vectors (N, D), differentiable."""
        pixels = preprocess(images.to(self.device).float(), self.size, self.mean, self.std, self.crop)
        return functional.normalize(self.model.get_image_features(pixel_values=pixels).pooler_output.float(), dim=-1)

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """N texts, cut off at the model's length, to unit vectors (N, D)."""
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        features = self.model.get_text_features(input_ids=tokens.input_ids.to(self.device))
        return functional.normalize(features.pooler_output.float(), dim=-1)

    def cosine(self, media: Tensor, texts: Sequence[str]) -> Tensor:
        """(B, F, 3, H, W) and B texts to (B,) float32: the cosine, as the mean over frames."""
        frames = self.images(media.flatten(0, 1)).view(media.shape[0], media.shape[1], -1)
        return cosines(frames, self.texts(texts))

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.device = torch.device(device)
        self.model.to(self.device)
