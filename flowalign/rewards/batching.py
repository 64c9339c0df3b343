"""Requests of many clients to one judge: a bounded queue, and one thread that scores what fits together at once."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from flowalign.rewards.base import Scored
from flowalign.rewards.judge import Judge
from flowalign.rewards.wire import ScoreRequest, as_float

logger = logging.getLogger(__name__)


class Full(Exception):
    """No room at present; worth another try a little later."""


class Budget:
    """Bytes that requests may hold in memory together, from the first byte of a body to the answer."""

    def __init__(self, most: int) -> None:
        self.most, self.used, self.peak = most, 0, 0
        self._lock = Lock()

    def lease(self) -> Lease:
        """Nothing yet; see `Lease.resize`."""
        return Lease(self)

    def change(self, by: int) -> None:
        """Takes or gives back bytes.

        Raises:
            Full: there are not so many left; nothing is taken then.
        """
        with self._lock:
            if by > 0 and self.used + by > self.most:
                raise Full(f"requests hold {self.used} of {self.most} bytes")
            self.used += by
            self.peak = max(self.peak, self.used)


class Lease:
    """The share of one request in a `Budget`."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._held = budget, 0

    def resize(self, size: int) -> None:
        """Holds ``size`` bytes from now on; raises `Full` and holds what it held where there are not so many."""
        self._budget.change(size - self._held)
        self._held = size

    def grow(self, size: int) -> None:
        """Holds at least ``size`` bytes from now on; see `resize`."""
        if size > self._held:
            self.resize(size)

    def close(self) -> None:
        """Gives everything back."""
        self.resize(0)


@dataclass(eq=False)
class Job:
    """A request that waits for its scores.

    Args:
        arrived: by the monotonic clock.
    """

    request: ScoreRequest
    future: Future[Scored] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> tuple[Any, ...] | None:
        """Requests of equal keys can be scored together; None = alone."""
        media = self.request.media
        if not isinstance(media, Tensor):
            return None
        return (tuple(media.shape[1:]), media.dtype, self.request.metadata is None)


class Batcher:
    """Scores requests in the order in which they came, each behind a future.

    Requests of one shape are scored together, up to ``max_batch`` samples, where they wait together anyway or come
    within ``wait`` of the first; their scores do not depend on it. Where scoring a batch fails, its requests are scored
    one by one, so that a bad one costs no other its scores. Groupwise judges see one request at a time.

    Args:
        judge: called by one thread only.
        max_queue: requests that may wait.
        max_batch: samples scored together; a larger request is scored alone.
        wait: seconds that a request waits for others.
        max_bytes: of media scored together.
    """

    def __init__(
        self, judge: Judge, *, max_queue: int = 64, max_batch: int = 32, wait: float = 0.005, max_bytes: int = 64 << 20
    ) -> None:
        self.judge, self.max_queue, self.max_batch = judge, max_queue, max_batch
        self.wait, self.max_bytes = wait, max_bytes
        self.counts = {"requests": 0, "samples": 0, "batches": 0, "failed": 0, "peak_queue": 0}
        self._queue: deque[Job] = deque()
        self._changed = Condition()
        self._closed = False
        self._thread: Thread | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def submit(self, request: ScoreRequest) -> Job:
        """Queues a request.

        Raises:
            Full: ``max_queue`` wait already.
            RuntimeError: after `close`.
        """
        job = Job(request)
        with self._changed:
            if self._closed:
                raise RuntimeError("the batcher is closed")
            if len(self._queue) >= self.max_queue:
                raise Full(f"{len(self._queue)} requests wait for {self.judge.spec.name!r}")
            if self._thread is None:
                self._thread = Thread(target=self._work, name=f"judge-{self.judge.spec.name}", daemon=True)
                self._thread.start()
            self._queue.append(job)
            self.counts["requests"] += 1
            self.counts["peak_queue"] = max(self.counts["peak_queue"], len(self._queue))
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """Forgets a request that nobody waits for any more; one that is being scored is scored."""
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)
            job.future.cancel()

    def close(self) -> None:
        """Takes no more requests; scores those that wait and then ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            batch = self._next()
            if batch is None:
                return
            self._finish(batch)
            del batch  # its media, while the thread waits

    def _next(self) -> list[Job] | None:
        """The requests to score next; None when there will be no more."""
        with self._changed:
            while True:
                if not self._queue:
                    if self._closed:
                        return None
                    self._changed.wait()
                    continue
                batch, full = self._fitting()
                left = self._queue[0].arrived + self.wait - time.monotonic()
                if full or self._closed or left <= 0:
                    for job in batch:
                        self._queue.remove(job)
                        job.future.set_running_or_notify_cancel()
                    return batch
                self._changed.wait(left)

    def _fitting(self) -> tuple[list[Job], bool]:
        """The first request and all that can be scored with it, and whether no other could join them."""
        first = self._queue[0]
        if first.key is None or self.judge.spec.scope == "groupwise":
            return [first], True
        batch: list[Job] = []
        samples = size = 0
        for job in self._queue:
            if job.key != first.key:
                continue
            samples, size = samples + len(job.request.prompts), size + job.request.nbytes
            if batch and (samples > self.max_batch or size > self.max_bytes):
                return batch, True
            batch.append(job)
        return batch, samples >= self.max_batch

    def _finish(self, batch: list[Job]) -> None:
        """Scores ``batch`` and tells its clients."""
        try:
            answers = self._score([job.request for job in batch])
        except BaseException as error:  # the thread must outlive whatever a judge raises
            answers = None
            if len(batch) == 1:
                self.counts["failed"] += 1
                batch[0].future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        if answers is not None:
            for job, answer in zip(batch, answers, strict=True):
                job.future.set_result(answer)
        elif len(batch) > 1:
            logger.warning("%s: a batch of %d requests failed, scoring each", self.judge.spec.name, len(batch))
            for job in batch:
                self._finish([job])

    def _score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        prompts = [text for request in requests for text in request.prompts]
        metadata = None
        if requests[0].metadata is not None:
            metadata = [one for request in requests for one in request.metadata or ()]
        media = requests[0].media
        if len(requests) > 1:
            media = torch.cat([request.media for request in requests if isinstance(request.media, Tensor)])
        self.counts["batches"] += 1
        self.counts["samples"] += len(prompts)
        scored = self.judge(as_float(media), prompts, metadata)
        if scored.score.shape != (len(prompts),):
            raise ValueError(f"{self.judge.spec.name}: {tuple(scored.score.shape)} scores for {len(prompts)} samples")
        answers, start = [], 0
        for request in requests:
            rows = slice(start, start + len(request.prompts))
            columns = {name: values[rows] for name, values in scored.subscores.items()}
            answers.append(Scored(scored.score[rows], columns, scored.details[rows]))
            start += len(request.prompts)
        return answers
