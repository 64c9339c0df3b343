"""Build the embedded pipeline ``shapes-sd3`` from nothing: renders, VAE, text towers, transformer, scheduler.

Each stage leaves its result in the work folder and is skipped when it is there, so an interrupted build goes on:

    python scripts/build_shapes_sd3.py                    # everything, about 45 minutes on two cores
    python scripts/build_shapes_sd3.py --stage export     # again with another checkpoint (chosen_step)

Stages: data, vae, latents, transformer, export.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
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
from validate_shapes import rates

from flowalign.data.worlds import shapes, shapes_render
from flowalign.data.worlds.shapes_verifier import verify

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("data", "vae", "latents", "transformer", "export")


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


# ---------------------------------------------------------------- transformer


class CountedNullAttention:
    """SD3's joint attention in which the last context token stands for several equal ones.

    Without a T5 tower the pipeline appends ``max_sequence_length`` zero tokens to the context. They are equal at every
    layer, so N of them act as one whose attention logit is raised by log N. That makes training short and lets it vary
    N: the model then works at the pipeline's default of 256 too.
    """

    def __call__(
        self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor
    ) -> Any:
        def heads(x: Tensor, norm: nn.Module | None = None) -> Tensor:
            x = x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            return x if norm is None else norm(x)

        image, context = hidden_states, encoder_hidden_states
        query = torch.cat([heads(attn.to_q(image), attn.norm_q), heads(attn.add_q_proj(context), attn.norm_added_q)], 2)
        key = torch.cat([heads(attn.to_k(image), attn.norm_k), heads(attn.add_k_proj(context), attn.norm_added_k)], 2)
        value = torch.cat([heads(attn.to_v(image)), heads(attn.add_v_proj(context))], 2)
        query, key = query.to(value.dtype), key.to(value.dtype)
        bias = F.pad(attention_mask.to(value.dtype)[:, None], (key.shape[2] - 1, 0))[:, None, None]
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.expand(-1, -1, query.shape[2], -1))
        image, context = output.transpose(1, 2).flatten(2).split([image.shape[1], context.shape[1]], 1)
        return attn.to_out[0](image), context if attn.context_pre_only else attn.to_add_out(context)


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


def load_latents(work: Path, settings: Settings, rare: bool = False) -> dict[str, Tensor]:
    """Normalised latents (n, 4, 16, 16) of the renders, and their captions' conditioning as the pipeline encodes it."""
    path = work / ("latents-rare.pt" if rare else "latents.pt")
    if path.exists():
        stored: dict[str, Tensor] = torch.load(path, weights_only=True)
        return stored
    images, texts = render_rare(settings) if rare else load_data(work, settings)
    pipe = new_pipeline(work, settings, new_transformer(settings))
    with torch.no_grad():
        chunks = [pipe.vae.encode(as_float(part)).latent_dist.mean for part in images.split(256)]
    latents = (torch.cat(chunks) - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    distinct = ["", *sorted(set(texts))]  # the empty caption first: it is what the pipeline uses as the negative
    embeds, _, pooled, _ = pipe.encode_prompt(
        distinct, None, None, do_classifier_free_guidance=False, max_sequence_length=64
    )
    position = {text: index for index, text in enumerate(distinct)}
    # The caption's tokens and one of the zero tokens behind them, see CountedNullAttention.
    embeds = embeds[:, : settings.text["max_length"] + 1]
    stored = {"latents": latents, "embeds": embeds.detach(), "pooled": pooled.detach()}
    stored["caption"] = torch.tensor([position[text] for text in texts])
    torch.save(stored, path)
    return stored


def render_rare(settings: Settings) -> tuple[Tensor, list[str]]:
    """Renders (n, 3, 64, 64) uint8 of training scenes with a rare pair, and their captions."""
    skills = ("color", "counting", "position", "binding")
    images, texts = [], []
    for index in range(settings.rare_renders):
        rng = np.random.default_rng([settings.seed + 7, index])
        spec = shapes.sample_spec(rng, skills[index % len(skills)])
        while not shapes.has_rare_pair(spec):
            spec = shapes.sample_spec(rng, skills[index % len(skills)])
        images.append(np.round(shapes_render.render(spec, rng) * 255.0).astype(np.uint8).transpose(2, 0, 1))
        texts.append(shapes.caption(spec))
    return torch.from_numpy(np.stack(images)), texts


def load_training_set(work: Path, settings: Settings, cycle: dict[str, Any]) -> dict[str, Tensor]:
    """Latents and conditioning of a cycle; with ``rare: true`` those of rare scenes too."""
    data = load_latents(work, settings)
    if not cycle.get("rare"):
        return data
    more = load_latents(work, settings, rare=True)
    joined = {name: torch.cat([data[name], more[name]]) for name in ("latents", "embeds", "pooled")}
    # Row 0 of the conditioning is the empty caption, which stands for a dropped one.
    return {**joined, "caption": torch.cat([data["caption"], more["caption"] + len(data["embeds"])])}


def train_transformer(work: Path, settings: Settings) -> None:
    """Flow matching in cycles; each starts from the last EMA with its own peak learning rate."""
    first = 0
    for cycle in settings.transformer["cycles"]:
        last = first + cycle.get("stop", cycle["steps"])
        if not (work / f"transformer-{last}").exists():
            train_cycle(work, settings, first, cycle)
        first = last


def build_optimizers(model: nn.Module, cycle: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """AdamW; with ``muon: true`` Muon (arXiv 2502.16982) for the matrices of attention and feed-forward layers."""
    hidden = {
        name: parameter
        for name, parameter in model.named_parameters()
        if cycle.get("muon")
        and parameter.ndim == 2
        and "transformer_blocks" in name
        and (".attn" in name or ".ff" in name)
    }
    others = [parameter for name, parameter in model.named_parameters() if name not in hidden]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=(0.9, 0.99), weight_decay=0.01)]
    if hidden:
        optimizers.append(torch.optim.Muon(hidden.values(), weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def train_cycle(work: Path, settings: Settings, first: int, cycle: dict[str, Any]) -> None:
    """One cycle from step ``first``; EMA checkpoints ``transformer-STEP`` and their scores in ``scores.jsonl``."""
    recipe, steps = settings.transformer, cycle["steps"]
    stop = cycle.get("stop", steps)
    data = load_training_set(work, settings, cycle)
    model, average = new_transformer(settings), new_transformer(settings).requires_grad_(False)
    if first:
        stored = SD3Transformer2DModel.from_pretrained(work / f"transformer-{first}").state_dict()
        model.load_state_dict(stored)
        average.load_state_dict(stored)
    for block in model.transformer_blocks:
        block.attn.set_processor(CountedNullAttention())
        block.compile()  # float32: at this width faster on a CPU than bfloat16 with its casts
    pipe = new_pipeline(work, settings, average)
    optimizers = build_optimizers(model, cycle)
    generator = torch.Generator().manual_seed(settings.seed + first)
    start, losses = time.time(), []
    for step in range(stop):
        loss = flow_matching_loss(model, data, recipe, generator)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = one_cycle(step, steps, cycle["peak"])
            optimizer.step()
        decay = min(recipe["ema"], (1.0 + step) / (10.0 + step))
        torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in model.parameters()], 1.0 - decay)
        losses.append(loss.item())
        done = first + step + 1
        if done % 100 == 0:
            print(f"transformer {done} loss {np.mean(losses[-100:]):.4f} {time.time() - start:.0f} s", flush=True)
        if done % recipe["save_every"] == 0 or step + 1 == stop:
            average.save_pretrained(work / f"transformer-{done}")
            row = {"step": done, "loss": float(np.mean(losses[-500:])), "seconds": time.time() - start}
            row |= {"held_out": accuracy(pipe, settings, 1.0)}
            with (work / "scores.jsonl").open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            print(row, flush=True)


