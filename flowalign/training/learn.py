"""From items to new weights: weighted means over all ranks, gradient accumulation, AdamW, averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from flowalign.algorithms.base import Algorithm, KeepsWeights
from flowalign.models.base import Model
from flowalign.training.distributed import Workers
from flowalign.training.settings import OptimizerSettings, TrainingSettings
from flowalign.types import (
    Batch,
    Conditioning,
    FlowAlignError,
    Policy,
    Terms,
    VelocityFn,
    WeightSet,
)


def make_policy(
    model: Model,
    module: nn.Module,
    workers: Workers,
    sets: Mapping[WeightSet, Callable[[], AbstractContextManager[object]]],
    autocast: torch.dtype | None = None,
) -> Policy:
    """The policy that an algorithm sees.

    Args:
        module: the transformer as `Workers.prepare` returned it; used where gradients are wanted.
        sets: contexts in which the transformer has other weights; "reference" must be among them.
        autocast: of all policies, in rollouts and in learning alike; None = none.
    """
    bare = workers.unwrap(module)

    def run(transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        # Caching of cast weights is off: without gradients it would keep them from before an update.
        with torch.autocast(x.device.type, autocast, cache_enabled=False) if autocast else nullcontext():
            return model.velocity(transformer, x, sigma, cond).float()

    def current(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        return run(module if torch.is_grad_enabled() else bare, x, sigma, cond)

    def kept(use: Callable[[], AbstractContextManager[object]]) -> VelocityFn:
        def velocity(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            with torch.no_grad(), use():
                return run(bare, x, sigma, cond)

        return velocity

    return Policy(current, **{name: kept(use) for name, use in sets.items()})


def kept_sets(algorithm: Algorithm) -> set[WeightSet]:
    """Names of the weight sets that the algorithm needs besides the weights in training."""
    return set(algorithm.decays(0)) if isinstance(algorithm, KeepsWeights) else set()


def in_chunks(policy: Policy, size: int) -> Policy:
    """``policy`` whose velocities are computed for at most ``size`` rows at a time; to be used without gradients.

    What an algorithm asks for in `prepare` is as many rows as the iteration has samples, which memory need not hold.
    """

    def chunked(velocity: VelocityFn) -> VelocityFn:
        def in_parts(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            parts = [slice(i, i + size) for i in range(0, x.shape[0], size)]
            return torch.cat([velocity(x[part], sigma[part], cond.select(part)) for part in parts])

        return in_parts

    return Policy(
        current=chunked(policy.current),
        reference=chunked(policy.reference),
        behaviour=chunked(policy.behaviour),
        anchor=chunked(policy.anchor),
    )


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name.

    Raises:
        FlowAlignError: there is none, or one is not float32, in which small steps would be lost.
    """
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise FlowAlignError("model: no parameter is trainable; add LoRA or leave the transformer's gradients on")
    for name, p in found.items():
        if p.dtype != torch.float32:
            raise FlowAlignError(f"model: trainable {name} is {p.dtype}, expected float32; load it so and use autocast")
    return found


def split_updates(batch: Batch, updates: int, num_samples: int) -> list[Tensor]:
    """Items of each update: those with weight whose sample is among the u-th of U equal parts of this rank's samples.

    Samples stand in the order of global positions j = b W + rank, so this is the part [u n/U, (u+1) n/U) of all n
    samples, whatever the number of ranks.

    Returns:
        U times (m,) int64 indices, ascending.
    """
    part = batch.sample // (num_samples // updates)
    return [((part == u) & (batch.weight > 0)).nonzero().flatten() for u in range(updates)]


def micro_batches(batch: Batch, index: Tensor, size: int, count: int) -> Iterator[Batch]:
    """``count`` micro-batches of at most ``size`` items; where ``index`` is used up, one item of weight 0.

    Every rank runs the same number of backward passes, or the others would wait for it forever.
    """
    parts: Sequence[Tensor] = torch.split(index, size) if index.numel() else ()
    yield from (batch.select(part) for part in parts)
    padding = batch.select(index[:1] if index.numel() else index.new_zeros(1))
    for _ in range(count - len(parts)):
        yield replace(padding, weight=torch.zeros_like(padding.weight))


class Weights(Protocol):
    """What the learner needs of `models.lora.WeightSets`."""

    def ema(self, name: str, decay: float) -> None: ...


