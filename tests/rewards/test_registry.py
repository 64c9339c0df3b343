"""Rewards by name, and their combination."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from flowalign.rewards import combine, registry
from flowalign.rewards.base import Scored
from flowalign.rewards.combine import WeightedReward
from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError
from tests.training.toy import ColorReward, spec


def test_built_in_names_and_specs() -> None:
    assert set(registry.BUILT_IN) <= set(registry.names())
    for found in registry.specs():
        assert found.licence and found.citation and found.description
    assert {s.name for s in registry.specs()} >= {"shapes-verifier", "pickscore", "clipscore"}


def test_names_import_no_model_code() -> None:
    code = "import sys; from flowalign.rewards import registry; registry.names(); registry.check_name('pickscore');"
    code += "sys.exit(any(m in sys.modules for m in ('transformers', 'diffusers', 'scipy', 'reward_models.pickscore')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pickscor", "did you mean 'pickscore'"),
        ("shapes_verifier", "did you mean 'shapes-verifier'"),
        ("zzz", "expected one of"),
        ("no_such_module:Reward", "cannot be imported"),
        ("tests.training.toy:Nothing", "cannot be imported"),
    ],
)
def test_wrong_names_are_refused_in_one_sentence(name: str, words: str) -> None:
    with pytest.raises(FlowAlignError) as caught:
        registry.create(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_module_and_class() -> None:
    reward = registry.create("tests.training.toy:ColorReward", invalid=("x red",))
    assert isinstance(reward.reward, ColorReward) and reward.reward.invalid == {"x red"}


def test_parameters_are_checked() -> None:
    with pytest.raises(FlowAlignError, match="no parameter 'scor'; did you mean 'score'"):
        registry.create("shapes-verifier", scor="strict")
    with pytest.raises(FlowAlignError, match="expected 'soft' or 'strict'"):
        registry.create("shapes-verifier", score="hard")


class Named:
    """Its parameters are called as those of `Judge` and of the registry are."""

    def __init__(self, name: str, batch_size: int, frames: str, device: object = "cpu") -> None:
        self.spec, self.given = spec("named"), (name, batch_size, frames)


def test_parameters_go_to_the_reward_whatever_their_names() -> None:
    judge = registry.create(f"{__name__}:Named", "cpu", 5, name="n", batch_size=7, frames="f")
    assert judge.reward.given == ("n", 7, "f")
    assert judge.batch_size == 5 and judge.frames.text == "mean"
    other = registry.create(f"{__name__}:Named", "cpu", 5, name="n", batch_size=8, frames="f")
    assert judge.digest != other.digest


def test_entry_points_are_found(monkeypatch) -> None:
    @dataclass
    class Point:
        name: str = "mine"
        value: str = "tests.training.toy:ColorReward"

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()] if group == "flowalign.rewards" else [])
    assert "mine" in registry.names()
    assert isinstance(registry.create("mine").reward, ColorReward)


def media(n: int = 4) -> torch.Tensor:
    return torch.rand(n, 1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_columns_equal_the_reward_whatever_the_batch_size() -> None:
    prompts = ["a red", "a green", "b red", "b blue"]
    expected = ColorReward()(media(), prompts).score
    for size in (1, 3, 4):
        reward = WeightedReward("color", Judge(ColorReward(), batch_size=size), 2.0)
        columns = combine.score([reward], media(), prompts)
        assert torch.allclose(columns.values["color"], expected, atol=1e-7)
        assert torch.allclose(columns.subscores["color/brightness"], media().mean((1, 2, 3, 4)), atol=1e-6)
    assert combine.weights([reward]) == {"color": 2.0}
    lower = SimpleNamespace(spec=spec("distance", higher_is_better=False))
    assert combine.weights([WeightedReward("distance", lower, 0.5)]) == {"distance": -0.5}


def test_what_cannot_be_scored_is_nan_and_the_share_is_limited() -> None:
    pictures = media()
    pictures[3, 0, 0, 0, 0] = torch.nan
    prompts = ["a red", "a green", "b red", "b blue"]
    columns = combine.score([WeightedReward("color", ColorReward(invalid=("a green",)))], pictures, prompts)
    assert torch.isnan(columns.values["color"]).tolist() == [False, True, False, True]
    assert combine.check_invalid_share(columns.values, prompts, 0.5) == 0.5
    with pytest.raises(FlowAlignError, match=r"'color': 2 of 4 .*50%.*40%.*'a green', 'b blue'"):
        combine.check_invalid_share(columns.values, prompts, 0.4)


def test_a_reward_that_breaks_its_contract_is_named() -> None:
    def wrong(shape):
        return _Returns(torch.zeros(shape))

    with pytest.raises(ValueError, match=r"'x': returned shape \(4, 1\) for 4 samples"):
        combine.score([WeightedReward("x", wrong((4, 1)))], media(), ["p"] * 4)
    with pytest.raises(FlowAlignError, match="twice"):
        combine.score([WeightedReward("x", wrong((4,)))] * 2, media(), ["p"] * 4)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        combine.score([WeightedReward("x", wrong((4,)))], media() * 255, ["p"] * 4)
    infinite = combine.score([WeightedReward("x", _Returns(torch.tensor([1.0, torch.inf])))], media(2), ["p"] * 2)
    assert torch.isnan(infinite.values["x"]).tolist() == [False, True]


class _Returns:
    def __init__(self, value: torch.Tensor) -> None:
        self.spec, self.value = spec("x"), value

    def __call__(self, media, prompts, metadata=None) -> Scored:
        return Scored(self.value)
