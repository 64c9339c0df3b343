"""A judge whose every score is known beforehand, and servers on the loopback interface."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import torch

from flowalign.rewards import listening, wire
from flowalign.rewards.base import Scored
from flowalign.rewards.judge import Judge
from flowalign.rewards.server import app
from flowalign.rewards.service import Service
from flowalign.rewards.wire import SAFETENSORS, ScoreRequest
from flowalign.types import FlowAlignError
from tests.training.toy import spec


class Meter:
    """A sum of a picture's bytes and a number of its prompt, exactly in float32, so that a swapped score is seen.

    Metadata {"nan": ...} have no score, {"raise": ...} raise, {"mistake": ...} are a user's mistake.
    """

    def __init__(self, seconds: float = 0.0, device: object = "cpu", **facts: Any) -> None:
        range_ = (0.0, float("inf"))
        self.spec = replace(spec("meter"), native_range=range_, differentiable=False, **facts)
        self.seconds, self.batches = seconds, []

    def __call__(self, media, prompts, metadata=None) -> Scored:
        self.batches.append(len(prompts))
        time.sleep(self.seconds)
        metadata = metadata or [{}] * len(prompts)
        if any("raise" in one for one in metadata):
            raise RuntimeError("the secret is 4711")
        if any("mistake" in one for one in metadata):
            raise FlowAlignError("meter: this was a mistake")
        sums = (media.double() * 255).sum((1, 2, 3, 4)).round() % 65521
        score = torch.stack([sums[i] + of_prompt(text) for i, text in enumerate(prompts)]).float()
        details = []
        for i, one in enumerate(metadata):
            if "nan" in one:
                score[i] = torch.nan
            details.append({"reason": "as asked"} if "nan" in one else {"prompt": prompts[i]})
        return Scored(score, {"letters": torch.tensor([float(len(text)) for text in prompts])}, tuple(details))


def of_prompt(text: str) -> float:
    return zlib.crc32(text.encode()) % 256 / 256


def expected(pixels: torch.Tensor, prompts: list[str]) -> list[float]:
    """Scores of (N, F, 3, H, W) uint8, one by one and with integers."""
    sums = [int(one.sum(dtype=np.int64)) for one in pixels.numpy()]
    return [total % 65521 + of_prompt(text) for total, text in zip(sums, prompts, strict=True)]


def pixels(count: int, frames: int = 1, size: tuple[int, int] = (4, 4), seed: int = 0) -> torch.Tensor:
    """(count, frames, 3, H, W) uint8, no two alike."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 256, (count, frames, 3, *size), dtype=torch.uint8, generator=generator)
    made[:, 0, 0, 0, 0] = torch.arange(count) % 256
    return made


@contextmanager
def running(
    judges: Mapping[str, Judge] | None = None, wrap: Callable[[Any], Any] | None = None, **options: Any
) -> Iterator[tuple[str, Service]]:
    """The URL of a server in a thread, and its service; it has finished what it began when the context ends."""
    application = app(judges or {"meter": Judge(Meter())}, **options)
    service: Service = application.state.service
    with listening.bind("127.0.0.1", 0) as bound:
        wrapped = wrap(application) if wrap else application
        server = listening.Server(wrapped, service, "serving", 5.0)
        if wrap:
            wrapped.server, service.wrapped = server, wrapped
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield listening.url(bound), service
        finally:
            server.handle_exit(15, None)
            thread.join(10)
            assert not thread.is_alive() and not server.unfinished


def body(media: object, prompts: object = None, reward: str = "meter", **fields: object) -> bytes:
    prompts = prompts or [f"p{i}" for i in range(len(media))]
    metadata = fields.pop("metadata", None)
    return wire.write_request(ScoreRequest(reward, media, tuple(prompts), metadata, **fields))


def post(url: str, content: object, kind: str = SAFETENSORS, seconds: float = 20, **headers: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/score", content=content, headers={"Content-Type": kind, **headers}, timeout=seconds)


def scores(answer: httpx.Response) -> list[float | None]:
    """As float32 numbers."""
    assert answer.status_code == 200, answer.text
    return [None if value is None else torch.tensor(value).item() for value in answer.json()["scores"]]
