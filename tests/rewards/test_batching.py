"""The queue in front of a judge: what is scored together, what is refused, and what is not forgotten."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from flowalign.rewards.batching import Batcher, Budget, Full
from flowalign.rewards.judge import Judge
from flowalign.rewards.wire import ScoreRequest
from tests.rewards.served import Meter, expected, pixels


def jobs(batcher: Batcher, *requests: ScoreRequest) -> list:
    return [batcher.submit(request) for request in requests]


def ask(media: object, *prompts: str, metadata: object = None) -> ScoreRequest:
    return ScoreRequest("meter", media, prompts, metadata)


def test_what_does_not_fit_together_is_not_scored_together() -> None:
    meter = Meter()
    batcher = Batcher(Judge(meter), wait=0.3, max_batch=4, max_bytes=300)  # a 4x4 picture has 48 bytes
    small, wide = pixels(2), pixels(2, size=(4, 5))
    given = [
        ask(small, "a", "b"),
        ask(wide, "c", "d"),
        ask(small, "e", "f", metadata=({}, {})),
        ask(small.float() / 255, "g", "h"),
        ask([small[0], wide[0]], "i", "j"),
        ask(small, "k", "l"),
        ask(small, "m", "n"),
    ]
    made = jobs(batcher, *given)
    for job, request in zip(made, given, strict=True):
        scored = job.future.result(5)
        rows = [(one * 255).round().to(torch.uint8) if one.is_floating_point() else one for one in request.media]
        assert scored.score.tolist() == [expected(r[None], [t])[0] for r, t in zip(rows, request.prompts, strict=True)]
    batcher.close()
    assert batcher.counts["batches"] == 6, "the first and sixth request only"
    assert sorted(meter.batches) == [1, 1, 2, 2, 2, 2, 4]
    assert batcher.counts["samples"] == 14


def test_bytes_bound_a_batch_too() -> None:
    meter = Meter()
    batcher = Batcher(Judge(meter), wait=0.3, max_batch=100, max_bytes=5 * 48)
    for job in jobs(batcher, *(ask(pixels(2), "a", "b") for _ in range(4))):
        job.future.result(5)
    assert meter.batches == [4, 4]


def test_groupwise_judges_see_one_request_at_a_time() -> None:
    meter = Meter(scope="groupwise")
    batcher = Batcher(Judge(meter), wait=0.2)
    for job in jobs(batcher, ask(pixels(2), "a", "a"), ask(pixels(3), "a", "a", "a")):
        job.future.result(5)
    assert meter.batches == [2, 3]


def test_a_queue_is_bounded_and_what_is_cancelled_makes_room() -> None:
    batcher = Batcher(Judge(Meter(seconds=0.5)), wait=0, max_queue=2)
    first = batcher.submit(ask(pixels(1), "a"))
    while batcher.waiting:
        time.sleep(0.005)
    second, third = jobs(batcher, ask(pixels(1), "b"), ask(pixels(1), "c"))
    with pytest.raises(Full, match="2 requests wait for 'meter'"):
        batcher.submit(ask(pixels(1), "d"))
    batcher.cancel(second)
    batcher.cancel(first)  # is being scored: goes on
    last = batcher.submit(ask(pixels(1), "d"))
    assert second.future.cancelled() and not first.future.cancelled()
    batcher.close()
    for job, text in ((first, "a"), (third, "c"), (last, "d")):
        assert job.future.result(5).score.tolist() == expected(pixels(1), [text])
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(ask(pixels(1), "e"))


def test_a_judge_that_exits_does_not_end_the_thread() -> None:
    class Exits(Meter):
        def __call__(self, media, prompts, metadata=None):
            if prompts[0] == "exit":
                sys.exit(3)
            return super().__call__(media, prompts, metadata)

    batcher = Batcher(Judge(Exits()), wait=0)
    with pytest.raises(RuntimeError, match="SystemExit"):
        batcher.submit(ask(pixels(1), "exit")).future.result(5)
    assert batcher.submit(ask(pixels(1), "a")).future.result(5).valid.all()


def test_leases_never_exceed_their_budget() -> None:
    budget = Budget(10)
    first, second = budget.lease(), budget.lease()
    first.resize(6)
    with pytest.raises(Full, match="6 of 10"):
        second.resize(5)
    second.resize(4)
    first.resize(1)
    second.resize(9)
    assert (budget.used, budget.peak) == (10, 10)
    first.close()
    first.close()
    second.close()
    assert budget.used == 0
