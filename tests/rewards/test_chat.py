"""The client of OpenAI-compatible endpoints, against a real server on the loopback that behaves well or badly."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from email.utils import formatdate

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.rewards import chat
from flowalign.types import FlowAlignError
from reward_models.unifiedreward.reward import UnifiedReward
from reward_models.vlm_judge.reward import VLMJudge, VLMJudgeVideo
from tests.rewards.chat_server import judge, media, said, server

__all__ = ["server"]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---------------------------------------------------------------- what is sent


def test_the_server_sees_every_pixel_and_the_question(server) -> None:
    shown = media(2)
    scored = judge(server, max_tokens=77)(shown, ["a {cat}", "two\ndogs"])
    assert scored.score.tolist() == [5, 5]
    for i, request in enumerate(server.requests):
        assert (request["model"], request["temperature"], request["max_tokens"]) == ("some/model", 0, 77)
        text = server.content(i)[-1]["text"]
        row = ["Q a {cat}", "Q two\ndogs"].index(text)
        expected = (shown[row, 0].permute(1, 2, 0) * 255).round().numpy().astype(np.uint8)
        (seen,) = server.pictures(i)
        assert seen.dtype == np.uint8 and np.array_equal(seen, expected)


def test_pictures_are_stretched_only_where_asked(server) -> None:
    shown = media(1, height=40, width=20)
    UnifiedReward(server.url, "m", resize=16)(shown, ["a cat"])
    (seen,) = server.pictures()
    drawn = Image.fromarray((shown[0, 0].permute(1, 2, 0) * 255).round().numpy().astype(np.uint8))
    assert np.array_equal(seen, np.asarray(drawn.resize((16, 16), Image.Resampling.BICUBIC)))


def test_frames_are_one_question_to_a_video_judge_and_one_each_to_a_picture_judge(server) -> None:
    shown = media(1, frames=5)
    frames = list((shown[0].permute(0, 2, 3, 1) * 255).round().numpy().astype(np.uint8))
    VLMJudgeVideo(server.url, "m", max_frames=3)(shown, ["a cat"])
    assert "frames in their order" in server.content()[-1]["text"]
    assert [next(i for i, f in enumerate(frames) if np.array_equal(f, seen)) for seen in server.pictures()] == [0, 2, 4]
    server.requests.clear()
    lock, given = threading.Lock(), iter([1, 2, 3, 4, 8])

    def answer(text, attempt):
        with lock:
            return said(f"Score: {next(given)}")

    server.answer = answer
    scored = judge(server)(shown, ["a cat"])
    assert len(server.requests) == 5 and scored.score.tolist() == pytest.approx([18 / 5])
    server.answer = lambda text, attempt: said(f"Score: {'none' if len(server.requests) == 3 else 4}")
    server.requests.clear()
    scored = judge(server, concurrency=1)(shown, ["a cat"])
    assert torch.isnan(scored.score).all() and "gives no score" in scored.details[0]["reason"]


def test_the_key_comes_from_the_environment_and_is_told_to_the_server_only(server, monkeypatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame-42")
    server.answer = lambda text, attempt: (401, {}, "the key sesame-42 is unknown")
    scored = judge(server, api_key_env="SOME_KEY")(media(), ["a cat"])
    assert server.headers[0]["Authorization"] == "Bearer sesame-42"
    assert "answered 401: the key *** is unknown" in scored.details[0]["reason"]
    server.answer = lambda text, attempt: said("Score: 1")
    judge(server)(media(), ["a cat"])
    assert "Authorization" not in server.headers[1]
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(FlowAlignError, match="SOME_KEY is not set"):
        judge(server, api_key_env="SOME_KEY")


# ---------------------------------------------------------------- when, how often, how many


def test_answers_keep_their_order_and_no_more_are_under_way_than_allowed(server) -> None:
    def answer(text, attempt):
        number = int(text.split()[-1])
        time.sleep(0.02 * ((7 * number) % 5))  # later questions are often answered earlier
        return said(f"Score: {number / 4}")

    server.answer = answer
    scored = judge(server, concurrency=4)(media(24), [f"number {i}" for i in range(24)])
    assert scored.score.tolist() == [i / 4 for i in range(24)]
    assert 2 <= server.most_at_once <= 4


def test_waiting_for_its_turn_is_no_part_of_a_question_s_time(server) -> None:
    def answer(text, attempt):
        time.sleep(0.15)
        return said("Score: 3")

    server.answer = answer
    scored = judge(server, concurrency=1, timeout=0.6)(media(6), list("abcdef"))  # 0.9 s in all
    assert scored.valid.all() and server.most_at_once == 1


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_or_failing_server_is_asked_again(server, status: int) -> None:
    server.answer = lambda text, attempt: (status, {}, "later") if attempt < 3 else said("Score: 7")
    scored = judge(server, retries=2)(media(), ["a cat"])
    assert scored.score.tolist() == [7] and len(server.requests) == 3
    server.attempts.clear()
    scored = judge(server, retries=1)(media(), ["a cat"])
    assert torch.isnan(scored.score).all() and len(server.requests) == 5
    assert scored.details == ({"reason": f"the server answered {status}: later"},)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 302])
def test_a_refused_question_is_not_asked_again(server, status: int) -> None:
    server.answer = lambda text, attempt: (status, {"Location": "/v1/other"}, f"no\n{'x' * 5000}")
    scored = judge(server)(media(), ["a cat"])
    assert torch.isnan(scored.score).all() and len(server.requests) == 1
    assert scored.details[0]["reason"].startswith(f"the server answered {status}: no xxx")
    assert len(scored.details[0]["reason"]) < 600


def test_the_time_that_the_server_names_is_waited_for_but_not_beyond_the_deadline(server) -> None:
    server.answer = lambda text, attempt: (429, {"Retry-After": "1"}, "") if attempt == 1 else said("Score: 7")
    start = time.monotonic()
    assert judge(server)(media(), ["a cat"]).score.tolist() == [7]
    assert 1.0 <= time.monotonic() - start < 4
    server.answer = lambda text, attempt: (429, {"Retry-After": "3600"}, "")
    start = time.monotonic()
    scored = judge(server)(media(), ["a dog"])
    assert time.monotonic() - start < 2
    assert "3600 s, after the deadline" in scored.details[0]["reason"]


def test_retry_after_is_seconds_or_a_date() -> None:
    assert chat.retry_after("12", 0.0) == 12
    assert chat.retry_after(formatdate(1_000_030, usegmt=True), 1_000_000.0) == 30
    assert chat.retry_after(formatdate(999_000, usegmt=True), 1_000_000.0) == 0
    assert chat.retry_after("soon", 0.0) is None and chat.retry_after("-5", 0.0) is None
    assert chat.retry_after(None, 0.0) is None


@pytest.mark.parametrize("how", ["silent", "trickling"])
def test_a_late_answer_is_invalid_and_costs_no_other_its_own(server, how: str) -> None:
    def answer(text, attempt):
        if not text.endswith("slow"):
            return said("Score: 3")
        if how == "silent":
            time.sleep(1.2)
            return said("Score: 3")
        return 200, {"X-Slow": "yes"}, said("Score: 3" + " " * 300)[2]  # a piece each 50 ms: 2 s in all

    server.answer = answer
    start = time.monotonic()
    scored = judge(server, timeout=0.5)(media(3), ["a cat", "slow", "a dog"])
    assert time.monotonic() - start < 1.1
    assert scored.score[[0, 2]].tolist() == [3, 3] and torch.isnan(scored.score[1])
    assert scored.details[1] == {"reason": "no answer within 0.5 s"}


def test_a_server_that_cannot_be_reached_makes_every_sample_invalid_soon(monkeypatch) -> None:
    monkeypatch.setattr(chat, "_BACK_OFF", 0.05)
    url = f"http://127.0.0.1:{closed_port()}/v1"
    start = time.monotonic()
    scored = VLMJudge(url, "m", concurrency=2, retries=2)(media(40), ["a cat"] * 40)
    # Two questions give up after 0.05 + 0.1 s; the 38 others are not asked any more.
    assert time.monotonic() - start < 1.5
    assert torch.isnan(scored.score).all()
    assert all(f"cannot connect to {url}/chat/completions" in one["reason"] for one in scored.details)


def test_a_connection_that_breaks_off_is_invalid(server) -> None:
    def answer(text, attempt):
        if text.endswith("cut"):
            return 200, {"Transfer-Encoding": "chunked"}, "no length of a chunk\r\n"
        return said("Score: 3")

    server.answer = answer
    scored = judge(server)(media(2), ["cut", "a cat"])
    assert torch.isnan(scored.score).tolist() == [True, False]
    assert "broke off" in scored.details[0]["reason"]


def test_a_running_loop_is_no_obstacle(server) -> None:
    async def inside():
        return judge(server)(media(), ["a cat"]).score.tolist()

    assert asyncio.run(inside()) == [5]
