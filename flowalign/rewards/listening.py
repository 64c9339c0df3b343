"""The socket side of the reward server: who may connect, how slow a client may be, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowalign.rewards.service import Service
from flowalign.types import FlowAlignError

HEADER_SECONDS = 10.0
"""From connecting, or from the first byte of a further request, to the end of its headers."""
MAX_HEADERS = 1 << 14  # bytes
MAX_CONNECTIONS = 400  # beyond, they are answered 503; beyond twice as many, cut off: files are often 1024


def check_host(host: str, token: str | None, allow_public: bool) -> None:
    """Refuses to let strangers use the judges by mistake.

    Raises:
        FlowAlignError: other machines can reach ``host``, and no token is asked for.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and token is None and not allow_public:
        raise FlowAlignError(
            f"--host {host!r}: anybody who reaches this machine could use the judges; give a token with --token-env, "
            "or --allow-public if that is meant"
        )


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address but does not listen yet: loading a judge takes minutes.

    Raises:
        FlowAlignError: the address is taken, or none of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise FlowAlignError(f"{host}:{port} cannot be listened on ({error}); choose another host or port") from None
    return bound


def url(bound: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(application: Any, service: Service, bound: socket.socket, banner: str, grace: float) -> None:
    """Answers requests until SIGTERM or SIGINT.

    Args:
        application: of `flowalign.rewards.server.app`, or one that wraps it.
        banner: printed before the address as soon as requests are answered.
        grace: seconds for the requests that have begun.

    Raises:
        FlowAlignError: requests were not finished by then.
    """
    server = Server(application, service, f"{banner} {url(bound)}", grace)
    server.run([bound])
    if server.unfinished:
        raise FlowAlignError(f"rewards serve: stopped with {server.unfinished} requests unfinished after {grace:g} s")


class Server(uvicorn.Server):
    """Refuses new requests with 503 while it finishes those that have begun, and only then closes its socket."""

    def __init__(self, application: Any, service: Service, line: str, grace: float) -> None:
        config = uvicorn.Config(
            application,
            http=Protocol,
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADERS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self.service, self.line, self.grace = service, line, grace
        self.unfinished = 0
        self._end = float("inf")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it answers once it does."""
        await super().startup(sockets)
        if self.started:
            print(self.line, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, raises no signal once more at the end: a stop that was asked for is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kept = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to stop; asked a second time, stops at once."""
        self._end = time.monotonic() if self.service.stopping else time.monotonic() + self.grace
        self.service.stopping = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        late = time.monotonic() >= self._end
        if self.service.stopping and (late or self.service.pending == 0):
            self.unfinished, self.should_exit, self.force_exit = self.service.pending, True, late
        return await super().on_tick(counter)


class Protocol(H11Protocol):
    """Cuts off clients that are slow to say what they want, or never end; uvicorn alone would wait for them."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts connections, and starts the clock."""
        super().connection_made(transport)
        if len(self.connections) > 2 * MAX_CONNECTIONS:
            transport.abort()
            return
        self._deadline = self.loop.call_later(HEADER_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Stops the clock with the last header; bodies have their own deadline in `Service`."""
        super().data_received(data)
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self.transport.close()  # the rest of a body that was answered without being read
        waiting = self.conn.their_state is h11.IDLE
        if self._deadline is None and waiting:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        elif self._deadline is not None and not waiting:
            self._deadline.cancel()
            self._deadline = None

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection without requests, also where the client does not read what it was sent."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)
