"""Scoring that overlaps sampling: a judge on the processor or on another machine works while the next part is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from flowalign.rewards import combine
from flowalign.rewards.base import Scored
from flowalign.rewards.combine import Columns, WeightedReward
from flowalign.rewards.judge import as_judge, merge
from flowalign.types import Metadata


class Background:
    """Scores parts of a batch as they come. Each reward has a thread of its own, in which its calls keep their order.

    The answer equals that of `combine.score` on the whole batch: scores do not depend on how samples are split, and
    groupwise rewards wait for all of them.
    """

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        combine.check_names(rewards)
        self._judges = {r.name: as_judge(r.reward) for r in rewards}
        self._threads = {name: ThreadPoolExecutor(1, f"reward-{name}") for name in self._judges}
        self._parts: list[tuple[Tensor, Sequence[str], Sequence[Metadata]]] = []
        self._futures: dict[str, list[Future[Scored]]] = {name: [] for name in self._judges}

    def add(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Starts on (B, F, 3, H, W) in [0, 1]; returns at once."""
        self._parts.append((media, prompts, metadata))
        for name, judge in self._judges.items():
            if judge.spec.scope == "pointwise":
                self._futures[name].append(self._threads[name].submit(judge, media, prompts, metadata))

    def result(self) -> Columns:
        """Scores of all that came since the last result, in the order in which it came.

        Raises:
            ValueError, FlowAlignError: what a judge raised; nothing is left over from this batch then.
        """
        parts, futures = self._parts, self._futures
        self._parts, self._futures = [], {name: [] for name in self._judges}
        scored = {}
        for name, judge in self._judges.items():
            if judge.spec.scope == "groupwise":
                texts = [text for _, prompts, _ in parts for text in prompts]
                extra = [one for _, _, metadata in parts for one in metadata]
                scored[name] = judge(torch.cat([media for media, _, _ in parts]), texts, extra)
                continue
            rows, start = [], 0
            for (_, prompts, _), future in zip(parts, futures[name], strict=True):
                rows.append((range(start, start + len(prompts)), future.result()))
                start += len(prompts)
            scored[name] = merge(rows, start)
        return combine.columns(scored)
