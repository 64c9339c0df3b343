"""Questions about pictures to a vision-language model behind an OpenAI-compatible endpoint, many at a time."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from PIL import Image

from flowalign.types import FlowAlignError

if TYPE_CHECKING:
    import httpx

_CONNECT = 10.0  # seconds
_BACK_OFF = 0.5  # seconds before the first repetition, then twice as long each time
_LARGEST = 1 << 20  # bytes of an answer
SHOWN = 500
"""Characters of an answer that are kept."""


class Question(NamedTuple):
    """Pictures (H, W, 3) uint8 in their order, and the text that follows them."""

    pictures: tuple[npt.NDArray[np.uint8], ...]
    text: str


class Answer(NamedTuple):
    """What the model said, or None and the reason why there is nothing.

    Args:
        cut: the model stopped at ``max_tokens``.
    """

    text: str | None
    reason: str = ""
    cut: bool = False


@dataclass
class _Gate:
    """Whether asking goes on: a server that was never reached is not waited for by every question."""

    reached: bool = False
    closed: str = ""


class _Retry(Exception):
    """Worth another attempt, after ``wait`` seconds if the server named a time."""

    def __init__(self, reason: str, wait: float | None = None, connecting: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.connecting = wait, connecting


class ChatClient:
    """Asks many questions at a time; an answer that does not come costs no other its own.

    Greedy decoding (temperature 0). A question is repeated only where the server could not be connected to, is busy
    (429) or failed (5xx), after the time that it names or twice as long each time.

    Args:
        url: up to the version, as in "http://127.0.0.1:8000/v1".
        model: as the server calls it.
        name: of the reward, for messages.
        api_key_env: name of the environment variable that holds the key; the key itself is in no recipe.
        timeout: seconds that a question may take, repetitions included.
        retries: most repetitions of a question.
        concurrency: most questions under way.
        transport: takes the place of the network, such as ``httpx.MockTransport``.

    Raises:
        FlowAlignError: httpx is missing, the URL is none, or the variable is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        name: str,
        *,
        api_key_env: str | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        concurrency: int = 16,
        max_tokens: int = 512,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        try:
            import httpx  # noqa: F401  # here, so that a missing package is told before training begins
        except ImportError:
            raise FlowAlignError(f"reward {name!r}: needs httpx; pip install 'flowalign[server]'") from None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise FlowAlignError(f"reward {name!r}: url {url!r}, expected one like 'http://127.0.0.1:8000/v1'")
        for what, value in (("timeout", timeout), ("concurrency", concurrency), ("max_tokens", max_tokens)):
            if not value > 0:
                raise FlowAlignError(f"reward {name!r}: {what} {value!r}, expected more than 0")
        if retries < 0:
            raise FlowAlignError(f"reward {name!r}: retries {retries!r}, expected 0 or more")
        self.url, self.model = url.rstrip("/") + "/chat/completions", model
        self.timeout, self.retries, self.concurrency, self.max_tokens = timeout, retries, concurrency, max_tokens
        self.transport = transport
        self._key = "" if api_key_env is None else os.environ.get(api_key_env, "")
        if api_key_env is not None and not self._key:
            raise FlowAlignError(f"reward {name!r}: the environment variable {api_key_env} is not set; export the key")

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """An answer to each question, in their order; never raises for what the server does."""
        gate = _Gate()
        # A loop in a thread of its own: the caller may run one itself, as notebooks and servers do.
        with ThreadPoolExecutor(1, thread_name_prefix="chat") as own:
            asked = own.submit(asyncio.run, self._all(questions, gate))
            try:
                return asked.result()
            except BaseException:
                gate.closed = "interrupted"
                raise

    async def _all(self, questions: Sequence[Question], gate: _Gate) -> list[Answer]:
        import httpx

        slots = asyncio.Semaphore(self.concurrency)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # The deadline is kept here and not by httpx, whose times count anew with every piece of an answer.
        times = httpx.Timeout(None, connect=min(_CONNECT, self.timeout))
        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(transport=self.transport, timeout=times, headers=headers, limits=limits) as client:

            async def one(question: Question) -> Answer:
                async with slots:
                    return await self._one(client, question, gate)

            return list(await asyncio.gather(*map(one, questions)))

    async def _one(self, client: httpx.AsyncClient, question: Question, gate: _Gate) -> Answer:
        if gate.closed:
            return Answer(None, gate.closed)
        body = await asyncio.to_thread(self._body, question)
        try:
            return await asyncio.wait_for(self._attempts(client, body, gate), self.timeout)
        except asyncio.TimeoutError:  # not the built-in one before Python 3.11
            return Answer(None, f"no answer within {self.timeout:g} s")

    def _body(self, question: Question) -> bytes:
        images = [{"type": "image_url", "image_url": {"url": _data_url(one)}} for one in question.pictures]
        content = [*images, {"type": "text", "text": question.text}]
        request = {"model": self.model, "temperature": 0, "max_tokens": self.max_tokens}
        return json.dumps({**request, "messages": [{"role": "user", "content": content}]}).encode()

    async def _attempts(self, client: httpx.AsyncClient, body: bytes, gate: _Gate) -> Answer:
        end = time.monotonic() + self.timeout
        for attempt in range(self.retries + 1):
            try:
                return await self._attempt(client, body, gate)
            except _Retry as failed:
                reason, wait = str(failed), failed.wait
                if attempt == self.retries or gate.closed:
                    if failed.connecting and not gate.reached:
                        gate.closed = reason
                    break
            wait = _BACK_OFF * 2**attempt if wait is None else wait
            if wait >= end - time.monotonic():
                reason += f"; the next attempt would be in {wait:g} s, after the deadline"
                break
            await asyncio.sleep(wait)
        return Answer(None, reason)

    async def _attempt(self, client: httpx.AsyncClient, body: bytes, gate: _Gate) -> Answer:
        import httpx

        received = bytearray()
        try:
            headers = {"Content-Type": "application/json"}
            async with client.stream("POST", self.url, content=body, headers=headers) as response:
                gate.reached = True
                async for piece in response.aiter_bytes():
                    received += piece
                    if len(received) > _LARGEST:
                        return Answer(None, f"the answer is longer than {_LARGEST} bytes")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Retry(f"cannot connect to {self.url} ({_words(error)})", connecting=True) from None
        except httpx.HTTPError as error:
            return Answer(None, f"the exchange with {self.url} broke off ({_words(error)})")
        text = received.decode(errors="replace")
        if response.status_code == 200:
            return read_completion(text)
        shown = " ".join((text.replace(self._key, "***") if self._key else text).split())[:SHOWN]
        reason = f"the server answered {response.status_code}: {shown}"
        if response.status_code == 429 or response.status_code >= 500:
            raise _Retry(reason, retry_after(response.headers.get("Retry-After"), time.time()))
        return Answer(None, reason)


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _data_url(picture: npt.NDArray[np.uint8]) -> str:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "PNG", compress_level=1)  # lossless; a JPEG would be another picture
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def retry_after(header: str | None, now: float) -> float | None:
    """Seconds to wait by a Retry-After header, given as seconds or as a date; None where it says neither.

    Args:
        now: seconds since 1970.
    """
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - now)
    except (TypeError, ValueError):
        return None


def read_completion(text: str) -> Answer:
    """The answer in the JSON of a chat completion; None and the reason where it holds none."""
    try:
        choice = json.loads(text)["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
    except (ValueError, RecursionError):
        return Answer(None, f"the server's answer is not JSON: {text[:80]!r}")
    except (KeyError, IndexError, TypeError, AttributeError):
        return Answer(None, f"the server's answer holds no message: {text[:80]!r}")
    if refusal:
        return Answer(None, f"the model refused: {str(refusal)[:SHOWN]!r}")
    if not isinstance(content, str) or not content.strip():
        return Answer(None, f"the model said nothing (it stopped for {choice.get('finish_reason')!r})")
    return Answer(content, cut=choice.get("finish_reason") == "length")
