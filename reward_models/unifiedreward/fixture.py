"""UnifiedReward without a server: answers that follow from the pictures and the question, in its own format."""

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
    text = content[-1]["text"]
    shown = [part["image_url"]["url"].partition(",")[2] for part in content[:-1]]
    pixels = [np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in shown]
    # By picture and by question; every axis gets a number of its own.
    light = sum((i + 1) * float(one.mean()) / 255 for i, one in enumerate(pixels)) / sum(range(1, len(pixels) + 1))
    luck = zlib.crc32(text.encode()) / 2**32
    values = [1 + 4 * (light * (1 - 0.2 * k) + luck) / 2 for k in range(3)]
    lines = [f"Final Score: {values[0]:.4f}"]
    if "Final Score" not in text:
        second = "Physics" if "Physics Score" in text else "Coherence"
        axes = zip(("Alignment", second, "Style"), values, strict=True)
        lines = [f"{axis} Score (1-5): {value:.4f}" for axis, value in axes]
    message = {"role": "assistant", "content": "\n".join(lines)}
    return httpx.Response(200, json={"choices": [{"message": message, "finish_reason": "stop"}]})
