"""Rewards as commands name them: a list of names, their parameters, and the judges made of both."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import yaml

from flowalign.config import document
from flowalign.rewards import registry
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError


def names(text: str) -> list[str]:
    """Names of a list that is separated by commas, each known.

    Raises:
        FlowAlignError: the list is empty, or a name is unknown.
    """
    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise FlowAlignError(f"--reward {text!r}: holds no name; give one such as pickscore")
    for name in found:
        registry.check_name(name)
    return found


def params(texts: Sequence[str], rewards: Sequence[str]) -> dict[str, dict[str, Any]]:
    """{reward: {parameter: value}} of ``NAME.KEY=VALUE``, or of ``KEY=VALUE`` where there is one reward only.

    Values are read as in recipes: ``1e-4`` is a number, ``true`` a truth value, ``[1, 2]`` a list, the rest is text.

    Raises:
        FlowAlignError: no such reward in ``rewards``, a bad value, or a parameter given twice.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in rewards}
    for text in texts:
        key, equals, value = text.partition("=")
        # Names hold dots themselves ("hpsv2.1"): the longest that fits.
        name = max((n for n in rewards if key.startswith(n + ".")), key=len, default=None)
        if name is None and len(rewards) == 1 and key.isidentifier():
            name, parameter = rewards[0], key
        else:
            parameter = key[len(name) + 1 :] if name is not None else ""
        if name is None or not equals or not parameter.isidentifier():
            raise FlowAlignError(
                f"--param {text!r}: expected NAME.KEY=VALUE with NAME one of {', '.join(rewards)}, such as "
                f"{rewards[0]}.path=/weights"
            )
        if parameter in found[name]:
            raise FlowAlignError(f"--param {text!r}: {parameter} of {name!r} is given twice; keep one")
        found[name][parameter] = _value(text, value)
    return found


def _value(text: str, value: str) -> Any:
    try:
        parsed = document.parse(value)
    except yaml.YAMLError as error:
        raise FlowAlignError(f"--param {text!r}: {document.describe(error)[1]}; quote the value") from None
    if parsed.problems:
        raise FlowAlignError(f"--param {text!r}: {parsed.problems[0].reason}")
    return parsed.data


def default_device(device: str | None) -> str:
    """``device``, or the GPU if there is one.

    Raises:
        FlowAlignError: torch does not know the device, or does not have it.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FlowAlignError(f"--device {device!r}: {reason}; leave it out to take the GPU if there is one") from None
    return device


def judges(
    rewards: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    *,
    device: str,
    batch_size: int = 32,
    frames: str = "mean",
) -> dict[str, Judge]:
    """{name: judge}, with weights loaded.

    Args:
        options: {name: {parameter: value}}; see `params`.
        frames: see `flowalign.rewards.judge.FramePolicy`.

    Raises:
        FlowAlignError: see `flowalign.rewards.registry.create`.
    """
    make_importable(rewards)
    made = {}
    for name in rewards:
        judge = registry.create(name, device, batch_size, **options.get(name, {}))
        made[name] = Judge(judge.reward, frames=frames, batch_size=batch_size, digest=judge.digest)
    return made


def make_importable(rewards: Sequence[str]) -> None:
    """Lets ``module:Class`` name a file of the current folder, which the installed command does not look into.

    It comes last, so that no file lying there can take the place of an installed module.
    """
    if any(":" in name for name in rewards) and not {"", "."} & set(sys.path):
        sys.path.append("")
