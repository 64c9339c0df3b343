"""The demo, made small: what it writes, and that it may be run twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flowalign import cli
from flowalign.commands import demo

SMALL = [
    "training.iterations=1",
    "prompts.count=8",
    "prompts.per_iteration=2",
    "prompts.group_size=4",
    "algorithm.num_steps=6",
    "tuning.rank=4",
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPTS", 6)
    monkeypatch.setattr(demo, "STEPS", 4)


@pytest.mark.usefixtures("small")
def test_demo_writes_report_picture_and_lora_and_may_be_run_again(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    for _ in range(2):
        assert cli.main(["demo", "--output", str(output), *SMALL]) == 0
    report = json.loads((output / "report.json").read_text())
    assert {"before", "after", "ci_low", "ci_high", "seconds", "images_per_second"} <= report.keys()
    assert report["ci_low"] <= report["difference"] <= report["ci_high"]
    assert report["difference"] == pytest.approx(report["after"] - report["before"], abs=1e-6)
    assert report["iterations"] == 1
    assert report["prompts"] == 6
    with Image.open(output / "before_after.png") as picture:
        assert picture.width > 6 * 128
    tensors = load_file(output / "lora" / "pytorch_lora_weights.safetensors")
    assert any(bool(torch.any(tensor != 0)) for name, tensor in tensors.items() if "lora_B" in name)


@pytest.mark.usefixtures("small")
def test_demo_refuses_a_misspelt_setting_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--output", str(tmp_path / "demo"), "training.iteration=1"]) == 2
    assert "training.iteration" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