def flow_matching_loss(
    model: SD3Transformer2DModel, data: dict[str, Tensor], recipe: dict[str, Any], generator: torch.Generator
) -> Tensor:
    """mean |v(x_sigma, sigma, caption) - (noise - clean)|^2 with a logit-normal sigma."""
    batch = recipe["batch"]
    index = torch.randint(len(data["latents"]), (batch,), generator=generator)
    clean = data["latents"][index]
    noise = torch.randn(clean.shape, generator=generator)
    sigma = torch.sigmoid(torch.randn(batch, generator=generator))
    caption = data["caption"][index] * (torch.rand(batch, generator=generator) >= recipe["drop"])
    # The number of zero tokens that the pipeline appends: mostly 16, now and then its default of 256. Many of them take
    # attention away from the image, so that equal shares would cost accuracy.
    null_bias = torch.where(torch.rand(batch, generator=generator) < recipe["long_context"], 256.0, 16.0).log()
    weight = sigma[:, None, None, None]
    velocity = model(
        (1.0 - weight) * clean + weight * noise,
        encoder_hidden_states=data["embeds"][caption],
        pooled_projections=data["pooled"][caption],
        timestep=1000.0 * sigma,
        joint_attention_kwargs={"attention_mask": null_bias},
    ).sample
    return F.mse_loss(velocity, noise - clean)


