"""A random Stable Diffusion 3 pipeline of 30,000 parameters, as a folder that diffusers loads."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

SIDE = 16
"""Pixels of a picture: 8 latents, 4 patches."""
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.-"


def build(folder: Path, *, t5: bool, seed: int = 0) -> Path:
    """Writes a pipeline with or without a T5 and returns its folder."""
    torch.manual_seed(seed)
    pipe = StableDiffusion3Pipeline(
        transformer=transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(),
        text_encoder=tower(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=tower(),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_tower() if t5 else None,
        tokenizer_3=t5_tokenizer() if t5 else None,
    )
    pipe.save_pretrained(folder)
    return folder


def transformer() -> SD3Transformer2DModel:
    """Two layers; the first with the second attention of SD3.5 medium."""
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=6,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ).eval()


def vae() -> AutoencoderKL:
    """Factor 2; decoder weights large enough that pictures use the whole range."""
    model = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5,
        shift_factor=0.06,
        sample_size=SIDE,
    ).eval()
    nn.init.normal_(model.decoder.conv_out.weight, std=0.1)
    return model


def tower() -> CLIPTextModelWithProjection:
    tokenizer = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=12,
        intermediate_size=24,
        projection_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return randomised(CLIPTextModelWithProjection(config))


def clip_tokenizer() -> CLIPTokenizer:
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=16)


def t5_tower() -> T5EncoderModel:
    size = len(LETTERS) + 4
    config = T5Config(
        vocab_size=size, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1
    )
    return randomised(T5EncoderModel(config))


def t5_tokenizer() -> T5Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *LETTERS]
    vocabulary = [(piece, 0.0 if i < 3 else -3.0) for i, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)


def randomised(module: nn.Module) -> nn.Module:
    """Weights so large that texts make a difference."""
    for parameter in module.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.4)
    return module.eval()
