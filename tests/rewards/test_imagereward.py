"""What is ImageReward's own: its normalisation, its length of prompts, and where its weights come from."""

from __future__ import annotations

import pytest
import torch

from flowalign.types import FlowAlignError
from reward_models.imagereward import fixture
from reward_models.imagereward.reward import ImageReward


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    return fixture.tiny(tmp_path_factory.mktemp("imagereward"), "imagereward")


def test_what_follows_the_35th_token_is_not_seen(params) -> None:
    reward = ImageReward(**params)
    media = torch.full((2, 1, 3, 48, 48), 0.5)
    # one token a letter, beside [CLS] and [SEP]
    same = reward(media, ["a " * 33 + "b", "a " * 33 + "c"]).score
    other = reward(media, ["a " * 32 + "b", "a " * 32 + "c"]).score
    assert same[0] == same[1] and (other[0] - other[1]).abs() > 1e-3


def test_a_head_that_says_the_authors_mean_scores_zero_and_one_deviation_more_scores_one(params) -> None:
    reward = ImageReward(**params)
    last = reward.blip.model.head[-1]
    media = torch.full((1, 1, 3, 48, 48), 0.5)
    for answer, score in ((0.16717362830052426, 0.0), (0.16717362830052426 + 1.0333394966054072, 1.0)):
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.constant_(last.bias, answer)
        assert float(reward(media, ["a"]).score) == pytest.approx(score, abs=1e-6)


def test_a_file_can_be_given_instead_of_its_folder(params) -> None:
    media = torch.rand(1, 1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    one = ImageReward(**params)(media, ["a"]).score
    other = ImageReward(**params | {"path": f"{params['path']}/ImageReward.pt"})(media, ["a"]).score
    assert torch.equal(one, other)


def test_an_unreachable_hub_gives_one_sentence(params, monkeypatch, tmp_path) -> None:
    asked = []

    def fetch(repository, file, revision):
        asked.append((repository, file, revision))
        raise OSError("offline\nfor now")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    with pytest.raises(FlowAlignError, match=r"'imagereward'.*ImageReward\.pt of THUDM/ImageReward") as caught:
        ImageReward(tokenizer=params["tokenizer"])
    assert asked == [("THUDM/ImageReward", "ImageReward.pt", "main")] and "\n" not in str(caught.value)


def test_weights_and_configuration_are_fetched_from_one_place(params, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, file, revision: f"{params['path']}/{file}")
    media = torch.full((1, 1, 3, 48, 48), 0.5)
    fetched = ImageReward(tokenizer=params["tokenizer"])
    assert torch.equal(fetched(media, ["a"]).score, ImageReward(**params)(media, ["a"]).score)
