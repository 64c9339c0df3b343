"""The command line: instant help with an example, one place for errors, exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from flowalign import __version__, cli
from flowalign.types import FlowAlignError

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ["demo", "train", "sample", "score", "rewards", "evaluate", "export"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stands in for flowalign.commands.train; what it does is set by the test as ``module.run``."""
    module = types.ModuleType("flowalign.commands.train")
    module.run = lambda args: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flowalign.commands.train", module)
    return module


def raising(error: BaseException):  # type: ignore[no-untyped-def]
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("arguments", [[], *([c] for c in COMMANDS)], ids=["flowalign", *COMMANDS])
def test_help_loads_nothing_heavy_and_shows_an_example(arguments: list[str]) -> None:
    code = f"""
import sys
from flowalign.cli import main
code = main({[*arguments, "--help"]!r})
heavy = "torch numpy pydantic yaml diffusers transformers accelerate peft wandb rich".split()
print("HEAVY", [m for m in heavy if m in sys.modules])
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    assert "example:\n  flowalign " + (arguments[0] if arguments else "") in done.stdout
    if not arguments:
        assert all(f"    {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_can_be_parsed(name: str) -> None:
    import shlex

    words = shlex.split(cli.EXAMPLES[name])
    assert words[0] == "flowalign"
    assert cli.parse(words[1:]).command == name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flowalign {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dmo"],
        ["train"],
        ["train", "x", "--resum", "--nonsense"],
        ["train", "x", "--resume", "nonsense"],
        ["sample", "m", "--guidance", "0.5"],
        ["sample", "m", "--guidance", "nan"],
        ["sample", "m", "--steps", "0"],
        ["sample", "m", "--seed", "-1"],
        ["sample", "m", "a=b"],
        ["score", "x"],
        ["score", "x", "--reward", "y", "--fps", "0"],
        ["rewards"],
        ["rewards", "show"],
        ["rewards", "serve", "a", "--port", "70000"],
        ["rewards", "serve", "a", "--token", "t", "--token-env", "T"],
        ["evaluate", "m", "--seeds", "0,0"],
        ["evaluate", "m", "--seeds", "0,x"],
        ["evaluate", "m", "--precision", "fp17"],
        ["export", "x"],
        ["export", "x", "--out", "y", "--format", "zip"],
    ],
)
def test_a_usage_error_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert "error: " in err and "Traceback" not in err


def test_overrides_may_stand_on_both_sides_of_an_option() -> None:
    args = cli.parse(["train", "r.yaml", "a.b=1", "--resume", "c=2", "d='x y'"])
    assert (args.recipe, args.overrides, args.resume) == ("r.yaml", ["a.b=1", "c=2", "d='x y'"], True)
    args = cli.parse(["demo", "--output", "out", "a=1"])
    assert (args.output, args.overrides) == ("out", ["a=1"])


def test_values_and_defaults() -> None:
    args = cli.parse(["sample", "m", "--prompt", "a", "--prompt", "b", "--guidance", "1"])
    assert (args.prompt, args.prompts, args.guidance, args.steps, args.seed) == (["a", "b"], None, 1.0, 28, 0)
    assert (args.num_images, args.height, args.width, args.negative, args.precision) == (1, None, None, "", "fp32")
    args = cli.parse(["evaluate", "m", "--lora", "a", "b", "--seeds", "3,5"])
    assert (args.lora, args.seeds, args.count, args.prompts) == (["a", "b"], (3, 5), 128, "shapes:held_out")
    assert cli.parse(["evaluate", "m"]).seeds == (0, 1)
    args = cli.parse(["export", "c", "--out", "o"])
    assert (args.format, args.weights, args.checkpoint) == ("diffusers", "current", "c")


def test_a_mistake_of_the_user_is_told_in_its_own_words(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run = raising(FlowAlignError("model 'x': no such folder; give a path"))  # type: ignore[attr-defined]
    assert cli.main(["train", "r"]) == 2
    assert capsys.readouterr() == ("", "model 'x': no such folder; give a path\n")


def test_a_fault_of_the_program_gives_a_line_and_a_hint(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOWALIGN_DEBUG", raising=False)
    command.run = raising(RuntimeError("shapes\ndiffer"))  # type: ignore[attr-defined]
    assert cli.main(["train", "r"]) == 1
    err = capsys.readouterr().err
    assert err == "flowalign: RuntimeError: shapes differ (set FLOWALIGN_DEBUG=1 to see where it happened)\n"
    monkeypatch.setenv("FLOWALIGN_DEBUG", "1")
    assert cli.main(["train", "r"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "in run" in err and err.endswith("RuntimeError: shapes\ndiffer\n")


def test_ctrl_c(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    command.run = raising(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert cli.main(["train", "r"]) == 130
    assert capsys.readouterr().err == "flowalign: interrupted\n"


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    code = "import sys; from flowalign.cli import main; sys.exit(main(['rewards', 'list']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()  # type: ignore[union-attr]
        assert process.stderr.read() == ""  # type: ignore[union-attr]
    assert process.returncode == 141


def test_the_entry_for_several_processes_is_the_same_command(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("modle: {}\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    results = [
        subprocess.run(
            [sys.executable, *start, str(bad), "x=1"], capture_output=True, text=True, env=environment, cwd=ROOT
        )
        for start in (
            ["recipes/train.py"],
            ["-c", "import sys; from flowalign.cli import main; sys.exit(main())", "train"],
        )
    ]
    assert [r.returncode for r in results] == [2, 2]
    assert results[0].stderr == results[1].stderr
    assert f"{bad}:1: modle: unknown key (did you mean 'model'?)" in results[0].stderr
