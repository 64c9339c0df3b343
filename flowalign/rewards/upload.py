"""The body of a request on its way in, of which no more is kept than there is room for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flowalign.rewards.batching import Lease
from flowalign.rewards.strict_json import TooLarge

if TYPE_CHECKING:
    from fastapi import Request

_LINGER = 1 << 20  # bytes
_LINGER_SECONDS = 2.0


class Upload:
    """A body that has not come yet.

    Args:
        complete: all of it has been received.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.complete = False

    async def read(self, limit: int, seconds: float, lease: Lease) -> bytes:
        """The whole body, counted while it comes, since its declared length may be missing or wrong.

        Raises:
            TooLarge: more than ``limit`` bytes.
            Full: more than ``lease`` can get.
            asyncio.TimeoutError: it takes longer than ``seconds``.
            ClientDisconnect: the client went away.
        """
        pieces: list[bytes] = []

        async def collect() -> None:
            size = 0
            while not self.complete:
                piece = await self._next()
                size += len(piece)
                if size > limit:
                    raise TooLarge(f"the body has more than {limit} bytes")
                lease.resize(size)
                pieces.append(piece)

        await asyncio.wait_for(collect(), seconds)
        return b"".join(pieces)

    async def discard(self) -> None:
        """Throws some of an unwanted body away: many clients read no answer before they have sent everything."""
        if self._request.headers.get("expect") is not None:
            return  # this one asks first

        async def drain() -> None:
            size = 0
            while not self.complete and size < _LINGER:
                size += len(await self._next())

        try:
            await asyncio.wait_for(drain(), _LINGER_SECONDS)
        except asyncio.TimeoutError:
            return

    async def _next(self) -> bytes:
        from starlette.requests import ClientDisconnect

        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self.complete = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece
