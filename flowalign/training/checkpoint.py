"""Everything that a run needs to go on, in one folder that is either whole or not there.

    checkpoints/000010/trainable.safetensors  optimizer.safetensors  state.json  recipe.yaml
                       ema.safetensors  behaviour.safetensors  ... one file for each weight set that the run keeps

A folder is written under a temporary name, flushed to the disk and then renamed. There are no random states to store:
all randomness is keyed by the iteration.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.models.lora import WeightSets
from flowalign.training.distributed import Workers
from flowalign.training.learn import Learner
from flowalign.types import FlowAlignError

FORMAT = "flowalign-checkpoint-2"
READABLE = (FORMAT, "flowalign-checkpoint-1")
"""The first had no weight set but "ema"; a program of its time would overlook the others, hence the new number."""
SUFFIX = ".safetensors"
TRAINABLE, OPTIMIZER, STATE, RECIPE = f"trainable{SUFFIX}", f"optimizer{SUFFIX}", "state.json", "recipe.yaml"


@dataclass(frozen=True)
class Checkpoint:
    """State after ``iteration`` iterations and ``steps`` optimiser steps.

    Args:
        trainable: {parameter name: tensor} of the weights in training.
        optimizer: {"parameter name|state name": tensor}.
        sets: {"ema", "behaviour", ...: {parameter name: tensor}}, all other weights that change in training.
    """

    iteration: int
    steps: int
    trainable: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    sets: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def folder_of(output: Path, iteration: int) -> Path:
    return output / "checkpoints" / f"{iteration:06d}"


def latest(output: str | Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    found = [p for p in Path(output, "checkpoints").glob("*") if p.name.isdigit() and (p / STATE).is_file()]
    return max(found, key=lambda p: int(p.name), default=None)


def save(output: str | Path, checkpoint: Checkpoint, recipe: str = "") -> Path:
    """Writes checkpoints/ITERATION below ``output`` and returns it; replaces one of the same iteration."""
    target = folder_of(Path(output), checkpoint.iteration)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {TRAINABLE: checkpoint.trainable, OPTIMIZER: checkpoint.optimizer}
    tensors |= {name + SUFFIX: tensors for name, tensors in checkpoint.sets.items()}
    for name, values in tensors.items():
        save_file({k: v.detach().cpu().contiguous() for k, v in values.items()}, str(temporary / name))
    (temporary / RECIPE).write_text(recipe, encoding="utf-8")
    state = {
        "format": FORMAT,
        "iteration": checkpoint.iteration,
        "steps": checkpoint.steps,
        "bytes": {p.name: p.stat().st_size for p in sorted(temporary.iterdir())},
    }
    (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    for path in (*temporary.iterdir(), temporary):
        _flush(path)
    if target.exists():
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)
    _flush(target.parent)
    return target


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(folder: str | Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        FlowAlignError: it is torn, or not a checkpoint of this program; names the folder and the file.
    """
    folder = Path(folder)
    state = _state(folder)
    for name, size in state["bytes"].items():
        actual = (folder / name).stat().st_size if (folder / name).is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise FlowAlignError(
                f"checkpoint {folder}: {name} {found}, expected {size} bytes; the copy is torn: use an earlier "
                "checkpoint"
            )
    sets = [name for name in state["bytes"] if name.endswith(SUFFIX) and name not in (TRAINABLE, OPTIMIZER)]
    return Checkpoint(
        iteration=state["iteration"],
        steps=state["steps"],
        trainable=_tensors(folder, TRAINABLE),
        optimizer=_tensors(folder, OPTIMIZER),
        sets={name.removesuffix(SUFFIX): _tensors(folder, name) for name in sets},
    )


