"""A Qwen2-VL that is small enough to make anew, in the files of the published ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.rewards.qwen2_vl import Head, LoRA, Qwen2VL, published

SPECIAL_NAMES = (
    "endoftext",
    "im_start",
    "im_end",
    "vision_start",
    "vision_end",
    "vision_pad",
    "image_pad",
    "video_pad",
)
SPECIAL = tuple(f"<|{name}|>" for name in SPECIAL_NAMES)
WIDTH = 32
"""Of hidden states."""
GAINS = {"lora_B": 0.3, "head.": 2.0}
"""Of random weights, where the usual one would drown the rest or be drowned."""


def write_base(folder: Path, template: str) -> None:
    """Writes configuration and tokenizer, as Qwen2-VL's own folders hold them.

    Args:
        template: the judge's question, whose words become tokens: as single bytes it would be five times as long.
    """
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())  # type: ignore[no-untyped-call]
    merges: list[Any] = []
    for word in dict.fromkeys(re.findall(" ?[A-Za-z]+", template)):
        pieces = word.replace(" ", "\u0120")  # how byte-level tokenizers write a space
        merges += [(pieces[:end], pieces[end]) for end in range(1, len(pieces))]
    merges = list(dict.fromkeys(merges))
    vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges)
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    tokenizer.save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in SPECIAL_NAMES}
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 2,
        "vocab_size": len(tokenizer) + 20,  # rows to spare, as published; tuning cuts them off
        "bos_token_id": ids["endoftext"],
        "eos_token_id": ids["im_end"],
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "hidden_size": WIDTH,
            "in_chans": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def weights(folder: Path, head: Head, tokens: Sequence[str], lora: LoRA | None = None) -> dict[str, Tensor]:
    """Random weights for what `write_base` wrote, by their published names; equal wherever they are made.

    Args:
        tokens: of the judge, for which the published files have rows.
    """
    from transformers import AutoTokenizer, Qwen2VLConfig

    config: Any = Qwen2VLConfig.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    config.text_config.vocab_size = len(tokenizer) + len(tokens)
    shapes = {key: value.shape for key, value in Qwen2VL(config, head, lora).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    state = {}
    for key, shape in shapes.items():
        # Sums of inputs keep their variance, or gain: pictures and prompts must make a difference.
        inputs = math.prod(shape[1:]) if len(shape) > 1 else 25
        gain = math.sqrt(inputs) if "embed_tokens" in key else 1.0
        gain *= next((factor for part, factor in GAINS.items() if part in key), 1.0)
        noise = torch.randn(shape, generator=generator) * gain / math.sqrt(inputs)
        is_gain = len(shape) == 1 and key.endswith("weight")
        state[published(key)] = 1 + noise if is_gain else noise
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    return state
