"""JSON from strangers: plain data of a bounded size, or a sentence that says what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

_MAX_ELEMENTS = 250_000  # an empty list takes 3 bytes to send and 64 to keep
_MAX_DEPTH = 32


class WireError(ValueError):
    """A body that the protocol does not allow; one sentence says what came and what was expected."""


class TooLarge(WireError):
    """A body beyond the limits."""


def parse(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object without repeated keys, infinities and bombs.

    Raises:
        WireError: anything else; begins with ``what``.
        TooLarge: more elements than a request or an answer needs.
    """
    if sum(text.count(mark) for mark in (b"{", b"[", b",")) > _MAX_ELEMENTS:
        raise TooLarge(f"{what} holds more than {_MAX_ELEMENTS} elements")
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_number)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"{what} is not JSON: {short(error)}") from None
    if not isinstance(found, dict):
        raise WireError(f"{what} is a {type(found).__name__}, expected a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise WireError("a JSON object holds a key twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise WireError(f"{short(text)} is no finite number")
    return value


def _no_number(text: str) -> NoReturn:
    raise WireError(f"{text} is no JSON")


def short(value: Any) -> str:
    """What came, on one line of plain characters and no longer than a message should be."""
    text = str(value[:100] if isinstance(value, str | list) else value)
    text = " ".join(text.encode("unicode_escape").decode().split())
    return text if len(text) <= 80 else text[:77] + "..."


def fault(value: Any, depth: int = 0) -> str | None:
    """What of ``value`` cannot be said in JSON and read back as it was; None where all can."""
    if depth > _MAX_DEPTH:
        return f"is nested deeper than {_MAX_DEPTH}"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "holds half of a surrogate pair, which is no Unicode text"
        return None
    if value is None or isinstance(value, bool | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"holds {value}"
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return "has a key that is no text"
        parts = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        return f"holds a {type(value).__name__}"
    return next((found for part in parts if (found := fault(part, depth + 1))), None)
