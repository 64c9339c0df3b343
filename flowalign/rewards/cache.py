"""Scores that need not be computed again: kept by the bytes of the media, the prompt and the judge."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from threading import Lock

from torch import Tensor

from flowalign.rewards.base import Scored
from flowalign.types import Metadata


class ScoreCache:
    """The ``size`` scores that were used last, in memory; safe to share between threads and judges."""

    def __init__(self, size: int = 65_536) -> None:
        self._size = size
        self._kept: OrderedDict[str, Scored] = OrderedDict()
        self._lock = Lock()
        self.hits = 0

    @staticmethod
    def key(digest: str, frames: str, media: Tensor, prompt: str, metadata: Metadata | None) -> str:
        """SHA-256 of all that a score depends on.

        The media enter as they are, in float32: rounded to bytes, two pictures with different scores could meet.
        """
        head = json.dumps([digest, frames, list(media.shape), prompt, metadata], sort_keys=True, default=str)
        found = hashlib.sha256(head.encode())
        found.update(media.detach().float().cpu().contiguous().numpy().data)
        return found.hexdigest()

    def get(self, key: str) -> Scored | None:
        """The kept score, one sample, or None."""
        with self._lock:
            scored = self._kept.get(key)
            if scored is not None:
                self.hits += 1
                self._kept.move_to_end(key)
            return scored

    def put(self, key: str, scored: Scored) -> None:
        """Keeps the score of one sample; one that could not be computed may be computable next time and is not kept."""
        if not bool(scored.valid.all()):
            return
        with self._lock:
            self._kept[key] = scored
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
