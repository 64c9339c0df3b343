"""What every reward owes its users, as checks that run on any reward."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError, Metadata

TOLERANCE = 1e-4
"""Batched float32 arithmetic rounds otherwise than single; relative to the largest score."""
GRADIENT_TOLERANCE = 0.05
"""Of a central difference in float32, relative."""


@dataclass(frozen=True)
class Example:
    """What a reward can score: media (B, F, 3, H, W) in [0, 1] with B >= 3, prompts and metadata.

    Args:
        valid: how many of the first samples must have a score; the others may be nan.
    """

    media: Tensor
    prompts: tuple[str, ...]
    metadata: tuple[Metadata, ...] | None = None
    valid: int = 1


class Finding(NamedTuple):
    """Whether one promise is kept, and what was seen."""

    check: str
    passed: bool
    detail: str


def default_example(modality: str) -> Example:
    """Smooth pictures with structure at several scales: pure noise lies outside what judges have seen."""
    generator = torch.Generator().manual_seed(0)
    frames = 1 if modality == "image" else 5
    coarse = torch.rand(4, frames, 3, 8, 8, generator=generator).flatten(0, 1)
    smooth = torch.nn.functional.interpolate(coarse, (64, 64), mode="bilinear", align_corners=False)
    media = smooth.clamp(0.05, 0.95).view(4, frames, 3, 64, 64)
    return Example(media, ("a red cat", "two dogs", "a blue car on a road", ""), valid=3)


def check(judge: Judge, example: Example) -> list[Finding]:
    """Runs every check; one that raises has failed, and the others still run."""
    checks: list[Callable[[Judge, Example], str]] = [
        _shape,
        _deterministic,
        _order,
        _batches,
        _range,
        _frames,
        _gradient,
        _offline,
    ]
    found = []
    for one in checks:
        name = (one.__doc__ or "").strip()
        try:
            found.append(Finding(name, True, one(judge, example)))
        except Exception as error:
            found.append(Finding(name, False, f"{type(error).__name__}: {error}" if str(error) else repr(error)))
    return found


def _score(judge: Judge, example: Example, rows: Sequence[int] | None = None) -> Tensor:
    chosen = list(range(len(example.prompts))) if rows is None else list(rows)
    metadata = None if example.metadata is None else [example.metadata[i] for i in chosen]
    return judge(example.media[chosen], [example.prompts[i] for i in chosen], metadata).score


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _same(got: Tensor, expected: Tensor, what: str) -> str:
    _expect(bool((got.isnan() == expected.isnan()).all()), f"{what}: nan moves, {got.tolist()} for {expected.tolist()}")
    known = torch.isfinite(expected)
    scale = float(expected[known].abs().max().clamp(min=1)) if known.any() else 1.0
    difference = float((got - expected)[known].abs().max()) / scale if known.any() else 0.0
    _expect(difference <= TOLERANCE, f"{what}: scores differ by {difference:.2e} of their size")
    return f"largest difference {difference:.1e}"


def _shape(judge: Judge, example: Example) -> str:
    """one float32 score a sample, finite or masked"""
    metadata = None if example.metadata is None else list(example.metadata)
    scored = judge.reward(_shown(judge, example), list(example.prompts), metadata)
    count = len(example.prompts)
    _expect(scored.score.shape == (count,), f"shape {tuple(scored.score.shape)}, expected ({count},)")
    _expect(scored.score.dtype == torch.float32, f"{scored.score.dtype}, expected float32")
    first = scored.score[: example.valid]
    _expect(bool(scored.valid[: example.valid].all()), f"the first {example.valid} scores are {first.tolist()}")
    for name, value in scored.subscores.items():
        _expect(value.shape == (count,), f"sub-score {name}: shape {tuple(value.shape)}, expected ({count},)")
    low, high = judge.spec.native_range
    known = scored.score[scored.valid]
    _expect(
        bool(((known >= low) & (known <= high)).all()),
        f"scores {known.tolist()} outside the native range [{low}, {high}]",
    )
    return f"{count} scores, {count - known.numel()} masked"


def _shown(judge: Judge, example: Example) -> Tensor:
    return example.media if judge.spec.modality == "video" else example.media[:, :1]


def _deterministic(judge: Judge, example: Example) -> str:
    """the same scores twice"""
    first, second = _score(judge, example), _score(judge, example)
    _expect(bool(torch.equal(first.nan_to_num(-1e9), second.nan_to_num(-1e9))), f"{first.tolist()}, {second.tolist()}")
    return "equal bit for bit"


def _order(judge: Judge, example: Example) -> str:
    """scores follow their samples"""
    rows = list(reversed(range(len(example.prompts))))
    return _same(_score(judge, example, rows), _score(judge, example)[rows], "in reverse order")


def _batches(judge: Judge, example: Example) -> str:
    """scores do not depend on the batch"""
    if judge.spec.scope == "groupwise":
        return "groupwise: not asked for"
    single = torch.cat([_score(judge, example, [i]) for i in range(len(example.prompts))])
    return _same(_score(judge, example), single, "one at a time")


def _range(judge: Judge, example: Example) -> str:
    """media in 0..255 and in [-1, 1] are refused"""
    for label, media in (("0..255", example.media * 255), ("[-1, 1]", example.media * 2 - 1)):
        try:
            _score(judge, Example(media, example.prompts, example.metadata))
        except (ValueError, FlowAlignError):
            continue
        raise AssertionError(f"media in {label} were scored")
    return "both refused"


def _frames(judge: Judge, example: Example) -> str:
    """a video scores the mean of its frames"""
    if judge.spec.modality == "video":
        return "a video reward: not asked for"
    video = torch.cat([example.media[:1], example.media[:1].flip(-1)], 1)
    metadata = None if example.metadata is None else list(example.metadata[:1])
    mean = Judge(judge.reward, frames="mean")(video, example.prompts[:1], metadata).score
    singles = [judge(video[:, i : i + 1], example.prompts[:1], metadata).score for i in (0, 1)]
    return _same(mean, torch.stack(singles).mean(0), "mean over two frames")


def _gradient(judge: Judge, example: Example) -> str:
    """gradient flows exactly where declared"""
    rows = slice(0, example.valid)
    metadata = None if example.metadata is None else list(example.metadata[rows])
    prompts = example.prompts[rows]
    media = example.media[rows].clone().requires_grad_(True)
    if not judge.spec.differentiable:
        try:
            judge(media, prompts, metadata, grad=True)
        except FlowAlignError:
            return "none declared, and asking for it is refused"
        raise AssertionError("no gradient is declared, but asking for one is not refused")
    score = judge(media, prompts, metadata, grad=True).score
    _expect(score.requires_grad, "the score does not depend on the media")
    (gradient,) = torch.autograd.grad(score.sum(), media)
    size = float(gradient.norm())
    _expect(size > 0, "the gradient is zero")
    # Along the gradient itself, where rounding weighs least; the best of several steps, since scores bend.
    errors = []
    for step in (3e-2, 1e-2, 3e-3, 1e-3):
        with torch.no_grad():
            moved = step * gradient / size
            inside = [(media + sign * moved).clamp(0, 1) for sign in (1, -1)]
            up, down = (judge(one, prompts, metadata).score.double().sum() for one in inside)
            expected = float(((inside[0] - inside[1]) * gradient).sum())
        errors.append(abs(float(up - down) - expected) / abs(expected))
    _expect(min(errors) <= GRADIENT_TOLERANCE, f"finite differences are off by {min(errors):.1%}")
    return f"finite differences agree within {min(errors):.1%}"


def _offline(judge: Judge, example: Example) -> str:
    """no socket is opened"""
    with no_sockets():
        _score(judge, example)
    return "none"


@contextmanager
def no_sockets() -> Iterator[None]:
    """Any attempt to open a connection raises."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a socket was opened")

    kept = socket.socket.connect, socket.getaddrinfo
    socket.socket.connect, socket.getaddrinfo = refuse, refuse  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        socket.socket.connect, socket.getaddrinfo = kept  # type: ignore[method-assign]
