"""What an algorithm is: a plan for sampling, a credit assignment and a loss; all of it without state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from flowalign.types import Batch, Examples, Policy, Rollout, RolloutPlan, Scores, Terms, WeightSet


class Algorithm(Protocol):
    """One method. The trainer calls `plan`, `prepare` and `losses` in this order, once per iteration each."""

    @property
    def updates(self) -> int:
        """Optimiser steps per iteration; the samples of an iteration are split evenly over them."""
        ...

    def plan(self, iteration: int) -> RolloutPlan | None:
        """How to sample in this iteration; None: the method learns from `Examples`."""
        ...

    def prepare(self, policy: Policy, samples: Rollout | Examples, scores: Scores | None) -> Batch:
        """Turns samples into items to learn from, without gradients; randomness only from ``samples.keys``."""
        ...

    def losses(self, policy: Policy, batch: Batch) -> Terms:
        """Per-item loss terms, with gradients to ``policy.current`` only."""
        ...


@runtime_checkable
class GuidedOnData(Protocol):
    """A method that learns from `Examples` and evaluates the model with classifier-free guidance on the way."""

    @property
    def guidance(self) -> float:
        """The scale, for previews too; 1 = off."""
        ...

    @property
    def negative(self) -> str | None:
        """Text whose conditioning the examples carry as their negative; None = none is needed."""
        ...


@runtime_checkable
class KeepsWeights(Protocol):
    """An algorithm that needs weights besides those in training: `Policy.behaviour`, `anchor` or `reference`.

    The trainer keeps them, and checkpoints hold them. Each starts as a copy of the weights in training.
    """

    def decays(self, iteration: int) -> Mapping[WeightSet, float]:
        """d of ``set <- d set + (1 - d) weights in training``, once after the updates of ``iteration``.

        0 is a copy, and 1 leaves the set as it is. The sets must be the same in every iteration.
        """
        ...
