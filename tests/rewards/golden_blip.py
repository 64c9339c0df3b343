"""What scripts/golden_blip.py showed to the authors' code, made here again bit by bit: weights, pictures and prompts.

Integers of splitmix64 (Steele et al. 2014), since no library promises that its random numbers stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = ("red", "cat", "dog", "two", "##s", "##ing", "left", "of", ",", ".", "!", "'", '"', "-")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{x}" for x in LETTERS if x != "s"), *WORDS)
SIZES = {"image_size": 224, "patch_size": 16, "embed_dim": 128, "depth": 2, "num_heads": 2}
"""Of the pictures' transformer; 224 as published, since the authors' preprocessing is part of what is compared."""
MED_CONFIG = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 160,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": len(VOCABULARY) + 2,
    "encoder_width": 768,
    "add_cross_attention": True,
}
PROMPTS = (
    "a red cat",
    "Two DOGS, left of a red cat!",
    "",
    'caf\u00e9 [ENC] na\u00efve \u6f22\u5b57 [DEC] \u201cred\u201d it\'s "cat"',
    "red cat, two dogs, " * 9,
    "q",
)
SHAPES = ((224, 224), (224, 224), (224, 224), (224, 224), (224, 224), (180, 320))
"""Height and width of the pictures; at 224 nothing is resized, so that nothing is rounded to bytes on the way."""


def integers(count: int, seed: int) -> np.ndarray:
    """``count`` of 64 random bits."""
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed) * np.uint64(1 << 32)
        x *= np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


RESIDUAL = ("cls_token", "pos_embed", "patch_embed.proj", "attn.proj", "mlp.fc2")


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """A state dict; large enough that pictures and prompts make a difference.

    What the pictures' transformer adds to its residual stream is small, so that its layer norms' eps makes one too.
    """
    state = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        uniform = (integers(math.prod(shape), seed) >> np.uint64(40)).astype(np.float64) / (1 << 23) - 1
        gain = 2.2 if name.startswith("mlp.") else 2.5
        scale = gain / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 0.3
        if "visual_encoder" in name and any(part in name for part in RESIDUAL):
            scale *= 0.1
        shift = 1.0 if len(shape) == 1 and "norm" in name.lower() and name.endswith("weight") else 0.0
        state[name] = torch.from_numpy((uniform * scale + shift).astype(np.float32).reshape(shape))
    return state


def picture(i: int) -> np.ndarray:
    """Picture ``i``, (H, W, 3) uint8: a few coarse squares of colour, and fine noise."""
    height, width = SHAPES[i]
    coarse = (integers(8 * 8 * 3, 1000 + i) % np.uint64(200)).astype(np.int64).reshape(8, 8, 3)
    rows, columns = np.arange(height) * 8 // height, np.arange(width) * 8 // width
    fine = (integers(height * width * 3, 2000 + i) % np.uint64(56)).astype(np.int64).reshape(height, width, 3)
    return (coarse[rows][:, columns] + fine).astype(np.uint8)
