"""GenEval's rules as functions of what a detector found, of Ghosh et al., arXiv 2310.11513, and of the reward that
Flow-GRPO (arXiv 2505.05470) makes of them.

A prompt's metadata lists clauses: ``{"tag", "include": [{"class", "count", "color"?, "position"?: [relation, index]}],
"exclude"?: [{"class", "count"}]}``. A position is that of the clause's objects to those of an earlier clause.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

Rule = Literal["soft", "flow-grpo", "strict", "official"]
RULES: tuple[str, ...] = get_args(Rule)
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")

THRESHOLD = 0.3
COUNTING_THRESHOLD = 0.9
"""Of the tag "counting"."""
MAX_PER_CLASS = 16
_OVERLAP = 0.1  # share of the two boxes' sides by which an offset is shortened before it is judged
_COSINE = 0.5
_CLAUSE_KEYS = {"class", "count", "color", "position"}


@dataclass(frozen=True)
class Detection:
    """One object found in a picture.

    Args:
        score: the detector's confidence, in [0, 1].
        box: left, top, right, bottom in pixels; y grows downwards.
        mask: (H, W), true on the object; None where the detector tells boxes only.
        colour: its name, None where the detector does not tell.
    """

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: npt.NDArray[np.bool_] | None = field(default=None, compare=False, repr=False)
    colour: str | None = None


@dataclass(frozen=True)
class Clause:
    """``count`` objects of a class, of one colour and in relation to those of the clause ``target``, if asked for."""

    label: str
    count: int
    colour: str | None = None
    relation: str | None = None
    target: int = -1


@dataclass(frozen=True)
class Request:
    """What a prompt asks for: all of ``include``, and fewer than each number of ``exclude``."""

    tag: str
    include: tuple[Clause, ...]
    exclude: tuple[tuple[str, int], ...] = ()


class Verdict(NamedTuple):
    """The score of one picture by each rule, and what is wrong with it in words.

    Args:
        soft: mean over partial credits, in [-14, 1].
        flow_grpo: as ``soft``, but with the full credit that the authors' code adds to a wrong position.
        strict: 1 where every number, colour and position is exact, else 0.
        official: 1 where GenEval's own evaluator accepts the picture: at least as many objects as asked for, of which
            the most confident are looked at.
    """

    soft: float
    flow_grpo: float
    strict: float
    official: float
    wrong: tuple[str, ...]

    def by(self, rule: str) -> float:
        """The score by ``rule`` of `RULES`."""
        score: float = getattr(self, rule.replace("-", "_"))
        return score


# ---------------------------------------------------------------- metadata


def read(metadata: Mapping[str, Any] | None, labels: Collection[str], colours: Collection[str]) -> Request:
    """The request of a prompt's metadata.

    Args:
        labels, colours: what the detector can tell; a clause about anything else could never be met.

    Raises:
        ValueError: one sentence says what is missing or unknown.
    """
    if not metadata or "include" not in metadata:
        raise ValueError("the prompt has no GenEval metadata; expected the keys 'tag' and 'include'")
    tag, include, exclude = (metadata.get(key) for key in ("tag", "include", "exclude"))
    if tag not in TAGS:
        raise ValueError(f"metadata: tag is {tag!r}, expected one of {', '.join(TAGS)}")
    if not isinstance(include, Sequence) or isinstance(include, str) or not include:
        raise ValueError(f"metadata: include is {include!r}, expected a list of at least one clause")
    if not isinstance(exclude or [], Sequence) or isinstance(exclude, str):
        raise ValueError(f"metadata: exclude is {exclude!r}, expected a list of clauses")
    clauses = tuple(_clause(one, f"include[{i}]", i, labels, colours) for i, one in enumerate(include))
    fewer = [_clause(one, f"exclude[{i}]", 0, labels, colours) for i, one in enumerate(exclude or [])]
    if any(one.colour is not None for one in fewer):
        raise ValueError("metadata: exclude names a color, expected 'class' and 'count' only")
    return Request(tag, clauses, tuple((one.label, one.count) for one in fewer))


def _clause(one: Any, where: str, index: int, labels: Collection[str], colours: Collection[str]) -> Clause:
    if not isinstance(one, Mapping) or not {"class", "count"} <= set(one) <= _CLAUSE_KEYS:
        raise ValueError(f"metadata: {where} is {one!r}, expected 'class' and 'count', maybe 'color' and 'position'")
    label, count = one["class"], one["count"]
    colour, position = one.get("color"), one.get("position")
    if label not in labels:
        raise ValueError(
            f"metadata: {where} asks for {label!r}, which the detector does not know{_near(label, labels)}"
        )
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_PER_CLASS:
        raise ValueError(f"metadata: {where} has count {count!r}, expected 1 to {MAX_PER_CLASS}")
    if colour is not None and colour not in colours:
        raise ValueError(f"metadata: {where} has color {colour!r}, expected one of {', '.join(colours)}")
    if position is None:
        return Clause(label, count, colour)
    pair = list(position) if isinstance(position, Sequence) and not isinstance(position, str) else []
    known = len(pair) == 2 and pair[0] in RELATIONS and isinstance(pair[1], int) and not isinstance(pair[1], bool)
    if not known or not 0 <= pair[1] < index:
        raise ValueError(
            f"metadata: {where} has position {position!r}, expected one of {', '.join(RELATIONS)} and the index of an "
            "earlier clause of include"
        )
    return Clause(label, count, colour, pair[0], pair[1])


def _near(label: Any, labels: Collection[str]) -> str:
    near = difflib.get_close_matches(str(label), labels, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


# ---------------------------------------------------------------- pictures


def keep(
    found: Sequence[Detection], tag: str, threshold: float = THRESHOLD, counting: float = COUNTING_THRESHOLD
) -> dict[str, list[Detection]]:
    """The objects that count, by class and most confident first: above the threshold, at most 16 a class.

    Args:
        threshold, counting: of all tags but "counting", and of that.
    """
    least = counting if tag == "counting" else threshold
    kept: dict[str, list[Detection]] = {}
    for one in sorted(found, key=lambda d: -d.score):
        if one.score > least and len(kept.get(one.label, ())) < MAX_PER_CLASS:
            kept.setdefault(one.label, []).append(one)
    return kept


def relations(a: Detection, b: Detection) -> set[str]:
    """Where ``a`` is of ``b``: none, one or two of `RELATIONS`.

    The offset of the boxes' centres is shortened along each axis by a tenth of the boxes' sides, and then holds along
    an axis where it is more than half of the whole offset.
    """
    (left, top, right, bottom), (left_b, top_b, right_b, bottom_b) = a.box, b.box
    offset = np.array([left + right - left_b - right_b, top + bottom - top_b - bottom_b]) / 2
    sides = np.array([abs(right - left) + abs(right_b - left_b), abs(bottom - top) + abs(bottom_b - top_b)])
    shortened = np.maximum(np.abs(offset) - _OVERLAP * sides, 0) * np.sign(offset)
    if (np.abs(shortened) < 1e-3).all():
        return set()
    across, down = shortened / np.linalg.norm(offset)
    holds = {"left of": across < -_COSINE, "right of": across > _COSINE, "above": down < -_COSINE}
    return {name for name, true in {**holds, "below": down > _COSINE}.items() if true}


def judge(request: Request, objects: Mapping[str, Sequence[Detection]]) -> Verdict:
    """The verdict on a picture.

    Args:
        objects: what `keep` gives; detections of classes with a colour clause must tell their colours.
    """
    credits, spared, wrong = _exact(request, objects)
    official = _official(request, objects)
    for label, count in request.exclude:
        if (number := len(objects.get(label, ()))) >= count:
            wrong.append(f"expected fewer than {count} {label}, found {number}")
            official = False
    soft = sum(credits) / len(credits)
    flow_grpo = (sum(credits) + spared) / (len(credits) + spared)
    return Verdict(soft, flow_grpo, float(not wrong), float(official), tuple(wrong))


def _exact(request: Request, objects: Mapping[str, Sequence[Detection]]) -> tuple[list[float], int, list[str]]:
    """The partial credits of ``include``, the number of wrong positions, and what is not exact."""
    credits: list[float] = []
    wrong: list[str] = []
    spared = 0
    groups: list[Sequence[Detection] | None] = []
    for clause in request.include:
        found = objects.get(clause.label, ())
        before = len(wrong)
        credits.append(1 - abs(clause.count - len(found)) / clause.count)
        if len(found) != clause.count:
            wrong.append(f"expected {clause.count} {clause.label}, found {len(found)}")
            if clause.colour is not None or clause.relation is not None:
                credits.append(0.0)
        elif clause.colour is not None:
            right = _coloured(found, clause.colour)
            credits.append(1 - abs(clause.count - right) / clause.count)
            if right != clause.count:
                wrong.append(f"expected {clause.count} {clause.colour} {clause.label}, found {right}")
        if clause.relation is not None and len(wrong) == before:
            target = groups[clause.target]
            holds = target is not None and _related(found, clause.relation, target)
            credits.append(float(holds))
            if not holds:
                spared += target is not None
                what = request.include[clause.target].label
                wrong.append(f"expected {clause.label} {clause.relation} {what}, which is not so")
        groups.append(found if len(wrong) == before else None)
    return credits, spared, wrong


def _official(request: Request, objects: Mapping[str, Sequence[Detection]]) -> bool:
    """Whether GenEval's evaluator accepts ``include``."""
    groups: list[Sequence[Detection] | None] = []
    for clause in request.include:
        found = objects.get(clause.label, ())[: clause.count]
        met = len(found) == clause.count
        if met and clause.colour is not None:
            met = _coloured(found, clause.colour) == clause.count
        if met and clause.relation is not None:
            target = groups[clause.target]
            met = target is not None and _related(found, clause.relation, target)
        groups.append(found if met else None)
    return all(group is not None for group in groups)


def _coloured(found: Sequence[Detection], colour: str) -> int:
    return sum(one.colour == colour for one in found)


def _related(found: Sequence[Detection], relation: str, target: Sequence[Detection]) -> bool:
    return all(relation in relations(one, other) for one in found for other in target)
