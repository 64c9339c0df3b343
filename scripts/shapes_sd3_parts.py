"""The parts of ``shapes-sd3``: renders, autoencoder, tokenizer, text towers and an untrained transformer."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from flowalign.data.worlds import shapes, shapes_render


@dataclass(frozen=True)
class Settings:
    """The recipe of the build; see ``shapes_sd3.yaml``."""

    seed: int
    renders: int
    rare_renders: int
    skill_weights: dict[str, float]
    vae: dict[str, Any]
    text: dict[str, Any]
    transformer: dict[str, Any]
    scheduler_shift: float
    evaluation: dict[str, Any]
    chosen_step: int


def one_cycle(step: int, steps: int, peak: float, warm: float = 0.05) -> float:
    """Learning rate: linear to the peak in the first ``warm`` of the steps, then a cosine down to 1 % of it."""
    if step < warm * steps:
        return peak * (step + 1) / (warm * steps)
    progress = (step - warm * steps) / (steps - warm * steps)
    return peak * (0.01 + 0.99 * 0.5 * (1.0 + np.cos(np.pi * progress)))


# ---------------------------------------------------------------- renders


def load_data(work: Path, settings: Settings) -> tuple[Tensor, list[str]]:
    """Training renders (n, 3, 64, 64) uint8 and their captions, rendered once."""
    if not (work / "captions.json").exists():
        images, texts = shapes_render.render_many(settings.renders, settings.seed, weights=settings.skill_weights)
        np.save(work / "renders.npy", images.transpose(0, 3, 1, 2))
        (work / "captions.json").write_text(json.dumps(texts))
    return torch.from_numpy(np.load(work / "renders.npy")), json.loads((work / "captions.json").read_text())


def as_float(images: Tensor) -> Tensor:
    """uint8 -> float32 in [-1, 1], the range of diffusers' autoencoders."""
    return images.float() / 127.5 - 1.0


# ---------------------------------------------------------------- autoencoder


