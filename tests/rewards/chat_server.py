"""A chat completions server on the loopback that behaves as a test wants, and keeps what it was asked."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.rewards import chat
from reward_models.vlm_judge.reward import VLMJudge


def said(text, reason="stop"):
    return 200, {}, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": reason}]})


@dataclass
class Server:
    """What it was asked, and what it answers: ``answer(text of the question, number of its attempt)``."""

    url: str = ""
    answer: object = lambda text, attempt: said("Score: 5")
    requests: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    attempts: dict = field(default_factory=lambda: defaultdict(int))
    at_once: int = 0
    most_at_once: int = 0
    lock: object = field(default_factory=threading.Lock)

    def pictures(self, i=0):
        """What the server sees of the pictures of request i."""
        urls = [part["image_url"]["url"] for part in self.content(i)[:-1]]
        assert all(url.startswith("data:image/png;base64,") for url in urls)
        return [np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))) for url in urls]

    def content(self, i=0):
        (message,) = self.requests[i]["messages"]
        assert message["role"] == "user"
        return message["content"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Server = self.server.state
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["messages"][0]["content"][-1]["text"]
        with server.lock:
            server.requests.append(request)
            server.headers.append(dict(self.headers))
            server.attempts[text] += 1
            attempt = server.attempts[text]
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            status, headers, body = (
                server.answer(text, attempt) if self.path == "/v1/chat/completions" else (404, {}, "")
            )
        finally:
            with server.lock:
                server.at_once -= 1
        body = body if isinstance(body, bytes) else body.encode()
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for start in range(0, len(body), 8) if headers.get("X-Slow") else [0]:
                self.wfile.write(body[start : start + 8] if headers.get("X-Slow") else body)
                time.sleep(0.05 if headers.get("X-Slow") else 0)
        except (BrokenPipeError, ConnectionResetError):  # a client that did not wait
            self.close_connection = True

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(chat, "_BACK_OFF", 0.02)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    state = running.state = Server(f"http://127.0.0.1:{running.server_port}/v1")
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    running.shutdown()
    running.server_close()
    thread.join()


def media(n=1, frames=1, height=7, width=5):
    values = torch.rand(n, frames, 3, height, width, generator=torch.Generator().manual_seed(0))
    return (values * 255).round() / 255


def judge(server, **params):
    return VLMJudge(server.url, "some/model", template="Q {prompt}", **params)
