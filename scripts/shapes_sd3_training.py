"""Training of the transformer of ``shapes-sd3``, and the accuracy of a pipeline."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from shapes_sd3_parts import Settings, as_float, load_data, new_pipeline, new_transformer, one_cycle
from torch import Tensor, nn

from flowalign.data.worlds import shapes, shapes_render
from flowalign.data.worlds.shapes_verifier import verify


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
