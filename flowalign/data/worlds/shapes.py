"""The shapes world: seeded scenes of coloured shapes, their captions, their 64x64 renders and the splits.

Captions follow GenEval's skills (arXiv 2310.11513) in a closed grammar; ``parse`` is the inverse of ``caption``:

    single    "a circle"                                    colour free
    color     "a red circle"
    counting  "three blue squares" or "three squares"       two to four; without a colour each may have its own
    position  "a red circle left of a blue square"          left of, right of, above, below
    binding   "a red circle and a blue square"

Training scenes never contain a held-out (colour, shape) pair, shape relation or (count, shape), not even where the
caption is silent about it; every held-out prompt contains at least one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

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

HELD_OUT_PAIRS = frozenset({("red", "triangle"), ("green", "cross"), ("blue", "circle"), ("yellow", "square")})
"""(colour, shape) pairs that training never shows: each shape once, with distinct colours."""
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

_MARGIN = 2.0  # pixels between an object and the border
_GAP = 3.0  # pixels between the bounding boxes of two objects
_RADII = {1: (10.0, 14.0), 2: (9.0, 12.0), 3: (8.0, 10.0), 4: (7.5, 9.0)}  # number of objects -> radius range in pixels
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


def _relation_held_out(shape_a: str, relation: str, shape_b: str) -> bool:
    triples = {(shape_a, relation, shape_b), (shape_b, CONVERSE[relation], shape_a)}
    return not HELD_OUT_RELATIONS.isdisjoint(triples)


def is_held_out(spec: SceneSpec) -> bool:
    """Whether a scene asks for a held-out pair, relation or count; such scenes are never trained on.

    Args:
        spec: A scene of the grammar.
    Returns:
        True for scenes of the ``held_out`` split, False for those of ``train``.
    """
    shapes = [obj.shape for obj in spec.objects]
    return (
        any((obj.color, obj.shape) in HELD_OUT_PAIRS for obj in spec.objects)
        or (spec.relation is not None and _relation_held_out(shapes[0], spec.relation, shapes[1]))
        or (spec.skill == "counting" and (len(shapes), shapes[0]) in HELD_OUT_COUNTS)
    )


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
    only a shape, and a model that never saw a shape has no way to learn its name. Small skills (``color`` has only four
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


def signed_distance(shape: str, x: npt.NDArray[np.floating], y: npt.NDArray[np.floating], radius: float) -> FloatArray:
    """Signed distance to a shape's edge, negative inside (exact but for corners, where it is a lower bound).

    Args:
        shape: One of ``SHAPES``.
        x: Offset from the centre to the right, in pixels.
        y: Offset from the centre downwards, in pixels, broadcastable with ``x``.
        radius: Half the width of the bounding box in pixels (squares are drawn at .88 of it, to look equally large).
    Returns:
        Distances in pixels, of the broadcast shape.
    """
    distance: npt.NDArray[np.floating]
    if shape == "circle":
        distance = np.hypot(x, y) - radius
    elif shape == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - 0.88 * radius
    elif shape == "triangle":
        # Upward isosceles: apex (0, -.9 r), base from (-r, .9 r) to (r, .9 r).
        slant = (1.8 * np.abs(x) - (y + 0.9 * radius)) / np.hypot(1.8, 1.0)
        distance = np.maximum(slant, y - 0.9 * radius)
    else:
        near, far = np.minimum(np.abs(x), np.abs(y)), np.maximum(np.abs(x), np.abs(y))
        distance = np.maximum(far - radius, near - 0.36 * radius)
    return np.asarray(distance, np.float32)


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


def _acceptable(spec: SceneSpec, centres: FloatArray, radii: FloatArray) -> bool:
    """Boxes apart, the stated relation clear, and no held-out relation in a training scene."""
    offsets = np.abs(centres[:, None] - centres[None]).max(-1) - radii[:, None] - radii[None]
    if np.any(offsets[np.triu_indices(len(radii), 1)] < _GAP):
        return False
    if spec.skill not in ("position", "binding"):
        return True
    # A triangle's centre of mass, by which relations are judged, lies .3 r below the middle of its box.
    fall = [0.3 * radius if obj.shape == "triangle" else 0.0 for obj, radius in zip(spec.objects, radii, strict=True)]
    dx, dy = float(centres[0, 0] - centres[1, 0]), float(centres[0, 1] + fall[0] - centres[1, 1] - fall[1])
    if spec.relation is not None:
        small, large = sorted((abs(dx), abs(dy)))
        return holds(spec.relation, dx, dy) and large > 1.3 * small + 2.0
    first, second = spec.objects
    shown = next((relation for relation in RELATIONS if holds(relation, dx, dy)), None)
    # A tie between the axes shows no relation; a held-out scene may show what it likes.
    return shown is None or is_held_out(spec) or not _relation_held_out(first.shape, shown, second.shape)


def _place(spec: SceneSpec, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Centres (n, 2) as (x, y) and radii (n,), in pixels, by rejection."""
    count = len(spec.objects)
    while True:
        radii = rng.uniform(*_RADII[count], count).astype(np.float32)
        low = radii[:, None] + _MARGIN
        centres = (low + rng.random((64, count, 2)) * (SIZE - 2 * low)).astype(np.float32)
        for candidate in centres:
            if _acceptable(spec, candidate, radii):
                return candidate, radii