def train_vae(work: Path, settings: Settings) -> AutoencoderKL:
    """AutoencoderKL whose latents are easy to generate, scaled and shifted to mean 0 and deviation 1.

    Loss: L1 + MSE + KL (per latent value) + the squared error of a linear map from latents to the image shrunk to their
    size. The last term makes latents a thumbnail with details; without it they are an arbitrary code (a linear map
    explains half of the thumbnail), and the transformer needs several times as many steps.
    """
    if (work / "vae").exists():
        return AutoencoderKL.from_pretrained(work / "vae")
    recipe = settings.vae
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    images, _ = load_data(work, settings)
    channels = recipe["channels"]
    vae = AutoencoderKL(
        block_out_channels=tuple(channels),
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=recipe["latent_channels"],
        sample_size=shapes.SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    ).to(memory_format=torch.channels_last)
    thumbnail = nn.Conv2d(recipe["latent_channels"], 3, 1)  # not kept
    parameters = [*vae.parameters(), *thumbnail.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=recipe["lr"], weight_decay=1e-4)
    start = time.time()
    for step in range(recipe["steps"]):
        batch = as_float(images[torch.randint(len(images), (recipe["batch"],), generator=generator)])
        posterior = vae.encode(batch.contiguous(memory_format=torch.channels_last)).latent_dist
        latents = posterior.sample(generator)
        output = vae.decode(latents).sample
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        shrunk = F.avg_pool2d(batch, 4)
        loss = F.l1_loss(output, batch) + F.mse_loss(output, batch) + recipe["kl"] * divergence
        loss = loss + recipe["thumbnail"] * F.mse_loss(thumbnail(latents), shrunk)
        optimizer.param_groups[0]["lr"] = one_cycle(step, recipe["steps"], recipe["lr"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 100 == 0:
            mse = F.mse_loss(output, batch).item()
            error = F.mse_loss(thumbnail(latents), shrunk).item()
            deviations = f"{posterior.mean.std().item():.2f} {posterior.std.mean().item():.2f}"
            print(
                f"vae {step} mse {mse:.5f} thumbnail {error:.5f} latents {deviations} {time.time() - start:.0f} s",
                flush=True,
            )
    vae.eval()
    with torch.no_grad():
        latents = torch.cat([vae.encode(as_float(images[i : i + 64])).latent_dist.mean for i in range(0, 2048, 64)])
    vae.register_to_config(scaling_factor=1.0 / latents.std().item(), shift_factor=latents.mean().item())
    vae.save_pretrained(work / "vae")
    return vae


# ---------------------------------------------------------------- tokenizer and text towers


def world_words() -> list[str]:
    """The words of all captions, sorted."""
    captions = {
        shapes.caption(spec)
        for skill in shapes.SKILLS
        for split in ("train", "held_out")
        for spec in shapes.all_specs(skill, split)
    }
    return sorted({word for text in captions for word in text.split()})


def build_tokenizer(settings: Settings) -> CLIPTokenizer:
    """A CLIP tokenizer with a byte alphabet, in which each word of the world is one token.

    CLIP's layout of ids: bytes, bytes that end a word, merges, begin, end. The alphabet is complete (a word the world
    does not know is spelled out), because an unknown piece would become the end token and cut the caption there.
    """
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer = normalizers.Lowercase()
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(
        world_words(),
        trainers.BpeTrainer(vocab_size=10_000, min_frequency=1, end_of_word_suffix="</w>", show_progress=False),
    )
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *("".join(merge) for merge in merges)]
    pieces = [*dict.fromkeys(pieces), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=settings.text["max_length"])


def write_slow_files(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """``vocab.json`` and ``merges.txt``, which transformers before version 5 read."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")


def build_text_tower(settings: Settings, tokenizer: CLIPTokenizer, seed: int) -> CLIPTextModelWithProjection:
    """A frozen random CLIP text model whose hidden states tell captions apart.

    Default initial weights (.02) leave hidden states that hardly depend on the words before a token; here embeddings
    have unit scale and attention mixes strongly. The transformer learns to read whatever code comes out.
    """
    text = settings.text
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=text["width"],
        intermediate_size=2 * text["width"],
        projection_dim=text["width"],
        num_hidden_layers=text["layers"],
        num_attention_heads=text["heads"],
        max_position_embeddings=text["max_length"],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tower = CLIPTextModelWithProjection(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in tower.named_parameters():
        if parameter.ndim == 2:
            scale = 1.0 if "token_embedding" in name else 0.5 if "position_embedding" in name else 0.0
            scale = scale or (1.5 if "_proj" in name and "text_" not in name else 1.0) * parameter.shape[1] ** -0.5
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return tower.eval().requires_grad_(False).half().float()  # exactly what the stored fp16 weights give


def build_silent_t5(settings: Settings) -> tuple[T5EncoderModel, T5Tokenizer]:
    """A T5 tower whose output is exactly 0: what the pipeline uses where there is no T5.

    diffusers loads a Stable Diffusion 3 folder without a T5 only if ``text_encoder_3=None`` is said in the call. This
    one lets a plain ``from_pretrained(path)`` load the folder, and both ways give the same images.
    """
    width = 2 * settings.text["width"]
    config = T5Config(
        vocab_size=64, d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=1, pad_token_id=0, eos_token_id=1
    )
    tower = T5EncoderModel(config)
    generator = torch.Generator().manual_seed(settings.seed + 3)
    for parameter in tower.parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    tower.encoder.final_layer_norm.weight.data.zero_()
    pieces = [
        "<pad>",
        "</s>",
        "<unk>",
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"\u2581{word}" for word in world_words()),
    ]
    vocabulary = [(piece, -float(index >= 3)) for index, piece in enumerate(pieces)]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)
    return tower.eval().requires_grad_(False), tokenizer


def new_pipeline(work: Path, settings: Settings, transformer: SD3Transformer2DModel) -> StableDiffusion3Pipeline:
    """The pipeline around a transformer; everything else is rebuilt from seeds or read from the work folder."""
    tokenizer = build_tokenizer(settings)
    silent, silent_tokenizer = build_silent_t5(settings)
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=settings.scheduler_shift),
        vae=train_vae(work, settings).half().float(),
        text_encoder=build_text_tower(settings, tokenizer, settings.seed + 1),
        tokenizer=tokenizer,
        text_encoder_2=build_text_tower(settings, tokenizer, settings.seed + 2),
        tokenizer_2=build_tokenizer(settings),
        text_encoder_3=silent,
        tokenizer_3=silent_tokenizer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def new_transformer(settings: Settings) -> SD3Transformer2DModel:
    recipe = settings.transformer
    width = recipe["heads"] * recipe["head_dim"]
    torch.manual_seed(settings.seed)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=settings.vae["latent_channels"],
        out_channels=settings.vae["latent_channels"],
        num_layers=recipe["layers"],
        num_attention_heads=recipe["heads"],
        attention_head_dim=recipe["head_dim"],
        joint_attention_dim=2 * settings.text["width"],
        pooled_projection_dim=2 * settings.text["width"],
        caption_projection_dim=width,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    # Blocks that start as the identity and an output that starts at 0, as in DiT: the first steps are not lost.
    for name, module in transformer.named_modules():
        if name.endswith(("norm1.linear", "norm1_context.linear", "norm_out.linear")) or name == "proj_out":
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return transformer
