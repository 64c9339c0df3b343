"""What a recipe may say of the loop and its optimiser; apart from the code that reads it, so that recipes load fast."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from annotated_types import MinLen

from flowalign.types import (
    Combination,
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    settings,
)

Name: TypeAlias = Annotated[str, MinLen(1)]


@settings
class OptimizerSettings:
    """AdamW; the learning rate rises to ``lr`` over the first ``warmup`` optimiser steps and stays."""

    lr: PositiveFloat
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 1e-4
    max_grad_norm: PositiveFloat = 1.0
    warmup: NonNegativeInt = 0


@settings
class TrainingSettings:
    """The loop.

    Args:
        iterations: in all, those before a resume included.
        output: folder for everything that is written.
        rollout_batch_size: samples per forward pass of one device.
        micro_batch_size: items per backward pass of one device; gradients accumulate over these.
        seed: of all randomness.
        ema_decay: of the averaged weights, updated every ``ema_every`` optimiser steps; null = none.
        checkpoint_every, preview_every: iterations; 0 = a checkpoint at the end only, no previews.
        preview_prompts: pictures in a preview.
        max_invalid: share of samples without a score, per reward, above which the run stops.
        combine_rewards: how several rewards become one number; see `core.combination.total`.
        overlap_scoring: score each part of a rollout while the next is drawn; null = unless the model is on the CPU.
        log: where metrics go besides metrics.jsonl.
    """

    iterations: PositiveInt
    output: Name
    rollout_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    seed: NonNegativeInt = 0
    ema_decay: Decay | None = None
    ema_every: PositiveInt = 1
    checkpoint_every: NonNegativeInt = 0
    preview_every: NonNegativeInt = 0
    preview_prompts: PositiveInt = 8
    max_invalid: Fraction = 0.5
    combine_rewards: Combination = "sum"
    overlap_scoring: bool | None = None
    log: tuple[Literal["wandb", "tensorboard"], ...] = ()
    wandb_project: Name = "flowalign"
