"""A judge on a server, used like one that is here: equal scores, every failure named, none of them spreading."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time

import pytest
import torch

from flowalign.rewards import contract, listening, registry, wire
from flowalign.rewards.cache import ScoreCache
from flowalign.rewards.client import RemoteReward
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError
from tests.rewards.faults import Faulty
from tests.rewards.pictures import media as pictures
from tests.rewards.served import Meter, expected, pixels, running

WEIGHTLESS = (
    "brightness",
    "colour-entropy",
    "jpeg-compressibility",
    "motion-energy",
    "shapes-verifier",
    "sharpness",
    "temporal-flicker",
)
DEAD = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def many():
    judges = {name: registry.create(name) for name in WEIGHTLESS}
    with running(judges | {"meter": Judge(Meter())}) as (url, _):
        yield url, judges


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("name", WEIGHTLESS)
@pytest.mark.parametrize("exact", [False, True])
def test_scores_equal_those_here_bit_for_bit(many, name: str, exact: bool) -> None:
    url, judges = many
    media = torch.cat([pictures(40, 48, *range(4)), pictures(40, 48, *range(4, 8))], 1)  # (4, 2, 3, 40, 48) of bytes
    media = media**1.1 if exact else media
    texts, metadata = ["a red circle", "two blue squares", "", "x"], [{"k": i} for i in range(4)]
    remote = RemoteReward(url, name, chunk=3, exact=exact)
    for frames in ("mean", "first"):
        local = Judge(judges[name].reward, frames=frames)(media, texts, metadata)
        there = Judge(remote, frames=frames)(media, texts, metadata)
        assert same(there.score, local.score), (there.score, local.score)
        assert there.subscores.keys() == local.subscores.keys()
        assert all(same(there.subscores[key], value) for key, value in local.subscores.items())
        assert [d.get("reason") for d in there.details] == [d.get("reason") for d in local.details]
    assert local.valid.any() or name == "shapes-verifier"


def test_other_media_are_rounded_as_saved_pictures_are_unless_exact(many) -> None:
    url, judges = many
    media = pictures(16, 16, 1, 2) * 0.997
    here = judges["brightness"]
    rounded = (media * 255).round() / 255
    assert same(RemoteReward(url, "brightness")(media, ["", ""]).score, here(rounded, ["", ""]).score)
    assert same(RemoteReward(url, "brightness", exact=True)(media, ["", ""]).score, here(media, ["", ""]).score)
    assert not same(here(rounded, ["", ""]).score, here(media, ["", ""]).score)


def test_the_contract_holds_but_for_sockets(many) -> None:
    judge = Judge(RemoteReward(many[0], "sharpness"))
    found = contract.check(judge, contract.default_example("image"))
    assert [f.check for f in found if not f.passed] == ["no socket is opened"]


def test_the_spec_is_the_servers_without_a_gradient(many) -> None:
    url, judges = many
    spec, own = RemoteReward(url, "brightness").spec, judges["brightness"].spec
    assert own.differentiable and not spec.differentiable
    assert (spec.name, spec.verified, spec.licence, spec.native_range) == (
        own.name,
        own.verified,
        own.licence,
        own.native_range,
    )
    assert spec.scales == own.scales and spec.higher_is_better == own.higher_is_better
    with pytest.raises(FlowAlignError, match="has no gradient"):
        Judge(RemoteReward(url, "brightness"))(pictures(8, 8), ["a"], grad=True)


def test_recipes_can_name_it(many) -> None:
    judge = registry.create("flowalign.rewards.client:RemoteReward", urls=many[0], name="meter", timeout=5.0)
    assert judge(pixels(2).float() / 255, ["a", "b"]).score.tolist() == expected(pixels(2), ["a", "b"])


def test_another_judge_of_the_same_name_has_another_digest() -> None:
    cache, digests = ScoreCache(), []
    for facts in ({}, {"licence": "another"}):
        with running({"meter": Judge(Meter(**facts), digest="d" + str(facts.get("licence", "")))}) as (url, _):
            for exact in (False, True):
                remote = RemoteReward(url, "meter", exact=exact)
                digests.append(remote.spec.digest())
                Judge(remote, cache=cache)(pixels(1).float() / 255, ["a"])
    assert len(set(digests)) == 4 and cache.hits == 0


def test_a_bad_sample_costs_no_other_its_score(many) -> None:
    remote = RemoteReward(many[0], "meter")
    media = pixels(7).float() / 255
    media[1, 0, 0, 0, 0] = torch.nan
    texts = ["a", "b", "\ud800", "d", "e", "x" * 20_000, "g"]
    metadata = [{}, {}, {}, {"k": {1, 2}}, {"k": math.nan}, {}, {"nan": 1}]
    scored = remote(media, texts, metadata)
    assert scored.valid.tolist() == [True] + [False] * 6
    assert scored.score[0].item() == expected(pixels(1), ["a"])[0]
    reasons = [one.get("reason") for one in scored.details]
    assert reasons == [
        None,
        "the media hold nan or infinity",
        "the prompt holds half of a surrogate pair, which is no Unicode text",
        "something in the metadata holds a set",
        "something in the metadata holds nan",
        "the prompt is no text of at most 16384 characters",
        "as asked",
    ]
    wide = torch.zeros(1, 1, 3, 1, 500)
    assert "longer than 32 times" in remote(wide, ["a"]).details[0]["reason"]


def test_what_the_judge_refuses_is_told_and_not_tried_again() -> None:
    with running() as (url, service):
        scored = RemoteReward(url, "meter", chunk=1)(pixels(2).float() / 255, ["a", "b"], [{"mistake": 1}, {}])
        assert scored.valid.tolist() == [False, True]
        assert scored.details[0]["reason"] == f"{url}: answered 400: meter: this was a mistake (attempt 1)"
        assert service.statuses == {400: 1, 200: 1}


def sizes(service) -> list[int]:
    return sorted(service.batchers["meter"].judge.reward.batches)


def test_requests_are_as_large_as_allowed_and_no_larger() -> None:
    options = {"max_body_bytes": 4000, "max_samples": 5, "batch_wait_ms": 0, "max_batch": 1}
    with running({"meter": Judge(Meter())}, **options) as (url, service):
        remote = RemoteReward(url, "meter", chunk=16)
        small = pixels(12)
        assert remote(small.float() / 255, ["p"] * 12).score.tolist() == expected(small, ["p"] * 12)
        assert sizes(service) == [2, 5, 5], "the server takes five"
        service.batchers["meter"].judge.reward.batches.clear()
        large = pixels(4, size=(16, 16))  # 768 bytes each, of 2000 for media
        assert remote(large.float() / 255, ["p"] * 4).score.tolist() == expected(large, ["p"] * 4)
        assert sizes(service) == [2, 2]
        service.batchers["meter"].judge.reward.batches.clear()
        texts = ['"' * 200, "\\" * 200, "\U0001f600" * 50, "a"]
        assert remote(small[:4].float() / 255, texts).score.tolist() == expected(small[:4], texts)
        assert len(sizes(service)) > 1, "texts count too"
        huge = remote(torch.zeros(1, 1, 3, 40, 40), ["a"])
        assert "take 4800 bytes, and the server takes 2000" in huge.details[0]["reason"]
        assert set(service.statuses) == {200}


def test_samples_of_one_prompt_stay_together_where_the_judge_compares_them() -> None:
    with running({"meter": Judge(Meter(scope="groupwise"))}) as (url, service):
        remote = RemoteReward(url, "meter", chunk=2)
        texts = ["a", "b", "a", "a", "b"]
        assert remote(pixels(5).float() / 255, texts).score.tolist() == expected(pixels(5), texts)
        assert sizes(service) == [2, 3]


def test_nothing_gives_nothing(many) -> None:
    assert RemoteReward(many[0], "meter")(pixels(1).float()[:0], []).score.shape == (0,)


def test_media_outside_the_contract_are_refused_here(many) -> None:
    remote = RemoteReward(many[0], "meter")
    for media in (pixels(1), pixels(1).float(), torch.zeros(2, 1, 3, 4, 4), torch.zeros(1, 3, 4, 4)):
        with pytest.raises(ValueError, match="remote reward 'meter'"):
            remote(media, ["a"])
    with pytest.raises(ValueError, match="1 metadata came with 2 prompts"):
        remote(torch.zeros(2, 1, 3, 4, 4), ["a", "b"], [{}])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"urls": []}, "no url"),
        ({"urls": "127.0.0.1:8000"}, "expected one like"),
        ({"urls": "ftp://x"}, "expected one like"),
        ({"urls": "http://x:99999"}, "expected one like"),
        ({"urls": "http://user:hunter2@x"}, "use token_env"),
        ({"token_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
        ({"retries": -1}, "retries -1"),
        ({"chunk": 0}, "chunk 0"),
        ({"chunk": 2.5}, "chunk 2.5"),
        ({"max_in_flight": 0}, "max_in_flight 0"),
        ({"timeout": 0.0}, "timeout 0.0"),
        ({"name": "other"}, "serves meter, not 'other'"),
        ({"digest": "e" * 64}, "expected eeeeeeee"),
        ({"urls": DEAD, "retries": 0}, "127.0.0.1:9: cannot connect .*; start the server"),
    ],
)
def test_mistakes_are_told_when_it_is_made(options: dict, said: str) -> None:
    with running() as (url, _), pytest.raises(FlowAlignError, match=f"^remote reward .*{said}") as caught:
        RemoteReward(**{"urls": url, "name": "meter"} | options)
    assert "hunter2" not in str(caught.value)


def test_what_is_no_reward_server_is_told(many) -> None:
    class Page:
        server = None

        async def __call__(self, scope, receive, send) -> None:
            if scope["type"] == "lifespan":
                await receive()
                await send({"type": "lifespan.startup.complete"})
                await receive()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"<html>"})

    with (
        running(None, lambda _: Page()) as (url, _),
        pytest.raises(FlowAlignError, match="is it a server of flowalign"),
    ):
        RemoteReward(url, "meter")


def test_tokens_come_from_the_environment_and_go_nowhere_else(monkeypatch) -> None:
    monkeypatch.setenv("RIGHT", "s3cret")
    monkeypatch.setenv("WRONG", "s3cretive")
    monkeypatch.setenv("ODD", "s3\ncret")
    with running(token="s3cret") as (url, service):
        remote = RemoteReward(url, "meter", token_env="RIGHT")
        assert remote(pixels(1).float() / 255, ["a"]).valid.all()
        for name in ("WRONG", None):
            with pytest.raises(FlowAlignError, match="answered 401: a token is needed") as caught:
                RemoteReward(url, "meter", token_env=name)
            assert "s3cret" not in str(caught.value)
        with pytest.raises(FlowAlignError, match="ODD is not set, or holds"):
            RemoteReward(url, "meter", token_env="ODD")
        service._token = b"changed"
        scored = remote(pixels(1).float() / 255, ["a"])
        assert scored.details[0]["reason"].startswith(f"{url}: answered 401")
        assert "s3cret" not in str(vars(remote.spec)) + str(scored.details)


def test_requests_are_spread_over_servers_and_a_dead_one_is_passed_over() -> None:
    media, texts = pixels(24), [f"p{i}" for i in range(24)]
    slow = {"batch_wait_ms": 0, "max_batch": 1}
    with (
        running({"meter": Judge(Meter(seconds=0.03))}, **slow) as (first, one),
        running({"meter": Judge(Meter(seconds=0.03))}, **slow) as (second, two),
    ):
        remote = RemoteReward([first, DEAD, second], "meter", chunk=1, max_in_flight=6)
        assert remote(media.float() / 255, texts).score.tolist() == expected(media, texts)
        shares = [service.batchers["meter"].counts["requests"] for service in (one, two)]
        assert sum(shares) == 24 and min(shares) >= 6


def test_a_server_that_goes_away_is_replaced_by_the_other() -> None:
    media, texts = pixels(12), [f"p{i} drop drop drop drop drop" for i in range(12)]
    with running(None, Faulty) as (bad, _), running() as (good, _):
        remote = RemoteReward([bad, good], "meter", chunk=1)
        begun = time.monotonic()
        assert remote(media.float() / 255, texts).score.tolist() == expected(media, texts)
        assert time.monotonic() - begun < 2, "without waiting"


def test_a_server_with_another_judge_is_not_asked_again() -> None:
    media = pixels(6).float() / 255
    with running() as (first, one), running() as (second, two):
        remote = RemoteReward([first, second], "meter", chunk=1, max_in_flight=2)
        one.batchers["meter"].judge.digest = "f" * 64
        assert remote(media, ["a"] * 6).valid.all()
        assert one.statuses[409] <= 2 and two.statuses == {200: 6}
        two.batchers["meter"].judge.digest = "f" * 64
        scored = remote(media, ["a"] * 6)
        assert not scored.valid.any()
        assert all("answered 409: reward 'meter' is ffff" in one["reason"] for one in scored.details)


def test_servers_must_serve_one_and_the_same_judge() -> None:
    with running() as (first, _), running({"meter": Judge(Meter(), digest="0" * 64)}) as (second, _):
        with pytest.raises(FlowAlignError, match=f"{second} serves it as 0000.*the same weights"):
            RemoteReward([first, second], "meter")
        with pytest.raises(FlowAlignError, match=f"{first} serves it as .*expected 0000"):
            RemoteReward([second, first], "meter", digest="0" * 64)
        assert RemoteReward(second, "meter", digest="0" * 64).digest == "0" * 64


def test_a_server_that_is_still_loading_is_waited_for() -> None:
    with listening.bind("127.0.0.1", 0) as bound:
        url = listening.url(bound)

    made: list[RemoteReward] = []
    waiting = threading.Thread(target=lambda: made.append(RemoteReward(url, "meter", retries=4)))
    waiting.start()
    time.sleep(0.3)
    from flowalign.rewards.server import app

    application = app({"meter": Judge(Meter())})
    with listening.bind("127.0.0.1", int(url.rpartition(":")[2])) as bound:
        server = listening.Server(application, application.state.service, "serving", 5.0)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        waiting.join(15)
        server.handle_exit(15, None)
        thread.join(10)
    assert made and made[0].spec.name == "meter"


def test_servers_on_this_machine_are_not_asked_by_way_of_a_proxy(many, monkeypatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, DEAD)
    for host in ("127.0.0.1", "localhost"):
        remote = RemoteReward(many[0].replace("127.0.0.1", host), "meter", retries=0)
        assert remote(pixels(1).float() / 255, ["a"]).valid.all()


def test_it_can_be_called_where_a_loop_runs_already(many) -> None:
    remote = RemoteReward(many[0], "meter")

    async def notebook() -> float:
        return remote(pixels(1).float() / 255, ["a"]).score.item()

    assert asyncio.run(notebook()) == expected(pixels(1), ["a"])[0]


def test_an_interrupt_does_not_wait_for_servers() -> None:
    # A shell starts what it puts in the background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupted_call()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_call() -> None:
    with running(None, Faulty) as (url, _):
        remote = RemoteReward(url, "meter", timeout=30)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            remote(pixels(1).float() / 255, ["a always hang"])
        assert time.monotonic() - begun < 5


def test_answers_without_end_are_cut_off(monkeypatch) -> None:
    monkeypatch.setattr("flowalign.rewards.delivery.MAX_ANSWER", 50)
    with running() as (url, _), pytest.raises(FlowAlignError, match="longer than 50 bytes"):
        RemoteReward(url, "meter", retries=0)


def test_the_largest_request_is_within_the_limits_of_the_server() -> None:
    # as the client counts: prompts at their longest, with the signs that take the most room when they are escaped
    limits = wire.Limits()
    texts = tuple(['"' * wire.MAX_PROMPT] * 16)
    metadata = tuple({"k": "\\" * 30_000} for _ in texts)
    request = wire.ScoreRequest("meter", pixels(16), texts, metadata, "i" * 32, "d" * 64)
    assert len(wire.write_request(request)) < wire.MAX_HEADER
    assert wire.read_request(wire.write_request(request), wire.SAFETENSORS, limits).prompts == texts
