"""The signs world: seeded pictures of words on coloured plates, their captions and the splits.

Captions quote what is written, as prompts for text rendering do (Flow-GRPO, arXiv 2505.05470), in a closed grammar;
``parse`` is the inverse of ``caption``:

    word      'a red sign that says "OPEN"'                  one word
    phrase    'a blue plate with "Wet Paint" written on it'  two words, one below the other

A text is in capitals, in lower case or with capital initials, and is drawn as it is quoted; some captions name the
colour of the letters too. Every held-out text has a word that training never shows, made of letters that it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float32]
Split: TypeAlias = Literal["train", "held_out"]

SIZE = 64
"""Side of every image, in pixels."""
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.80, 0.12, 0.13),
    "green": (0.05, 0.45, 0.22),
    "blue": (0.10, 0.25, 0.72),
    "yellow": (0.98, 0.82, 0.12),
    "purple": (0.46, 0.15, 0.60),
    "black": (0.08, 0.08, 0.09),
    "white": (0.98, 0.98, 0.97),
}
"""Name -> RGB in [0, 1], of plates and of letters."""
LETTERS: dict[str, tuple[str, ...]] = {
    "red": ("white", "yellow"),
    "green": ("white", "yellow"),
    "blue": ("white", "yellow"),
    "yellow": ("black", "red", "blue"),
    "purple": ("white", "yellow"),
    "black": ("white", "yellow"),
    "white": ("black", "red", "blue", "green"),
}
"""Colour of a plate -> colours of letters that can be read on it."""
_WORDS = (
    "open exit stop sale taxi bank hotel cafe park market museum garden beach police danger music pizza books free "
    "menu juice quiet slow keys farm water video push fruit honey lunch movie ferry gym wax zebra junk query"
)
_PHRASES = (
    "no entry, wet paint, keep left, bus stop, car park, ice cream, fresh fish, good news, road work, last bus, "
    "hot tea, new menu, toy box, mind gap, two ways, blue room, jazz club, quick wash, red fox, dog walk"
)
_HELD_OUT_WORDS = "closed bakery hostel north yield enter coffee bridge planet silver"
_HELD_OUT_PHRASES = "keep right, shop open, no tents, cold milk, bike path, green lamp"
TEXTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("word", "train"): tuple(_WORDS.split()),
    ("word", "held_out"): tuple(_HELD_OUT_WORDS.split()),
    ("phrase", "train"): tuple(_PHRASES.split(", ")),
    ("phrase", "held_out"): tuple(_HELD_OUT_PHRASES.split(", ")),
}
"""(skill, split) -> texts, in lower case."""
SKILLS = ("word", "phrase")
CASES = (str.upper, str.title, str.lower)
"""How a text may be written."""
WORDINGS = (
    'a {color} sign that says "{text}"',
    'a {color} plate with "{text}" written on it',
    'the text "{text}" on a {color} board',
    'a {color} sign with "{text}" in {ink} letters',
    '"{text}" in {ink} letters on a {color} plate',
)

_NAMES = "|".join(COLORS)
_PATTERNS = tuple(
    re.compile(wording.format(color=f"(?P<color>{_NAMES})", ink=f"(?P<ink>{_NAMES})", text="(?P<text>[^\"]+)"))
    for wording in WORDINGS
)
_WRITTEN = {case(text): key for key, texts in TEXTS.items() for text in texts for case in CASES}


@dataclass(frozen=True)
class SignSpec:
    """What a caption asks for.

    Args:
        text: as it is written, one word or two.
        color: of the plate.
        ink: colour of the letters; None where the caption leaves it open.
        wording: which of ``WORDINGS``.
    """

    text: str
    color: str
    ink: str | None = None
    wording: int = 0


def caption(spec: SignSpec) -> str:
    """The caption of a sign; ``parse`` inverts it."""
    return WORDINGS[spec.wording].format(text=spec.text, color=spec.color, ink=spec.ink)


def parse(text: str) -> SignSpec:
    """The sign that a caption asks for; the inverse of ``caption``.

    Raises:
        ValueError: the caption is outside the grammar, or asks for letters that cannot be read on their plate.
    """
    for wording, pattern in enumerate(_PATTERNS):
        if found := pattern.fullmatch(text):
            spec = SignSpec(**found.groupdict(), wording=wording)
            if spec.text in _WRITTEN and (spec.ink is None or spec.ink in LETTERS[spec.color]):
                return spec
    raise ValueError(
        f"caption {text!r} is not of the signs world, write for instance {caption(SignSpec('OPEN', 'red'))!r}."
    )


def skill(spec: SignSpec) -> str:
    """One of ``SKILLS``."""
    return _WRITTEN[spec.text][0]


def is_held_out(spec: SignSpec) -> bool:
    """Whether a sign is of the ``held_out`` split; such texts are never trained on."""
    return _WRITTEN[spec.text][1] == "held_out"


def all_specs(skill: str, split: Split) -> Iterator[SignSpec]:
    """All signs of a skill in a split, in a fixed order.

    Args:
        skill: one of ``SKILLS``.
        split: "train" or "held_out".
    """
    for text, case, color, (wording, template) in product(TEXTS[skill, split], CASES, COLORS, enumerate(WORDINGS)):
        for ink in LETTERS[color] if "{ink}" in template else (None,):
            yield SignSpec(case(text), color, ink, wording)


@cache
def _table(skill: str, split: Split) -> tuple[SignSpec, ...]:
    if (skill, split) not in TEXTS:
        raise ValueError(f"skill {skill!r}, split {split!r}: expected a skill of {SKILLS} and 'train' or 'held_out'.")
    return tuple(all_specs(skill, split))


def sample_spec(rng: np.random.Generator, skill: str | None = None, split: Split = "train") -> SignSpec:
    """Draw a sign: the skill uniformly unless given, then the sign uniformly within the skill.

    Args:
        rng: source of randomness.
        skill: one of ``SKILLS``, or None.
        split: "train" or "held_out".

    Raises:
        ValueError: the skill or split is unknown.
    """
    specs = _table(SKILLS[rng.integers(len(SKILLS))] if skill is None else skill, split)
    return specs[rng.integers(len(specs))]


def prompts(split: Split, n: int, seed: int, skills: Sequence[str] = SKILLS) -> list[str]:
    """Distinct captions, balanced over the skills as far as the skills have enough of them.

    Args:
        split: "train" or "held_out".
        n: how many, at least 1.
        seed: same arguments, same list.
        skills: restrict to these.

    Returns:
        ``n`` captions in random order; any prefix is about as balanced as the whole.

    Raises:
        ValueError: a skill or the split is unknown, or there are fewer than ``n`` captions.
    """
    rng = np.random.default_rng([seed, n])
    queues = {skill: list(rng.permutation(len(_table(skill, split)))) for skill in skills}
    available = sum(map(len, queues.values()))
    if not 1 <= n <= available:
        raise ValueError(f"n is {n}, but the {split} split has {available} captions of {', '.join(skills)}.")
    chosen: list[str] = []
    while len(chosen) < n:  # one caption a skill in turn; the order within a turn is random
        filled = [skill for skill in queues if queues[skill]]
        for index in rng.permutation(len(filled))[: n - len(chosen)]:
            skill = filled[index]
            chosen.append(caption(_table(skill, split)[queues[skill].pop()]))
    return chosen


def alter(spec: SignSpec, rng: np.random.Generator) -> SignSpec:
    """Another text of the same skill and split, written in the same case: for wrong captions and preference pairs.

    Args:
        spec: a sign of the grammar.
        rng: source of randomness.
    """
    case = next(case for case in CASES if case(spec.text) == spec.text)
    others = [text for text in TEXTS[_WRITTEN[spec.text]] if case(text) != spec.text]
    return replace(spec, text=case(others[rng.integers(len(others))]))
