"""Reads a YAML text into plain data that remembers where each key stood; executes and constructs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from flowalign.types import FlowAlignError

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
COMMAND_LINE = 0
"""In place of a line number: the value came from the command line."""


class RecipeError(FlowAlignError):
    """One line per problem: ``file:line: dotted.key: reason``."""


class Problem(NamedTuple):
    """What is wrong at a key; ``line`` overrides where the key stands."""

    path: KeyPath
    reason: str
    line: int | None = None


@dataclass(frozen=True)
class Document:
    """``lines``: line of each key or list item, counted from 1, or COMMAND_LINE."""

    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, path: KeyPath) -> int:
        """Where ``path`` stands, or the innermost section around it that is there."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars, so that 1e-4 is a number and ``no`` is not a truth value; no aliases, no deep nesting."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=event.start_mark)
        if self.depth >= MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} levels deep"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", "~nN\0", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+", "-+0123456789", int),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
        lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan") if text[-1].isalpha() else text),
    ),
    "str": (r"", "", str),
}
for _name, (_pattern, _first, _) in _SCALARS.items():
    if _first:
        _initials = ["" if c == "\0" else c for c in _first]
        _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _initials)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that `_Loader` would read as something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump(data: dict[str, Any]) -> str:
    """Plain data to YAML that `parse` reads back to equal data."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def _scalar(node: yaml.ScalarNode, path: KeyPath, into: Document) -> Any:
    kind = node.tag.removeprefix(_TAG)
    if kind not in _SCALARS:
        line = node.start_mark.line + 1
        into.problems.append(Problem(path, f"the tag {node.tag!r} is not allowed in a recipe; remove it", line))
        return None
    *_, convert = _SCALARS[kind]
    text = node.value.lower() if kind == "float" else node.value
    try:
        return convert(text)
    except ValueError:  # more digits than Python converts, or an explicit tag that does not fit
        line = node.start_mark.line + 1
        into.problems.append(Problem(path, f"{node.value[:20]!r}... cannot be read as {kind}", line))
        return None


def _plain(node: yaml.Node, path: KeyPath, into: Document) -> Any:
    """Node to plain data; lines and problems go ``into``."""
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, into)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for position, item in enumerate(node.value):
            into.lines[(*path, position)] = item.start_mark.line + 1
            items.append(_plain(item, (*path, position), into))
        return items
    section: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            into.problems.append(Problem(path, "a key must be a plain word, got a list or a section", line))
            continue
        key: str = key_node.value
        here = (*path, key)
        if key in section:
            into.problems.append(Problem(here, f"given twice, first on line {into.lines[here]}; keep one", line))
            continue
        into.lines[here] = line
        section[key] = _plain(value_node, here, into)
    return section


def parse(text: str) -> Document:
    """YAML text to a document; problems that leave the rest readable stand in ``problems``.

    Raises:
        yaml.YAMLError: not YAML, more than one document, an alias, or nested too deeply.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    finally:
        loader.dispose()
    document = Document(data=None)
    if node is None:
        return document
    data = _plain(node, (), document)
    return Document(data, document.lines, document.problems)


def describe(error: yaml.YAMLError) -> tuple[int, str]:
    """Line (from 1) and one-line reason of a YAML error."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        return (mark.line + 1 if mark else 1), " ".join(str(error.problem or error.context).split())
    return 1, " ".join(str(error).split())[:200]


def read(path: Path) -> Document:
    """A recipe file to a document whose data is a section.

    Raises:
        RecipeError: one sentence: unreadable, too large, not text, not YAML, empty, or no section of keys.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise RecipeError(
                f"{path}: {size:,} bytes are too many for a recipe (at most {MAX_BYTES:,}); is it the right file?"
            )
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); give the path of a recipe") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: is not a text file in UTF-8; give the path of a YAML recipe") from None
    try:
        document = parse(text)
    except yaml.YAMLError as error:
        line, reason = describe(error)
        raise RecipeError(f"{path}:{line}: is not a valid recipe: {reason}") from None
    if document.data is None and not document.problems:
        raise RecipeError(f"{path}:1: is empty; start from a shipped recipe such as shapes/flow_grpo")
    if not isinstance(document.data, dict):
        raise RecipeError(
            f"{path}:1: does not consist of keys and values; start from a shipped recipe such as shapes/flow_grpo"
        )
    return document
