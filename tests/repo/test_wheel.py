"""What is installed is whole: packages, judges, recipes, assets and type information, without a checkout around."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("flowalign", "reward_models", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("flowalign-*.whl")
    return built


def test_a_wheel_holds_what_a_checkout_holds(wheel: Path) -> None:
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = set()
    for top in ("flowalign", "reward_models", "recipes"):
        for file in (ROOT / top).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                name = file.relative_to(ROOT).as_posix()
                expected.add("flowalign/" + name if top == "recipes" else name)
    assert inside == expected
    assert {"flowalign/py.typed", "reward_models/py.typed", "flowalign/recipes/shapes/demo.yaml"} <= inside


def test_an_installed_wheel_finds_its_parts(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    code = """
import json, pathlib, flowalign, reward_models
from flowalign.config.load import load_recipe, shipped_recipes
print(json.dumps({
    "flowalign": flowalign.__file__, "reward_models": reward_models.__file__, "recipes": len(shipped_recipes()),
    "assets": (pathlib.Path(flowalign.__file__).parent / "assets").is_dir(),
    "algorithm": load_recipe("shapes/flow_grpo").algorithm.name, "version": flowalign.__version__,
}))
"""
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["flowalign"].startswith(str(target)) and found["reward_models"].startswith(str(target))
    assert found["recipes"] >= 10 and found["assets"] and found["algorithm"] == "flow_grpo"
    script = subprocess.run(
        [sys.executable, target / "bin" / "flowalign", "--version"], env=environment, capture_output=True, text=True
    )
    assert script.stdout.strip() == f"flowalign {found['version']}", script.stderr
