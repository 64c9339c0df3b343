"""``flowalign score`` that was stopped and is started again: it goes on, and nobody can tell from the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowalign import cli
from flowalign.commands import score_listing, score_table
from flowalign.types import FlowAlignError
from tests.commands import media_folder
from tests.commands.media_folder import grey, table

ROOT = Path(__file__).resolve().parents[2]


def journal(path: Path, restart: bool = False, **settings) -> score_table.Journal:
    return score_table.Journal(path / "s.csv", {"frames": "mean", "rewards": {"r": "abcdefghij"}, **settings}, restart)


def test_a_torn_line_is_forgotten_and_a_damaged_one_is_refused(tmp_path) -> None:
    rows = grey(tmp_path / "in", range(4))
    for row in rows:
        row.scores = {"r": 0.5, "r/part": float("nan")}
    written = journal(tmp_path)
    written.append(rows[:2])
    written.append(rows[2:3])
    written.close(done=False)
    whole = written.path.read_bytes()
    for cut in (1, 20):
        written.path.write_bytes(whole[:-cut])
        again = journal(tmp_path)
        fresh = score_listing.list_media(tmp_path / "in")
        assert [again.recall(row) for row in fresh] == [True, True, False, False]
        assert fresh[0].scores["r"] == 0.5 and np.isnan(fresh[0].scores["r/part"])
        again.append(rows[2:3])
        again.close(done=False)
        assert again.path.read_bytes() == whole, "what was torn is cut off before more is written"
    first, second, third, _ = whole.split(b"\n")
    written.path.write_bytes(b"\n".join([first, second[:-9], third, b""]))
    with pytest.raises(FlowAlignError, match=r"jsonl:2: damaged; begin anew with --restart"):
        journal(tmp_path)
    journal(tmp_path, restart=True).close(done=True)
    assert not written.path.exists()


def test_other_settings_are_refused(tmp_path) -> None:
    journal(tmp_path).close(done=False)
    with pytest.raises(FlowAlignError, match=r"begun with frames 'mean', now it is frames 'min'; .* --restart"):
        journal(tmp_path, frames="min")
    with pytest.raises(FlowAlignError, match=r"rewards 'r \(abcdefgh\)', now it is rewards 'r \(zyxwvuts\)'"):
        journal(tmp_path, rewards={"r": "zyxwvutsrq"})


def test_a_file_that_changed_is_scored_anew(tmp_path) -> None:
    rows = grey(tmp_path / "in", [0, 51])
    kept = journal(tmp_path)
    kept.append(rows)
    Image.new("L", (8, 8), 204).save(tmp_path / "in" / "001.png")
    os.utime(tmp_path / "in" / "001.png", ns=(1, 1))
    kept.close(done=False)
    again = journal(tmp_path)
    assert [again.recall(row) for row in score_listing.list_media(tmp_path / "in")] == [True, False]


SLOW = '''
import time
from flowalign.rewards.base import RewardSpec, Scored

class Slow:
    """The brightness, after a while."""
    spec = RewardSpec("slow", "", "image", True, (0.0, 1.0), False, "Apache-2.0", "", "exact", needs=())

    def __init__(self, seconds=0.0, device="cpu"):
        self.seconds = seconds

    def __call__(self, media, prompts, metadata=None):
        time.sleep(self.seconds)
        return Scored(media.mean((1, 2, 3, 4)))
'''


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals of POSIX")
def test_a_run_that_is_killed_goes_on_and_its_table_is_that_of_one_that_was_not(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("av")
    media_folder.build(tmp_path / "in", pictures=23, videos=4)
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    command = ["score", "in", "--reward", "jpeg-compressibility,shapes-verifier,slow:Slow", "--batch-size", "4"]
    command += ["--param", "slow:Slow.seconds=0.1", "--out"]
    partial = tmp_path / "killed.csv.partial.jsonl"
    start = [sys.executable, "-c", "import sys; from flowalign.cli import main; sys.exit(main())"]
    with subprocess.Popen([*start, *command, "killed.csv"], env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        limit = time.monotonic() + 120
        while not partial.is_file() or partial.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed.csv").exists()
    done = sum(len(json.loads(line)["rows"]) for line in partial.read_bytes().split(b"\n")[1:-1])
    assert 8 <= done < 27
    sys.modules.pop("slow", None)
    assert cli.main([*command, "killed.csv"]) == 0
    assert f"going on: {done} of 27 files are scored already" in capsys.readouterr().err
    assert cli.main([*command, "whole.csv"]) == 0
    assert (tmp_path / "killed.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not partial.exists()
    rows = table(tmp_path / "whole.csv")
    assert len(rows) == 27
    for name, row in rows.items():
        reason = media_folder.ODD.get(name, "")
        assert reason in row["invalid"]
        invalid = reason and reason != "no caption"
        assert bool(row["jpeg-compressibility"]) == (not invalid), "all are scored or listed with the reason"
        if name not in media_folder.ODD:
            assert row["invalid"] == "" and float(row["shapes-verifier"]) > 0.9
    assert rows["odd/strip.png"]["invalid"].startswith("shapes-verifier") and rows["odd/strip.png"]["slow:Slow"]
    # the same picture in 8 and in 16 bits
    grey, deep = (float(rows[f"odd/{name}.png"]["slow:Slow"]) for name in ("grey", "deep"))
    assert grey == pytest.approx(deep, abs=0.5 / 255) and deep < 0.95
