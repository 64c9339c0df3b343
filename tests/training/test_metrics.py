"""What the log says."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
from rich.console import Console

from flowalign.training import metrics
from flowalign.types import FlowAlignError, Scores
from tests.training.toy import training


def test_summary_of_scores() -> None:
    nan = math.nan
    values = {"a": torch.tensor([1.0, 3.0, 2.0, 2.0, nan]), "b": torch.tensor([0.0, 1.0, 0.5, 0.5, 1.0])}
    group = torch.tensor([0, 0, 1, 1, 1])
    scores = Scores(
        values, {"a": 1.0, "b": 2.0}, group, torch.arange(5), {"a/part": torch.tensor([nan, 1, nan, 2, 3.0])}
    )
    summary = metrics.summarise_scores(scores, 0.2)
    assert summary["reward_mean"] == pytest.approx((1 + 5 + 3 + 3) / 4)
    assert summary["reward_std"] == pytest.approx(math.sqrt((4 + 4) / 4))
    assert summary["reward/a_mean"] == 2 and summary["reward/b_mean"] == pytest.approx(0.6)
    assert summary["subscore/a/part"] == 2 and summary["invalid_share"] == 0.2
    assert summary["zero_variance_share"] == pytest.approx(3 / 5)


def test_updates_are_merged() -> None:
    merged = metrics.merge_updates([{"x": 1.0, "x_max": 5.0}, None, {"x": 3.0, "x_max": 2.0}])
    assert merged == {"skipped_updates": 1, "x": 2.0, "x_max": 5.0}
    assert metrics.merge_updates([None]) == {"skipped_updates": 1}


def plain():
    return Console(file=io.StringIO(), width=200)


def test_lines_and_plain_terminal(tmp_path) -> None:
    console = plain()
    with metrics.Recorder(tmp_path, 0, training(tmp_path, iterations=3), console=console) as recorder:
        for i in range(3):
            values = {"reward_mean": 0.5 + i, "reward_std": 0.25, "images_per_second": 12.34, "odd": math.nan}
            recorder.write(i, values)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2] and lines[1]["reward_mean"] == 1.5
    assert lines[0]["odd"] is None
    shown = console.file.getvalue().splitlines()
    assert len(shown) == 3
    assert shown[1].startswith("iteration 2/3  reward 1.5000 ± 0.2500  12.3 images/s  0:0")
    assert shown[2].endswith("0:00 left")


def test_a_terminal_gets_a_bar(tmp_path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with metrics.Recorder(tmp_path, 0, training(tmp_path, iterations=2), console=console) as recorder:
        recorder.write(0, {"loss/flow_matching": 0.25, "images_per_second": 3.0})
        recorder.write(1, {"loss/flow_matching": 0.125, "images_per_second": 3.0})
    text = console.file.getvalue()
    assert "2/2" in text and "flow_matching 0.12500" in text and "3.0 images/s" in text


def test_lines_of_an_interrupted_run_are_dropped(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 0}\n{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3, "re')
    with metrics.Recorder(tmp_path, 2, training(tmp_path, iterations=4), console=plain()) as recorder:
        recorder.write(2, {"reward_mean": 1.0, "reward_std": 0.0})
    assert [json.loads(line)["iteration"] for line in file.read_text().splitlines()] == [0, 1, 2]


def test_other_processes_write_nothing(tmp_path) -> None:
    with metrics.Recorder(tmp_path / "x", 0, training(tmp_path), active=False) as recorder:
        recorder.write(0, {"reward_mean": 1.0})
    assert not (tmp_path / "x").exists() and recorder.history == [{"iteration": 0, "reward_mean": 1.0}]


def test_wandb_offline(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = training(tmp_path, iterations=1, log=("wandb",))
    with metrics.Recorder(tmp_path, 0, settings, "a: recipe", console=plain()) as recorder:
        recorder.write(0, {"reward_mean": 1.0, "reward_std": 0.0})
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_unknown_tracker(tmp_path) -> None:
    with pytest.raises(FlowAlignError, match="expected wandb or tensorboard"):
        metrics.Recorder(tmp_path, 0, training(tmp_path, log=("mlflow",)), console=plain())


def test_durations() -> None:
    assert [metrics._duration(s) for s in (0, 61.4, 3599.6, 7325)] == ["0:00", "1:01", "1:00:00", "2:02:05"]
