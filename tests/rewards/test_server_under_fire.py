"""Two hundred requests at once while answers are late, lost, broken and wrong."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter

import psutil
import pytest

from flowalign.rewards.client import RemoteReward
from flowalign.rewards.judge import Judge
from tests.rewards.faults import FAULTS, Faulty
from tests.rewards.served import Meter, body, expected, pixels, running

COUNT = 200
SIDE = 64
ROOM = 30 * 3 * SIDE**2  # bytes of 30 pictures: many requests have to come again
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


class Beleaguered(Meter):
    """Scores nothing before the server has been full."""

    service = None

    def __call__(self, *arguments):
        end = time.monotonic() + 10
        while self.service is not None and not self.service.statuses[429] and time.monotonic() < end:
            time.sleep(0.01)
        return super().__call__(*arguments)


def test_no_score_is_lost_or_swapped_and_every_failure_is_named() -> None:
    media, texts = pixels(COUNT, size=(SIDE, SIDE)), prompts()
    shown = media.float() / 255
    with running(
        {"meter": Judge(Beleaguered(seconds=0.05))}, Faulty, max_queue=16, max_queue_bytes=ROOM, max_batch=4
    ) as (url, service):
        faulty = service.wrapped
        remote = RemoteReward(url, "meter", timeout=120, retries=3, max_in_flight=COUNT, chunk=1)
        service.batchers["meter"].judge.reward.service = service
        scored = remote(shown, texts)
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
    # what the server holds is bounded
    assert 1 < counts["peak_queue"] <= 16
    assert ROOM // 4 < budget.peak <= ROOM
    assert budget.used == 0 and counts["failed"] == 0


SENDERS = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
port, file, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
content = open(file, "rb").read()
head = b"POST /v1/score HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/x-safetensors\\r\\n"

def send(_):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(head + b"Content-Length: %d\\r\\n\\r\\n" % len(content))
        sock.sendall(content)
        return sock.recv(4096).split()[1].decode()

with ThreadPoolExecutor(count) as pool:
    print(*pool.map(send, range(count)))
"""


def test_memory_is_bounded_while_far_more_is_sent_than_there_is_room_for(tmp_path) -> None:
    release = threading.Event()

    class Stuck(Judge):
        def __call__(self, *arguments):
            release.wait(20)
            return super().__call__(*arguments)

    def rss() -> int:
        return psutil.Process(os.getpid()).memory_info().rss

    content = body(pixels(1, size=(1024, 1365)))  # 4 MiB
    (tmp_path / "content").write_bytes(content)
    count, room = 60, 32 << 20
    fitting = room // len(content)
    with running({"meter": Stuck(Meter())}, max_queue_bytes=room, max_batch=1) as (url, service):
        before, most = rss(), 0
        command = [sys.executable, "-c", SENDERS, url.rpartition(":")[2], str(tmp_path / "content"), str(count)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as senders:
            end = time.monotonic() + 20
            while service.statuses[429] < count - fitting and time.monotonic() < end:
                most = max(most, rss())
                time.sleep(0.01)
            held = service.budget.used
            release.set()
            assert senders.stdout is not None
            statuses = Counter(senders.stdout.read().split())
    assert statuses == {"200": fitting, "429": count - fitting}, "as many as fit, and all others are told"
    assert held <= service.budget.peak <= room and service.budget.used == 0
    assert len(content) * count > 7 * room
    # 32 MiB of bodies, two of which are decoded, 16 MiB of float32 for the judge, and what 60 connections have in hand
    assert most - before < 150 << 20


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
        assert scored.details[2]["reason"] == (
            f"{url}: answered 429: as asked; the next attempt would come after the 2 s of the call"
        )
        assert 3 <= service.wrapped.attempts["c"] <= 8, "although the server says Retry-After: 0"


def test_being_busy_is_no_failure() -> None:
    with running(None, Faulty) as (url, _):
        remote = RemoteReward(url, "meter", retries=1)
        assert remote(pixels(1).float() / 255, ["a 429 429 429 drop"]).valid.all()


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
