"""Where prompts come from, and which samples a rank draws in an iteration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from flowalign.core import rng
from flowalign.types import FlowAlignError, Metadata

WORLD_SOURCES = ("shapes:train", "shapes:held_out", "signs:train", "signs:held_out")
SKILLS = {"shapes": ("single", "color", "counting", "position", "binding"), "signs": ("word", "phrase")}
"""Of each world, as its module has them; here, so that a recipe is checked without importing worlds."""
WORLD_COUNT = 256
"""Prompts of a world where the number is left open."""


@dataclass(frozen=True)
class Prompt:
    """A text and whatever else its file says of it (rewards may read it)."""

    text: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class PromptData:
    """Prompts to sample from: ``per_iteration`` prompts with ``group_size`` samples each, over all ranks.

    ``negative`` is the text that guidance steers away from; it is encoded only where a plan has guidance.
    """

    prompts: Sequence[Prompt]
    per_iteration: int
    group_size: int
    negative: str | None = None


def load_prompts(source: str, count: int | None = None, seed: int = 0) -> list[Prompt]:
    """Prompts of a source, each text once.

    Args:
        source: "shapes:train", "shapes:held_out", "signs:train", "signs:held_out", each with ":SKILL+SKILL" behind it
            where only some skills of the world are wanted; or a .txt file (one prompt a line) or a .jsonl file (one
            object a line with "prompt" or "text"; all other keys become metadata).
        count: only so many; of a file, the first of a keyed permutation. None = all (256 of a world).
        seed: same arguments, same prompts.

    Raises:
        FlowAlignError: unknown or unreadable source, empty or duplicate lines, or fewer prompts than ``count``.
    """
    if source.startswith(("shapes:", "signs:")):
        return _of_world(source, WORLD_COUNT if count is None else count, seed)
    path = Path(source)
    if path.suffix not in (".txt", ".jsonl"):
        expected = ", ".join(repr(name) for name in WORLD_SOURCES)
        raise FlowAlignError(f"prompts {source!r}: unknown source; expected {expected}, or a .txt or .jsonl file")
    if not path.is_file():
        raise FlowAlignError(f"prompts {source!r}: no such file; give the path of a .txt or .jsonl file of prompts")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FlowAlignError(f"prompts {source!r}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    parse = _from_json if path.suffix == ".jsonl" else _from_text
    prompts = [parse(line, f"{source}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise FlowAlignError(f"prompts {source!r}: the file holds no prompt; write one prompt a line")
    _refuse_duplicates(prompts, source)
    if count is None:
        return prompts
    if count > len(prompts):
        raise FlowAlignError(f"prompts {source!r}: holds {len(prompts)} prompts, fewer than count {count}; lower count")
    order = torch.randperm(len(prompts), generator=rng.generator(seed, "prompts"))[:count]
    return [prompts[i] for i in sorted(order.tolist())]


def _of_world(source: str, count: int, seed: int) -> list[Prompt]:
    """Captions of a world; those of signs have the text to write as metadata "text", which the judge of text reads."""
    # Here, so that reading a prompt file does not import the worlds.
    from flowalign.data.worlds import shapes, signs

    world, split, skills = world_source(source)
    try:
        if world == "shapes":
            return [Prompt(text) for text in shapes.prompts(split, count, seed, skills or None)]
        texts = signs.prompts(split, count, seed, skills or signs.SKILLS)
        return [Prompt(text, {"text": signs.parse(text).text}) for text in texts]
    except ValueError as error:
        raise FlowAlignError(f"prompts {source!r}: {error}") from None


def world_source(source: str) -> tuple[str, Literal["train", "held_out"], tuple[str, ...]]:
    """World, split and skills of a source; no skills = all.

    Raises:
        FlowAlignError: no such source or skill.
    """
    name, _, listed = source.removeprefix("shapes:").removeprefix("signs:").partition(":")
    world = source.partition(":")[0]
    own = [known for known in WORLD_SOURCES if known.startswith(f"{world}:")]
    if f"{world}:{name}" not in own:
        raise FlowAlignError(f"prompts {source!r}: the {world} world has the sources {' and '.join(own)}")
    skills = tuple(listed.split("+")) if listed else ()
    if unknown := [skill for skill in skills if skill not in SKILLS[world]]:
        known = ", ".join(SKILLS[world])
        raise FlowAlignError(f"prompts {source!r}: no skill {unknown[0]!r}; expected some of {known}, joined by +")
    return world, "train" if name == "train" else "held_out", skills


def _from_text(line: str, where: str) -> Prompt:
    return Prompt(line.strip())


def _from_json(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FlowAlignError(
            f"{where}: not JSON ({error.msg}, column {error.colno}); write one object a line"
        ) from None
    if not isinstance(record, dict):
        raise FlowAlignError(f'{where}: {type(record).__name__} came, expected an object like {{"prompt": "a cat"}}')
    key = "prompt" if "prompt" in record else "text"
    text = record.get(key)
    if not isinstance(text, str) or not text.strip():
        raise FlowAlignError(f'{where}: no text; expected a key "prompt" or "text" with a sentence')
    return Prompt(text.strip(), {k: v for k, v in record.items() if k != key})


def _refuse_duplicates(prompts: Sequence[Prompt], source: str) -> None:
    counts = Counter(prompt.text for prompt in prompts)
    repeated = [text for text, count in counts.items() if count > 1]
    if repeated:
        raise FlowAlignError(
            f"prompts {source!r}: {len(repeated)} prompts occur more than once, the first is {repeated[0]!r}; a "
            "prompt's samples form one group, so write each prompt once"
        )


class SampleId(NamedTuple):
    """One sample of an iteration: which prompt, which of its repeats, and where it stands in the global order."""

    prompt: int
    repeat: int
    position: int


class KRepeatSampler:
    """Every prompt of an iteration exactly ``group_size`` times over all ranks; a function of its arguments only.

    The m prompts of an iteration are the next m of a keyed permutation of all prompts: an epoch shows each prompt at
    most once, and what an epoch leaves over after its last whole iteration differs from epoch to epoch. The n = m K
    samples are shuffled by a key; position j belongs to rank j mod W, so update u of U learns from positions
    [u n/U, (u+1) n/U), the same samples whatever W. With ``whole_groups`` it is prompts that are dealt out: prompt i
    of the m belongs to rank i mod W with all of its samples, and update u learns from prompts [u m/U, (u+1) m/U).

    Args:
        num_prompts: prompts in all.
        per_iteration: m.
        group_size: K.
        world_size: W.
        seed: of both permutations.
        updates: U.
        whole_groups: all samples of a prompt belong to one rank.

    Raises:
        FlowAlignError: more prompts an iteration than there are, or n (with ``whole_groups``: m) not divisible by U W.
    """

    def __init__(
        self,
        num_prompts: int,
        per_iteration: int,
        group_size: int,
        world_size: int,
        seed: int,
        *,
        updates: int = 1,
        whole_groups: bool = False,
    ) -> None:
        if min(num_prompts, per_iteration, group_size, world_size, updates) < 1:
            raise ValueError("KRepeatSampler: all of its sizes must be at least 1")
        if per_iteration > num_prompts:
            raise FlowAlignError(
                f"prompts.per_iteration: {per_iteration} prompts an iteration, but there are only {num_prompts}; use "
                f"{num_prompts} or fewer, or give more prompts"
            )
        parts, samples = updates * world_size, per_iteration * group_size
        if whole_groups and per_iteration % parts:
            several = _nearest(per_iteration, lambda m: m % parts == 0, num_prompts)
            raise FlowAlignError(
                f"prompts: per_iteration {per_iteration} groups do not split evenly over {updates} updates x "
                f"{world_size} processes; the nearest that do: {several or f'{parts}, with as many prompts'}"
            )
        if samples % parts:
            several = _nearest(per_iteration, lambda m: m * group_size % parts == 0, num_prompts)
            sizes = _nearest(group_size, lambda k: k >= 2 and per_iteration * k % parts == 0, None)
            ways = [f"per_iteration {several}"] * bool(several) + [f"group_size {sizes}"] * bool(sizes)
            raise FlowAlignError(
                f"prompts: per_iteration {per_iteration} x group_size {group_size} = {samples} samples do not split "
                f"evenly over {updates} updates x {world_size} processes; the nearest that do: {', or '.join(ways)}"
            )
        self.num_prompts, self.per_iteration, self.group_size = num_prompts, per_iteration, group_size
        self.world_size, self.seed, self.whole_groups = world_size, seed, whole_groups

    def samples(self, iteration: int, rank: int) -> list[SampleId]:
        """What ``rank`` samples in ``iteration``, in the order of positions."""
        m, k = self.per_iteration, self.group_size
        epoch, turn = divmod(iteration, self.num_prompts // m)
        order = torch.randperm(self.num_prompts, generator=rng.generator(self.seed, "epoch", epoch))
        prompts = order[turn * m : (turn + 1) * m].tolist()
        if self.whole_groups:
            own = [(prompt, repeat) for prompt in prompts[rank :: self.world_size] for repeat in range(k)]
            return [SampleId(*pair, block * self.world_size + rank) for block, pair in enumerate(own)]
        shuffled = torch.randperm(m * k, generator=rng.generator(self.seed, "shuffle", iteration)).tolist()
        return [SampleId(prompts[shuffled[j] // k], shuffled[j] % k, j) for j in range(rank, m * k, self.world_size)]


def _nearest(value: int, valid: Callable[[int], bool], high: int | None) -> str:
    """The valid numbers next below and next above ``value``, as text; "" if there are none."""
    below = next((str(v) for v in range(value - 1, 0, -1) if valid(v)), None)
    above = next((str(v) for v in range(value + 1, 64 * value + 4096 if high is None else high + 1) if valid(v)), None)
    return " or ".join(v for v in (below, above) if v)
