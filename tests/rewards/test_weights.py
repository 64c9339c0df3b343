"""Weights are checked before they are believed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowalign.rewards import weights
from flowalign.rewards.base import WeightFile
from flowalign.types import FlowAlignError

FILE = WeightFile("some/repository", "inside/head.safetensors")


def test_a_file_or_its_folder_and_its_checksum(tmp_path) -> None:
    saved = tmp_path / "head.safetensors"
    save_file({"weight": torch.ones(2)}, saved)
    assert weights.locate(FILE, str(tmp_path), "x") == weights.locate(FILE, str(saved), "x") == saved
    assert weights.locate(FILE, str(saved), "x", sha256=weights.checksum(saved)) == saved
    with pytest.raises(FlowAlignError, match=r"'x'.*expected 000000"):
        weights.locate(FILE, str(saved), "x", sha256="0" * 64)
    with pytest.raises(FlowAlignError, match="no file"):
        weights.locate(FILE, str(tmp_path / "none"), "x")


class Code:
    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize("what", ["damaged", "code", "torn"])
def test_nothing_but_tensors_is_read(tmp_path, capfd, what: str) -> None:
    path = tmp_path / ("w.safetensors" if what == "torn" else "w.pt")
    if what == "code":
        torch.save({"a": Code()}, path)
    else:
        path.write_bytes(b"not weights" * 20)
    with pytest.raises(FlowAlignError, match=r"'x'.*no plain weights") as caught:
        weights.read(path, "x")
    assert "\n" not in str(caught.value) and "unpickled" not in capfd.readouterr().out


def test_a_state_dict_under_its_key(tmp_path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"state_dict": {"a": torch.ones(1)}, "step": 3}, path)
    assert list(weights.read(path, "x", "state_dict")) == ["a"]
    for key in (None, "model"):
        with pytest.raises(FlowAlignError, match="no state dict"):
            weights.read(path, "x", key)


def test_every_weight_and_nothing_more() -> None:
    layer, good = nn.Linear(2, 1), {"weight": torch.full((1, 2), 3.0), "bias": torch.zeros(1)}
    weights.load_strict(layer, {**good, "position_ids": torch.zeros(1)}, "x", unused=("position_ids",))
    assert layer.weight.tolist() == [[3.0, 3.0]]
    for bad, words in (
        ({"weight": good["weight"]}, "bias is missing"),
        ({**good, "extra": torch.zeros(1)}, "extra is unknown"),
        ({**good, "bias": torch.zeros(2)}, r"bias is \(2,\), expected \(1,\)"),
    ):
        with pytest.raises(FlowAlignError, match=words):
            weights.load_strict(layer, bad, "x")