# ---------------------------------------------------------------- evaluation and export


def sample(
    pipe: StableDiffusion3Pipeline,
    texts: list[str],
    settings: Settings,
    guidance: float,
    seed: int = 0,
    nulls: int = 16,
) -> Tensor:
    """Images (n, 3, 64, 64) in [0, 1] by plain calls of the pipeline."""
    images = []
    for first in range(0, len(texts), 64):
        generators = [torch.Generator().manual_seed(1000 * seed + i) for i in range(first, min(first + 64, len(texts)))]
        output = pipe(
            texts[first : first + 64],
            num_inference_steps=settings.evaluation["steps"],
            guidance_scale=guidance,
            generator=generators,
            max_sequence_length=nulls,
            output_type="pt",
        )
        images.append(output.images.float())
    return torch.cat(images)


def accuracy(
    pipe: StableDiffusion3Pipeline,
    settings: Settings,
    guidance: float,
    seed: int = 0,
    split: shapes.Split = "held_out",
    nulls: int = 16,
) -> dict[str, float]:
    """Strict accuracy per skill and over all, and the mean soft score."""
    texts = shapes.prompts(split, settings.evaluation["prompts"], 0)
    verdict = verify(sample(pipe, texts, settings, guidance, seed, nulls), texts)
    skills = np.array([shapes.parse(text).skill for text in texts])
    result = {skill: round(float(verdict.strict[skills == skill].mean()), 4) for skill in sorted(set(skills.tolist()))}
    return result | {"strict": round(float(verdict.strict.mean()), 4), "soft": round(float(verdict.soft.mean()), 4)}


