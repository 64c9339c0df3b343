"""Trained weights in the formats that others load, each proven by loading it again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from flowalign.core import rng
from flowalign.models.base import Model
from flowalign.models.lora import ADAPTER
from flowalign.models.verbosity import quiet
from flowalign.types import FlowAlignError

FILE = "pytorch_lora_weights.safetensors"
"""The name that ``pipe.load_lora_weights(folder)`` looks for."""
PROOF = "flowalign-proof"
TOLERANCE = 1e-4
"""Largest relative difference of a velocity after reloading; rounding of float32 stays far below."""


def export_lora(model: Model, path: str | Path, *, verify: bool = True) -> Path:
    """Writes the adapter as ONE diffusers LoRA file and returns its path.

    alpha / rank is folded into B, and no alpha is written. diffusers (0.42) has two places for it and loses both in
    common use: the metadata of the file is ignored by older diffusers, by ``load_lora_weights(state_dict)`` and by
    other programs, and is refused where the reader's peft does not know a key that the writer's did; and ``.alpha``
    tensors are refused by SD3's loader. A reader without an alpha takes alpha = rank, so that after folding all of them
    compute the same.

    Args:
        path: a folder, for FOLDER/pytorch_lora_weights.safetensors, or a file name that ends in .safetensors.
        verify: load the file again by diffusers and compare.

    Raises:
        FlowAlignError: the model has no adapter, or the file does not reproduce it.
    """
    transformer: Any = model.transformer
    config = getattr(transformer, "peft_config", {}).get(ADAPTER)
    if config is None:
        raise FlowAlignError("export: the model has no LoRA adapter; use --format merged for full fine-tuning")
    state = get_peft_model_state_dict(transformer, adapter_name=ADAPTER)
    scale = config.lora_alpha / config.r
    folded = {
        name: ((tensor.float() * scale) if ".lora_B." in name else tensor.float()).detach().cpu().contiguous()
        for name, tensor in state.items()
    }
    path = Path(path)
    file = path if path.suffix == ".safetensors" else path / FILE
    model.pipeline().save_lora_weights(file.parent, transformer_lora_layers=folded, weight_name=file.name)
    if verify:
        _prove_lora(model, file)
    return file


def export_merged(model: Model, folder: str | Path, *, verify: bool = True) -> Path:
    """Writes a whole diffusers pipeline whose transformer has the trained weights, and returns its folder.

    Args:
        verify: load the transformer again and compare.

    Raises:
        FlowAlignError: the folder does not reproduce the model.
    """
    folder, pipe = Path(folder), model.pipeline()
    if folder.is_file():
        raise FlowAlignError(f"export: {folder} is a file; name a folder for the merged pipeline")
    merged: Any = copy.deepcopy(model.transformer)
    if getattr(merged, "peft_config", None):
        merged.fuse_lora()
        merged.unload_lora()
    with quiet():
        type(pipe)(**{**pipe.components, "transformer": merged}).save_pretrained(folder)
    if verify:
        with quiet():
            reloaded: Any = type(merged).from_pretrained(folder / "transformer", torch_dtype=merged.dtype)
        expected = _probe(model, model.transformer)
        _compare(_probe(model, reloaded.to(merged.device).eval()), expected, merged.dtype, folder)
    return folder


def _prove_lora(model: Model, file: Path) -> None:
    """Loads the file by diffusers' own path beside the trained adapter, and compares weights and velocities."""
    transformer: Any = model.transformer
    expected = _probe(model, transformer)
    required = {name: p.requires_grad for name, p in transformer.named_parameters()}
    with quiet():
        model.pipeline().load_lora_weights(
            str(file.parent), weight_name=file.name, adapter_name=PROOF, use_safetensors=True
        )
    try:
        transformer.set_adapter(PROOF)
        _compare(_probe(model, transformer), expected, transformer.dtype, file)
        for name, module in transformer.named_modules():
            if isinstance(module, LoraLayer):
                _compare_layer(name, module, file)
    finally:
        transformer.set_adapter(ADAPTER)
        transformer.delete_adapters(PROOF)
        for name, p in transformer.named_parameters():
            p.requires_grad_(required[name])


@torch.no_grad()
def _compare_layer(name: str, layer: LoraLayer, file: Path) -> None:
    """A as it is and alpha / rank B: a velocity of a coarse dtype would not show a small mistake."""
    if PROOF not in layer.lora_A:
        raise FlowAlignError(f"export: {file} lacks {name}, which the model trains: do not use it, and report this")
    parts: Any = (
        (layer.lora_A, 1.0, 1.0),
        (layer.lora_B, layer.scaling[ADAPTER], layer.scaling[PROOF]),
    )
    for part, trained_scale, read_scale in parts:
        trained, read = part[ADAPTER].weight.float() * trained_scale, part[PROOF].weight.float() * read_scale
        # A coarse model reads the file into its own dtype.
        if not torch.allclose(read, trained, rtol=max(1e-5, torch.finfo(part[PROOF].weight.dtype).eps), atol=0):
            difference = float((read - trained).abs().max())
            raise FlowAlignError(
                f"export: {name} differs by {difference:.2g} after reading {file}; expected the trained weights: do "
                "not use it, and report this"
            )


@torch.no_grad()
def _probe(model: Model, transformer: nn.Module) -> Tensor:
    """A velocity at a fixed input; differs whenever the weights do."""
    config: Any = transformer.config
    side = int(config.sample_size)
    device = next(transformer.parameters()).device
    x = rng.normal([rng.generator("export", 0)], (int(config.in_channels), side, side), device)
    cond = model.encode(["a red circle"]).to(device)
    return model.velocity(transformer, x, torch.full((1,), 0.5, device=device), cond)


def _compare(found: Tensor, expected: Tensor, dtype: torch.dtype, path: Path) -> None:
    scale = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    # Merging rounds W + BA to the dtype of W.
    if not difference <= scale * max(TOLERANCE, 8 * torch.finfo(dtype).eps):
        raise FlowAlignError(
            f"export: what was written to {path} gives velocities that differ by {difference:.2g} of {scale:.2g}; "
            "expected the trained model's: do not use it, and report this"
        )
