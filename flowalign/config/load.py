"""Reads recipes: YAML and ``key=value`` into a `Recipe`, or everything that is wrong with them, all at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from flowalign.config import checks, document, explain
from flowalign.config.document import COMMAND_LINE, Document, KeyPath, Problem, RecipeError
from flowalign.config.schema import Recipe

__all__ = ["RecipeError", "dump_recipe", "load_recipe", "recipe_folder", "resolve_recipe_path", "shipped_recipes"]


@cache
def _adapter() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


def recipe_folder() -> Path:
    """The shipped recipes: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """{name such as "shapes/flow_grpo": file} of all shipped recipes."""
    root = recipe_folder()
    files = sorted(f for f in root.rglob("*.yaml") if f.parent.name != "accelerate")
    return {f.relative_to(root).with_suffix("").as_posix(): f for f in files}


def resolve_recipe_path(name: str | Path) -> Path:
    """A recipe by its path, or by its name among the shipped ones.

    Raises:
        RecipeError: there is neither.
    """
    path = Path(name)
    try:
        if path.is_file():
            return path
        if path.is_dir():
            raise RecipeError(f"{path}: is a folder; give a recipe file in it")
    except OSError as error:
        raise RecipeError(
            f"{str(path)[:80]}...: cannot be read ({error.strerror}); give the path of a recipe"
        ) from None
    shipped = shipped_recipes()
    key = path.with_suffix("").as_posix() if path.suffix in {".yaml", ".yml"} else path.as_posix()
    if key in shipped:
        return shipped[key]
    short = key.removeprefix("recipes/")
    hint = explain.nearest(short, shipped, f"; the shipped ones are {', '.join(shipped)}")
    raise RecipeError(f"{name}: there is no such recipe file and no shipped recipe of this name{hint}")


def _assign(data: Any, parts: Sequence[str], value: Any) -> KeyPath:
    """Puts ``value`` at ``parts`` of plain data, making sections on the way.

    Returns:
        the parts with numbers where they count the items of a list.

    Raises:
        LookupError: there is nothing of this kind; the message says why.
    """
    path: list[str | int] = []
    for part in parts:
        where, last = ".".join(map(str, path)), len(path) == len(parts) - 1
        if isinstance(data, list):
            if not (part.isascii() and part.isdecimal()):
                raise LookupError(f"{where} is a list; give the number of an item, counted from 0")
            if int(part) >= len(data):
                raise LookupError(f"{where} is a list of {len(data)} items, counted from 0")
            path.append(int(part))
            if last:
                data[int(part)] = value
            data = data[int(part)]
        elif isinstance(data, dict):
            path.append(part)
            if last:
                data[part] = value
            elif data.get(part) is None:
                data[part] = {}
            data = data[part]
        else:
            raise LookupError(f"{where} is {explain.shown(data)}, which has no keys of its own")
    return tuple(path)


def _override(target: Document, text: str) -> Problem | None:
    """Applies one ``a.b=c``; the value is read as YAML would read it in a file."""
    dotted, equals, raw = text.partition("=")
    parts = dotted.split(".")
    if not equals or "" in parts:
        return Problem((dotted,), f"got {text!r}, expected key=value such as training.seed=1", COMMAND_LINE)
    try:
        value = document.parse(raw)
        if value.problems:
            raise LookupError(value.problems[0].reason)
        path = _assign(target.data, parts, value.data)
    except yaml.YAMLError as error:
        return Problem(tuple(parts), f"got {raw!r}: {document.describe(error)[1]}; put a text in quotes", COMMAND_LINE)
    except LookupError as error:
        return Problem(tuple(parts), str(error), COMMAND_LINE)
    for inside in [key for key in target.lines if key[: len(path)] == path]:
        del target.lines[inside]
    for depth in range(len(path)):
        target.lines.setdefault(path[: depth + 1], COMMAND_LINE)
    return None


def _validate(data: dict[str, Any]) -> tuple[Recipe | None, list[Problem]]:
    try:
        # Strict JSON mode: nothing is converted but whole numbers to floats and lists to tuples.
        return _adapter().validate_json(json.dumps(data), strict=True), []
    except ValidationError as error:
        return None, explain.explain(error, data)


def _report(path: Path, source: Document, problems: Sequence[Problem]) -> RecipeError:
    rows = []
    for problem in problems:
        line = source.line(problem.path) if problem.line is None else problem.line
        where = "command line" if line == COMMAND_LINE else f"{path}:{line}"
        key = ".".join(map(str, problem.path))
        text = ": ".join(filter(None, [where, key, problem.reason])).replace("\n", " ")
        rows.append((line == COMMAND_LINE, line, text))
    return RecipeError("\n".join(dict.fromkeys(text for *_, text in sorted(rows))))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads, overrides and checks a recipe; executes nothing and opens no other file.

    Args:
        path: a recipe file, or the name of a shipped recipe such as "shapes/flow_grpo".
        overrides: ``dotted.key=value``; list items by number, as in ``rewards.0.weight=2``.

    Raises:
        RecipeError: every problem on a line of its own, ``file:line: dotted.key: reason``.
    """
    file = resolve_recipe_path(path)
    source = document.read(file)
    problems = [*source.problems]
    problems += [p for p in (_override(source, text) for text in overrides) if p]
    recipe, found = _validate(source.data)
    problems += found
    problems += checks.reward_problems(source.data)
    if recipe is not None:
        problems += checks.cross_check(recipe)
    if problems or recipe is None:
        raise _report(file, source, problems)
    return recipe


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def dump_recipe(recipe: Recipe) -> str:
    """The recipe with all defaults, as YAML that `load_recipe` reads back to an equal recipe."""
    return document.dump(_listed(dataclasses.asdict(recipe)))
