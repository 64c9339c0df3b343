"""A CLIP that is small enough to make anew, in the files of the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZE = 32
WIDTH = 16
"""Of image and text vectors."""


def write(folder: Path, activation: str) -> None:
    """Writes model, tokenizer (single bytes and one merge) and image processor, as `CLIPModel.from_pretrained` reads.

    Args:
        activation: "quick_gelu" as OpenAI's models, or "gelu" as LAION's.
    """
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())  # type: ignore[no-untyped-call]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "ca", "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[Any] = [("c", "a")]  # declared as list[str], read as pairs
    CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77).save_pretrained(folder)
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_act": activation,
    }
    ends = {"bos_token_id": vocab["<|startoftext|>"], "eos_token_id": vocab["<|endoftext|>"]}
    config = CLIPConfig(
        text_config={**small, **ends, "vocab_size": len(vocab), "max_position_embeddings": 77},
        vision_config={**small, "image_size": SIZE, "patch_size": 8},
        projection_dim=WIDTH,
    )
    with torch.random.fork_rng(devices=[]):
        model = CLIPModel(config)
    randomise(model)
    model.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}).save_pretrained(folder)


def randomise(model: nn.Module) -> None:
    """Weights that are equal wherever they are made, and large enough to tell pictures apart, unlike initial ones.

    The temperature stays as it is.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "logit_scale":
                continue
            centre = float(parameter.ndim == 1 and name.endswith("weight"))  # gains of normalisation
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
