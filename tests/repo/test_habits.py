"""Habits that a reader relies on: sizes, names, safe loading, no leftovers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    f for top in ("flowalign", "reward_models", "recipes", "scripts", "tests") for f in (ROOT / top).rglob("*.py")
)
SHIPPED = [f for f in SOURCES if f.relative_to(ROOT).parts[0] != "tests"]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_files_and_functions_stay_small() -> None:
    large = []
    for file in SOURCES:
        text = file.read_text()
        if text.count("\n") > 400:
            large.append(f"{name_of(file)}: {text.count(chr(10))} lines, at most 400 and better 300")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > 80:
                    large.append(f"{name_of(file)}:{node.lineno} {node.name}: {lines} lines, at most 80 and better 60")
    assert not large


def test_files_are_named_after_what_they_hold() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py", "common.py"}
    assert not [name_of(f) for f in SOURCES if f.name in vague]


def test_every_module_and_public_class_says_what_it_is() -> None:
    silent = []
    for file in SHIPPED:
        tree = ast.parse(file.read_text())
        if not ast.get_docstring(tree):
            silent.append(name_of(file))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{name_of(file)}:{node.lineno} {node.name}")
    assert not silent


def test_nothing_is_ever_unpickled() -> None:
    found = []
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if {n.split(".")[0] for n in names} & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}:
                found.append(f"{name_of(file)}:{node.lineno} imports a pickler")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
                if not safe:
                    found.append(f"{name_of(file)}:{node.lineno} torch.load without weights_only=True")
            allows = isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
            if allows and isinstance(node, ast.keyword):
                found.append(f"{name_of(file)}:{node.value.lineno} allow_pickle")
    assert not found


def test_yaml_constructs_plain_data_only() -> None:
    unsafe = re.compile(r"\byaml\.(load|load_all|unsafe_load|full_load|Loader|FullLoader|UnsafeLoader)\b")
    assert not [name_of(f) for f in SHIPPED if unsafe.search(f.read_text())]


def test_no_error_is_swallowed_and_nothing_is_left_to_do() -> None:
    found = []
    for file in SHIPPED:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.ExceptHandler)
                and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
                and all(isinstance(statement, ast.Pass) for statement in node.body)
            ):
                found.append(f"{name_of(file)}:{node.lineno} swallows every exception")
        if re.search(r"\b(TODO|FIXME|XXX)\b", text):
            found.append(f"{name_of(file)}: an open end")
    assert not found


def test_make_has_the_two_commands_that_a_newcomer_needs() -> None:
    text = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^([\w./-]+)\s*:(?!=)", text, re.M)
    commands = [r for r in rules if not r.startswith(".")]
    assert commands == ["demo", "test"]
    assert re.search(r"^\.PHONY: demo test$", text, re.M)
    for command in commands:
        assert re.search(rf"^#   make {command}\b", text, re.M), "explained at the top"
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & 0o111, "executable"
