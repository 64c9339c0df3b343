"""Weights that are small enough to make anew."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

CLIP_SIZE = 32


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A folder with a CLIP of 40,000 parameters and a tokenizer of single bytes and one merge."""
    folder = tmp_path_factory.mktemp("clip")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "ca", "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    CLIPTokenizer(vocab=vocab, merges=[("c", "a")], model_max_length=24).save_pretrained(folder)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": vocab["<|startoftext|>"], "eos_token_id": vocab["<|endoftext|>"]}
    config = CLIPConfig(
        text_config={**small, **ends, "vocab_size": len(vocab), "max_position_embeddings": 24},
        vision_config={**small, "image_size": CLIP_SIZE, "patch_size": 8},
        projection_dim=16,
    )
    torch.manual_seed(0)
    model = CLIPModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # the initial weights are too small to tell pictures apart
    model.save_pretrained(folder)
    CLIPImageProcessor(
        size={"shortest_edge": CLIP_SIZE}, crop_size={"height": CLIP_SIZE, "width": CLIP_SIZE}
    ).save_pretrained(folder)
    return folder
