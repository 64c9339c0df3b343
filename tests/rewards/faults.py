"""A middleware that spoils answers as prompts ask for it: "p3 drop 500" loses the first answer and fails the second."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

FAULTS = ("delay", "drop", "cut", "truncate", "digest", "swap", "fewer", "500", "503", "429", "hang")
LASTING = "always"
"""Before a fault: on every attempt."""


class Faulty:
    """Wraps the application of a server with requests of one sample each."""

    def __init__(self, application: Any) -> None:
        self.application = application
        self.server: Any = None  # set once it runs
        self.attempts: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/score":
            await self.application(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        found = re.search(rb'prompts\\": \[\\"([^"\\]*)', body)
        assert found is not None, body[:300]
        number, *faults = found.group(1).decode().split()
        attempt = self.attempts[number]
        self.attempts[number] += 1
        fault = ""
        if faults and faults[0] == LASTING:
            fault = faults[1]
        elif attempt < len(faults):
            fault = faults[attempt]
        assert fault in ("", *FAULTS)
        self.injected[fault] += 1
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Any:
            return next(given, None) or await receive()

        await self._answer(fault, scope, again, send)

    async def _answer(self, fault: str, scope: Any, receive: Any, send: Any) -> None:
        if fault == "drop":  # before the judge has seen it
            self._abort(scope)
            return
        if fault == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if fault in ("500", "503", "429"):
            headers = [(b"retry-after", b"0")] if fault != "500" else []
            await send({"type": "http.response.start", "status": int(fault), "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "as asked"}'})
            return
        if fault == "delay":
            await asyncio.sleep(0.3)
        sent: list[Any] = []

        async def keep(message: Any) -> None:
            sent.append(message)

        await self.application(scope, receive, keep)
        start, body = sent[0], b"".join(message.get("body", b"") for message in sent[1:])
        if start["status"] == 200:
            body = spoilt(fault, body)
        length = len(body)
        if fault == "cut":
            body = body[: length // 2]
        start["headers"] = [(k, v) for k, v in start["headers"] if k != b"content-length"]
        start["headers"].append((b"content-length", str(length).encode()))
        await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": fault == "cut"})
        if fault == "cut":
            self._abort(scope, flush=True)

    def _abort(self, scope: Any, flush: bool = False) -> None:
        for connection in list(self.server.server_state.connections):
            if connection.scope is scope:
                connection.transport.close() if flush else connection.transport.abort()


def spoilt(fault: str, body: bytes) -> bytes:
    """A right answer made wrong."""
    if fault == "truncate":
        return body[: len(body) // 2]
    answer = json.loads(body)
    if fault == "digest":
        answer["spec_digest"] = "0" * 64
    elif fault == "swap":
        answer["request_id"] = "of-another-request"
    elif fault == "fewer":
        answer["scores"] = []
    return json.dumps(answer).encode()
