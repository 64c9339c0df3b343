"""Model families; `load_model` picks the adapter that a pipeline folder asks for."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from flowalign.models.base import Model
from flowalign.models.sd3 import SD3
from flowalign.types import FlowAlignError

ASSETS = Path(__file__).parent.parent / "assets"
ADAPTERS = {"StableDiffusion3Pipeline": SD3}
"""Class of the pipeline, as model_index.json names it -> adapter."""

__all__ = ["ADAPTERS", "embedded", "load_model", "resolve"]


def resolve(path: str | Path) -> str:
    """The folder of an embedded pipeline where ``path`` is its bare name, otherwise ``path`` itself."""
    name = str(path)
    return str(ASSETS / name) if name in embedded() else name


def embedded() -> list[str]:
    """Names of the pipelines that are shipped; other assets, such as judges, are no models."""
    return sorted(index.parent.name for index in ASSETS.glob("*/model_index.json"))


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_sequence_length: int | None = None,
) -> Model:
    """Loads a diffusers pipeline: an embedded name, a folder or a hub id.

    Args:
        dtype: of the weights.
        max_sequence_length: tokens of the long text encoder; None = the pipeline's own default.

    Raises:
        FlowAlignError: nothing there, not reachable, or a family without an adapter.
    """
    where = resolve(path)
    try:
        name = DiffusionPipeline.load_config(where).get("_class_name")
    except (OSError, ValueError) as error:
        raise FlowAlignError(
            f"model {str(path)!r}: no diffusers pipeline could be read ({_first_line(error)}); give an embedded model "
            f"({', '.join(embedded())}), a folder with a model_index.json, or a hub id that this machine can reach"
        ) from None
    if name not in ADAPTERS:
        raise FlowAlignError(
            f"model {str(path)!r}: is a {name}, expected one of {', '.join(ADAPTERS)}; write an adapter as "
            "flowalign/models/base.py says"
        )
    return ADAPTERS[name].from_pretrained(where, dtype=dtype, device=device, max_sequence_length=max_sequence_length)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
