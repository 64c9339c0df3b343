"""Rewards by name. Names can be listed without importing any model code."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import torch

from flowalign.rewards.base import Reward, RewardSpec
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError

ENTRY_POINTS = "flowalign.rewards"

BUILT_IN = {
    "aesthetic": "reward_models.aesthetic.reward:Aesthetic",
    "background-consistency": "reward_models.consistency.reward:BackgroundConsistency",
    "brightness": "reward_models.pixels.reward:Brightness",
    "clipscore": "reward_models.clipscore.reward:CLIPScore",
    "colour-entropy": "reward_models.pixels.reward:ColourEntropy",
    "cyclereward": "reward_models.cyclereward.reward:CycleReward",
    "geneval": "reward_models.geneval.reward:GenEval",
    "hpsv2": "reward_models.hpsv2.reward:HPSv2",
    "hpsv2.1": "reward_models.hpsv2.reward:HPSv21",
    "hpsv3": "reward_models.hpsv3.reward:HPSv3",
    "imagereward": "reward_models.imagereward.reward:ImageReward",
    "jpeg-compressibility": "reward_models.jpeg.reward:JPEGCompressibility",
    "jpeg-incompressibility": "reward_models.jpeg.reward:JPEGIncompressibility",
    "motion-energy": "reward_models.pixels.reward:MotionEnergy",
    "ocr": "reward_models.ocr.reward:OCR",
    "pickscore": "reward_models.pickscore.reward:PickScore",
    "shapes-verifier": "reward_models.shapes_verifier.reward:ShapesVerifier",
    "sharpness": "reward_models.pixels.reward:Sharpness",
    "subject-consistency": "reward_models.consistency.reward:SubjectConsistency",
    "temporal-flicker": "reward_models.pixels.reward:TemporalFlicker",
    "unifiedreward": "reward_models.unifiedreward.reward:UnifiedReward",
    "unifiedreward-video": "reward_models.unifiedreward.reward:UnifiedRewardVideo",
    "videoalign": "reward_models.videoalign.reward:VideoAlign",
    "vlm-judge": "reward_models.vlm_judge.reward:VLMJudge",
    "vlm-judge-video": "reward_models.vlm_judge.reward:VLMJudgeVideo",
}


def names() -> list[str]:
    """All names that a recipe may use: built in, and those of installed plug-ins."""
    return sorted({*BUILT_IN, *_plugged_in()})


def _plugged_in() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def check_name(name: str) -> None:
    """Refuses a name that cannot be a reward, without importing anything.

    Raises:
        FlowAlignError: the name is unknown; says the nearest one.
    """
    if name not in names() and ":" not in name:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names())}, or 'module:Class'"
        raise FlowAlignError(f"reward {name!r}: unknown name; {hint}")


def load(name: str) -> Callable[..., Reward]:
    """The class behind a name.

    Args:
        name: built in, of an entry point "flowalign.rewards", or "module:Class".

    Raises:
        FlowAlignError: the name is unknown, or its module or class cannot be imported.
    """
    check_name(name)
    target = BUILT_IN.get(name) or _plugged_in().get(name) or name
    module, _, attribute = target.partition(":")
    try:
        loaded: Callable[..., Reward] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise FlowAlignError(
            f"reward {name!r}: {target} cannot be imported ({error}); check module and class"
        ) from error
    return loaded


def create(
    name: str,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
    frames: str = "mean",
    offload: bool = False,
    /,
    **params: Any,
) -> Judge:
    """The reward called ``name`` on ``device``, behind the contract; ``params`` go to its constructor.

    Args:
        batch_size, frames: see `Judge`.
        offload: its weights are on ``device`` during calls only.

    Raises:
        FlowAlignError: see `load`; the constructor has no such parameter; or there is nothing to offload.
    """
    factory = load(name)
    accepted = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        known = [key for key in accepted if key != "device"]
        for key in params:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
                raise FlowAlignError(f"reward {name!r}: no parameter {key!r}; {hint}")
    try:
        reward = factory(device=device, **params)
    except TypeError as error:
        raise FlowAlignError(f"reward {name!r}: {error}; check its params") from error
    return Judge(
        reward,
        frames=frames,
        batch_size=batch_size,
        digest=reward.spec.digest([name, params]),
        offload=device if offload else None,
    )


def specs() -> list[RewardSpec]:
    """Facts about every reward that is built in or plugged in. Imports their modules, but loads no weights."""
    available = sorted({*BUILT_IN, *_plugged_in()})
    return [load(name).spec for name in available]  # type: ignore[attr-defined]  # a class that makes a Reward has its spec
