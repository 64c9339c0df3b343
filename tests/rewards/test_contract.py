"""One contract for every reward of the registry, and that the contract notices each way to break it."""

from __future__ import annotations

import importlib
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowalign.rewards import contract, registry
from flowalign.rewards.base import Scored
from flowalign.rewards.judge import Judge
from tests.training.toy import spec


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_every_reward_keeps_the_contract(name: str, tmp_path: Path) -> None:
    fixture = importlib.import_module(registry.load(name).__module__.rpartition(".")[0] + ".fixture")
    judge = registry.create(name, **fixture.tiny(tmp_path, name))
    example = fixture.example(name) if hasattr(fixture, "example") else contract.default_example(judge.spec.modality)
    found = contract.check(judge, example)
    assert len(found) == 8
    assert not [f for f in found if not f.passed]


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_every_reward_says_what_it_is(name: str) -> None:
    made = registry.load(name)
    assert made.spec.name == name
    card = Path(importlib.import_module(made.__module__).__file__).with_name("card.md").read_text()
    assert name in card.splitlines()[0]
    assert all(file.repository.removeprefix("PyPI ") in card for file in made.spec.weights)


class Good:
    """A contrast that is right in everything; the ways to be wrong derive from it."""

    def __init__(self) -> None:
        self.spec = replace(spec("good"), native_range=(0.0, 1.0))

    def __call__(self, media, prompts, metadata=None) -> Scored:
        return Scored(media.float().square().mean((1, 2, 3, 4)))


class Coupled(Good):
    def __call__(self, media, prompts, metadata=None) -> Scored:
        score = super().__call__(media, prompts).score
        return Scored(score / score.max())


class Positional(Good):
    def __call__(self, media, prompts, metadata=None) -> Scored:
        return Scored(super().__call__(media, prompts).score * torch.linspace(0.5, 1, len(prompts)))


class Random(Good):
    def __call__(self, media, prompts, metadata=None) -> Scored:
        return Scored(super().__call__(media, prompts).score + 1e-3 * torch.rand(len(prompts)))


class Double(Good):
    def __call__(self, media, prompts, metadata=None) -> Scored:
        return Scored(super().__call__(media, prompts).score.double())


class Detached(Good):
    def __call__(self, media, prompts, metadata=None) -> Scored:
        return Scored(super().__call__(media.detach(), prompts).score)


class Rounded(Good):
    """Its gradient skips what its score goes through."""

    def __call__(self, media, prompts, metadata=None) -> Scored:
        score = super().__call__(media, prompts).score
        return Scored(score + (0.2 * score.detach() - 0.2 * score.detach().square()))


class Calling(Good):
    def __call__(self, media, prompts, metadata=None) -> Scored:
        with socket.socket() as opened:
            opened.connect_ex(("127.0.0.1", 9))
            opened.connect(("127.0.0.1", 9))
        return super().__call__(media, prompts)


class Masked(Good):
    def __call__(self, media, prompts, metadata=None) -> Scored:
        return Scored(super().__call__(media, prompts).score * torch.nan)


class Outside(Good):
    def __call__(self, media, prompts, metadata=None) -> Scored:
        return Scored(super().__call__(media, prompts).score + 1)


def failed(reward) -> set[str]:
    return {f.check for f in contract.check(Judge(reward), contract.default_example("image")) if not f.passed}


def test_a_good_reward_passes() -> None:
    assert failed(Good()) == set()


@pytest.mark.parametrize(
    ("reward", "check"),
    [
        (Coupled, "scores do not depend on the batch"),
        (Positional, "scores follow their samples"),
        (Random, "the same scores twice"),
        (Double, "one float32 score a sample, finite or masked"),
        (Masked, "one float32 score a sample, finite or masked"),
        (Outside, "one float32 score a sample, finite or masked"),
        (Detached, "gradient flows exactly where declared"),
        (Rounded, "gradient flows exactly where declared"),
        (Calling, "no socket is opened"),
    ],
)
def test_each_broken_promise_is_noticed(reward, check: str) -> None:
    assert check in failed(reward())
