"""The reward server as its clients see it: scores, statuses and limits."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from flowalign.rewards import registry, server
from flowalign.rewards.judge import Judge
from flowalign.rewards.wire import JSON, SAFETENSORS
from flowalign.types import FlowAlignError
from tests.rewards.served import Meter, body, expected, pixels, post, running, scores
from tests.rewards.test_wire import bomb, curl, png

TOKEN = {"Authorization": "Bearer s3cret"}


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(Meter())


@pytest.fixture(scope="module")
def url(judge):
    judges = {"meter": judge, "brightness": registry.create("brightness")}
    with running(judges, max_body_bytes=1 << 20, body_timeout=0.5) as (found, _):
        yield found


@pytest.fixture(scope="module")
def guarded():
    with running(token="s3cret") as (found, _):
        yield found


def test_it_says_what_it_serves(url: str, judge: Judge) -> None:
    assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
    found = httpx.get(f"{url}/v1/rewards").json()
    assert found["protocol"] == 1 and found["limits"] == {"body": 1 << 20, "samples": 1024, "json_body": 1 << 18}
    assert [one["name"] for one in found["rewards"]] == ["meter", "brightness"]
    assert found["rewards"][0]["digest"] == judge.digest and found["rewards"][0]["spec"] == judge.spec.as_dict()


@pytest.mark.parametrize("exact", [False, True])
def test_scores_are_those_of_the_judge(url: str, judge: Judge, exact: bool) -> None:
    media, prompts = pixels(3, frames=2), ["a", "ü", "\U0001f600"]
    sent = media.float() / 255 if exact else media
    metadata = ({}, {"nan": 1}, {})
    answer = post(url, body(sent, prompts, metadata=metadata, request_id="mine", spec_digest=judge.digest))
    found = answer.json()
    local = judge(media.float() / 255, prompts, list(metadata))
    assert scores(answer) == [local.score[0].item(), None, local.score[2].item()]
    assert scores(answer)[0] == pytest.approx(expected(media, prompts)[0] / 2, abs=1)  # mean of frames
    assert found["subscores"] == {"letters": [1.0, 1.0, 1.0]}
    assert found["details"][1]["reason"] == "as asked"
    assert (found["request_id"], found["spec_digest"]) == ("mine", judge.digest)


def test_pictures_of_different_sizes_keep_their_order(url: str) -> None:
    media = [pixels(1, size=(4, 4 + i % 3), seed=i)[0] for i in range(7)]
    prompts = [f"p{i}" for i in range(7)]
    want = [expected(one[None], [text])[0] for one, text in zip(media, prompts, strict=True)]
    assert scores(post(url, body(media, prompts))) == want


def test_curl_can_ask_with_json(url: str) -> None:
    media = pixels(2)
    pictures = [png(one[0].permute(1, 2, 0).numpy()) for one in media]
    found = post(url, curl(pictures, reward="meter", prompts=["a", "b"]), "application/json; charset=utf-8")
    assert scores(found) == expected(media, ["a", "b"])
    assert len(found.json()["request_id"]) == 32


@pytest.mark.parametrize(
    ("content", "kind", "status", "said"),
    [
        (b"\x80\x04K\x01.", SAFETENSORS, 400, "no safetensors file"),
        (b"\x80\x04K\x01.", "application/octet-stream", 415, "content type"),
        (b"\x80\x04K\x01.", "application/x-pickle", 415, "content type"),
        (b"\x80\x04K\x01.", JSON, 400, "not JSON"),
        (b"", SAFETENSORS, 400, "no safetensors file"),
        (b"{}", JSON, 400, "protocol"),
        (body(pixels(1)), "text/plain", 415, "content type"),
        (body(pixels(1)), "", 415, "content type"),
        (body(pixels(1), reward="other"), SAFETENSORS, 404, "there is meter, brightness"),
        (body(pixels(1), reward="../../etc/passwd"), SAFETENSORS, 404, "no reward"),
        (body(pixels(1), reward="os:system"), SAFETENSORS, 404, "no reward"),
        (body(pixels(1), reward="reward_models.ocr.reward:OCR"), SAFETENSORS, 404, "no reward"),
        (body(pixels(1), reward="__class__"), SAFETENSORS, 404, "no reward"),
        (body(pixels(1), spec_digest="0" * 64), SAFETENSORS, 409, "000 here, not 000|not 0000"),
        (body(pixels(1025)), SAFETENSORS, 413, "1025 media"),
        (curl([bomb(700, 700)]), JSON, 413, "more than a request may hold"),
        (curl([bomb(60_000, 60_000)]), JSON, 400, "base64 PNG"),
        (b"[" * 200_000, JSON, 400, "not JSON"),
        (b"[" * 255_000, JSON, 413, "elements"),
        (b" " * (300 << 10), JSON, 413, "at most 262144"),
        (body(pixels(1, size=(600, 600))), SAFETENSORS, 413, "at most 1048576"),
        (body(pixels(1), metadata=({"mistake": 1},)), SAFETENSORS, 400, "meter: this was a mistake"),
    ],
)
def test_what_is_no_request_is_refused_by_name(url: str, content: bytes, kind: str, status: int, said: str) -> None:
    found = post(url, content, kind)
    assert found.status_code == status
    assert found.headers["content-type"] == JSON
    assert re.search(said, found.json()["error"])
    assert "Traceback" not in found.text and ".py" not in found.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/score", 405),
        ("POST", "/healthz", 405),
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/rewards/..%2f..%2fetc/passwd", 404),
        ("GET", "/v1/rewards/meter", 404),
        ("GET", "/v1/rewards/", 404),
    ],
)
def test_there_are_no_other_doors(url: str, method: str, path: str, status: int) -> None:
    found = httpx.request(method, url + path)
    assert found.status_code == status and "see GET /v1/rewards" in found.json()["error"]


def test_without_a_token_there_is_no_name_but_localhost(url: str, guarded: str) -> None:
    for host in ("attacker.example", "attacker.example:8000", "localhost.example", "127.0.0.1.example"):
        for found in (post(url, body(pixels(1)), Host=host), httpx.get(f"{url}/v1/rewards", headers={"Host": host})):
            assert found.status_code == 403 and "without a token" in found.json()["error"]
    for host in ("localhost", "localhost:1", "127.0.0.1", "[::1]:8000"):
        assert post(url, body(pixels(1)), Host=host).status_code == 200
    assert post(guarded, body(pixels(1)), Host="attacker.example", **TOKEN).status_code == 200
    with running(any_host=True) as (public, _):
        assert post(public, body(pixels(1)), Host="gpu.example").status_code == 200


def test_compressed_bodies_are_refused(url: str) -> None:
    assert post(url, b"\x1f\x8b", **{"Content-Encoding": "gzip"}).status_code == 415


def test_a_token_is_asked_for_everywhere_but_for_health(guarded: str) -> None:
    good = body(pixels(1))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"Authorization": "Bearer"}):
        for found in (post(guarded, good, **headers), httpx.get(f"{guarded}/v1/rewards", headers=headers)):
            assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{guarded}/v1/metrics", headers=headers).status_code == 401
    assert post(guarded, good, Authorization=b"Bearer \xff\xfe").status_code == 401
    assert post(guarded, good, **TOKEN).status_code == 200
    assert httpx.get(f"{guarded}/healthz").status_code == 200
    statuses = httpx.get(f"{guarded}/v1/metrics", headers=TOKEN).json()["statuses"]
    assert statuses["200"] >= 1 and statuses["401"] >= 5


@pytest.mark.parametrize("token", ["", " ", "a b", "ü", "a\n"])
def test_tokens_that_no_client_could_send_are_refused(token: str) -> None:
    with pytest.raises(FlowAlignError, match="token: is empty"):
        server.app({}, token=token)


def test_a_failing_judge_is_answered_with_an_id_that_the_log_has(url: str, caplog) -> None:
    found = post(url, body(pixels(1), metadata=({"raise": 1},)))
    assert found.status_code == 500 and set(found.json()) == {"error", "id"}
    assert "4711" not in found.text and "Traceback" not in found.text
    assert any(found.json()["id"] in record.message for record in caplog.records)
    assert "the secret is 4711" in caplog.text


def test_requests_of_one_shape_are_scored_together_and_a_bad_one_costs_no_other_its_scores() -> None:
    meter = Meter()
    with running({"meter": Judge(meter)}, batch_wait_ms=300, max_batch=8) as (url, service):
        media = [pixels(2, seed=i) for i in range(6)]
        bad = [({"raise": 1}, {}) if i == 4 else ({}, {}) for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            sent = [pool.submit(post, url, body(media[i], metadata=bad[i])) for i in range(6)]
            found = [one.result() for one in sent]
        assert [one.status_code for one in found] == [200, 200, 200, 200, 500, 200]
        for i in (0, 1, 2, 3, 5):
            assert scores(found[i]) == expected(media[i], ["p0", "p1"])
        counts = service.batchers["meter"].counts
        assert counts["failed"] == 1 and counts["requests"] == 6
        assert max(meter.batches) == 8, "four requests of two samples fit together"


def test_a_full_queue_says_when_to_come_again() -> None:
    with running({"meter": Judge(Meter(seconds=0.4))}, max_queue=1, batch_wait_ms=0, max_batch=1) as (url, service):
        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(post, url, body(pixels(1, seed=i))) for i in range(4)]
            found = [one.result() for one in sent]
        statuses = sorted(one.status_code for one in found)
        assert statuses[0] == 200 and statuses[-1] == 429
        for one in found:
            assert one.status_code == 200 or one.headers["retry-after"] == "1"
        assert service.batchers["meter"].counts["peak_queue"] == 1
        assert service.budget.used == 0


def test_bytes_of_all_requests_are_bounded_too() -> None:
    with running(max_queue_bytes=5000) as (url, service):
        assert post(url, body(pixels(1))).status_code == 200
        large = body(pixels(2, size=(32, 32)))
        assert post(url, large).status_code == 429
        assert post(url, iter([large[:3000], large[3000:]])).status_code == 429, "without a declared length"
        assert service.budget.peak <= 5000 and service.budget.used == 0


def test_a_request_that_nobody_waits_for_is_not_scored() -> None:
    meter = Meter(seconds=0.4)
    with running({"meter": Judge(meter)}, batch_wait_ms=0) as (url, service):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, url, body(pixels(1)))
            while not meter.batches:
                time.sleep(0.01)
            with pytest.raises(httpx.ReadTimeout):
                post(url, body(pixels(3)), seconds=0.1)
            assert first.result().status_code == 200
        while service.pending:
            time.sleep(0.01)
        assert meter.batches == [1] and service.budget.used == 0


def test_json_of_the_metrics_is_plain(url: str) -> None:
    found = json.loads(httpx.get(f"{url}/v1/metrics").text)
    assert found["bytes"] == 0 and found["rewards"]["meter"]["waiting"] == 0
