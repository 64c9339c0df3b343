"""What a reward server answers, in JSON: scores that arrive bit for bit, and the spec of a judge.

An answer is ``{scores, subscores, details, spec_digest, request_id, seconds}``; null has no score, and its details say
why. Floats are the shortest decimal numbers that are read back as the same float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowalign.rewards import strict_json
from flowalign.rewards.base import RewardSpec, Scale, Scored, WeightFile
from flowalign.rewards.strict_json import WireError, short

MAX_ANSWER = 32 << 20  # bytes
_KEYS = ("scores", "subscores", "details", "spec_digest", "request_id", "seconds")
_MAX_NESTING = 16


@dataclass(frozen=True)
class Answer:
    """Scores of N samples, and whose they are.

    Args:
        seconds: from the arrival of the request to its answer.
    """

    scored: Scored
    spec_digest: str
    request_id: str
    seconds: float


def write_answer(answer: Answer) -> bytes:
    """The JSON body."""
    scored = answer.scored
    found = {
        "scores": _column(scored.score),
        "subscores": {name: _column(values) for name, values in scored.subscores.items()},
        "details": [_plain(one) for one in scored.details],
        "spec_digest": answer.spec_digest,
        "request_id": answer.request_id,
        "seconds": round(answer.seconds, 6),
    }
    return json.dumps(found, allow_nan=False, separators=(",", ":")).encode()


def _column(values: Tensor) -> list[float | None]:
    return [_decimal(value) for value in values.detach().float().cpu().numpy()]


def _decimal(value: np.float32) -> float | None:
    if not np.isfinite(value):
        return None
    short_one = float(str(value))
    # By way of a double, a decimal could in principle be rounded twice.
    return short_one if np.float32(short_one) == value else float(value)


def _plain(value: Any, depth: int = 0) -> Any:
    """Details as JSON can say them: what is not finite becomes null, and what is no plain data its text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str) or depth == _MAX_NESTING:
        return str(value).encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one, depth + 1) for one in value]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _plain(value.tolist(), depth + 1)
    return _plain(str(value))


def read_answer(body: bytes, count: int) -> Answer:
    """The answer to a request of ``count`` samples.

    Raises:
        WireError: it is cut off, has another number of scores, or is otherwise no answer.
    """
    found = strict_json.parse(body, "the answer")
    if set(found) != set(_KEYS):
        raise WireError(f"the answer holds {short(sorted(found))}, expected {', '.join(_KEYS)}")
    subscores, details = found["subscores"], found["details"]
    if not isinstance(subscores, dict) or not isinstance(details, list):
        raise WireError("the answer's subscores or details are not what they should be")
    if len(details) not in (0, count) or not all(isinstance(one, dict) for one in details):
        raise WireError(f"the answer holds {len(details)} details for {count} samples")
    for key in ("spec_digest", "request_id"):
        if not isinstance(found[key], str):
            raise WireError(f"the answer's {key} is no text")
    if isinstance(found["seconds"], bool) or not isinstance(found["seconds"], int | float):
        raise WireError("the answer's seconds are no number")
    scored = Scored(
        _scores(found["scores"], count, "scores"),
        {name: _scores(values, count, f"sub-scores {name!r}") for name, values in subscores.items()},
        tuple(details),
    )
    return Answer(scored, found["spec_digest"], found["request_id"], float(found["seconds"]))


def _scores(values: Any, count: int, what: str) -> Tensor:
    if not isinstance(values, list) or len(values) != count:
        came = len(values) if isinstance(values, list) else "no"
        raise WireError(f"the answer holds {came} {short(what)} for {count} samples")
    if not all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        raise WireError(f"the answer's {short(what)} are not all numbers or null")
    try:
        column = torch.tensor([math.nan if one is None else float(one) for one in values], dtype=torch.float64).float()
    except OverflowError:
        column = torch.tensor([math.inf])
    if column.isinf().any():
        raise WireError(f"the answer's {short(what)} hold a number beyond float32")
    return column


# ---------------------------------------------------------------- specs


def read_spec(data: Any) -> RewardSpec:
    """The spec in what `RewardSpec.as_dict` gave.

    Raises:
        WireError: it is none.
    """
    known = {field.name: field for field in fields(RewardSpec)}
    if not isinstance(data, dict) or set(data) - set(known):
        raise WireError(f"a spec with unknown keys: {short(data)}; bring both sides to the same version of flowalign")
    if missing := [n for n, f in known.items() if f.default is f.default_factory is MISSING and n not in data]:
        raise WireError(f"a spec without {', '.join(missing)}; bring both sides to the same version of flowalign")
    try:
        low, high = data["native_range"]
        spec = RewardSpec(
            **data
            | {
                "native_range": (-math.inf if low is None else float(low), math.inf if high is None else float(high)),
                "needs": tuple(data.get("needs", ("prompt",))),
                "weights": tuple(WeightFile(**one) for one in data.get("weights", ())),
                "scales": {name: Scale(**one) for name, one in data.get("scales", {}).items()},
            }
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise WireError(f"a spec that cannot be read: {short(error)}") from None
    if not _sound(spec):
        raise WireError(f"a spec with values of the wrong kind: {short(data)}")
    return spec


def _sound(spec: RewardSpec) -> bool:
    texts: Sequence[Any] = (spec.name, spec.description, spec.licence, spec.citation, spec.verified, spec.preprocess)
    return (
        all(isinstance(text, str) for text in texts)
        and spec.modality in ("image", "video")
        and spec.scope in ("pointwise", "groupwise")
        and isinstance(spec.higher_is_better, bool)
        and isinstance(spec.differentiable, bool)
        and set(spec.needs) <= {"prompt", "metadata"}
        and all(isinstance(number, int | float) for scale in spec.scales.values() for number in scale)
    )
