"""What no single key shows: whether the parts of a recipe fit together."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from flowalign.algorithms.flow_dpo import FlowDPOSettings, OfflineFlowDPOSettings
from flowalign.config import explain
from flowalign.config.document import KeyPath, Problem
from flowalign.config.schema import LEARNS_FROM_DATA, PromptSettings, Recipe
from flowalign.data.prompts import WORLD_SOURCES, world_source
from flowalign.rewards import registry
from flowalign.types import FlowAlignError


def reward_problems(data: dict[str, Any]) -> list[Problem]:
    """Names and parameters of rewards, from the raw data, so that they are reported with all other problems.

    Only judges that come with flowalign are imported, and only for the types of their parameters; never a plug-in and
    never a ``module:Class`` of a recipe.
    """
    rewards = data.get("rewards")
    problems = []
    for number, reward in enumerate(rewards if isinstance(rewards, list) else []):
        name = reward.get("name") if isinstance(reward, dict) else None
        if not isinstance(name, str) or not name or reward.get("remote") is not None:
            continue  # the schema says so, or the servers will
        if ":" not in name and name not in registry.BUILT_IN and name not in registry.names():
            others = f"; expected one of {', '.join(registry.names())}, or your own as 'module:Class'"
            reason = f"unknown reward {name!r}{explain.nearest(name, registry.names(), others)}"
            problems.append(Problem(("rewards", number, "name"), reason))
        elif name in registry.BUILT_IN:
            if isinstance(reward.get("params"), dict):
                problems += _parameter_problems(("rewards", number, "params"), name, reward["params"])
            if isinstance(reward.get("scale"), str):
                problems += _scale_problems(("rewards", number, "scale"), name, reward["scale"])
    return problems


def _scale_problems(path: KeyPath, name: str, scale: str) -> list[Problem]:
    scales = registry.load(name).spec.scales  # type: ignore[attr-defined]  # a class that makes a Reward has its spec
    if scale in scales:
        return []
    siblings = f"; {name} has {', '.join(scales) or 'none'}"
    return [Problem(path, f"unknown scale {scale!r}{explain.nearest(scale, list(scales), siblings)}")]


def _parameter_problems(path: KeyPath, name: str, params: dict[str, Any]) -> list[Problem]:
    """``params`` against the signature of the judge's constructor."""
    if not params:
        return []
    try:
        judge = registry.load(name)
    except FlowAlignError:
        return []  # refused when the run is built, with the reason
    accepted = [key for key in inspect.signature(judge).parameters if key != "device"]
    hints = get_type_hints(judge.__init__ if inspect.isclass(judge) else judge, include_extras=True)
    problems = []
    for key, value in params.items():
        if key not in accepted:
            siblings = f"; {name} has {', '.join(accepted) or 'none'}"
            problems.append(Problem((*path, key), f"unknown key{explain.nearest(key, accepted, siblings)}"))
            continue
        try:
            TypeAdapter(hints.get(key, Any)).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            problems += [explain.invalid((*path, key), detail) for detail in error.errors(include_url=False)[:1]]
    return problems


def cross_check(recipe: Recipe) -> list[Problem]:
    """Problems of a recipe whose every key is right by itself."""
    problems = []
    for key in ("output", "wandb_project"):
        if not getattr(recipe.training, key).strip():
            problems.append(Problem(("training", key), "got an empty text, expected a name"))
    if len(set(recipe.training.log)) != len(recipe.training.log):
        problems.append(Problem(("training", "log"), "names a place twice; keep one"))
    if isinstance(recipe.algorithm, LEARNS_FROM_DATA):
        return [*problems, *_learns_from_data(recipe)]
    return [*problems, *_samples_from_prompts(recipe)]


def _learns_from_data(recipe: Recipe) -> list[Problem]:
    algorithm, problems = recipe.algorithm, []
    if recipe.dataset is None:
        what = "preferences" if isinstance(algorithm, OfflineFlowDPOSettings) else "captioned images"
        problems.append(Problem(("dataset",), f"missing section, {algorithm.name} learns from {what}"))
    if recipe.prompts is not None:
        problems.append(Problem(("prompts",), f"{algorithm.name} learns from a dataset and never samples; remove it"))
    if recipe.rewards:
        problems.append(Problem(("rewards",), f"{algorithm.name} learns from a dataset, not from rewards; remove them"))
    if isinstance(algorithm, LEARNS_FROM_DATA) and algorithm.batch_size % algorithm.updates:
        reason = f"{algorithm.batch_size} images do not split evenly over {algorithm.updates} updates"
        problems.append(Problem(("algorithm", "batch_size"), f"{reason}; use a multiple of {algorithm.updates}"))
    return problems


def _samples_from_prompts(recipe: Recipe) -> list[Problem]:
    algorithm, problems = recipe.algorithm, []
    if recipe.dataset is not None:
        problems.append(Problem(("dataset",), f"{algorithm.name} samples from prompts and reads no dataset; remove it"))
    if not recipe.rewards:
        problems.append(Problem(("rewards",), f"missing, {algorithm.name} learns from at least one reward"))
    for name, count in Counter(reward.name for reward in recipe.rewards).items():
        if count > 1:
            problems.append(Problem(("rewards",), f"{name!r} is given {count} times; keep one and adapt its weight"))
    if recipe.rewards and not any(reward.weight for reward in recipe.rewards):
        problems.append(Problem(("rewards",), "every weight is 0: there is nothing to learn; give one a weight"))
    if recipe.prompts is None:
        problems.append(Problem(("prompts",), f"missing section, {algorithm.name} samples from prompts"))
        return problems
    samples = recipe.prompts.per_iteration * recipe.prompts.group_size
    if samples % algorithm.updates:
        factors = f"{recipe.prompts.per_iteration} prompts x group_size {recipe.prompts.group_size} = {samples} samples"
        reason = f"{factors} do not split evenly over algorithm.updates {algorithm.updates}; change one of the three"
        problems.append(Problem(("prompts", "per_iteration"), reason))
    elif isinstance(algorithm, FlowDPOSettings) and recipe.prompts.per_iteration % algorithm.updates:
        groups = f"{recipe.prompts.per_iteration} whole groups do not split evenly over"
        reason = f"{groups} algorithm.updates {algorithm.updates}; change one of the two"
        problems.append(Problem(("prompts", "per_iteration"), reason))
    return [*problems, *_source(recipe.prompts)]


def _source(prompts: PromptSettings) -> list[Problem]:
    """The file is looked for when the run starts; here only whether it can be a source at all."""
    source = prompts.source
    if source.startswith(tuple(f"{known}:" for known in WORLD_SOURCES)):
        try:
            world_source(source)
        except FlowAlignError as error:
            return [Problem(("prompts", "source"), str(error))]
        return []
    if source in WORLD_SOURCES or Path(source).suffix in {".txt", ".jsonl"}:
        return []
    expected = f"got {source!r}, expected {', '.join(WORLD_SOURCES)} or a .txt or .jsonl file"
    return [Problem(("prompts", "source"), expected + explain.nearest(source, WORLD_SOURCES))]