class Learner:
    """Takes optimiser steps.

    Args:
        module: the transformer as `Workers.prepare` returned it.
        parameters: the trainable ones by name, float32.
        optimizer: AdamW; the learning rate rises to ``lr`` over the first ``warmup`` steps and stays.
        training: items per backward pass, and how the averaged weights "ema" of ``weights`` follow, if at all.
        weights: holds "ema" and what the algorithm keeps.

    Attributes:
        steps: optimiser steps taken.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        policy: Policy,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: OptimizerSettings,
        workers: Workers,
        training: TrainingSettings,
        weights: Weights,
    ) -> None:
        self.algorithm, self.policy, self.workers = algorithm, policy, workers
        self.module, self.parameters, self.settings = module, dict(parameters), optimizer
        self.micro_batch_size, self.weights = training.micro_batch_size, weights
        self.ema_decay, self.ema_every = training.ema_decay, training.ema_every
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self.steps = 0

    def update(self, batch: Batch, index: Tensor, iteration: int) -> dict[str, float] | None:
        """One optimiser step on the items ``index`` of ``batch``; None, and no step, where no rank has any weight.

        Returns:
            Over all ranks: weighted means of every loss term ("loss/TERM") and metric ("METRIC"), the largest value of
            every metric ("METRIC_max"), and "grad_norm".

        Raises:
            FlowAlignError: a loss or gradient is not finite; on every rank, before the step.
        """
        total = float(self.workers.reduce(batch.weight[index].sum().double()))
        if total == 0:
            return None
        size = self.micro_batch_size
        count = int(self.workers.reduce(torch.tensor(-(-index.numel() // size)), "max"))
        record = _Record()
        for i, micro in enumerate(micro_batches(batch, index, size, count)):
            with self._accumulate(last=i == count - 1):
                terms = self.algorithm.losses(self.policy, micro)
                loss = torch.stack(list(terms.losses.values())).sum(0)
                # DDP averages gradients over ranks, while the mean is over the items of all ranks.
                loss = (loss * micro.weight).sum() * (self.workers.world_size / total)
                self.workers.backward(loss)
            record.add(terms, micro.weight)
        metrics = record.close(self.workers, total)
        losses = {name: value for name, value in metrics.items() if name.startswith("loss/")}
        self._refuse_non_finite(losses, "loss term", iteration)
        norm = float(self.workers.clip(self.parameters.values(), self.settings.max_grad_norm))
        self._refuse_non_finite({"norm": norm}, "gradient", iteration)
        self._step()
        return {**metrics, "grad_norm": norm}

    @property
    def sets(self) -> list[str]:
        """Names of the weight sets that change in training."""
        averaged = [] if self.ema_decay is None else ["ema"]
        return averaged + sorted(kept_sets(self.algorithm))

    def follow(self, iteration: int) -> None:
        """Moves the weight sets that the algorithm keeps, after the updates of ``iteration``."""
        if isinstance(self.algorithm, KeepsWeights):
            for name, decay in self.algorithm.decays(iteration).items():
                self.weights.ema(name, decay)

    def _accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.workers.no_sync(self.module)

    def _step(self) -> None:
        scale = min(1.0, (self.steps + 1) / self.settings.warmup) if self.settings.warmup else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * scale
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if self.ema_decay is not None and self.steps % self.ema_every == 0:
            self.weights.ema("ema", self.ema_decay)

    def _refuse_non_finite(self, values: dict[str, float], what: str, iteration: int) -> None:
        for name, value in values.items():
            if not torch.isfinite(torch.tensor(value)):
                self.optimizer.zero_grad(set_to_none=True)
                raise FlowAlignError(
                    f"iteration {iteration}: {what} {name!r} is {value}, expected a finite number; the weights are "
                    "untouched: lower optimizer.lr, use precision fp32, or resume from an earlier checkpoint"
                )


class _Record:
    """Sums of the terms and metrics of one update."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, terms: Terms, weight: Tensor) -> None:
        terms_by_name = {f"loss/{name}": value for name, value in terms.losses.items()}
        for name, value in {**terms_by_name, **terms.metrics}.items():
            contribution = (value.detach().double() * weight).sum()
            self._sums[name] = self._sums.get(name, torch.zeros_like(contribution)) + contribution
        for name, value in terms.metrics.items():
            # Of padding, which has no weight, nothing must be seen; metrics may be negative.
            largest = value.detach().double().where(weight > 0, -torch.inf).amax()
            self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def close(self, workers: Workers, total: float) -> dict[str, float]:
        sums = workers.reduce(torch.stack(list(self._sums.values()))).tolist()
        metrics = {name: value / total for name, value in zip(self._sums, sums, strict=True)}
        if self._maxima:
            maxima = workers.reduce(torch.stack(list(self._maxima.values())), "max").tolist()
            metrics |= {f"{name}_max": value for name, value in zip(self._maxima, maxima, strict=True)}
        return metrics
