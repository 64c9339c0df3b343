"""The shapes world: seeded scenes of coloured shapes, their captions and the splits.

Captions follow GenEval's skills (arXiv 2310.11513) in a closed grammar; ``parse`` is the inverse of ``caption``:

    single    "a circle"                                    colour free
    color     "a red circle"
    counting  "three blue squares" or "three squares"       two to four; without a colour each may have its own
    position  "a red circle left of a blue square"          left of, right of, above, below
    binding   "a red circle and a blue square"

Training never shows a held-out scene, not even where the caption is silent about it. Held out are all scenes with one
of ``HELD_OUT_RELATIONS`` or ``HELD_OUT_COUNTS``, and half of the scenes with one of ``RARE_PAIRS``.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float32]
Split: TypeAlias = Literal["train", "held_out"]

SIZE = 64
"""Side of every image, in pixels."""
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.16, 0.16),
    "green": (0.15, 0.66, 0.24),
    "blue": (0.14, 0.28, 0.90),
    "yellow": (0.97, 0.83, 0.10),
    "purple": (0.58, 0.17, 0.74),
    "cyan": (0.10, 0.78, 0.86),
}
"""Name -> RGB in [0, 1]."""
SHAPES = ("circle", "square", "triangle", "cross")
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
COUNTS = {2: "two", 3: "three", 4: "four"}
SKILLS = ("single", "color", "counting", "position", "binding")
CONVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
RELATIONS = tuple(CONVERSE)

RARE_PAIRS = frozenset({("red", "triangle"), ("green", "cross"), ("blue", "circle"), ("yellow", "square")})
"""(colour, shape) pairs that training shows in half of their scenes only: each shape once, with distinct colours."""
HELD_OUT_RELATIONS = frozenset(
    {
        ("circle", "left of", "square"),
        ("triangle", "left of", "cross"),
        ("square", "above", "triangle"),
        ("cross", "above", "circle"),
    }
)
"""(shape, relation, shape) that training never shows, in either wording ("b right of a" is "a left of b")."""
HELD_OUT_COUNTS = frozenset({(3, "triangle"), (4, "circle")})
"""(count, shape) that training never shows."""

_NOUNS = {**{shape: shape for shape in SHAPES}, **{plural: shape for shape, plural in PLURALS.items()}}
_NUMBERS = {word: count for count, word in COUNTS.items()}
_ONE = rf"a (?:({'|'.join(COLORS)}) )?({'|'.join(SHAPES)})"
_MANY = rf"({'|'.join(_NUMBERS)}) (?:({'|'.join(COLORS)}) )?({'|'.join(PLURALS.values())})"
_COLORED = rf"a ({'|'.join(COLORS)}) ({'|'.join(SHAPES)})"
_TWO = rf"{_COLORED} (and|{'|'.join(RELATIONS)}) {_COLORED}"
_PATTERNS = tuple(re.compile(pattern) for pattern in (_ONE, _MANY, _TWO))


@dataclass(frozen=True)
class Obj:
    """One requested object; ``color`` None means that any colour will do."""

    shape: str
    color: str | None = None


@dataclass(frozen=True)
class SceneSpec:
    """What a caption asks for: a skill, the objects, and for ``position`` the relation of the first to the second."""

    skill: str
    objects: tuple[Obj, ...]
    relation: str | None = None


def _noun_phrase(obj: Obj) -> str:
    return " ".join(word for word in ("a", obj.color, obj.shape) if word)


def caption(spec: SceneSpec) -> str:
    """The caption of a scene; ``parse`` inverts it.

    Args:
        spec: A scene of the grammar.
    Returns:
        One of the sentences listed in the module's docstring.
    Raises:
        KeyError: The number of objects of a ``counting`` scene is not 2, 3 or 4.
    """
    first = spec.objects[0]
    if spec.skill == "counting":
        words = (COUNTS[len(spec.objects)], first.color, PLURALS[first.shape])
        return " ".join(word for word in words if word)
    if len(spec.objects) == 1:
        return _noun_phrase(first)
    return f"{_noun_phrase(first)} {spec.relation or 'and'} {_noun_phrase(spec.objects[1])}"


def parse(text: str) -> SceneSpec:
    """The scene that a caption asks for; the inverse of ``caption``.

    Args:
        text: A caption of the grammar, in lower case.
    Returns:
        Its scene.
    Raises:
        ValueError: The caption is outside the grammar, or asks for two objects of one colour and shape in relation.
    """
    one, many, two = (pattern.fullmatch(text) for pattern in _PATTERNS)
    if one:
        color, shape = one.groups()
        return SceneSpec("color" if color else "single", (Obj(shape, color),))
    if many:
        number, color, plural = many.groups()
        return SceneSpec("counting", (Obj(_NOUNS[plural], color),) * _NUMBERS[number])
    if two:
        color_a, shape_a, link, color_b, shape_b = two.groups()
        if (color_a, shape_a) != (color_b, shape_b):
            objects = (Obj(shape_a, color_a), Obj(shape_b, color_b))
            return SceneSpec("binding", objects) if link == "and" else SceneSpec("position", objects, link)
    raise ValueError(
        f"caption {text!r} is not of the shapes world, write for instance 'a red circle and a blue square'."
    )


def relation_held_out(shape_a: str, relation: str, shape_b: str) -> bool:
    """Whether a relation of two shapes is held out, in either wording ("b right of a" is "a left of b")."""
    triples = {(shape_a, relation, shape_b), (shape_b, CONVERSE[relation], shape_a)}
    return not HELD_OUT_RELATIONS.isdisjoint(triples)


def is_held_out(spec: SceneSpec) -> bool:
    """Whether a scene is held out; such scenes are never trained on.

    Of the scenes with a rare pair it is the half whose objects have an even checksum, whatever their order and
    relation: two objects that are held out together never meet in training.

    Args:
        spec: A scene of the grammar.
    Returns:
        True for scenes of the ``held_out`` split, False for those of ``train``.
    """
    first = spec.objects[0]
    if spec.skill == "counting" and (len(spec.objects), first.shape) in HELD_OUT_COUNTS:
        return True
    if spec.relation is not None and relation_held_out(first.shape, spec.relation, spec.objects[1].shape):
        return True
    objects = " ".join(sorted(map(_noun_phrase, spec.objects)))
    return has_rare_pair(spec) and zlib.crc32(f"held out {objects}".encode()) % 2 == 0


def has_rare_pair(spec: SceneSpec) -> bool:
    """Whether a scene asks for one of ``RARE_PAIRS``."""
    return any((obj.color, obj.shape) in RARE_PAIRS for obj in spec.objects)


def all_specs(skill: str, split: Split) -> Iterator[SceneSpec]:
    """All scenes of a skill in a split, in a fixed order.

    Args:
        skill: One of ``SKILLS``.
        split: "train" or "held_out".
    Yields:
        Distinct scenes; two-object scenes have different shapes and different colours.
    """
    for spec in _grammar(skill):
        if is_held_out(spec) == (split == "held_out"):
            yield spec


def _grammar(skill: str) -> Iterator[SceneSpec]:
    if skill == "single":
        yield from (SceneSpec(skill, (Obj(shape),)) for shape in SHAPES)
    elif skill == "color":
        yield from (SceneSpec(skill, (Obj(shape, color),)) for color, shape in product(COLORS, SHAPES))
    elif skill == "counting":
        for count, color, shape in product(COUNTS, (None, *COLORS), SHAPES):
            yield SceneSpec(skill, (Obj(shape, color),) * count)
    else:
        pairs = [Obj(shape, color) for color, shape in product(COLORS, SHAPES)]
        for a, b in product(pairs, pairs):
            if a.shape != b.shape and a.color != b.color:
                for relation in RELATIONS if skill == "position" else (None,):
                    yield SceneSpec(skill, (a, b), relation)


_TABLE: dict[tuple[str, str], tuple[SceneSpec, ...]] = {
    (skill, split): tuple(all_specs(skill, split))  # type: ignore[arg-type]  # a literal loop variable reads as str
    for skill, split in product(SKILLS, ("train", "held_out"))
}


def has_scenes(skill: str, split: Split) -> bool:
    """Whether a skill has scenes in a split."""
    return bool(_TABLE.get((skill, split)))


def _check(skill: str, split: str) -> tuple[SceneSpec, ...]:
    if (skill, split) not in _TABLE:
        raise ValueError(f"skill {skill!r}, split {split!r}: expected a skill of {SKILLS} and 'train' or 'held_out'.")
    if not _TABLE[skill, split]:
        raise ValueError(f"skill {skill!r} has no {split} scenes: its caption names no colour, relation or count.")
    return _TABLE[skill, split]


def sample_spec(rng: np.random.Generator, skill: str | None = None, split: Split = "train") -> SceneSpec:
    """Draw a scene: the skill uniformly unless given, then the scene uniformly within the skill.

    Args:
        rng: Source of randomness.
        skill: One of ``SKILLS``, or None.
        split: "train" or "held_out".
    Returns:
        A scene of the split.
    Raises:
        ValueError: The skill or split is unknown, or the skill has no scenes in the split.
    """
    if skill is None:
        names = [name for name in SKILLS if _TABLE.get((name, split))] or ["single"]
        skill = names[rng.integers(len(names))]
    specs = _check(skill, split)
    return specs[rng.integers(len(specs))]


def prompts(split: Split, n: int, seed: int, skills: Sequence[str] | None = None) -> list[str]:
    """Distinct captions, balanced over the skills as far as the skills have enough of them.

    The held-out split covers color, counting, position and binding. ``single`` cannot be held out: its caption names
    only a shape, and a model that never saw a shape has no way to learn its name. Small skills (``color`` has few
    held-out captions) give all that they have, and the others share the rest equally.

    Args:
        split: "train" or "held_out".
        n: How many, at least 1.
        seed: Same arguments, same list.
        skills: Restrict to these; all that the split has if None.
    Returns:
        ``n`` captions in random order; any prefix is about as balanced as the whole.
    Raises:
        ValueError: A skill or the split is unknown or empty, or there are fewer than ``n`` captions.
    """
    if skills is None:
        skills = [skill for skill in SKILLS if skill != "single" or split == "train"]
    rng = np.random.default_rng([seed, n])
    queues = {skill: list(rng.permutation(len(_check(skill, split)))) for skill in skills}
    available = sum(map(len, queues.values()))
    if not 1 <= n <= available:
        raise ValueError(f"n is {n}, but the {split} split has {available} captions of {', '.join(skills)}.")
    chosen: list[str] = []
    while len(chosen) < n:  # one caption a skill in turn; the order within a turn is random
        filled = [skill for skill in queues if queues[skill]]
        for index in rng.permutation(len(filled))[: n - len(chosen)]:
            skill = filled[index]
            chosen.append(caption(_TABLE[skill, split][queues[skill].pop()]))
    return chosen


def holds(relation: str, dx: float, dy: float, threshold: float = 0.0) -> bool:
    """Whether a relation holds; the four exclude each other.

    Args:
        relation: One of ``RELATIONS``, of the first object to the second.
        dx: x of the first minus x of the second, in pixels (x grows to the right).
        dy: y of the first minus y of the second, in pixels (y grows downwards).
        threshold: Least offset along the axis, in pixels.
    Returns:
        True iff the offset has the right sign, exceeds the threshold and exceeds that along the other axis.
    """
    along, across = (dx, dy) if relation in ("left of", "right of") else (dy, dx)
    signed = along if relation in ("right of", "below") else -along
    return signed > threshold and signed > abs(across)


def alter(spec: SceneSpec, rng: np.random.Generator) -> SceneSpec:
    """Change one attribute, so that no image shows both scenes: for wrong captions and preference pairs.

    Args:
        spec: A scene of the grammar.
        rng: Source of randomness: which of the attributes that the caption states (colour, shape, count, relation), and
            its new value.
    Returns:
        A scene of the grammar and the same skill.
    """
    kinds = ["shape"]
    kinds += ["color"] if spec.objects[0].color is not None else []
    kinds += ["count"] if spec.skill == "counting" else []
    kinds += ["relation"] if spec.relation is not None else []
    kind = kinds[rng.integers(len(kinds))]

    def other(values: Sequence[str] | Sequence[int], value: str | int | None) -> Any:
        left = [candidate for candidate in values if candidate != value]
        return left[rng.integers(len(left))]

    if kind == "relation":
        return replace(spec, relation=other(RELATIONS, spec.relation))
    if kind == "count":
        return replace(spec, objects=(spec.objects[0],) * other(list(COUNTS), len(spec.objects)))
    # Two different objects: one of them changes; equal objects (counting): all of them.
    old = spec.objects[rng.integers(len(spec.objects))]
    new = replace(old, shape=other(SHAPES, old.shape))
    if kind == "color":
        new = replace(old, color=other(list(COLORS), old.color))
    if new in spec.objects:
        return alter(spec, rng)  # it would ask for the other object twice
    return replace(spec, objects=tuple(new if obj == old else obj for obj in spec.objects))
