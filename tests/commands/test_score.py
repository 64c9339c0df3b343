"""``flowalign score``: every file is scored or named with a reason."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flowalign import cli
from flowalign.commands import reward_arguments, score, score_files, score_listing, score_sheet
from flowalign.rewards.base import Scored
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError
from tests.commands.media_folder import grey, picture, table
from tests.training.toy import spec

CAPTIONS = ["a red circle", "two blue squares", "a green square left of a red cross"]


def run(path, *options, reward="shapes-verifier", out="") -> int:
    return score.run(cli.parse(["score", str(path), "--reward", reward, "--out", str(out), *options]))


@pytest.fixture
def folder(tmp_path):
    """Three good pictures captioned in three ways, and four that cannot be scored."""
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    picture(folder / "a.png", CAPTIONS[0])
    picture(folder / "b.webp", CAPTIONS[1])
    (folder / "b.txt").write_text(CAPTIONS[1] + "\n")
    picture(folder / "sub" / "c.png", CAPTIONS[2])
    picture(folder / "naked.png", CAPTIONS[0])
    Image.new("RGB", (32, 32)).save(folder / "small.png")
    (folder / "broken.png").write_bytes(b"\x89PNG nothing")
    rows = [("a.png", CAPTIONS[0]), ("./sub/c.png", CAPTIONS[2]), ("gone.png", "a red circle")]
    rows += [("small.png", "a red circle"), ("broken.png", "a red circle")]
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def test_scores_a_folder_and_lists_what_it_cannot(folder, capsys) -> None:
    out = folder / "scores.csv"
    assert run(folder, out=out) == 0
    rows = table(out)
    assert list(rows) == ["a.png", "b.webp", "broken.png", "gone.png", "naked.png", "small.png", "sub/c.png"]
    for name in ("a.png", "b.webp", "sub/c.png"):
        assert float(rows[name]["shapes-verifier"]) > 0.95 and rows[name]["invalid"] == ""
    for name, reason in {
        "naked.png": "no caption",
        "small.png": "32x32",
        "broken.png": "cannot be read",
        "gone.png": "missing",
    }.items():
        assert rows[name]["shapes-verifier"] == "" and reason in rows[name]["invalid"]
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("naked.png  invalid: no caption") for line in printed)
    (line,) = (line.split() for line in printed if line.startswith("shapes-verifier "))
    known = np.array([float(rows[name]["shapes-verifier"]) for name in ("a.png", "b.webp", "sub/c.png")])
    np.testing.assert_allclose(
        [float(v) for v in line[1:5]], [known.mean(), known.std(), known.min(), known.max()], atol=6e-5
    )
    assert line[5:] == ["3", "4"]
    assert not list(folder.glob("*.partial.jsonl")) and not list(folder.glob(".*"))


def test_the_sheet_of_an_earlier_run_is_no_picture_to_score(folder) -> None:
    out = folder / "scores.csv"
    assert run(folder, out=out) == 0
    first = out.read_bytes()
    assert (folder / "scores-best-worst.png").is_file()
    assert run(folder, out=out) == 0
    assert out.read_bytes() == first
    picture(folder / "mine-best-worst.png", CAPTIONS[0])  # of no table
    assert run(folder, out=out) == 0
    assert "mine-best-worst.png" in table(out) and "scores-best-worst.png" not in table(out)


def test_prompt_for_all_and_jsonl(folder) -> None:
    out = folder / "scores.jsonl"
    assert run(folder / "naked.png", "--prompt", CAPTIONS[0], out=out) == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["text"] == CAPTIONS[0] and record["shapes-verifier"] > 0.95 and record["invalid"] is None
    assert record["shapes-verifier/position"] is None  # the caption asks for none


def test_parquet_holds_the_same_as_csv(folder, tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run(folder, out=tmp_path / "s.csv") == run(folder, out=tmp_path / "s.parquet") == 0
    rows = table(tmp_path / "s.csv")
    for record in parquet.read_table(tmp_path / "s.parquet").to_pylist():
        expected = rows[record["file_name"]]
        assert {k: "" if v is None else v for k, v in record.items()} == {
            k: np.float32(v) if "shapes" in k and v else v for k, v in expected.items()
        }


def test_nothing_scored_is_exit_1_and_mistakes_are_refused(tmp_path, folder) -> None:
    assert run(folder / "small.png", "--prompt", "a red circle") == 1
    assert run(folder / "naked.png", "--prompt", "a photo of a cat") == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(FlowAlignError, match="no picture or video in it"):
        run(tmp_path / "empty")
    with pytest.raises(FlowAlignError, match=r"ends in \.csv, \.jsonl or \.parquet"):
        run(folder, out="scores.txt")
    with pytest.raises(FlowAlignError, match="no such folder"):
        run(tmp_path / "none")
    with pytest.raises(FlowAlignError, match="did you mean 'shapes-verifier'"):
        run(folder, reward="shape-verifier")
    with pytest.raises(FlowAlignError, match="frames: 'last', expected first"):
        run(folder, "--frames", "last")
    with pytest.raises(FlowAlignError, match="--device 'gpu'"):
        run(folder, "--device", "gpu")


@pytest.mark.parametrize(("package", "name", "extra"), [("pyarrow", "s.parquet", "parquet"), ("av", "s.csv", "video")])
def test_a_missing_package_is_told_before_anything_is_scored(folder, tmp_path, monkeypatch, package, name, extra):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == package else found(n, *a))
    (folder / "film.mp4").write_bytes(b"0")
    with pytest.raises(FlowAlignError, match=rf"pip install 'flowalign\[{extra}\]'"):
        run(folder, out=tmp_path / name)
    assert not list(tmp_path.glob("s.*"))


def test_a_judge_that_reads_no_text_needs_no_captions(folder, tmp_path) -> None:
    out = tmp_path / "s.csv"
    assert run(folder, out=out, reward="jpeg-compressibility") == 0
    assert table(out)["naked.png"]["invalid"] == ""
    assert run(folder, out=out, reward="jpeg-compressibility,shapes-verifier") == 0
    row = table(out)["naked.png"]
    assert row["jpeg-compressibility"] and not row["shapes-verifier"]
    assert row["invalid"].startswith("shapes-verifier: no caption")


class Recorder:
    """Scores the mean, and keeps what it was shown; ``faults`` maps prompts to what it raises."""

    def __init__(self, faults=None, **changes) -> None:
        self.spec, self.faults, self.seen = replace(spec("recorder"), **changes), faults or {}, []

    def __call__(self, media, prompts, metadata=None) -> Scored:
        self.seen.append((tuple(media.shape), list(prompts), metadata))
        for text in prompts:
            if text in self.faults:
                raise self.faults[text]
        return Scored(media.mean((1, 2, 3, 4)), details=tuple({"reason": "seen"} for _ in prompts))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (ValueError("bad\nsample"), "recorder: bad sample"),
        (FlowAlignError("recorder: no"), "recorder: no"),
        (RuntimeError("shape"), "recorder: RuntimeError: shape"),
    ],
)
def test_a_judge_that_raises_costs_the_culprit_only(tmp_path, fault, reason) -> None:
    rows = grey(tmp_path / "in", [0, 51, 102, 153])
    judge = Judge(Recorder({"2": fault}))
    score_files.score_files(rows, {"recorder": judge}, score_files.Reading())
    np.testing.assert_allclose([row.scores["recorder"] for row in rows], [0, 0.2, np.nan, 0.6], atol=1e-6)
    assert [row.invalid for row in rows] == ["", "", reason, ""]


def test_a_judge_that_is_broken_stops_the_run(tmp_path) -> None:
    rows = grey(tmp_path / "in", [0, 51])
    broken = dict.fromkeys("01", RuntimeError("no kernel image"))
    with pytest.raises(RuntimeError, match="no kernel image"):
        score_files.score_files(rows, {"recorder": Judge(Recorder(broken))}, score_files.Reading())


def test_metadata_reaches_the_judge(tmp_path) -> None:
    reward = Recorder()
    score_files.score_files(grey(tmp_path / "in", [0, 9]), {"recorder": Judge(reward)}, score_files.Reading())
    assert reward.seen == [((2, 1, 3, 8, 8), ["0", "1"], [{"number": 0}, {"number": 1}])]


def test_few_files_are_held_at_a_time(tmp_path, monkeypatch) -> None:
    rows = grey(tmp_path / "in", range(10))
    held: list[int] = []
    alive = 0
    read = score_files.media.read

    def counted(*args, **options):
        nonlocal alive
        import weakref

        media = read(*args, **options)
        alive += 1
        held.append(alive)

        def gone() -> None:
            nonlocal alive
            alive -= 1

        weakref.finalize(media, gone)
        return media

    monkeypatch.setattr(score_files.media, "read", counted)
    monkeypatch.setattr(score_files, "WINDOW_PIXELS", 128)  # two pictures of 8x8
    reward = Recorder()
    score_files.score_files(rows, {"recorder": Judge(reward)}, score_files.Reading())
    assert [len(prompts) for _, prompts, _ in reward.seen] == [2] * 5
    # one window is scored, one waits, and the first of the one after it is what ended that
    assert max(held) <= 5


def test_a_groupwise_judge_sees_whole_groups(tmp_path) -> None:
    rows = grey(tmp_path / "in", [0, 51, 102])
    for row in rows:
        row.text = "same" if row.file != "001.png" else "other"
    reward = Recorder(scope="groupwise")
    score_files.score_files(rows, {"recorder": Judge(reward)}, score_files.Reading(batch_size=1))
    assert [prompts for _, prompts, _ in reward.seen] == [["same", "same"], ["other"]]


def test_captions(tmp_path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("a.png", "b.png", "deep/a.png", "deep/er/a.png", "._a.png"):
        Image.new("L", (8, 8)).save(tmp_path / name)
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": "one\\u2028line", "tag": [1]}\n\n{"file_name": "../x.png", "text": "x"}\n'
        '{"file_name": "b.png", "text": "this"}\n{"file_name": "b.png", "text": "that"}\n'
    )
    (tmp_path / "deep" / "metadata.jsonl").write_text('{"file_name": "er/a.png", "text": "inner"}')
    (tmp_path / "deep" / "a.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "c.tiff").write_bytes(b"II*\0")
    rows = {row.file: row for row in score_listing.list_media(tmp_path, prompt="rest")}
    assert sorted(rows) == ["../x.png", "a.png", "b.png", "c.tiff", "deep/a.png", "deep/er/a.png"]
    assert (rows["a.png"].text, rows["a.png"].metadata) == ("one\u2028line", {"tag": [1]})
    assert rows["deep/er/a.png"].text == "inner" and rows["c.tiff"].text == "rest"
    assert "listed twice" in rows["b.png"].invalid and "outside the folder" in rows["../x.png"].invalid
    assert "a.txt is not UTF-8" in rows["deep/a.png"].invalid
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n{"text": "y"}')
    with pytest.raises(FlowAlignError, match='jsonl:2: expected an object with "file_name"'):
        score_listing.list_media(tmp_path)


def test_parameters() -> None:
    params = reward_arguments.params
    names = ["a", "hpsv2", "hpsv2.1", "m:C"]
    assert params(["a.b=1e-4", "hpsv2.1.path=/x", "m:C.on=true", "hpsv2.path='1'"], names) == {
        "a": {"b": 1e-4},
        "hpsv2": {"path": "1"},
        "hpsv2.1": {"path": "/x"},
        "m:C": {"on": True},
    }
    assert params(["path=/x=y"], ["a"]) == {"a": {"path": "/x=y"}}
    for bad in ("path=/x", "c.path=1", "a.path", "a.=1"):
        with pytest.raises(FlowAlignError, match=r"expected NAME\.KEY=VALUE with NAME one of a, b"):
            params([bad], ["a", "b"])
    with pytest.raises(FlowAlignError, match="given twice"):
        params(["a.b=1", "b=2"], ["a"])


def test_parameters_reach_the_judge(folder, tmp_path) -> None:
    assert run(folder, "--param", "score=strict", out=tmp_path / "s.csv") == 0
    assert table(tmp_path / "s.csv")["a.png"]["shapes-verifier"] == "1.0"
    with pytest.raises(FlowAlignError, match="no parameter 'scor'; did you mean 'score'"):
        run(folder, "--param", "shapes-verifier.scor=strict", out=tmp_path / "s.csv")


def test_the_sheet_shows_the_best_and_the_worst(tmp_path) -> None:
    rows = grey(tmp_path / "in", range(0, 250, 10))
    for i, row in enumerate(rows):
        row.scores["r"] = float("nan") if i == 3 else float(i % 20)
    choice = score_sheet.choose(rows, "r", True)
    assert [row.scores["r"] for row in choice.best] == [19, 18, 17, 16, 15, 14, 13, 12]
    # 3 has no score; 20 to 24 score 0 to 4 again, and come after 0 to 4
    assert [row.file for row in choice.worst] == [f"{i:03d}.png" for i in (20, 0, 21, 1, 22, 2, 23, 24)]
    lower = score_sheet.choose(rows, "r", False)
    assert [row.scores["r"] for row in lower.best] == [0, 0, 1, 1, 2, 2, 3, 4]
    few = score_sheet.choose(rows[:3], "r", True)
    assert len(few.best) == 2 and len(few.worst) == 1, "none twice"
    (tmp_path / "in" / "000.png").unlink()
    score_sheet.write_sheet(tmp_path / "sheet.png", choice, "r")
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("L")).astype(int)
    # the brightest picture is 19, the first tile: 190 of 255, as large as the tile
    tile = pixels[score_sheet.MARGIN + 56 + 34 :, score_sheet.MARGIN :][: score_sheet.SIDE, : score_sheet.SIDE]
    assert np.median(tile) == 190
