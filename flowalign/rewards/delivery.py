"""Requests to several servers that may be slow, busy, broken or gone: deadlines, repetitions, fail-over."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from flowalign.rewards.chat import retry_after
from flowalign.rewards.strict_json import WireError, short
from flowalign.rewards.wire import SAFETENSORS
from flowalign.rewards.wire_answers import MAX_ANSWER

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
_CONNECT = 10.0  # seconds
_BACK_OFF = 0.25  # seconds before the first repetition, then twice as long each time
_MAX_BACK_OFF = 8.0
_DOWN = 1.0  # seconds for which a server that cannot be reached is asked only where there is no other
_BUSY = 1.0  # seconds, where a busy server names none; the most between questions where it names fewer


class Failure(Exception):
    """What went wrong with an attempt.

    Args:
        kind: "again" = may go well another time; "busy" = will go well another time; "server" = not with this server;
            "request" = with none.
        wait: seconds that the server asks for.
    """

    def __init__(
        self, reason: str, kind: Literal["again", "busy", "server", "request"] = "server", wait: float | None = None
    ) -> None:
        super().__init__(reason)
        self.kind, self.wait = kind, wait


class Numbered(Protocol):
    """What a request is made of; ``number`` is its id."""

    @property
    def number(self) -> str:
        """The same in every repetition."""
        ...


P = TypeVar("P", bound=Numbered)


class _Call:
    """One call: its end, and what it has learnt of the servers."""

    def __init__(self, urls: Sequence[str], timeout: float, slots: int) -> None:
        self.urls, self.timeout = urls, timeout
        self.end = time.monotonic() + timeout
        self.slots = asyncio.Semaphore(slots)
        self.in_flight: Counter[str] = Counter()
        self.ready = dict.fromkeys(urls, 0.0)
        self.banned: dict[str, str] = {}

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def choose(self, tried: Counter[str]) -> str | None:
        """The server for the next attempt of a request: not tried yet, ready, and with the fewest requests."""
        now = time.monotonic()
        usable = [url for url in self.urls if url not in self.banned]
        return min(usable, key=lambda url: (tried[url], self.ready[url] > now, self.in_flight[url]), default=None)


class Delivery:
    """Sends requests to the servers at ``urls``; see `flowalign.rewards.client.RemoteReward` for the arguments.

    Raises:
        ImportError: httpx is missing.
    """

    def __init__(
        self, urls: Sequence[str], token: str | None, timeout: float, retries: int, max_in_flight: int
    ) -> None:
        import httpx

        self.urls, self.timeout, self.retries, self.max_in_flight = list(urls), timeout, retries, max_in_flight
        self._token = token
        # Made once: reading the certificates takes longer than many calls.
        secure = any(url.startswith("https:") for url in urls)
        self._verify: ssl.SSLContext | bool = httpx.create_ssl_context() if secure else False

    def announcements(self, read: Callable[[bytes], T]) -> dict[str, T]:
        """{url: what ``read`` made of its list of rewards}, of all servers that answer.

        Args:
            read: may raise `WireError`, or a `Failure` that tells the user.

        Raises:
            Failure: no server answers, or one refuses.
        """
        return _run(self._announcements(read))

    def deliver(
        self, packets: Sequence[tuple[P, Callable[[P], bytes]]], read: Callable[[P, bytes], T]
    ) -> list[T | str]:
        """For each packet what ``read`` made of its answer, or one sentence that says why there is none.

        Args:
            packets: each with what makes its body.
            read: raises `WireError` for an answer that must not be used.
        """
        return _run(self._deliver_all(packets, read)) if packets else []

    # ------------------------------------------------------------ in the loop

    def _client(self) -> httpx.AsyncClient:
        import httpx

        headers = {"Accept-Encoding": "identity"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        # The deadline is kept in this file: httpx's times count anew with every piece of an answer.
        return httpx.AsyncClient(
            verify=self._verify,
            headers=headers,
            timeout=httpx.Timeout(None, connect=min(_CONNECT, self.timeout)),
            limits=httpx.Limits(max_connections=None),
            mounts={f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")},  # not by way of a proxy
        )

    async def _announcements(self, read: Callable[[bytes], T]) -> dict[str, T]:
        call = _Call(self.urls, self.timeout, self.max_in_flight)

        async def one(url: str) -> T | Failure:
            try:
                body = await asyncio.wait_for(self._exchange(client, "GET", f"{url}/v1/rewards"), call.left())
                return read(body)
            except asyncio.TimeoutError:  # not the built-in one before Python 3.11
                return Failure(f"{url}: no answer within {self.timeout:g} s", "again")
            except WireError as error:
                return Failure(f"{url}: {error}")
            except Failure as failure:
                return Failure(f"{url}: {failure}", failure.kind, failure.wait)

        async with self._client() as client:
            for attempt in range(self.retries + 1):
                found = dict(zip(self.urls, await asyncio.gather(*map(one, self.urls)), strict=True))
                failures = [value for value in found.values() if isinstance(value, Failure)]
                if refused := [failure for failure in failures if failure.kind in ("server", "request")]:
                    raise refused[0]
                if len(failures) < len(self.urls):
                    break
                wait = max([_back_off(attempt, random.Random(attempt)), *(f.wait or 0.0 for f in failures)])
                if attempt == self.retries or wait >= call.left():
                    raise Failure("; ".join(map(str, failures)) + "; start the server, or mend urls")
                await asyncio.sleep(wait)
        return {url: value for url, value in found.items() if not isinstance(value, Failure)}

    async def _deliver_all(
        self, packets: Sequence[tuple[P, Callable[[P], bytes]]], read: Callable[[P, bytes], T]
    ) -> list[T | str]:
        call = _Call(self.urls, self.timeout, self.max_in_flight)
        async with self._client() as client:

            async def one(packet: P, body: Callable[[P], bytes]) -> T | str:
                async with call.slots:
                    if call.left() <= 0:
                        return f"not sent: the {self.timeout:g} s of the call were over"
                    return await self._deliver(client, call, packet, await asyncio.to_thread(body, packet), read)

            return list(await asyncio.gather(*(one(packet, body) for packet, body in packets)))

    async def _deliver(
        self, client: httpx.AsyncClient, call: _Call, packet: P, body: bytes, read: Callable[[P, bytes], T]
    ) -> T | str:
        tried: Counter[str] = Counter()
        jitter = random.Random(packet.number)
        reason, failures, busy = "no server is left", 0, 0
        while True:
            url = call.choose(tried)
            if url is None:
                return reason if tried else "; ".join(call.banned.values())
            wait = call.ready[url] - time.monotonic()
            if tried[url]:
                wait = max(wait, _back_off(failures - 1, jitter), min(_BUSY, _back_off(busy - 1, jitter)))
            if wait >= call.left():
                return f"{reason}; the next attempt would come after the {self.timeout:g} s of the call"
            await asyncio.sleep(max(0.0, wait))
            tried[url] += 1
            call.in_flight[url] += 1
            try:
                answer = await asyncio.wait_for(
                    self._exchange(client, "POST", f"{url}/v1/score", body), max(0.0, call.left())
                )
                return read(packet, answer)
            except asyncio.TimeoutError:
                before = f", after: {reason}" if failures else ""
                return f"{url}: no answer within the {self.timeout:g} s of the call{before}"
            except WireError as error:
                failure = Failure(str(error), "again")
            except Failure as raised:
                failure = raised
            finally:
                call.in_flight[url] -= 1
            reason = f"{url}: {failure}"
            if failure.wait is not None:
                # Not all at once when the time is over.
                call.ready[url] = max(call.ready[url], time.monotonic() + failure.wait * jitter.uniform(1, 1.25))
            if failure.kind == "server":
                call.banned[url] = reason
            busy += failure.kind == "busy"
            failures += failure.kind != "busy"
            if failure.kind == "request" or failures > self.retries:
                return f"{reason} (attempt {sum(tried.values())})"

    async def _exchange(self, client: httpx.AsyncClient, method: str, url: str, body: bytes | None = None) -> bytes:
        """The body of an answer of status 200.

        Raises:
            Failure: there is none.
        """
        import httpx

        received = bytearray()
        headers = {} if body is None else {"Content-Type": SAFETENSORS}
        try:
            async with client.stream(method, url, content=body, headers=headers) as response:
                async for piece in response.aiter_bytes():
                    received += piece
                    if len(received) > MAX_ANSWER:
                        raise Failure(f"the answer is longer than {MAX_ANSWER} bytes", "again")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            # With a wait, since a server that is down would else always be the one with the fewest requests.
            raise Failure(f"cannot connect ({_words(error)})", "again", _DOWN) from None
        except httpx.HTTPError as error:
            raise Failure(f"the exchange broke off ({_words(error)})", "again") from None
        status = response.status_code
        if status == 200:
            return bytes(received)
        reason = f"answered {status}: {self._said(bytes(received))}"
        wait = retry_after(response.headers.get("Retry-After"), time.time())
        if status == 429:
            raise Failure(reason, "busy", _BUSY if wait is None else wait)
        if status >= 500 or status == 408:
            raise Failure(reason, "again", wait)
        raise Failure(reason, "request" if status in (400, 413, 415) else "server")

    def _said(self, body: bytes) -> str:
        """The server's sentence, or the beginning of whatever else it sent."""
        import json

        try:
            text = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = short(body.decode(errors="replace"))
        text = " ".join("".join(sign if sign.isprintable() else " " for sign in str(text)[:500]).split())
        return text.replace(self._token, "***") if self._token else text


def _back_off(failures: int, jitter: random.Random) -> float:
    """Seconds; keyed by the request, so that requests that failed together do not come back together."""
    if failures < 0:
        return 0.0
    return min(_MAX_BACK_OFF, _BACK_OFF * 2.0**failures) * jitter.uniform(0.75, 1.25)


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` in a loop and thread of its own, since the caller may have a loop, as notebooks do."""
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    async def main() -> T:
        started.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    with ThreadPoolExecutor(1, thread_name_prefix="remote-reward") as own:
        running = own.submit(asyncio.run, main())
        try:
            return running.result()
        except BaseException:
            # An interrupt must not wait for servers.
            for loop, task in started:
                if task is not None and not running.done():
                    loop.call_soon_threadsafe(task.cancel)
            raise