def _state(folder: Path) -> dict[str, Any]:
    if not (folder / STATE).is_file():
        what = "no such folder" if not folder.is_dir() else f"no {STATE} in it"
        raise FlowAlignError(f"checkpoint {folder}: {what}; expected a folder like RUN/checkpoints/000010")
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        known = state["format"] in READABLE and isinstance(state["bytes"], dict)
        whole = all(isinstance(state[key], int) for key in ("iteration", "steps"))
    except (ValueError, KeyError, TypeError):
        known = whole = False
    if not (known and whole):
        raise FlowAlignError(
            f"checkpoint {folder}: {STATE} is not of format {FORMAT}; use a checkpoint of this program"
        )
    loaded: dict[str, Any] = state
    return loaded


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    try:
        loaded: dict[str, Tensor] = load_file(str(folder / name))
    except (SafetensorError, OSError) as error:
        raise FlowAlignError(
            f"checkpoint {folder}: {name} cannot be read ({error}); use an earlier checkpoint"
        ) from None
    return loaded


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """State of an optimiser by parameter name; ``names`` in the order of its parameters."""
    state = optimizer.state_dict()["state"]
    return {f"{names[i]}|{key}": torch.as_tensor(value) for i, s in state.items() for key, value in s.items()}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor], where: str
) -> None:
    """The inverse of `optimizer_tensors`.

    Raises:
        FlowAlignError: the state is of other parameters.
    """
    state: dict[int, dict[str, Tensor]] = {}
    index = {name: i for i, name in enumerate(names)}
    for key, value in tensors.items():
        name, _, part = key.rpartition("|")
        if name not in index:
            raise FlowAlignError(
                f"{where}: optimiser state of {name!r}, which this model does not train; use its own recipe"
            )
        state.setdefault(index[name], {})[part] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# ---------------------------------------------------------------- of a run


def claim(output: str | Path, resumed: Path | None, workers: Workers) -> Path:
    """The output folder of a run.

    Raises:
        FlowAlignError: it holds checkpoints of another run.
    """
    folder = Path(output)
    found = latest(folder)
    workers.barrier()  # nobody may write before everybody has looked
    if found is not None and resumed is None:
        raise FlowAlignError(
            f"training.output: {folder} holds {found.name} and perhaps more checkpoints of an earlier run; resume it, "
            "choose another output, or delete the folder"
        )
    return folder


def record(output: Path, iteration: int, learner: Learner, weights: WeightSets, recipe: str, workers: Workers) -> Path:
    """Writes the state of a run after ``iteration`` iterations; the main process does, the others wait."""
    if workers.is_main:
        state = Checkpoint(
            iteration=iteration,
            steps=learner.steps,
            trainable=learner.parameters,
            optimizer=optimizer_tensors(learner.optimizer, list(learner.parameters)),
            sets={name: weights.state_dict(name) for name in learner.sets},
        )
        save(output, state, recipe)
    workers.barrier()
    return folder_of(output, iteration)


def resume(folder: Path, learner: Learner, weights: WeightSets, iterations: int) -> int:
    """Puts a run back to where ``folder`` was written; returns the iterations done.

    Raises:
        FlowAlignError: see `load`; or it is of another model, or has nothing left to do.
    """
    state, where = load(folder), f"checkpoint {folder}"
    if state.iteration >= iterations:
        raise FlowAlignError(
            f"{where}: {state.iteration} iterations are done and training.iterations is {iterations}; raise it to go on"
        )
    if set(state.sets) != set(learner.sets):
        has, needs = (", ".join(sorted(names)) or "none" for names in (state.sets, learner.sets))
        raise FlowAlignError(
            f"{where}: besides the weights in training it has {has}, but this run keeps {needs} (training.ema_decay "
            f"{learner.ema_decay}); resume with its recipe"
        )
    try:
        weights.load(None, state.trainable)
        for name, tensors in state.sets.items():
            weights.load(name, tensors)
    except FlowAlignError as error:
        raise FlowAlignError(f"{where}: {error}") from None
    restore_optimizer(learner.optimizer, list(learner.parameters), state.optimizer, where)
    learner.steps = state.steps
    return state.iteration
