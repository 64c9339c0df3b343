"""One contract for every reward of the registry, and that the contract notices each way to break it."""

from __future__ import annotations

import socket
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowalign.data.worlds import shapes, shapes_render
from flowalign.rewards import contract, registry
from flowalign.rewards.base import Scored
from flowalign.rewards.judge import Judge
from tests.training.toy import spec

CAPTIONS = ("a red circle", "two blue squares", "a green square left of a red cross", "a photo of a cat")


def shapes_example() -> contract.Example:
    renders = [shapes_render.render(shapes.parse(text), np.random.default_rng(0)) for text in CAPTIONS[:3]]
    pictures = [torch.from_numpy(np.asarray(p)).permute(2, 0, 1).float() for p in renders]
    return contract.Example(torch.stack([*pictures, pictures[0]])[:, None], CAPTIONS, valid=3)


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_every_reward_keeps_the_contract(name: str, weights) -> None:
    if name == "shapes-verifier":
        judge, example = registry.create(name), shapes_example()
    elif name.startswith("jpeg"):
        judge, example = registry.create(name), contract.default_example("image")
    else:
        judge = registry.create(name, path=str(weights), processor=str(weights))
        example = contract.default_example(judge.spec.modality)
    found = contract.check(judge, example)
    assert len(found) == 8
    assert not [f for f in found if not f.passed]


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
