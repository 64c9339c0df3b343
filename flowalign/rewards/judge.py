"""A reward as it is used: one place for the checks, frames, ragged sizes, batches and caching of every judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flowalign.rewards.base import Reward, Scored, check_media
from flowalign.rewards.cache import ScoreCache
from flowalign.types import FlowAlignError, Metadata

Media: TypeAlias = Tensor | Sequence[Tensor]
"""(B, F, 3, H, W), or B tensors (F, 3, H, W) of different sizes; float32 in [0, 1]."""

FRAME_POLICIES = "first, middle, mean, min or uniform:K"


@dataclass(frozen=True)
class FramePolicy:
    """Which frames of a video an image reward sees, and how their scores become one.

    "first" and "middle" see one frame; "mean" and "min" see all; "uniform:K" the mean over K evenly spaced ones, the
    first and the last among them.
    """

    text: str = "mean"

    def __post_init__(self) -> None:
        name, _, count = self.text.partition(":")
        known = self.text in ("first", "middle", "mean", "min")
        if not known and not (name == "uniform" and count.isdecimal() and int(count) > 0):
            raise FlowAlignError(f"frames: {self.text!r}, expected {FRAME_POLICIES}")

    def frames(self, count: int) -> list[int]:
        """Indices of the frames to score, out of ``count``."""
        if self.text == "first":
            return [0]
        if self.text == "middle":
            return [count // 2]
        if self.text in ("mean", "min"):
            return list(range(count))
        wanted = min(int(self.text.partition(":")[2]), count)
        if wanted == 1:
            return [count // 2]
        return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]

    def reduce(self, values: Tensor) -> Tensor:
        """(B, K) scores of frames to (B,); nan if any is."""
        return values.amin(1) if self.text == "min" else values.mean(1)


class Judge:
    """A reward behind one contract, whatever its author took care of.

    Media that are not finite are invalid (nan) and never shown to the reward. An image reward scores frames one by
    one and they are reduced by ``frames``. Samples are split into batches; the scores do not depend on how.

    Args:
        reward: the judge itself.
        frames: see `FramePolicy`; image rewards only.
        batch_size: media (of image rewards: frames) shown at a time.
        cache: kept scores; not used where gradients are asked for.
        digest: of reward and parameters, the cache's key; see `RewardSpec.digest`.
        offload: move weights to the CPU after each call, where the reward has ``to(device)``.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        frames: str = "mean",
        batch_size: int = 32,
        cache: ScoreCache | None = None,
        digest: str | None = None,
        offload: torch.device | str | None = None,
    ) -> None:
        self.reward, self.spec = reward, reward.spec
        self.frames, self.batch_size, self.cache = FramePolicy(frames), batch_size, cache
        self.digest = digest or self.spec.digest()
        self._move: Callable[[Any], Any] | None = None
        if offload is not None:
            self._move = getattr(reward, "to", None)
            if self._move is None:
                raise FlowAlignError(f"reward {self.spec.name!r}: has no weights to offload; leave offload out")
            self._home = offload
            self._move("cpu")

    def __call__(
        self, media: Media, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None, *, grad: bool = False
    ) -> Scored:
        """B raw scores, float32, on the CPU unless ``grad``.

        Args:
            media: see `Media`.
            grad: keep the graph from scores to media.

        Raises:
            ValueError: media outside the contract, or a reward that breaks it.
            FlowAlignError: ``grad`` of a reward that has no gradient.
        """
        if grad and not self.spec.differentiable:
            raise FlowAlignError(
                f"reward {self.spec.name!r}: has no gradient; choose one that `flowalign rewards list` calls "
                "differentiable"
            )
        if metadata is not None and len(metadata) != len(prompts):
            raise ValueError(f"{self.spec.name}: {len(metadata)} metadata came with {len(prompts)} prompts")
        sizes = self._buckets(media, prompts)
        if self._move is not None:
            self._move(self._home)
        try:
            with torch.set_grad_enabled(grad):
                parts = [(rows, self._bucket(part, rows, prompts, metadata, grad)) for rows, part in sizes]
        finally:
            if self._move is not None:
                self._move("cpu")
        return merge(parts, len(prompts))

    def _buckets(self, media: Media, prompts: Sequence[str]) -> list[tuple[list[int], Tensor]]:
        """Rows and media of each size."""
        if isinstance(media, Tensor):
            check_media(media, prompts, self.spec.name)
            return [(list(range(len(prompts))), media)] if len(prompts) else []
        if len(media) != len(prompts):
            raise ValueError(f"{self.spec.name}: {len(media)} media came with {len(prompts)} prompts")
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, one in enumerate(media):
            check_media(one[None], prompts[i : i + 1], self.spec.name)
            rows.setdefault(tuple(one.shape), []).append(i)
        return [(chosen, torch.stack([media[i] for i in chosen])) for chosen in rows.values()]

    def _bucket(
        self,
        media: Tensor,
        rows: Sequence[int],
        prompts: Sequence[str],
        metadata: Sequence[Metadata] | None,
        grad: bool,
    ) -> Scored:
        """Scores of media of one size."""
        texts = [prompts[i] for i in rows]
        extra = None if metadata is None else [metadata[i] for i in rows]
        finite = torch.isfinite(media).flatten(1).all(1).tolist()
        keys = None
        known: dict[int, Scored] = {}
        if self.cache is not None and not grad:
            keys = [
                self.cache.key(self.digest, self.frames.text, media[i], texts[i], None if extra is None else extra[i])
                for i in range(len(rows))
            ]
            known = {i: kept for i, key in enumerate(keys) if (kept := self.cache.get(key)) is not None}
        todo = [i for i in range(len(rows)) if finite[i] and i not in known]
        parts = [([i], kept) for i, kept in known.items()]
        parts += [([i], _invalid("the media hold nan or infinity")) for i in range(len(rows)) if not finite[i]]
        for chosen in self._batches(todo, texts, media.shape[1]):
            own = media if len(chosen) == len(rows) else media[torch.tensor(chosen, device=media.device)]
            scored = self._call(own, [texts[i] for i in chosen], None if extra is None else [extra[i] for i in chosen])
            scored = scored if grad else _detached(scored)
            parts.append((chosen, scored))
            if keys is not None and self.cache is not None:
                for j, i in enumerate(chosen):
                    self.cache.put(keys[i], _row(scored, j))
        return merge(parts, len(rows))

    def _batches(self, todo: list[int], texts: Sequence[str], frames: int) -> list[list[int]]:
        if self.spec.scope == "groupwise":  # all samples of one prompt at a time
            groups: dict[str, list[int]] = {}
            for i in todo:
                groups.setdefault(texts[i], []).append(i)
            return list(groups.values())
        shown = len(self.frames.frames(frames)) if self.spec.modality == "image" else 1
        size = max(1, self.batch_size // shown)
        return [todo[i : i + size] for i in range(0, len(todo), size)]

    def _call(self, media: Tensor, prompts: list[str], metadata: list[Metadata] | None) -> Scored:
        if self.spec.modality == "video":
            return _checked(self.reward(media, prompts, metadata), len(prompts), self.spec.name)
        index = self.frames.frames(media.shape[1])
        count = len(index)
        frames = media[:, index].flatten(0, 1)[:, None]
        texts = [text for text in prompts for _ in index]
        extra = None if metadata is None else [one for one in metadata for _ in index]
        scored = _checked(self.reward(frames, texts, extra), len(texts), self.spec.name)

        def reduce(values: Tensor) -> Tensor:
            return values if count == 1 else self.frames.reduce(values.view(len(prompts), count))

        details = scored.details
        if details and count > 1:
            details = tuple(_first_reason(details[i : i + count]) for i in range(0, len(details), count))
        return Scored(reduce(scored.score), {k: reduce(v) for k, v in scored.subscores.items()}, details)


def as_judge(reward: Reward | Judge) -> Judge:
    """``reward`` behind the contract, if it is not yet."""
    return reward if isinstance(reward, Judge) else Judge(reward)


def _checked(scored: Scored, count: int, name: str) -> Scored:
    """The answer of a reward, or an error that names it; infinities are no scores either."""

    def column(value: Tensor, label: str) -> Tensor:
        if value.shape != (count,):
            raise ValueError(
                f"reward {label!r}: returned shape {tuple(value.shape)} for {count} samples, expected ({count},)"
            )
        value = value.float()
        return torch.where(torch.isfinite(value), value, torch.full_like(value, torch.nan))

    if scored.details and len(scored.details) != count:
        raise ValueError(f"reward {name!r}: returned {len(scored.details)} details for {count} samples")
    return Scored(
        column(scored.score, name),
        {key: column(value, f"{name}/{key}") for key, value in scored.subscores.items()},
        scored.details,
    )


def _first_reason(details: Sequence[Any]) -> Any:
    """Of the frames of one video: the first that says why it has no score, else the first."""
    return next((d for d in details if d.get("reason")), details[0])


def _invalid(reason: str) -> Scored:
    return Scored(torch.tensor([torch.nan]), {}, ({"reason": reason},))


def _detached(scored: Scored) -> Scored:
    subscores = {key: value.detach().cpu() for key, value in scored.subscores.items()}
    return Scored(scored.score.detach().cpu(), subscores, scored.details)


def _row(scored: Scored, i: int) -> Scored:
    return Scored(
        scored.score[i : i + 1], {k: v[i : i + 1] for k, v in scored.subscores.items()}, scored.details[i : i + 1]
    )


def merge(parts: Sequence[tuple[Sequence[int], Scored]], count: int) -> Scored:
    """Puts scores of some of ``count`` rows each into one; a sub-score that a part lacks is nan there."""
    if len(parts) == 1 and list(parts[0][0]) == list(range(count)):
        return parts[0][1]
    order = torch.tensor([row for rows, _ in parts for row in rows], dtype=torch.int64).argsort()
    names = dict.fromkeys(name for _, scored in parts for name in scored.subscores)
    missing = [scored.score.detach().new_full((len(rows),), torch.nan) for rows, scored in parts]

    def join(values: Sequence[Tensor]) -> Tensor:
        device = next((v.device for v in values if v.device.type != "cpu"), torch.device("cpu"))
        return torch.cat([v.to(device) for v in values])[order.to(device)] if values else torch.empty(0)

    subscores = {
        name: join([s.subscores.get(name, gap) for (_, s), gap in zip(parts, missing, strict=True)]) for name in names
    }
    details: tuple[Any, ...] = ()
    if any(scored.details for _, scored in parts):
        listed = [d for rows, s in parts for d in (s.details or ({},) * len(rows))]
        details = tuple(listed[i] for i in order.tolist())
    return Scored(join([scored.score for _, scored in parts]), subscores, details)