def _free_color(shape: str, rng: np.random.Generator) -> str:
    names = [name for name in COLORS if (name, shape) not in HELD_OUT_PAIRS]
    return names[rng.integers(len(names))]


_PIXELS = np.arange(SIZE, dtype=np.float32) + 0.5


def render(spec: SceneSpec, rng: np.random.Generator) -> FloatArray:
    """Draw a scene, anti-aliased, on a light, nearly grey background.

    Where the caption leaves the colour open, any but a held-out one is drawn; where it leaves the arrangement open, a
    training scene never shows a held-out relation. Nothing touches the border or another object.

    Args:
        spec: A scene of the grammar.
        rng: Source of randomness: background, places, sizes, small changes of colour.
    Returns:
        RGB image (64, 64, 3) in [0, 1].
    """
    background = np.clip(rng.uniform(0.88, 0.98) + rng.uniform(-0.02, 0.02, 3), 0.0, 1.0)
    image = np.broadcast_to(background.astype(np.float32), (SIZE, SIZE, 3)).copy()
    centres, radii = _place(spec, rng)
    for obj, (x, y), radius in zip(spec.objects, centres, radii, strict=True):
        color = np.asarray(COLORS[obj.color or _free_color(obj.shape, rng)]) + rng.normal(0.0, 0.015, 3)
        distance = signed_distance(obj.shape, _PIXELS[None, :] - x, _PIXELS[:, None] - y, float(radius))
        coverage = np.clip(0.5 - distance, 0.0, 1.0)[..., None]
        image += coverage * (np.clip(color, 0.0, 1.0).astype(np.float32) - image)
    return image


def render_many(
    n: int, seed: int, split: Split = "train", weights: Mapping[str, float] | None = None
) -> tuple[npt.NDArray[np.uint8], list[str]]:
    """Many captioned renders, each from its own generator keyed by (seed, index).

    Args:
        n: How many.
        seed: Same arguments, same renders; a longer run begins with the shorter one.
        split: "train" or "held_out".
        weights: Skill -> relative frequency; uniform over the split's skills if None.
    Returns:
        Images (n, 64, 64, 3) uint8 and their captions.
    Raises:
        ValueError: The split is unknown, or a skill with positive weight has no scenes in it.
    """
    if weights is None:
        weights = {skill: 1.0 for skill in SKILLS if _TABLE.get((skill, split))}
    names, total = list(weights), sum(weights.values())
    images = np.empty((n, SIZE, SIZE, 3), np.uint8)
    texts = []
    for index in range(n):
        rng = np.random.default_rng([seed, index])
        spec = sample_spec(rng, str(rng.choice(names, p=[weights[name] / total for name in names])), split)
        images[index] = np.round(render(spec, rng) * 255.0)
        texts.append(caption(spec))
    return images, texts


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


def write_folder(path: str | Path, n: int, seed: int, split: Split = "train") -> None:
    """Write the common dataset folder: PNG files and ``metadata.jsonl`` with {"file_name", "text"} a line.

    Args:
        path: Folder, made if absent.
        n: Number of images.
        seed: Same arguments, same folder.
        split: "train" or "held_out".
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    images, texts = render_many(n, seed, split)
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as lines:
        for index, (image, text) in enumerate(zip(images, texts, strict=True)):
            name = f"{index:06d}.png"
            Image.fromarray(image).save(folder / name)
            lines.write(json.dumps({"file_name": name, "text": text}) + "\n")
