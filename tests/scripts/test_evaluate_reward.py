"""``scripts/evaluate_reward.py`` on preferences whose right answers are known."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
OWN = '''
import time
from dataclasses import replace
from flowalign.rewards.base import RewardSpec, Scored

class Brightness:
    spec = RewardSpec("brightness", "", "image", True, (0.0, 1.0), False, "MIT", "", "exact", needs=())

    def __init__(self, seconds=0.0, device="cpu"):
        self.seconds = seconds

    def __call__(self, media, prompts, metadata=None):
        time.sleep(self.seconds)
        return Scored(media.mean((1, 2, 3, 4)))

class Darkness(Brightness):
    """The same number, of which less is better."""
    spec = replace(Brightness.spec, name="darkness", higher_is_better=False)
'''


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("evaluate_reward")
    for name in ("evaluate_reward", "evaluate_reward_plots", "own_rewards"):
        sys.modules.pop(name, None)


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """Six preferences between grey pictures; of the last, one file is missing."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for value in (0, 51, 102, 153):
        Image.new("L", (8, 8), value).save(tmp_path / f"{value}.png")
    # brightness differs by 0.2 in all but a tie; it is right in two of three, and half in the tie
    rows = [("a", 51, 0), ("a", 102, 51), ("b", 102, 153), ("c", 0, 0), ("d", 51, 7)]
    lines = [{"prompt": p, "better": f"{x}.png", "worse": f"{y}.png"} for p, x, y in rows]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def run(script, *arguments: str) -> dict:
    assert script.main([*arguments, "--out", "out"]) == 0
    return json.loads(Path("out/report.json").read_text())


def test_accuracy_temperature_and_correlation(script, pairs, capsys) -> None:
    rewards = "own_rewards:Brightness,own_rewards:Darkness"
    report = run(script, "--pairs", "pairs.jsonl", "--reward", rewards)
    # pictures are scored once a prompt: 51, 0 and 102 of a; 102 and 153 of b; 0 of c; 51 and the missing one of d
    assert report["pairs"] == 5 and report["media"] == 8
    bright = report["rewards"]["own_rewards:Brightness"]
    found = bright["accuracy"]
    assert found["mean"] == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert (found["pairs"], found["ties"], found["invalid"], found["prompts"]) == (4, 1, 1, 3)
    # two of three pairs that differ by 0.2 are right: sigmoid(0.2 / T) = 2 / 3
    assert bright["calibration"]["temperature"] == pytest.approx(0.2 / np.log(2), rel=1e-5)
    assert bright["invalid"] == {"no such file": 1}
    dark = report["rewards"]["own_rewards:Darkness"]
    assert dark["accuracy"]["mean"] == pytest.approx(1 - found["mean"])
    assert dark["calibration"]["temperature"] is None and "no better than chance" in dark["calibration"]["reason"]
    np.testing.assert_allclose(report["spearman"], np.ones((2, 2)))
    text = Path("out/report.md").read_text()
    assert "| own_rewards:Brightness | 62.5% |" in text and text in capsys.readouterr().out
    for name in ("calibration-own_rewards_Brightness.png", "correlation.png"):
        with Image.open(f"out/{name}") as plot:
            assert min(plot.size) > 100 and np.unique(np.asarray(plot)).size > 10


def test_votes_weigh_a_preference(script, pairs) -> None:
    lines = [{"prompt": "a", "better": "51.png", "worse": "0.png", "votes": votes} for votes in (0.9, 0.7)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = run(script, "--pairs", "pairs.jsonl", "--reward", "own_rewards:Brightness")
    found = report["rewards"]["own_rewards:Brightness"]["calibration"]
    assert found["temperature"] == pytest.approx(0.2 / np.log(0.8 / 0.2), rel=1e-5)  # 0.8 on average


def test_throughput_is_media_over_seconds(script, pairs) -> None:
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "a", "better": "51.png", "worse": "0.png"}))
    report = run(script, "--pairs", "pairs.jsonl", "--reward", "own_rewards:Brightness", "--param", "seconds=0.1")
    found = report["rewards"]["own_rewards:Brightness"]["throughput"]
    assert found["media"] == 2 and 10 < found["media_per_second"] <= 20
    assert report["threads"] >= 1 and report["device"]


def test_pairs_of_the_shapes_world(script, pairs) -> None:
    report = run(script, "--shapes", "12", "--reward", "shapes-verifier", "--param", "score=strict")
    found = report["rewards"]["shapes-verifier"]["accuracy"]
    assert found["mean"] == 1.0 and found["pairs"] == 12
    assert found["low"] == pytest.approx(0.025 ** (1 / found["prompts"]))
    lines = [json.loads(line) for line in Path("out/shapes/pairs.jsonl").read_text().splitlines()]
    again = script.write_shapes_pairs(Path("again"), 12)
    assert again.read_text() == Path("out/shapes/pairs.jsonl").read_text()
    for side in ("better", "worse"):
        assert (Path("again") / lines[3][side]).read_bytes() == (Path("out/shapes") / lines[3][side]).read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"pairs.jsonl:2: not JSON"),
        ('{"prompt": "a", "better": "x"}', r'pairs.jsonl:2: expected an object with the texts "prompt"'),
        ('{"prompt": "a", "better": "x", "worse": "y", "votes": 0.2}', '"votes" is 0.2'),
        ('{"prompt": "a", "better": "x", "worse": "y", "metadata": 1}', '"metadata" is 1'),
    ],
)
def test_a_malformed_line_is_named(script, pairs, capsys, line, message) -> None:
    good = json.dumps({"prompt": "a", "better": "51.png", "worse": "0.png"})
    Path("pairs.jsonl").write_text(f"{good}\n{line}")
    assert script.main(["--pairs", "pairs.jsonl", "--reward", "jpeg-compressibility"]) == 2
    assert message in capsys.readouterr().err
