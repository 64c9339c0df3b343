"""What the endpoints of the reward server do; see `flowalign.rewards.server` for the whole."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flowalign.rewards import wire
from flowalign.rewards.base import Scored
from flowalign.rewards.batching import Batcher, Budget, Full, Job, Lease
from flowalign.rewards.judge import Judge
from flowalign.rewards.strict_json import TooLarge, WireError, short
from flowalign.rewards.upload import Upload
from flowalign.rewards.wire_answers import Answer, write_answer
from flowalign.types import FlowAlignError

if TYPE_CHECKING:
    from fastapi import Request, Response

logger = logging.getLogger(__name__)

_RETRY_AFTER = 1  # seconds; enough for some batches
_RETRY_STOPPED = 5


class Refusal(Exception):
    """An answer without scores.

    Args:
        retry_after: seconds.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


class Service:
    """What the endpoints do; see `flowalign.rewards.server.app` for the arguments."""

    def __init__(
        self,
        judges: Mapping[str, Judge],
        token: str | None,
        any_host: bool,
        limits: wire.Limits,
        max_queue_bytes: int,
        body_timeout: float,
        batching: Mapping[str, Any],
    ) -> None:
        if token is not None and not re.fullmatch("[!-~]+", token):
            raise FlowAlignError("token: is empty or has spaces or other letters than ASCII; give another")
        self.limits, self.body_timeout, self._any_host = limits, body_timeout, any_host
        self._token = None if token is None else token.encode()
        self.batchers = {name: Batcher(judge, **batching) for name, judge in judges.items()}
        self.budget = Budget(max_queue_bytes)
        self.statuses: Counter[int] = Counter()
        self.pending = 0
        self.stopping = False
        self._decoders = ThreadPoolExecutor(2, "decode")

    def close(self) -> None:
        """Ends the threads once what they do is done."""
        self.stopping = True
        for batcher in self.batchers.values():
            batcher.close()
        self._decoders.shutdown(wait=False)

    # ------------------------------------------------------------ endpoints

    async def health(self, request: Request) -> Response:
        """For load balancers, without a token."""
        stopping = self.stopping
        return as_json({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)

    async def rewards(self, request: Request) -> Response:
        """What is served."""
        if (refused := self._unauthorised(request)) is not None:
            return self._refuse(refused)
        served = [
            {"name": name, "digest": batcher.judge.digest, "spec": batcher.judge.spec.as_dict()}
            for name, batcher in self.batchers.items()
        ]
        limits = self.limits._asdict() | {"json_body": self.limits.json}
        return as_json({"protocol": wire.PROTOCOL, "rewards": served, "limits": limits})

    async def metrics(self, request: Request) -> Response:
        """Counts since the start."""
        if (refused := self._unauthorised(request)) is not None:
            return self._refuse(refused)
        queues = {name: {**b.counts, "waiting": b.waiting} for name, b in self.batchers.items()}
        held = {"bytes": self.budget.used, "peak_bytes": self.budget.peak, "max_bytes": self.budget.most}
        return as_json({"rewards": queues, "pending": self.pending, "statuses": dict(self.statuses), **held})

    async def score(self, request: Request) -> Response:
        """Scores, or a `Refusal` as JSON; whatever else happens is logged under an id and answered with it."""
        from starlette.requests import ClientDisconnect

        self.pending += 1
        try:
            response = await self._score(request)
        except Refusal as refusal:
            response = self._refuse(refusal)
        except ClientDisconnect:
            response = as_json({"error": "the client went away"}, 400)
        except Exception as error:
            response = self._failure(error)
        finally:
            self.pending -= 1
        self.statuses[response.status_code] += 1
        return response

    # ------------------------------------------------------------ steps

    async def _score(self, request: Request) -> Response:
        begun, upload = time.monotonic(), Upload(request)
        if (early := self._refusal_by_headers(request)) is not None:
            await self._discard(upload, early, request)
            raise early
        lease = self.budget.lease()
        try:
            # At once: many bodies that come in together, none of which fits wholly, would all be in vain.
            lease.resize(int(request.headers.get("content-length", "0")))
            found = await self._read(upload, _content_type(request), lease)
            job = self._submit(found)
        except BaseException as error:
            lease.close()
            if isinstance(error, Full):
                busy = Refusal(429, f"busy: {error}", _RETRY_AFTER)
                await self._discard(upload, busy, request)
                raise busy from None
            if isinstance(error, WireError):
                raise Refusal(413 if isinstance(error, TooLarge) else 400, str(error)) from None
            raise
        # Not at the end of this call: a judge may still hold the media of a client that went away.
        job.future.add_done_callback(lambda _: lease.close())
        scored = await self._wait(request, job)
        digest = self.batchers[found.reward].judge.digest
        answer = write_answer(Answer(scored, digest, found.request_id, time.monotonic() - begun))
        from starlette.responses import Response

        return Response(answer, media_type=wire.JSON)

    async def _discard(self, upload: Upload, refusal: Refusal, request: Request) -> None:
        """All of a body that is to come again later, so that its client learns that; else some of it."""
        if refusal.retry_after is not None:
            await upload.discard(self._limit(_content_type(request)), self.body_timeout)
        else:
            await upload.discard()

    def _refusal_by_headers(self, request: Request) -> Refusal | None:
        """What can be refused before any of the body is read."""
        if (refused := self._unauthorised(request)) is not None:
            return refused
        if self.stopping:
            return Refusal(503, "the server is stopping", _RETRY_STOPPED)
        if _content_type(request) not in (wire.SAFETENSORS, wire.JSON):
            return Refusal(415, f"content type: expected {wire.SAFETENSORS}, or {wire.JSON}")
        if request.headers.get("content-encoding", "identity") != "identity":
            return Refusal(415, "content encoding: expected none")
        declared = request.headers.get("content-length", "0")
        limit = self._limit(_content_type(request))
        if not re.fullmatch("[0-9]{1,15}", declared) or int(declared) > limit:
            return Refusal(413, f"the body has {short(declared)} bytes, at most {limit} are taken")
        return None

    def _unauthorised(self, request: Request) -> Refusal | None:
        if self._token is None:
            if self._any_host or _is_address(request.url.hostname or ""):
                return None
            # A page in a browser of this machine could have a name of its own lead here (DNS rebinding).
            return Refusal(403, "without a token, only requests to localhost or to an address in numbers are answered")
        given = next((value for key, value in request.headers.raw if key == b"authorization"), b"")
        scheme, _, value = given.partition(b" ")
        if hmac.compare_digest(value, self._token) and scheme.lower() == b"bearer":
            return None
        return Refusal(401, "a token is needed, as in 'Authorization: Bearer TOKEN'")

    def _limit(self, content_type: str) -> int:
        return self.limits.json if content_type == wire.JSON else self.limits.body

    async def _read(self, upload: Upload, content_type: str, lease: Lease) -> wire.ScoreRequest:
        try:
            body = await upload.read(self._limit(content_type), self.body_timeout, lease)
        except asyncio.TimeoutError:  # not the built-in one before Python 3.11
            raise Refusal(408, f"the body did not come within {self.body_timeout:g} s") from None
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._decoders, wire.read_request, body, content_type, self.limits)
        lease.resize(found.nbytes)
        return found

    def _submit(self, found: wire.ScoreRequest) -> Job:
        # Names are looked up among the judges that were loaded at the start; nothing is ever imported by request.
        batcher = self.batchers.get(found.reward)
        if batcher is None:
            raise Refusal(404, f"no reward {short(found.reward)!r} here; there is {', '.join(self.batchers)}")
        if found.spec_digest not in (None, batcher.judge.digest):
            raise Refusal(
                409,
                f"reward {found.reward!r} is {batcher.judge.digest} here, not {found.spec_digest}; make both anew with "
                "the same weights and parameters",
            )
        if self.stopping:
            raise Refusal(503, "the server is stopping", _RETRY_STOPPED)
        return batcher.submit(found)

    async def _wait(self, request: Request, job: Job) -> Scored:
        """The scores; where the client goes away first, its place in the queue becomes free."""
        answered = asyncio.wrap_future(job.future)
        gone = asyncio.ensure_future(request.receive())  # after the body, there is only the end of the connection
        either: set[asyncio.Future[Any]] = {answered, gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise Refusal(400, "the client went away")
            return answered.result()
        except FlowAlignError as error:
            raise Refusal(400, str(error)) from None
        finally:
            gone.cancel()
            if not answered.done():
                self.batchers[job.request.reward].cancel(job)

    def _refuse(self, refusal: Refusal) -> Response:
        headers = {"Connection": "close"}  # there may be more of the body, which nobody will read
        if refusal.retry_after is not None:
            headers["Retry-After"] = str(refusal.retry_after)
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return as_json({"error": refusal.message}, refusal.status, headers)

    def _failure(self, error: Exception) -> Response:
        """500: the details stay on this side."""
        number = uuid4().hex[:12]
        logger.error("failure %s", number, exc_info=error)
        return as_json({"error": f"the judge failed; the server's log says more under {number}", "id": number}, 500)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response in JSON."""
    from starlette.responses import Response

    return Response(json.dumps(content), status, headers, wire.JSON)
