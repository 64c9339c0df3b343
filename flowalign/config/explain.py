"""Turns what pydantic finds wrong into sentences for a person: what came, what was expected, the nearest right name."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from flowalign.config.document import KeyPath, Problem
from flowalign.config.schema import Recipe

EXPECTED = {
    "int_type": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text (put it in quotes)",
    "string_too_short": "a text that is not empty",
    "dataclass_type": "a section of keys",
    "dict_type": "a section of keys",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_short": "at least one item",
    "greater_than": "a value > {gt}",
    "greater_than_equal": "a value >= {ge}",
    "less_than": "a value < {lt}",
    "less_than_equal": "a value <= {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
}


def nearest(word: str, names: Iterable[str], otherwise: str = "") -> str:
    """`` (did you mean 'name'?)``, or ``otherwise`` where no name is near."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else otherwise


def shown(value: Any) -> str:
    """A value as a user would recognise it, in a few characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a section of keys"
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + "..." + text[-1]


def _sections(hint: Any) -> list[type]:
    """The settings classes that a type hint speaks of."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [found for argument in typing.get_args(hint) for found in _sections(argument)]


def section_at(path: KeyPath, data: Any) -> type | None:
    """The settings class at a key of a recipe; a union is resolved by the ``name`` in the data; None: not a section."""
    hint: Any = Recipe
    for part in path:
        data = _child(data, part)
        if isinstance(part, str):
            known = {f.name: f.type for f in dataclasses.fields(hint)} if dataclasses.is_dataclass(hint) else {}
            hint = known.get(part)
        sections = _sections(hint)
        if sections and (isinstance(part, int) or not _is_list(hint)):
            hint = next((s for s in sections if isinstance(data, dict) and data.get("name") in _names(s)), sections[0])
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _child(data: Any, part: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(part)
    if isinstance(data, list) and isinstance(part, int) and part < len(data):
        return data[part]
    return None


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _names(section: type) -> tuple[Any, ...]:
    """What the ``name`` of a section of a union may be."""
    return next((typing.get_args(f.type) for f in dataclasses.fields(section) if f.name == "name"), ())


def _all_keys(section: type, prefix: str = "") -> Iterable[str]:
    for f in dataclasses.fields(section):
        yield prefix + f.name
        if not _is_list(f.type):
            for inner in _sections(f.type):
                yield from _all_keys(inner, f"{prefix}{f.name}.")


def _unknown(path: KeyPath, siblings: Sequence[str]) -> Problem:
    key, dotted = str(path[-1]), ".".join(map(str, path))
    elsewhere = sorted({k for k in _all_keys(Recipe) if k.rpartition(".")[2] == key and k not in (key, dotted)})
    if elsewhere and not difflib.get_close_matches(key, siblings, n=1, cutoff=0.8):
        hint = f" (did you mean {' or '.join(map(repr, elsewhere))}?)"
    else:
        hint = nearest(key, siblings, f"; expected one of {', '.join(siblings)}")
    return Problem(path, f"unknown key{hint}")


def invalid(path: KeyPath, error: ErrorDetails) -> Problem:
    """A value of the wrong type or outside its range."""
    value, context = error["input"], error.get("ctx", {})
    kind = error["type"]
    if kind == "too_long":
        return Problem(path, f"got {shown(value)}, expected {context['max_length']}")
    if kind == "missing" and isinstance(path[-1], int):  # too short a list of fixed length
        return Problem(path[:-1], f"got {shown(value)}, expected at least {path[-1] + 1}")
    if kind not in EXPECTED:
        return Problem(path, f"got {shown(value)}: {error['msg']}")
    expected = EXPECTED[kind].format(**{k: shown(v) if isinstance(v, float) else v for k, v in context.items()})
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        hint = nearest(value, [name.strip("'") for name in expected.replace(" or ", ", ").split(", ")])
    return Problem(path, f"got {shown(value)}, expected {expected}{hint}")


def _union(path: KeyPath, error: ErrorDetails, data: Any) -> Problem:
    """The name that chooses among several kinds of section is missing or unknown."""
    if not isinstance(data, dict):
        return Problem(path, f"got {shown(data)}, expected a section of keys")
    names = [n for f in dataclasses.fields(Recipe) if f.name == path[-1] for s in _sections(f.type) for n in _names(s)]
    here, choice = (*path, "name"), f"expected one of {', '.join(names)}"
    if "name" not in data:
        misspelt = difflib.get_close_matches("name", data, n=1, cutoff=0.6)
        if misspelt:
            return Problem((*path, misspelt[0]), "unknown key (did you mean 'name'?)")
        return Problem(here, f"missing key, {choice}")
    return Problem(here, f"got {shown(data['name'])}, {choice}{nearest(str(data['name']), names)}")


def _locate(location: Sequence[str | int], data: Any) -> KeyPath:
    """pydantic's location without the tags of unions that it puts in."""
    unions = {f.name for f in dataclasses.fields(Recipe) if len(_sections(f.type)) > 1}
    path: list[str | int] = []
    for part in location:
        if len(path) == 1 and path[0] in unions and part == _child(data, "name"):
            continue
        path.append(part)
        data = _child(data, part)
    return tuple(path)


def explain(error: ValidationError, data: dict[str, Any]) -> list[Problem]:
    """One problem for each thing that is wrong; a key that is missing because it is misspelt is reported once."""
    problems: list[Problem] = []
    missing: list[KeyPath] = []
    for detail in error.errors(include_url=False):
        path = _locate(detail["loc"], data)
        kind = detail["type"]
        if kind == "unexpected_keyword_argument":
            section = section_at(path[:-1], data)
            siblings = [f.name for f in dataclasses.fields(section)] if section else []
            problems.append(_unknown(path, siblings))
        elif kind == "missing" and isinstance(path[-1], str):
            missing.append(path)
        elif kind.startswith("union_tag"):
            inner = data
            for part in path:
                inner = _child(inner, part)
            problems.append(_union(path, detail, inner))
        elif kind == "value_error":
            problems.append(_own_check(path, detail, data))
        else:
            problems.append(invalid(path, detail))
    for path in missing:
        named = f"(did you mean {path[-1]!r}?)"
        if not any(p.path[:-1] == path[:-1] and p.reason.endswith(named) for p in problems):
            problems.append(Problem(path, "missing key, it has no default"))
    return problems


def _own_check(path: KeyPath, detail: ErrorDetails, data: Any) -> Problem:
    """A settings class refused its values: its message starts with the key that it speaks of."""
    message = detail["msg"].removeprefix("Value error, ")
    key, colon, reason = message.partition(": ")
    section = section_at(path, data)
    if colon and section and key in {f.name for f in dataclasses.fields(section)}:
        return Problem((*path, key), reason)
    return Problem(path, message)
