"""Two hundred requests at once while answers are late, lost, broken and wrong."""

from __future__ import annotations

import math
import os
import threading
import time

import psutil
import pytest

from flowalign.rewards.client import RemoteReward
from flowalign.rewards.judge import Judge
from tests.rewards.faults import FAULTS, Faulty
from tests.rewards.served import Meter, expected, pixels, running

COUNT = 200
SIDE = 96
ROOM = 40 * 3 * SIDE**2  # bytes of 40 pictures: most of the requests have to come again
SAID = {
    "drop": "the exchange broke off",
    "cut": "the exchange broke off",
    "truncate": "the answer is not JSON",
    "digest": "is of judge '0000000000000000'",
    "swap": "is of request 'of-another-request'",
    "fewer": "holds 0 scores for 1 samples",
    "500": "answered 500: as asked",
    "503": "answered 503: as asked",
}


def prompts() -> list[str]:
    """Half of them without a fault, the others with each fault once, twice in a row, mixed, or on every attempt."""
    passing = [fault for fault in FAULTS if fault != "hang"]
    plans = [""] * 9
    plans += passing
    plans += [f"{fault} {fault}" for fault in passing]
    plans += [f"{a} {b} {c}" for a, b, c in zip(passing, passing[3:], passing[5:], strict=False)]
    made = [plans[i % len(plans)] for i in range(COUNT - len(SAID))]
    made += [f"always {fault}" for fault in SAID]
    return [f"p{i} {plan}".rstrip() for i, plan in enumerate(made)]


def rss() -> int:
    return psutil.Process(os.getpid()).memory_info().rss


def test_no_score_is_lost_or_swapped_and_every_failure_is_named() -> None:
    media, texts = pixels(COUNT, size=(SIDE, SIDE)), prompts()
    shown = media.float() / 255
    with running(
        {"meter": Judge(Meter(seconds=0.01))}, Faulty, max_queue=32, max_queue_bytes=ROOM, max_batch=16
    ) as (url, service):
        faulty = service.wrapped
        remote = RemoteReward(url, "meter", timeout=60, max_in_flight=COUNT, chunk=1)
        remote(shown[:2], ["warm", "up"])
        before, most, done = rss(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.02):
                most[0] = max(most[0], rss())

        watcher = threading.Thread(target=watch)
        watcher.start()
        begun = time.monotonic()
        scored = remote(shown, texts)
        seconds = time.monotonic() - begun
        done.set()
        watcher.join()
        counts, budget = service.batchers["meter"].counts, service.budget

    lost = [i for i in range(COUNT) if "always" in texts[i]]
    wanted = expected(media, texts)
    for i in range(COUNT):
        if i in lost:
            fault = texts[i].split()[-1]
            assert math.isnan(scored.score[i]), texts[i]
            reason = scored.details[i]["reason"]
            assert reason.startswith(url) and SAID[fault] in reason, (texts[i], reason)
        else:
            assert scored.score[i].item() == wanted[i], (texts[i], scored.details[i])
            assert scored.subscores["letters"][i].item() == len(texts[i])
            assert scored.details[i] == {"prompt": texts[i]}
    assert len({scored.score[i].item() for i in range(COUNT) if i not in lost}) > COUNT // 2, "told apart by score"
    assert all(faulty.injected[fault] > 5 for fault in FAULTS if fault != "hang"), "every fault has been there"
    assert service.statuses[429] > 0, "and the server has been full"
    # what the server holds is bounded: requests, bytes, and so the memory of the process, client and pictures included
    assert 1 < counts["peak_queue"] <= 32
    assert ROOM // 4 < budget.peak <= ROOM
    assert budget.used == 0 and counts["failed"] == 0
    assert most[0] - before < 200 << 20
    assert seconds < 40, "most of it is waiting as the server asks"
    print(seconds)




def test_a_call_ends_in_time_whatever_the_server_does() -> None:
    media = pixels(3)
    with running(None, Faulty) as (url, service):
        remote = RemoteReward(url, "meter", timeout=2, chunk=1)
        begun = time.monotonic()
        texts = ["a", "b always hang", "c always 429"]
        scored = remote(media.float() / 255, texts)
        assert 1 < time.monotonic() - begun < 4
        assert scored.valid.tolist() == [True, False, False]
        assert scored.score[0].item() == expected(media, texts)[0]
        assert scored.details[1]["reason"] == f"{url}: no answer within the 2 s of the call"
        assert scored.details[2]["reason"].startswith(f"{url}: answered 429: as asked; the next attempt would come after")
        assert 3 <= service.wrapped.attempts["c"] <= 8, "although the server says Retry-After: 0"


@pytest.mark.parametrize("fault", ["drop", "cut", "500"])
def test_one_request_alone_survives_as_many_faults_as_it_has_retries(fault: str) -> None:
    media = pixels(2)
    with running(None, Faulty) as (url, service):
        remote = RemoteReward(url, "meter", retries=2, chunk=1)
        texts = [f"a {fault} {fault}", f"b {fault} {fault} {fault}"]
        scored = remote(media.float() / 255, texts)
        assert scored.score[0].item() == expected(media, texts)[0]
        assert math.isnan(scored.score[1]) and "(attempt 3)" in scored.details[1]["reason"]
        assert service.wrapped.attempts == {"a": 3, "b": 3}
