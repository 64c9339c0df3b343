"""``flowalign evaluate`` on files."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from PIL import Image

from flowalign import cli
from flowalign.commands import evaluate, score
from tests.models import tiny_sd3


def test_evaluate_writes_a_report_that_score_reads(tmp_path, capsys) -> None:
    model = tiny_sd3.build(tmp_path / "tiny", t5=False)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red\na green\n")
    out = tmp_path / "out"
    args = argparse.Namespace(
        model=str(model),
        lora=[],
        prompts=str(prompts),
        count=2,
        seeds=(0, 3),
        reward="tests.training.toy:ColorReward",
        steps=2,
        guidance=1.5,
        height=None,
        width=None,
        precision="fp32",
        max_sequence_length=None,
        out=str(out),
    )
    assert evaluate.run(args) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["prompts"] == 2 and report["seeds"] == [0, 3]
    found = report["base"]["tests.training.toy:ColorReward"]
    assert found["count"] == 4 and found["invalid"] == 0
    lines = [json.loads(line) for line in (out / "base" / "metadata.jsonl").read_text().splitlines()]
    assert [line["seed"] for line in lines] == [0, 3, 0, 3]
    assert found["mean"] == pytest.approx(np.mean([line["tests.training.toy:ColorReward"] for line in lines]), abs=1e-6)
    assert Image.open(out / "base" / lines[0]["file_name"]).size == (tiny_sd3.SIDE, tiny_sd3.SIDE)
    Image.open(out / "base" / "grid.png").verify()
    rescored = out / "again.jsonl"
    assert score.run(cli.parse(["score", str(out / "base"), "--reward", args.reward, "--out", str(rescored)])) == 0
    again = {r["file_name"]: r for r in map(json.loads, rescored.read_text().splitlines())}
    for line in lines:  # only the rounding of PNG lies between
        assert again[line["file_name"]][args.reward] == pytest.approx(line[args.reward], abs=2 / 255)
    assert "± " in capsys.readouterr().out
