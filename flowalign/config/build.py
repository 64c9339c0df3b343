"""From a recipe to objects: the only file that knows every class."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from flowalign.algorithms.awm import AWM, AWMSettings
from flowalign.algorithms.base import Algorithm
from flowalign.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTSettings
from flowalign.algorithms.flow_dpo import FlowDPO, FlowDPOSettings, OfflineFlowDPOSettings
from flowalign.algorithms.flow_grpo import FlowGRPO, FlowGRPOSettings
from flowalign.algorithms.ram import RAM, RAMSettings
from flowalign.algorithms.sft import SFT, SFTSettings
from flowalign.algorithms.soar import SOAR, SOARSettings
from flowalign.config.load import dump_recipe
from flowalign.config.schema import LEARNS_FROM_DATA, AlgorithmSettings, Recipe, RewardSettings
from flowalign.data.pairs import METADATA, PairData, load_pairs, load_preferences
from flowalign.data.prompts import PromptData, load_prompts
from flowalign.data.worlds import shapes_render, signs_render
from flowalign.models import load_model, lora
from flowalign.models.base import Model
from flowalign.rewards import registry
from flowalign.rewards.client import RemoteReward
from flowalign.rewards.combine import WeightedReward
from flowalign.rewards.judge import Judge
from flowalign.training import checkpoint, trainer
from flowalign.training.distributed import Workers
from flowalign.training.trainer import TrainResult
from flowalign.types import FlowAlignError

WORLDS = {"shapes": shapes_render.write_folder, "signs": signs_render.write_folder}
"""Datasets that are rendered when they are asked for."""
PREFERENCE_WORLDS = {"shapes": shapes_render.write_preferences}
"""Those of preferences."""
REMOTE_BATCH_SIZE = 128
"""Samples on their way to servers at a time: as many requests as the client sends side by side, filled."""
WORLD_COUNT = 512
"""Renders of a world where the number is left open."""


def build_model(recipe: Recipe, device: torch.device | str) -> Model:
    """The model with the parameters that the recipe trains in float32 and requiring gradients, all others frozen.

    Raises:
        FlowAlignError: no such model, or a size that it cannot make.
    """
    settings, tuning = recipe.model, recipe.tuning
    # Weights in training stay float32; frozen ones may be as coarse as the arithmetic.
    coarse = settings.precision == "bf16" and tuning.kind == "lora"
    model = load_model(
        settings.path,
        dtype=torch.bfloat16 if coarse else torch.float32,
        device=device,
        max_sequence_length=settings.max_sequence_length,
    )
    model.latent_shape(settings.height, settings.width)  # refuses a size before anything is sampled
    if tuning.kind == "lora":
        lora.add_lora(model, rank=tuning.rank, alpha=tuning.alpha, targets=tuning.targets, seed=recipe.training.seed)
    else:
        model.transformer.requires_grad_(True)
    if settings.activation_checkpointing:
        enable = getattr(model.transformer, "enable_gradient_checkpointing", None)
        if enable is None:
            raise FlowAlignError(
                f"model.activation_checkpointing: {type(model.transformer).__name__} does not offer it; set it to false"
            )
        enable()
    return model


def build_algorithm(settings: AlgorithmSettings, model: Model) -> Algorithm:
    """The method with its settings."""
    if isinstance(settings, SFTSettings):
        return SFT(settings)
    if isinstance(settings, SOARSettings):
        return SOAR(settings, shift=model.shift)
    if isinstance(settings, FlowGRPOSettings):
        return FlowGRPO(settings, shift=model.shift)
    if isinstance(settings, DiffusionNFTSettings):
        return DiffusionNFT(settings, shift=model.shift)
    if isinstance(settings, FlowDPOSettings | OfflineFlowDPOSettings):
        return FlowDPO(settings, shift=model.shift)
    if isinstance(settings, AWMSettings):
        return AWM(settings, shift=model.shift)
    if isinstance(settings, RAMSettings):
        return RAM(settings, shift=model.shift)
    raise TypeError(f"no algorithm is known for {type(settings).__name__}; add it here")


def build_rewards(recipe: Recipe, device: torch.device | str) -> list[WeightedReward]:
    """The judges in the order of the recipe.

    Raises:
        FlowAlignError: a judge that this version does not have, or parameters that it does not take.
    """
    # What fits into memory for sampling is a fair guess for scoring.
    return [_build_reward(r, r.device or device, recipe.training.rollout_batch_size) for r in recipe.rewards]


def _build_reward(settings: RewardSettings, device: torch.device | str, batch_size: int) -> WeightedReward:
    name, remote = settings.name, settings.remote
    if remote is None:
        judge = registry.create(
            name, device, settings.batch_size or batch_size, settings.frames, settings.offload, **settings.params
        )
    else:
        reward = RemoteReward(remote.urls, name, remote.token_env, remote.timeout, exact=remote.exact)
        judge = Judge(reward, frames=settings.frames, batch_size=settings.batch_size or REMOTE_BATCH_SIZE)
    weight, scales = settings.weight, judge.spec.scales
    if settings.scale is not None and settings.scale not in scales:
        known = f"it has {', '.join(scales)}" if scales else "it has none"
        raise FlowAlignError(f"reward {name!r}: no scale {settings.scale!r}; {known}")
    if settings.scale is not None:
        weight /= scales[settings.scale].divisor
    return WeightedReward(name, judge, weight, settings.gate)


def build_prompts(recipe: Recipe) -> PromptData:
    """Prompts to sample from.

    Raises:
        FlowAlignError: no such file, or fewer prompts than the recipe asks for.
    """
    settings = recipe.prompts
    if settings is None:
        raise FlowAlignError("prompts: missing section; name a source of prompts")
    prompts = load_prompts(settings.source, settings.count, settings.seed)
    return PromptData(prompts, settings.per_iteration, settings.group_size, settings.negative)


def build_pairs(recipe: Recipe, workers: Workers) -> PairData:
    """Captioned images or preferences to learn from; the main process renders those of a world into the output folder.

    Raises:
        FlowAlignError: no such folder, or one that is not as `load_pairs` or `load_preferences` says.
    """
    settings, algorithm = recipe.dataset, recipe.algorithm
    if settings is None or not isinstance(algorithm, LEARNS_FROM_DATA):
        raise FlowAlignError("dataset: missing section; name a folder with a metadata.jsonl, or a world")
    preferences = isinstance(algorithm, OfflineFlowDPOSettings)
    folder, count = Path(settings.path), settings.count
    writers = PREFERENCE_WORLDS if preferences else WORLDS
    if settings.path in writers:
        number = count or WORLD_COUNT
        kind = f"{settings.path}-preferences" if preferences else settings.path
        folder, count = Path(recipe.training.output) / "dataset" / f"{kind}-{number}-{settings.seed}", None
        _render(writers[settings.path], folder, number, settings.seed, workers)
    size = {"height": recipe.model.height, "width": recipe.model.width}
    if preferences:
        better, worse = load_preferences(folder, **size, count=count, seed=settings.seed)
        return PairData(better, algorithm.batch_size, worse)
    return PairData(load_pairs(folder, **size, count=count, seed=settings.seed), algorithm.batch_size)


def _render(write: Callable[[Path, int, int], None], folder: Path, count: int, seed: int, workers: Workers) -> None:
    """Renders into ``folder``, whose name depends on what it holds only, so that a resumed run finds it."""
    if workers.is_main and not (folder / METADATA).is_file():
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write(partial, count, seed)
        partial.rename(folder)
    workers.barrier()


def train(
    recipe: Recipe, *, resume: bool = False, workers: Workers | None = None, model: Model | None = None
) -> TrainResult:
    """One run.

    Args:
        resume: go on from the last checkpoint in ``training.output``.
        workers: the processes of the run; left out, they are found out.
        model: as `build_model` makes it; left out, it is made. It is trained in place.

    Raises:
        FlowAlignError: anything that the user can mend.
    """
    workers = workers or Workers()
    last = checkpoint.latest(recipe.training.output) if resume else None
    if resume and last is None:
        raise FlowAlignError(f"--resume: {recipe.training.output} holds no checkpoint; start the run without --resume")
    rewards = build_rewards(recipe, workers.device)
    data = build_prompts(recipe) if recipe.prompts is not None else build_pairs(recipe, workers)
    model = model or build_model(recipe, workers.device)
    return trainer.train(
        model,
        build_algorithm(recipe.algorithm, model),
        data,
        rewards,
        optimizer=recipe.optimizer,
        training=recipe.training,
        workers=workers,
        lora=recipe.tuning.kind == "lora",
        size=(recipe.model.height, recipe.model.width),
        autocast=torch.bfloat16 if recipe.model.precision == "bf16" else None,
        recipe_text=dump_recipe(recipe),
        resume=last,
    )