def export(work: Path, out: Path, settings: Settings) -> None:
    """Write the folder in fp16, reload it, and measure what the model card states."""
    chosen = SD3Transformer2DModel.from_pretrained(work / f"transformer-{settings.chosen_step}").half().float().eval()
    pipe = new_pipeline(work, settings, chosen)
    texts = shapes.prompts("held_out", 8, 1)
    before = sample(pipe, texts, settings, 1.0)
    pipe.to(torch.float16).save_pretrained(out, safe_serialization=True)
    write_slow_files(pipe.tokenizer, out / "tokenizer")
    write_slow_files(pipe.tokenizer_2, out / "tokenizer_2")
    for path in out.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes them readable by their owner only
    pipe = StableDiffusion3Pipeline.from_pretrained(out, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    change = (sample(pipe, texts, settings, 1.0) - before).abs().max().item()
    if change > 1e-4:
        raise RuntimeError(f"{out}: the reloaded pipeline's images differ by {change:.2g}, expected at most 1e-4.")
    numbers = measure(pipe, work, settings) | {"reload_difference": change}
    (work / "numbers.json").write_text(json.dumps(numbers, indent=1))
    (out / "README.md").write_text(model_card(numbers, settings))


def measure(pipe: StableDiffusion3Pipeline, work: Path, settings: Settings) -> dict[str, Any]:
    """The numbers of the model card; two seeds a prompt."""
    runs = {
        "held-out, no guidance": {"guidance": 1.0},
        f"held-out, guidance {settings.evaluation['guidance']}": {"guidance": settings.evaluation["guidance"]},
        "held-out, no guidance, max_sequence_length 256": {"guidance": 1.0, "nulls": 256},
        "training prompts, no guidance": {"guidance": 1.0, "split": "train"},
    }
    table = {}
    for name, options in runs.items():
        seeds = [accuracy(pipe, settings, seed=seed, **options) for seed in (0, 1)]
        table[name] = {key: round(float(np.mean([row[key] for row in seeds])), 4) for key in seeds[0]}
        print(name, table[name], flush=True)
    scores = [json.loads(line) for line in (work / "scores.jsonl").read_text().splitlines()]
    return {
        "accuracy": table,
        "verifier": rates(pipe.vae, 10_000),
        "parameters": {
            name: sum(parameter.numel() for parameter in module.parameters())
            for name, module in pipe.components.items()
            if isinstance(module, nn.Module)
        },
        "training": training_row(scores, settings),
    }


def training_row(scores: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """The chosen checkpoint's row, with the seconds of the cycles before it added."""
    row = dict(next(row for row in scores if row["step"] == settings.chosen_step))
    ends = np.cumsum([cycle.get("stop", cycle["steps"]) for cycle in settings.transformer["cycles"]]).tolist()
    row["seconds"] += sum(other["seconds"] for other in scores if other["step"] in ends and other["step"] < row["step"])
    return row


def model_card(numbers: dict[str, Any], settings: Settings) -> str:
    """README.md of the folder, from ``shapes_sd3_card.md``."""
    skills = ["color", "counting", "position", "binding", "single", "strict", "soft"]
    table = [f"| prompts | {' | '.join(skills)} |", f"|---|{'---|' * len(skills)}"]
    for name, row in numbers["accuracy"].items():
        table.append(f"| {name} | {' | '.join(f'{row[key]:.3f}' if key in row else '-' for key in skills)} |")
    verifier, training, parameters = numbers["verifier"], numbers["training"], numbers["parameters"]
    recipe, evaluation = settings.transformer, settings.evaluation
    template = (ROOT / "scripts" / "shapes_sd3_card.md").read_text()
    return template.format(
        table="\n".join(table),
        sizes="\n".join(f"| {name} | {count:,} |" for name, count in parameters.items()),
        renders=settings.renders,
        vae_steps=settings.vae["steps"],
        vae_batch=settings.vae["batch"],
        vae_mse=verifier["vae_mse"],
        steps=training["step"],
        cycles=" + ".join(f"{cycle['steps']} (peak {cycle['peak']})" for cycle in recipe["cycles"]),
        batch=recipe["batch"],
        ema=recipe["ema"],
        loss=training["loss"],
        seconds=training["seconds"],
        shift=settings.scheduler_shift,
        sampler_steps=evaluation["steps"],
        prompts=evaluation["prompts"],
        direct=verifier["direct"],
        after_vae=verifier["after_vae"],
        wrong=verifier["wrong_accepted"],
        wrong_vae=verifier["wrong_accepted_after_vae"],
        reload=numbers["reload_difference"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=Path, default=ROOT / "scripts" / "shapes_sd3.yaml")
    parser.add_argument("--work", type=Path, default=Path("/tmp/shapes_build"))
    parser.add_argument("--out", type=Path, default=ROOT / "flowalign" / "assets" / "shapes-sd3")
    parser.add_argument("--stage", choices=STAGES, help="only this stage (and what it needs); all if absent")
    arguments = parser.parse_args()
    settings = Settings(**yaml.safe_load(arguments.settings.read_text()))
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_flush_denormal(True)
    stages = STAGES if arguments.stage is None else (arguments.stage,)
    for stage in stages:
        if stage == "data":
            load_data(arguments.work, settings)
        elif stage == "vae":
            train_vae(arguments.work, settings)
        elif stage == "latents":
            load_latents(arguments.work, settings)
        elif stage == "transformer":
            train_transformer(arguments.work, settings)
        elif stage == "export":
            export(arguments.work, arguments.out, settings)


if __name__ == "__main__":
    main()
