"""The reward server on its socket: clients that are slow, loud or strange, and how it stops."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from flowalign.rewards import listening, server
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError
from tests.rewards.served import Meter, body, expected, pixels, post, running, scores


@pytest.fixture(scope="module")
def url():
    with running(max_body_bytes=1 << 20, body_timeout=0.5) as (found, _):
        yield found


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def received(sock: socket.socket) -> bytes:
    """All until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


HEAD = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-safetensors\r\n"


@pytest.mark.parametrize("declared", [True, False])
def test_a_hundred_megabytes_are_refused_and_not_read(url: str, declared: bool) -> None:
    total, sent = 100 << 20, 0
    piece = bytes(1 << 16)
    with connect(url) as sock:
        length = b"Content-Length: %d\r\n\r\n" % total if declared else b"Transfer-Encoding: chunked\r\n\r\n"
        sock.sendall(HEAD + length)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < total:
                sock.sendall(piece if declared else b"10000\r\n" + piece + b"\r\n")
                sent += len(piece)
        answer = received(sock)
    # one MiB that is thrown away or read, and what the buffers of both sockets take
    assert sent < 12 << 20
    assert not answer or answer.startswith(b"HTTP/1.1 413")
    if declared:  # a client that asks first gets its answer before it sends anything
        with connect(url) as sock:
            sock.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % total)
            assert received(sock).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("length", [b"-5", b"1e3", b"0x10", b"99999999999999999999", b"5, 6", b"\xb2"])
def test_lengths_that_are_none_are_refused(url: str, length: bytes) -> None:
    with connect(url) as sock:
        sock.sendall(HEAD + b"Content-Length: " + length + b"\r\n\r\n")
        assert received(sock).split()[1] in (b"400", b"413")


def test_bodies_that_never_end_are_cut_off(url: str) -> None:
    for start in (b"Content-Length: 1000\r\n\r\n12345", b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n"):
        begun = time.monotonic()
        with connect(url) as sock:
            sock.sendall(HEAD + start)
            assert received(sock).startswith(b"HTTP/1.1 408")
        assert 0.4 < time.monotonic() - begun < 5


def test_headers_that_never_end_are_cut_off(url: str, monkeypatch) -> None:
    monkeypatch.setattr(listening, "HEADER_SECONDS", 0.4)
    begun = time.monotonic()
    with connect(url) as silent, connect(url) as slow, connect(url) as second:
        second.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b'"ok"}'):
            answer += second.recv(4096)
        second.sendall(b"GET /healthz HT")  # of a further request on the same connection
        for letter in b"POST /v1/s":
            slow.sendall(bytes([letter]))
            time.sleep(0.02)
        assert received(slow) == b"" and received(silent) == b"" and received(second) == b""
    assert time.monotonic() - begun < 5
    assert httpx.get(f"{url}/healthz").status_code == 200


def test_headers_of_any_length_are_refused(url: str) -> None:
    with connect(url) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 20))
        answer = received(sock)
    assert not answer or answer.startswith(b"HTTP/1.1 400")


def test_what_follows_an_answer_that_did_not_need_it_is_not_read_forever(url: str) -> None:
    with connect(url) as sock:
        sock.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 404")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(200):
                sock.sendall(bytes(1000))
                time.sleep(0.005)


def test_strangers_are_let_in_on_purpose_only() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        listening.check_host(host, None, False)
    for host in ("0.0.0.0", "::", "192.168.0.1", "", "example.org", "localhost.example.org"):
        with pytest.raises(FlowAlignError, match="anybody who reaches"):
            listening.check_host(host, None, False)
        listening.check_host(host, "token", False)
        listening.check_host(host, None, True)
    with pytest.raises(FlowAlignError, match="anybody who reaches"):
        server.serve(["brightness"], host="0.0.0.0")


def test_a_taken_address_is_told_before_weights_are_loaded() -> None:
    with listening.bind("127.0.0.1", 0) as bound:
        bound.listen()
        with pytest.raises(FlowAlignError, match="cannot be listened on"):
            server.serve(["no such judge"], port=bound.getsockname()[1])


ROOT = Path(__file__).resolve().parents[2]
SERVE = """
import sys
from flowalign.rewards import server
server.serve(["tests.rewards.served:Meter"], port=0, params={"tests.rewards.served:Meter": {"seconds": 1.0}}, grace=%s)
"""


def started(grace: float) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, "-c", SERVE % grace], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving tests.rewards.served:Meter on http://127.0.0.1:")
    return process, line.split()[-1]


def test_what_has_begun_is_finished_and_no_more_is_begun() -> None:
    process, url = started(20)
    name = "tests.rewards.served:Meter"
    try:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(url, body(pixels(2), ["a", "b"], reward=name))))
        thread.start()
        while httpx.get(f"{url}/v1/metrics").json()["rewards"][name]["batches"] == 0:
            time.sleep(0.02)
        process.terminate()
        time.sleep(0.2)
        late = post(url, body(pixels(1), reward=name))
        assert late.status_code == 503 and int(late.headers["retry-after"]) > 0
        assert httpx.get(f"{url}/healthz").status_code == 503
        thread.join(10)
        assert scores(answers[0]) == expected(pixels(2), ["a", "b"])
        assert process.wait(10) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz")
    finally:
        process.kill()
        process.wait()


def test_stopping_does_not_wait_for_ever(monkeypatch) -> None:
    release, servers, errors = threading.Event(), [], []

    class Stuck(Meter):
        def __call__(self, media, prompts, metadata=None):
            release.wait(20)
            return super().__call__(media, prompts, metadata)

    class Kept(listening.Server):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            servers.append(self)

    def serve() -> None:
        try:
            listening.run(application, application.state.service, bound, "serving", 0.2)
        except FlowAlignError as error:
            errors.append(str(error))

    monkeypatch.setattr(listening, "Server", Kept)
    application = server.app({"meter": Judge(Stuck())})
    with listening.bind("127.0.0.1", 0) as bound:
        url = listening.url(bound)
        thread = threading.Thread(target=serve)
        thread.start()
        while not (servers and servers[0].started):
            time.sleep(0.01)
        with connect(url) as sock:
            content = body(pixels(1))
            sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
            while not application.state.service.batchers["meter"].counts["batches"]:
                time.sleep(0.01)
            servers[0].handle_exit(15, None)
            thread.join(15)
            release.set()
        assert not thread.is_alive()
    assert errors == ["rewards serve: stopped with 1 requests unfinished after 0.2 s"]
