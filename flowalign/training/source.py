"""Where the samples of an iteration come from: prompts or pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flowalign.algorithms.base import Algorithm, GuidedOnData
from flowalign.core import schedule
from flowalign.data.pairs import PairData
from flowalign.data.prompts import KRepeatSampler, PromptData, SampleId
from flowalign.models.base import Model
from flowalign.rewards.background import Background
from flowalign.rewards.combine import WeightedReward
from flowalign.training.collect import LatentCache, PromptCache, collect, read_examples, score
from flowalign.training.distributed import Workers
from flowalign.training.metrics import Clock, summarise_scores
from flowalign.training.settings import TrainingSettings
from flowalign.types import Examples, FlowAlignError, Policy, Rollout, RolloutPlan, Scores

PREVIEW_STEPS = 28
"""Euler steps of a preview where the algorithm has no plan of its own; the default of SD3's pipeline."""


@dataclass(frozen=True)
class Drawn:
    """What an iteration learns from: samples, their scores, the plan they came from, and metrics for the log."""

    samples: Rollout | Examples
    scores: Scores | None
    plan: RolloutPlan | None
    metrics: Mapping[str, float]


class Source(Protocol):
    """Where samples come from."""

    images: int  # of an iteration, over all ranks
    size: tuple[int, int]

    def draw(self, iteration: int, clock: Clock) -> Drawn: ...

    def preview(self, count: int) -> tuple[list[str], Tensor, float]:
        """Up to ``count`` prompts, the sigmas and the guidance to show them with."""
        ...


def source_of(
    model: Model,
    policy: Policy,
    algorithm: Algorithm,
    data: PromptData | PairData,
    rewards: Sequence[WeightedReward],
    workers: Workers,
    training: TrainingSettings,
    size: tuple[int, int],
) -> Source:
    """What `trainer.train` says of its arguments.

    Raises:
        FlowAlignError: data of the wrong kind for the algorithm, no reward, or a size that cannot be split evenly.
    """
    plan = algorithm.plan(0)
    if isinstance(data, PairData):
        if plan is not None:
            raise FlowAlignError("this algorithm samples from prompts, but a dataset came; give prompts and rewards")
        return PairSource(model, algorithm, data, workers, training.seed)
    if plan is None:
        raise FlowAlignError("this algorithm learns from a dataset, but prompts came; give a dataset instead")
    if not rewards:
        raise FlowAlignError("rewards: none came, expected at least one; name one under rewards")
    sampler = KRepeatSampler(
        len(data.prompts),
        data.per_iteration,
        data.group_size,
        workers.world_size,
        training.seed,
        updates=algorithm.updates,
        whole_groups=plan.whole_groups,
    )
    return PromptSource(model, policy, algorithm, data, sampler, rewards, workers, training, size)


class PromptSource:
    """Samples of prompts, scored. Arguments as in `source_of`."""

    def __init__(
        self,
        model: Model,
        policy: Policy,
        algorithm: Algorithm,
        data: PromptData,
        sampler: KRepeatSampler,
        rewards: Sequence[WeightedReward],
        workers: Workers,
        training: TrainingSettings,
        size: tuple[int, int],
    ) -> None:
        self.model, self.policy, self.algorithm, self.data, self.sampler = model, policy, algorithm, data, sampler
        self.rewards, self.workers, self.training, self.size = rewards, workers, training, size
        self.images = data.per_iteration * data.group_size
        plan = algorithm.plan(0)
        guided = plan is not None and plan.guidance != 1
        self.cache = PromptCache(model, (data.negative or "") if guided else None)
        overlap = training.overlap_scoring
        # On one processor, threads of model and judges would only get in each other's way.
        self.background = Background(rewards) if overlap or (overlap is None and workers.device.type != "cpu") else None

    def _score_in_background(self, samples: Sequence[SampleId], media: Tensor) -> None:
        assert self.background is not None
        prompts = [self.data.prompts[s.prompt] for s in samples]
        self.background.add(media, [p.text for p in prompts], [p.metadata for p in prompts])

    def draw(self, iteration: int, clock: Clock) -> Drawn:
        plan = self.algorithm.plan(iteration)
        assert plan is not None
        samples = self.sampler.samples(iteration, self.workers.rank)
        with clock.phase("rollout"):
            rollout = collect(
                self.model,
                self.policy,
                plan,
                self.cache,
                self.data.prompts,
                samples,
                iteration=iteration,
                seed=self.training.seed,
                shape=self.model.latent_shape(*self.size),
                batch_size=self.training.rollout_batch_size,
                device=self.workers.device,
                drawn=self._score_in_background if self.background is not None else None,
            )
        with clock.phase("score"):
            scores, invalid = score(
                self.rewards,
                rollout,
                self.data,
                samples,
                self.workers,
                max_invalid=self.training.max_invalid,
                combination=self.training.combine_rewards,
                background=self.background,
            )
        per_sample = (plan.sigmas.shape[0] - 1) * (2 if plan.guidance != 1 else 1)
        return Drawn(rollout, scores, plan, summarise_scores(scores, invalid) | {"nfe": per_sample * self.images})

    def preview(self, count: int) -> tuple[list[str], Tensor, float]:
        plan = self.algorithm.plan(0)
        assert plan is not None
        return [prompt.text for prompt in self.data.prompts[:count]], plan.sigmas, plan.guidance


class PairSource:
    """Captioned latents. Arguments as in `source_of`."""

    def __init__(self, model: Model, algorithm: Algorithm, data: PairData, workers: Workers, seed: int) -> None:
        parts = algorithm.updates * workers.world_size
        if data.batch_size % parts:
            low = data.batch_size - data.batch_size % parts
            near = f"{low} or {low + parts}" if low else str(parts)
            raise FlowAlignError(
                f"batch_size: {data.batch_size} images do not split evenly over {algorithm.updates} updates x "
                f"{workers.world_size} processes; the nearest that do: {near}"
            )
        self.model, self.data, self.workers, self.seed = model, data, workers, seed
        self.images, self.size = data.batch_size, (data.pairs.height, data.pairs.width)
        guided = algorithm if isinstance(algorithm, GuidedOnData) else None
        self.guidance = guided.guidance if guided else 1.0
        self.cache = PromptCache(model, guided.negative if guided else None)
        self.latents = LatentCache(model, data.pairs)
        self.worse = None if data.worse is None else LatentCache(model, data.worse)

    def draw(self, iteration: int, clock: Clock) -> Drawn:
        with clock.phase("read"):
            examples = read_examples(
                self.data,
                self.latents,
                self.cache,
                self.workers,
                iteration=iteration,
                seed=self.seed,
                worse=self.worse,
            )
        return Drawn(examples, None, None, {})

    def preview(self, count: int) -> tuple[list[str], Tensor, float]:
        texts = list(dict.fromkeys(self.data.pairs.texts))[:count]
        return texts, schedule.diffusers_shift(PREVIEW_STEPS, self.model.shift), self.guidance
