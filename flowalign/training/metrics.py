"""What a run says of itself: a line per iteration in metrics.jsonl, the terminal, and trackers where asked."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from flowalign.core import advantages, combination
from flowalign.training.settings import TrainingSettings
from flowalign.types import FlowAlignError, Scores

FILE = "metrics.jsonl"


def summarise_scores(scores: Scores, invalid_share: float) -> dict[str, float]:
    """Mean and spread of the weighted sum, of every reward and of every sub-score; nan entries do not count.

    The sum, however the rewards are combined: normalised rewards and ranks have the same mean in every iteration.
    """
    summary = {**_moments("reward", combination.weighted_sum(scores)), "invalid_share": invalid_share}
    total = combination.total(scores)
    summary["zero_variance_share"] = float(advantages.zero_variance(total, scores.group).float().mean())
    if scores.gated is not None:
        summary["gated_share"] = float(scores.gated.float().mean())
    for name, value in scores.values.items():
        summary |= _moments(f"reward/{name}", value)
    for name, value in scores.subscores.items():
        summary[f"subscore/{name}"] = _mean(value)
    return summary


def _mean(value: Tensor) -> float:
    known = value[torch.isfinite(value)].double()
    return float(known.mean()) if known.numel() else math.nan


def _moments(name: str, value: Tensor) -> dict[str, float]:
    known = value[torch.isfinite(value)].double()
    std = float(known.std(correction=0)) if known.numel() else math.nan
    return {f"{name}_mean": _mean(value), f"{name}_std": std}


def merge_updates(updates: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Means over the updates of an iteration, largest value of "_max" metrics, and how many updates had no weight."""
    taken = [update for update in updates if update is not None]
    merged: dict[str, float] = {"skipped_updates": float(len(updates) - len(taken))}
    for name in taken[0] if taken else ():
        values = [update[name] for update in taken]
        merged[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return merged


class Clock:
    """Seconds spent in named phases."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def summary(self, images: int) -> dict[str, float]:
        """Seconds of each phase and of all, and ``images`` per second."""
        phases = {f"seconds/{name}": value for name, value in self.seconds.items()}
        return {**phases, "seconds": self.total, "images_per_second": images / self.total}

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Recorder:
    """Writes metrics. Only the main process writes; on the others every method does nothing.

    Args:
        output: folder of metrics.jsonl.
        start: first iteration; lines of it and later ones, left by an interrupted run, are dropped.
        settings: how many iterations, and which trackers: "wandb" (online, or offline with WANDB_MODE=offline) and
            "tensorboard".
        recipe: text that the trackers keep beside the metrics.
    """

    def __init__(
        self,
        output: Path,
        start: int,
        settings: TrainingSettings,
        recipe: str = "",
        *,
        active: bool = True,
        console: Console | None = None,
    ) -> None:
        self.history: list[dict[str, float]] = []
        self._active, self._iterations, self._file = active, settings.iterations, output / FILE
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._trackers: list[Any] = []
        self._began, self._start = time.perf_counter(), start
        if not active:
            return
        output.mkdir(parents=True, exist_ok=True)
        self._keep_lines_before(start)
        self._trackers = [_tracker(name, output, settings.wandb_project, recipe) for name in settings.log]
        if self._console.is_terminal:
            self._progress = _progress_bar(self._console)
            self._task = self._progress.add_task("", total=self._iterations, completed=start, reward="", speed="")
            self._progress.start()

    def _keep_lines_before(self, start: int) -> None:
        lines = self._file.read_text().splitlines(keepends=True) if self._file.exists() and start else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["iteration"] < start]
        self._file.write_text("".join(kept))

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """One iteration, counted from 0."""
        record = {"iteration": iteration, **metrics}
        self.history.append(record)
        if not self._active:
            return
        with self._file.open("a") as file:
            # JSON has no nan: null says that there was no number.
            file.write(json.dumps({k: v if math.isfinite(v) else None for k, v in record.items()}) + "\n")
        for tracker in self._trackers:
            tracker.log(iteration, metrics)
        self._show(iteration, metrics)

    def _show(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if "reward_mean" in metrics:
            reward = f"reward {metrics['reward_mean']:.4f} ± {metrics['reward_std']:.4f}"
        else:
            reward = "  ".join(
                f"{k.removeprefix('loss/')} {v:.5f}" for k, v in metrics.items() if k.startswith("loss/")
            )
        speed = f"{metrics['images_per_second']:.1f} images/s" if "images_per_second" in metrics else ""
        if self._progress is not None:
            self._progress.update(self._task, completed=iteration + 1, reward=reward, speed=speed)
            return
        done = iteration + 1 - self._start
        left = (time.perf_counter() - self._began) / done * (self._iterations - iteration - 1)
        text = f"iteration {iteration + 1}/{self._iterations}  {reward}  {speed}  {_duration(left)} left"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        for tracker in self._trackers:
            tracker.close()
        self._progress, self._trackers = None, []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("iteration"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[reward]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
    )


def _tracker(name: str, output: Path, project: str, recipe: str) -> Any:
    if name == "wandb":
        return _Wandb(output, project, recipe)
    if name == "tensorboard":
        return _TensorBoard(output, recipe)
    raise FlowAlignError(f"training.log: {name!r} is no tracker; expected wandb or tensorboard")


class _Wandb:
    def __init__(self, output: Path, project: str, recipe: str) -> None:
        import wandb

        try:
            self._run = wandb.init(project=project, dir=str(output), config={"recipe": recipe})
        except wandb.errors.Error as error:
            raise FlowAlignError(
                f"wandb: {error}; log in, set WANDB_MODE=offline, or leave it out of training.log"
            ) from None

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, output: Path, recipe: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise FlowAlignError(
                "training.log: tensorboard is not installed; pip install 'flowalign[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(output / "tensorboard"))
        self._writer.add_text("recipe", f"```yaml\n{recipe}\n```")

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()
