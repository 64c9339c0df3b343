"""``flowalign score`` and ``flowalign evaluate`` on files."""

from __future__ import annotations

import argparse
import csv
import json

import numpy as np
import pytest
from PIL import Image

from flowalign.commands import evaluate, score
from flowalign.data.worlds import shapes, shapes_render
from flowalign.types import FlowAlignError
from tests.models import tiny_sd3

CAPTIONS = ["a red circle", "two blue squares", "a green square left of a red cross"]


def picture(path, caption, seed=0):
    pixels = shapes_render.render(shapes.parse(caption), np.random.default_rng(seed))
    Image.fromarray(np.round(np.asarray(pixels) * 255).astype(np.uint8)).save(path)


def arguments(path, **changes):
    return argparse.Namespace(
        **{"path": str(path), "reward": "shapes-verifier", "prompt": None, "out": None, **changes}
    )


@pytest.fixture
def folder(tmp_path):
    """Three good pictures captioned in three ways, and four that cannot be scored."""
    picture(tmp_path / "a.png", CAPTIONS[0])
    picture(tmp_path / "b.webp", CAPTIONS[1])
    (tmp_path / "b.txt").write_text(CAPTIONS[1] + "\n")
    (tmp_path / "sub").mkdir()
    picture(tmp_path / "sub" / "c.png", CAPTIONS[2])
    picture(tmp_path / "naked.png", CAPTIONS[0])
    Image.new("RGB", (32, 32)).save(tmp_path / "small.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    rows = [("a.png", CAPTIONS[0]), ("sub/c.png", CAPTIONS[2]), ("gone.png", "a red circle")]
    rows += [("small.png", "a red circle"), ("broken.png", "a red circle")]
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_scores_a_folder_and_lists_what_it_cannot(folder, capsys) -> None:
    out = folder / "scores.csv"
    assert score.run(arguments(folder, out=str(out))) == 0
    rows = {row["file_name"]: row for row in csv.DictReader(out.open())}
    assert set(rows) == {"a.png", "b.webp", "sub/c.png", "naked.png", "small.png", "broken.png", "gone.png"}
    for name in ("a.png", "b.webp", "sub/c.png"):
        assert float(rows[name]["shapes-verifier"]) > 0.95 and rows[name]["invalid"] == ""
    for name, reason in {
        "naked.png": "no caption",
        "small.png": "32x32 pixels",
        "broken.png": "cannot be read",
        "gone.png": "missing",
    }.items():
        assert rows[name]["shapes-verifier"] == "" and reason in rows[name]["invalid"]
    printed = capsys.readouterr().out
    assert "4 invalid" in printed and ("mean 0.9" in printed or "mean 1.0" in printed)
    assert "naked.png  invalid: no caption" in printed


def test_prompt_for_all_and_jsonl(folder) -> None:
    out = folder / "scores.jsonl"
    assert score.run(arguments(folder / "naked.png", prompt=CAPTIONS[0], out=str(out))) == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["text"] == CAPTIONS[0] and record["shapes-verifier"] > 0.95 and record["invalid"] is None
    assert record["shapes-verifier/position"] is None  # the caption asks for none


def test_nothing_scored_is_exit_1_and_mistakes_are_refused(tmp_path, folder) -> None:
    assert score.run(arguments(folder / "small.png", prompt="a red circle")) == 1
    assert score.run(arguments(folder / "naked.png", prompt="a photo of a cat")) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(FlowAlignError, match="no picture in it"):
        score.run(arguments(tmp_path / "empty"))
    with pytest.raises(FlowAlignError, match=r"ends in \.csv or \.jsonl"):
        score.run(arguments(folder, out="scores.txt"))
    with pytest.raises(FlowAlignError, match="no such folder"):
        score.run(arguments(tmp_path / "none"))
    with pytest.raises(FlowAlignError, match="did you mean 'shapes-verifier'"):
        score.run(arguments(folder, reward="shape-verifier"))


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
    assert score.run(arguments(out / "base", reward=args.reward, out=str(rescored))) == 0
    again = {r["file_name"]: r for r in map(json.loads, rescored.read_text().splitlines())}
    for line in lines:  # only the rounding of PNG lies between
        assert again[line["file_name"]][args.reward] == pytest.approx(line[args.reward], abs=2 / 255)
    assert "± " in capsys.readouterr().out
