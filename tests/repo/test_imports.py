"""Who may import whom: the table of the design, read off the syntax trees of all source files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(f for top in ("flowalign", "reward_models", "recipes", "scripts") for f in (ROOT / top).rglob("*.py"))

PURE = {"__future__", "collections", "dataclasses", "enum", "functools", "hashlib", "itertools", "math", "typing"}
"""Standard library of the mathematics: no files, no logging, no time, no random."""
SHARED_BY_FAMILIES = ("flowalign.models.base", "flowalign.models.lora", "flowalign.models.verbosity")
"""Of no family: what every family and the training may use."""
GLOBAL_RANDOM = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"}
GLOBAL_RANDOM_ANYHOW = {"manual_seed", "seed", "rand_like", "randn_like", "randint_like", "set_rng_state"}
"""These cannot take a generator, or change the global one."""


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def module_of(file: Path) -> str:
    return name_of(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, wherever it does, also under TYPE_CHECKING; ``from a import b`` gives a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}:{node.lineno}: write absolute imports"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def files_in(*folders: str) -> list[Path]:
    return [f for f in FILES if name_of(f).startswith(tuple(folder + "/" for folder in folders))]


def offences(files: list[Path], *, forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{name_of(file)}:{line} imports {name}"
        for file in files
        for name, line in imports(file)
        if within(name, *forbidden) and not within(name, *allowed, module_of(file))
    ]


@pytest.mark.parametrize(
    ("folder", "own"),
    [
        ("flowalign/core", ("flowalign.core",)),
        ("flowalign/algorithms", ("flowalign.core", "flowalign.algorithms.base")),
    ],
)
def test_mathematics_and_methods_are_pure(folder: str, own: tuple[str, ...]) -> None:
    found = [
        f"{name_of(file)}:{line} imports {name}"
        for file in files_in(folder)
        for name, line in imports(file)
        if not within(name, "torch", "annotated_types", "flowalign.types", *own) and name.split(".")[0] not in PURE
    ]
    assert not found


def test_mathematics_and_methods_hold_no_modules_and_touch_no_global_random_numbers() -> None:
    found = []
    for file in files_in("flowalign/core", "flowalign/algorithms"):
        for node in ast.walk(ast.parse(file.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Call) else ""
            if isinstance(node, ast.Attribute) and text in ("nn.Module", "torch.nn.Module"):
                found.append(f"{name_of(file)}:{node.lineno} uses nn.Module")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                function = ast.unparse(node.func)
                bare = function.removeprefix("torch.")
                keyed = any(keyword.arg == "generator" for keyword in node.keywords)
                if function.startswith("torch.") and bare in GLOBAL_RANDOM and not keyed:
                    found.append(f"{name_of(file)}:{node.lineno} {function} without a generator")
                if function.startswith("torch.") and bare in GLOBAL_RANDOM_ANYHOW:
                    found.append(f"{name_of(file)}:{node.lineno} {function} uses the global generator")
    assert not found


def test_models_and_judges_know_nothing_of_training() -> None:
    above = ("flowalign.training", "flowalign.algorithms", "flowalign.config", "flowalign.commands", "flowalign.cli")
    assert not offences(files_in("flowalign/models"), forbidden=(*above, "flowalign.rewards", "reward_models"))
    assert not offences(files_in("reward_models"), forbidden=(*above, "flowalign.models"))
    assert not offences(files_in("flowalign/rewards", "flowalign/data"), forbidden=(*above, "flowalign.models"))


def test_families_and_judges_do_not_know_each_other() -> None:
    for file in files_in("flowalign/models"):
        if file.name != "__init__.py" and module_of(file) not in SHARED_BY_FAMILIES:
            assert not offences([file], forbidden=("flowalign.models",), allowed=SHARED_BY_FAMILIES)
    for file in files_in("reward_models"):
        judge = ".".join(module_of(file).split(".")[:2])
        assert not offences([file], forbidden=("reward_models",), allowed=(judge,))


def test_training_knows_protocols_only() -> None:
    assert not offences(
        files_in("flowalign/training"),
        forbidden=(
            "flowalign.algorithms",
            "flowalign.models",
            "flowalign.rewards",
            "reward_models",
            "flowalign.config",
        ),
        allowed=(
            "flowalign.algorithms.base",
            *SHARED_BY_FAMILIES,
            "flowalign.rewards.background",
            "flowalign.rewards.base",
            "flowalign.rewards.combine",
        ),
    )


def test_accelerate_has_one_importer() -> None:
    others = [f for f in FILES if name_of(f) != "flowalign/training/distributed.py"]
    assert not offences(others, forbidden=("accelerate",))


def test_nobody_imports_what_knows_everything() -> None:
    entries = ("flowalign/commands", "flowalign/config/build.py", "flowalign/cli.py", "recipes", "scripts")
    rest = [f for f in FILES if not name_of(f).startswith(entries)]
    assert not offences(rest, forbidden=("flowalign.config.build", "flowalign.cli", "flowalign.commands"))
    # the command line itself is imported by entry points alone
    entries = ("recipes/train.py", "scripts/")
    assert not offences([f for f in FILES if not name_of(f).startswith(entries)], forbidden=("flowalign.cli",))


def test_the_command_line_imports_nothing_heavy() -> None:
    heavy = {name for name, _ in imports(ROOT / "flowalign/cli.py")}
    assert all(
        within(n, "flowalign.__version__", "flowalign.types") or n.split(".")[0] not in {"flowalign", "torch"}
        for n in heavy
    )
    assert not {n.split(".")[0] for n in heavy} & {"pydantic", "yaml", "numpy", "diffusers", "transformers", "rich"}
