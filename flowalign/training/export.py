"""Trained weights in the formats that others load, each proven by loading it again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from flowalign.core import rng
from flowalign.models.base import Model
from flowalign.types import FlowAlignError

PROOF = "flowalign-proof"
TOLERANCE = 1e-4
"""Largest relative difference of a velocity after reloading; rounding of float32 stays far below."""


def export_lora(model: Model, folder: str | Path) -> Path:
    """Writes the adapter as ONE diffusers LoRA file, FOLDER/pytorch_lora_weights.safetensors, and returns its path.

    alpha / rank is folded into B. Loaders find alpha in different places (metadata, ``.alpha`` keys) and those that find
    none take alpha = rank; after folding all of them compute the same.

    Raises:
        FlowAlignError: the model has no adapter, or the file does not reproduce it.
    """
    transformer: Any = model.transformer
    config = getattr(transformer, "peft_config", {}).get("default")
    if config is None:
        raise FlowAlignError("export: the model has no LoRA adapter; use --format merged for full fine-tuning")
    state = get_peft_model_state_dict(transformer, adapter_name="default")
    scale = config.lora_alpha / config.r
    folded = {
        name: ((tensor.float() * scale) if ".lora_B." in name else tensor.float()).detach().cpu().contiguous()
        for name, tensor in state.items()
    }
    folder = Path(folder)
    pipe = model.pipeline()
    pipe.save_lora_weights(folder, transformer_lora_layers=folded)
    _prove_lora(model, folder)
    return folder / "pytorch_lora_weights.safetensors"


def export_merged(model: Model, folder: str | Path) -> Path:
    """Writes a whole diffusers pipeline whose transformer has the trained weights, and returns its folder.

    Raises:
        FlowAlignError: the folder does not reproduce the model.
    """
    folder, pipe = Path(folder), model.pipeline()
    merged: Any = copy.deepcopy(model.transformer)
    if getattr(merged, "peft_config", None):
        merged.fuse_lora()
        merged.unload_lora()
    type(pipe)(**{**pipe.components, "transformer": merged}).save_pretrained(folder)
    reloaded = type(model.transformer).from_pretrained(folder / "transformer", torch_dtype=merged.dtype)  # type: ignore[attr-defined]
    expected = _probe(model, model.transformer)
    _compare(_probe(model, reloaded.to(merged.device).eval()), expected, merged.dtype, folder)
    return folder


def _prove_lora(model: Model, folder: Path) -> None:
    """Loads the file by diffusers' own path beside the trained adapter, and compares velocities."""
    transformer, pipe = model.transformer, model.pipeline()
    expected = _probe(model, transformer)
    required = {name: p.requires_grad for name, p in transformer.named_parameters()}
    pipe.load_lora_weights(str(folder), adapter_name=PROOF)
    try:
        transformer.set_adapter(PROOF)  # type: ignore[operator]
        _compare(_probe(model, transformer), expected, torch.float32, folder)
    finally:
        transformer.set_adapter("default")  # type: ignore[operator]
        transformer.delete_adapters(PROOF)  # type: ignore[operator]
        for name, p in transformer.named_parameters():
            p.requires_grad_(required[name])


@torch.no_grad()
def _probe(model: Model, transformer: nn.Module) -> Tensor:
    """A velocity at a fixed input; differs whenever the weights do."""
    transformer = transformer.eval()
    config: Any = transformer.config
    side = int(config.sample_size)
    device = next(transformer.parameters()).device
    x = rng.normal([rng.generator("export", 0)], (int(config.in_channels), side, side), device)
    return model.velocity(transformer, x, torch.full((1,), 0.5, device=device), model.encode(["a red circle"]))


def _compare(found: Tensor, expected: Tensor, dtype: torch.dtype, folder: Path) -> None:
    scale = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    # Merging rounds W + BA to the dtype of W.
    if not difference <= scale * max(TOLERANCE, 8 * torch.finfo(dtype).eps):
        raise FlowAlignError(
            f"export: what was written to {folder} gives velocities that differ by {difference:.2g} of {scale:.2g}; expected "
            "the trained model's: do not use it, and report this"
        )
