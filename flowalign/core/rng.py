"""Keyed randomness: a draw depends on its key only, never on world size, batch split, resume or call order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def key(*parts: int | str) -> int:
    """A 63-bit integer from any sequence of integers and strings, equal on every machine."""
    # With lengths, no text can imitate two parts.
    named = "".join(f"{type(p).__name__}:{len(str(p))}:{p};" for p in parts)
    digest = hashlib.blake2b(named.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by ``key(*parts)``; CPU, so that every device draws the same numbers."""
    return torch.Generator("cpu").manual_seed(key(*parts))


def normal(generators: Sequence[torch.Generator], shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """The next standard normal draw of each generator: (len(generators), *shape) float32."""
    return torch.stack([torch.randn(tuple(shape), generator=g) for g in generators]).to(device)
