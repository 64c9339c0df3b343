"""The loop: sample or read, score, learn, record. It knows protocols only, no concrete model, algorithm or reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from flowalign.algorithms.base import Algorithm
from flowalign.data.pairs import PairData
from flowalign.data.prompts import PromptData
from flowalign.models import lora as adapters
from flowalign.models.base import Model
from flowalign.rewards.combine import WeightedReward
from flowalign.training import checkpoint, learn, metrics, preview, replay
from flowalign.training.distributed import Workers
from flowalign.training.learn import Learner
from flowalign.training.settings import OptimizerSettings, TrainingSettings
from flowalign.training.source import source_of
from flowalign.types import WeightSet


@dataclass(frozen=True)
class TrainResult:
    """``history`` has a dict of metrics per iteration; ``weights`` holds "ema" and other sets that the run keeps."""

    iteration: int
    seconds: float
    images_per_second: float
    history: list[dict[str, float]]
    checkpoint: Path
    weights: adapters.WeightSets


def train(
    model: Model,
    algorithm: Algorithm,
    data: PromptData | PairData,
    rewards: Sequence[WeightedReward],
    *,
    optimizer: OptimizerSettings,
    training: TrainingSettings,
    workers: Workers,
    lora: bool,
    size: tuple[int, int],
    autocast: torch.dtype | None = None,
    recipe_text: str = "",
    resume: Path | None = None,
) -> TrainResult:
    """Trains ``model`` in place.

    Args:
        model: on ``workers.device``; its trainable parameters require gradients and are float32.
        data: prompts for algorithms that sample, pairs for those that learn from data.
        lora: the reference is the disabled adapter; otherwise a copy of the weights.
        size: height and width in pixels.
        optimizer, training: sections of a recipe.
        autocast: dtype of the transformer's arithmetic, in sampling and learning alike.
        recipe_text: kept in every checkpoint.
        resume: checkpoint to go on from.

    Raises:
        FlowAlignError: data that does not fit, a ratio that is not 1 at the start, too many invalid scores, a loss or
            gradient that is not finite, an output folder of another run.
    """
    output = checkpoint.claim(training.output, resume, workers)
    learner, weights = _learner(model, algorithm, optimizer, training, workers, lora, autocast)
    source = source_of(
        model,
        learner.policy,
        algorithm,
        data,
        rewards,
        workers,
        training,
        size,
    )
    start = checkpoint.resume(resume, learner, weights, training.iterations) if resume else 0
    saved, seconds = resume or output, 0.0
    with metrics.Recorder(output, start, training, recipe_text, active=workers.is_main) as recorder:
        for done in range(start + 1, training.iterations + 1):
            clock = metrics.Clock(workers.device)
            before = replay.fingerprint(model.transformer) if done == start + 1 else None
            drawn = source.draw(done - 1, clock)
            with clock.phase("prepare"), torch.no_grad():
                policy = learn.in_chunks(learner.policy, training.rollout_batch_size)
                batch = algorithm.prepare(policy, drawn.samples, drawn.scores)
            parts = learn.split_updates(batch, algorithm.updates, len(drawn.samples.keys))
            if before is not None:
                with clock.phase("replay_check"):
                    replay.check(
                        model.transformer, learner, drawn, batch, parts[0], before, training.rollout_batch_size
                    )
            with clock.phase("learn"):
                updates = [learner.update(batch, part, done - 1) for part in parts]
                learner.follow(done - 1)
            values = {**drawn.metrics, **metrics.merge_updates(updates), **clock.summary(source.images)}
            recorder.write(done - 1, values)
            seconds += clock.total
            if training.preview_every and done % training.preview_every == 0 and workers.is_main:
                preview.write(output, done, model, source, weights, training, workers.device)
            if done == training.iterations or (training.checkpoint_every and done % training.checkpoint_every == 0):
                saved = checkpoint.record(output, done, learner, weights, recipe_text, workers)
    speed = source.images * (training.iterations - start) / seconds
    return TrainResult(training.iterations, seconds, speed, recorder.history, saved, weights)


def _learner(
    model: Model,
    algorithm: Algorithm,
    optimizer: OptimizerSettings,
    training: TrainingSettings,
    workers: Workers,
    lora: bool,
    autocast: torch.dtype | None,
) -> tuple[Learner, adapters.WeightSets]:
    """The learner and the weight sets: "ema" where asked for, those that the algorithm keeps, and "reference" where no
    adapter can be disabled."""
    weights, kept = adapters.WeightSets(model.transformer), learn.kept_sets(algorithm)
    if not lora:
        kept.add("reference")
    sets: dict[WeightSet, Callable[[], AbstractContextManager[None]]]
    sets = {"reference": partial(adapters.reference, model.transformer)}
    for name in kept:
        weights.copy(name)
        sets[name] = partial(weights.use, name)
    if training.ema_decay is not None:
        weights.copy("ema")
    module = workers.prepare(model.transformer.eval())  # dropout would draw other densities than it replays
    policy = learn.make_policy(model, module, workers, sets, autocast)
    learner = Learner(
        algorithm,
        policy,
        module,
        learn.trainable(model.transformer),
        optimizer,
        workers,
        training,
        weights,
    )
    return learner, weights
