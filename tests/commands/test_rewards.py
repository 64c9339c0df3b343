"""``flowalign rewards``: what is listed, shown, checked and served."""

from __future__ import annotations

import json
import os
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from flowalign import cli
from flowalign.rewards import registry
from flowalign.rewards.base import RewardSpec

GOOD = '''
from flowalign.rewards.base import RewardSpec, Scored

class Brightness:
    spec = RewardSpec("brightness", "", "image", True, (0.0, 1.0), True, "MIT", "", "exact", needs=())

    def __init__(self, power: int = 2, device="cpu"):
        self.power = power

    def __call__(self, media, prompts, metadata=None):
        return Scored((media ** self.power).mean((1, 2, 3, 4)))

class Coupled(Brightness):
    """Depends on the other samples of the batch."""

    def __call__(self, media, prompts, metadata=None):
        score = super().__call__(media, prompts).score
        return Scored(score / score.max())
'''
NEEDS_METADATA = '''
import torch
from flowalign.rewards.base import RewardSpec, Scored
from flowalign.rewards.contract import Example

class Tagged:
    spec = RewardSpec("tagged", "", "image", True, (0.0, 1.0), False, "MIT", "", "exact", needs=("metadata",))

    def __init__(self, device="cpu"):
        pass

    def __call__(self, media, prompts, metadata=None):
        return Scored(torch.tensor([one["value"] for one in metadata]))

def example(name):
    return Example(torch.full((3, 1, 3, 8, 8), 0.25), ("a", "b", "c"), tuple({"value": v} for v in (0.1, 0.2, 0.3)), 3)
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A current folder with rewards of one's own, which is not on the path yet."""
    (tmp_path / "mine.py").write_text(GOOD)
    (tmp_path / "tagged.py").write_text(NEEDS_METADATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    yield tmp_path
    for name in ("mine", "tagged"):
        sys.modules.pop(name, None)


def listed(text: str) -> dict[str, tuple[str, str]]:
    """{name: (its line, what is said below it in one line)}."""
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines()[1:]:
        if not line.startswith(" "):
            name = line.split()[0]
            found[name] = (line, "")
        else:
            found[name] = (found[name][0], f"{found[name][1]} {line.strip()}".strip())
    return found


@pytest.mark.parametrize("columns", ["80", "200"])
def test_every_judge_is_listed_with_what_one_must_know(capsys, monkeypatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["rewards", "list"]) == 0
    out = capsys.readouterr().out
    head, *lines = out.splitlines()
    assert head.split() == ["name", "media", "better", "gradient", "needs"]
    # a word may be longer than the terminal is wide, and is left whole
    assert not [line for line in lines if len(line) > int(columns) and " " in line.strip()]
    found = listed(out)
    assert list(found) == registry.names()
    where = {name: head.index(name) for name in head.split()}
    for name in registry.BUILT_IN:
        spec: RewardSpec = registry.load(name).spec  # type: ignore[attr-defined]
        line, below = found[name]
        assert line[where["media"] :].startswith(spec.modality)
        assert line[where["better"] :].startswith("higher" if spec.higher_is_better else "lower")
        assert line[where["gradient"] :].startswith("yes" if spec.differentiable else "no")
        assert line[where["needs"] :].startswith(spec.needs[0] if spec.needs else "nothing")
        assert f"licence {spec.licence}; weights " in below and below.endswith(f"verified: {spec.verified}")
        assert all(f"{file.repository}/{file.file}" in below for file in spec.weights)


def test_the_list_as_json(capsys) -> None:
    assert cli.main(["rewards", "list", "--json"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert list(records) == registry.names()
    pickscore = records["pickscore"]
    assert pickscore["weights"][0]["repository"] == "yuvalkirstain/PickScore_v1" and pickscore["differentiable"] is True


def test_a_plug_in_that_cannot_be_loaded_does_not_hide_the_others(capsys, monkeypatch) -> None:
    points = [EntryPoint("broken", "no_such_package.x:Y", registry.ENTRY_POINTS)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert cli.main(["rewards", "list"]) == 0
    found = listed(capsys.readouterr().out)
    assert "no_such_package.x:Y cannot be imported" in found["broken"][1] and "pickscore" in found


def test_show_says_everything_and_the_card(capsys) -> None:
    assert cli.main(["rewards", "show", "pickscore"]) == 0
    out = capsys.readouterr().out
    facts = dict(line.split("  ", 1) for line in out.split("\n\n")[0].splitlines())
    assert facts["native range"].strip() == "-100 to 100"
    assert facts["scales"].strip() == "flow-grpo: (score - 0) / 26"
    assert "path='yuvalkirstain/PickScore_v1'" in facts["params"] and "device" not in facts["params"]
    assert "\n# pickscore\n" in out and "| source | Kirstain et al." in out
    assert cli.main(["rewards", "show", "pickscore", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["card"].startswith("# pickscore") and record["native_range"] == [-100, 100]
    assert cli.main(["rewards", "show", "pikscore"]) == 2
    assert "did you mean 'pickscore'" in capsys.readouterr().err


def test_a_reward_of_the_current_folder_is_shown_and_checked(own, capsys) -> None:
    assert cli.main(["rewards", "show", "mine:Brightness"]) == 0
    assert "params            power=2" in capsys.readouterr().out
    assert cli.main(["rewards", "check", "mine:Brightness", "--param", "power=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 8 + ["mine:Brightness:"]
    assert lines[-1] == "mine:Brightness: 8 of 8 kept"


def test_check_names_the_broken_promise(own, capsys) -> None:
    assert cli.main(["rewards", "check", "mine:Coupled"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert any("scores do not depend on the batch" in line and "differ by" in line for line in failed)
    assert lines[-1] == f"mine:Coupled: {8 - len(failed)} of 8 kept"


def test_check_takes_the_example_of_the_module(own, capsys) -> None:
    assert cli.main(["rewards", "check", "tagged:Tagged"]) == 0
    assert "tagged:Tagged: 8 of 8 kept" in capsys.readouterr().out


def test_check_with_tiny_weights_needs_no_hub(capsys) -> None:
    assert cli.main(["rewards", "check", "clipscore", "--tiny"]) == 0
    assert "clipscore: 8 of 8 kept, with tiny random weights" in capsys.readouterr().out


def test_serve_passes_on_what_it_is_given(own, monkeypatch, capsys) -> None:
    served = []
    server = types.ModuleType("flowalign.rewards.server")
    server.serve = lambda names, **options: served.append((names, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flowalign.rewards.server", server)
    monkeypatch.setitem(os.environ, "MY_TOKEN", "secret")
    command = ["rewards", "serve", "pickscore", "mine:Brightness", "--param", "mine:Brightness.power=3"]
    assert cli.main([*command, "--port", "0", "--token-env", "MY_TOKEN", "--device", "cpu", "--batch-size", "8"]) == 0
    expected = {"host": "127.0.0.1", "port": 0, "token": "secret", "device": "cpu", "allow_public": False}
    expected |= {"params": {"pickscore": {}, "mine:Brightness": {"power": 3}}, "batch_size": 8}
    assert served == [(["pickscore", "mine:Brightness"], expected)]
    assert cli.main([*command, "--token-env", "NO_SUCH"]) == 2
    assert "NO_SUCH: there is no such variable" in capsys.readouterr().err
