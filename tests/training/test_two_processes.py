"""Two processes draw the same samples and end with the same weights as one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowalign.training import checkpoint
from flowalign.training.distributed import launched_count

SCRIPT = Path(__file__).with_name("two_process_run.py")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folders = []
    for processes in (1, 2):
        # The command that a user types, so that it is seen to start as many processes as it says.
        folder = tmp_path_factory.mktemp(f"processes-{processes}")
        launch = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--cpu",
            "--num_machines",
            "1",
            "--dynamo_backend",
            "no",
        ]
        launch += ["--mixed_precision", "no", "--num_processes", str(processes), "--main_process_port", "0"]
        done = subprocess.run([*launch, str(SCRIPT), str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert len(list(folder.glob("rank-*"))) == processes
        folders.append(folder)
    return folders


@pytest.mark.parametrize("name", ["toy", "sd3", "dpo"])
def test_rewards_and_weights_agree(outputs, name: str) -> None:
    records = [[json.loads(line) for line in (f / name / "metrics.jsonl").read_text().splitlines()] for f in outputs]
    assert len(records[0]) == len(records[1]) == 3
    worst = 0.0
    for one, two in zip(*records, strict=True):
        assert one.keys() == two.keys()
        own = ("loss/preference", "better_error") if name == "dpo" else ("kl", "ratio", "loss/policy")
        for key in ("reward_mean", "reward_std", "invalid_share", "zero_variance_share", *own):
            assert two[key] == pytest.approx(one[key], abs=TOLERANCE), key
            worst = max(worst, abs(one[key] - two[key]))
    a, b = (checkpoint.load(checkpoint.latest(f / name)) for f in outputs)
    difference = max(float((a.trainable[k] - b.trainable[k]).abs().max()) for k in a.trainable)
    moved = max(float((a.trainable[k] - a.sets["ema"][k]).abs().max()) for k in a.trainable)
    print(f"{name}: largest difference of metrics {worst:.2e}, of weights {difference:.2e}; weights moved {moved:.2e}")
    assert difference <= TOLERANCE < moved / 10
    assert a.sets.keys() == b.sets.keys() == {"ema"}
    assert all(float((v - b.sets["ema"][k]).abs().max()) <= TOLERANCE for k, v in a.sets["ema"].items())
    assert a.steps == b.steps == 6


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("accelerate launch --cpu --num_processes 3 train.py", 3),
        ("accelerate launch --num-processes=4 --cpu train.py --other 5", 4),
        ("accelerate launch --cpu train.py", None),
    ],
)
def test_processes_that_a_command_line_asks_for(command: str, count: int | None) -> None:
    assert launched_count(command.split()) == count


def test_processes_that_a_configuration_asks_for(tmp_path) -> None:
    config = tmp_path / "two.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    assert launched_count(["accelerate", "launch", "--config_file", str(config), "train.py"]) == 2
    assert launched_count(["accelerate", "launch", f"--config_file={config}", "--num_processes", "5", "x.py"]) == 5
