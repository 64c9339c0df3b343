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
                lease.grow(size)
                pieces.append(piece)

        try:
            await asyncio.wait_for(collect(), seconds)
        except BaseException:
            pieces.clear()  # which the error's traceback would keep while the rest is thrown away
            raise
        return b"".join(pieces)

    async def discard(self, most: int = _LINGER, seconds: float = _LINGER_SECONDS) -> None:
        """Throws an unwanted body away: many clients read no answer before they have sent everything.

        Args:
            most: bytes, at about which the client must bear that the connection breaks off.
        """
        if self._request.headers.get("expect") is not None:
            return  # this one asks first

        async def drain() -> None:
            size = 0
            while not self.complete and size < most:
                size += len(await self._next())

        try:
            await asyncio.wait_for(drain(), seconds)
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
