"""A judge without a server: an answer that follows from the pictures and the question."""

from __future__ import annotations

import base64
import io
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import httpx


def tiny(folder: Path, name: str) -> dict[str, Any]:
    """Constructor parameters; nothing is written to ``folder`` and no socket is opened."""
    import httpx

    return {"url": "http://judge.invalid/v1", "model": "tiny", "transport": httpx.MockTransport(_answer)}


def _answer(request: httpx.Request) -> httpx.Response:
    import httpx

    content = json.loads(request.content)["messages"][0]["content"]
    shown = [part["image_url"]["url"].partition(",")[2] for part in content[:-1]]
    pixels = [np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in shown]
    light = float(np.mean([one.mean() for one in pixels])) / 255
    luck = zlib.crc32(content[-1]["text"].encode()) / 2**32
    said = f"Some of the request is there.\n\nScore: {5 * (light + luck):.4f}"
    return httpx.Response(200, json={"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})
