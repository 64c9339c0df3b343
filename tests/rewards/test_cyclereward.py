"""What is CycleReward's own: its variants, its length of prompts, and that its weights are not on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowalign.types import FlowAlignError
from reward_models.cyclereward import fixture
from reward_models.cyclereward.reward import CycleReward


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    return fixture.tiny(tmp_path_factory.mktemp("cyclereward"), "cyclereward")


def test_what_follows_the_128th_token_is_not_seen(params) -> None:
    reward = CycleReward(**params)
    media = torch.full((2, 1, 3, 48, 48), 0.5)
    # one token a letter, beside [CLS] and [SEP]
    same = reward(media, ["a " * 126 + "b", "a " * 126 + "c"]).score
    other = reward(media, ["a " * 125 + "b", "a " * 125 + "c"]).score
    assert same[0] == same[1] and (other[0] - other[1]).abs() > 1e-5


@pytest.mark.parametrize(("variant", "file"), [("combo", "Combo"), ("i2t", "I2T"), ("t2i", "T2I")])
def test_each_variant_has_its_file(params, variant: str, file: str, tmp_path) -> None:
    for name in ("med_config.json", "CycleReward-Combo.pth"):
        target = name.replace("Combo", file)
        (tmp_path / target).write_bytes((Path(params["path"]) / name).read_bytes())
    media = torch.full((1, 1, 3, 48, 48), 0.5)
    given = CycleReward(variant, path=str(tmp_path), tokenizer=params["tokenizer"])
    assert torch.equal(given(media, ["a"]).score, CycleReward(**params)(media, ["a"]).score)
    for other in {"combo", "i2t", "t2i"} - {variant}:
        with pytest.raises(FlowAlignError, match=r"no file.*CycleReward-"):
            CycleReward(other, path=str(tmp_path), tokenizer=params["tokenizer"])


def test_without_a_path_the_error_names_what_to_download() -> None:
    url = "https://github.com/hjbahng/cyclereward/releases/download/v1.0.0/"
    with pytest.raises(FlowAlignError, match=r"CycleReward-I2T\.pth and med_config\.json") as caught:
        CycleReward("i2t")
    assert url in str(caught.value) and "params.path" in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(FlowAlignError, match="variant 'both', expected combo, i2t, t2i"):
        CycleReward("both")
