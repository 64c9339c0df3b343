"""Checkpoints are whole or refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from flowalign.training import checkpoint
from flowalign.training.checkpoint import Checkpoint
from flowalign.types import FlowAlignError


def state(iteration=10, sets=("ema",)):
    tensors = {"a.weight": torch.randn(3, 4), "b": torch.randn(2)}
    optimizer = {f"{k}|exp_avg": v * 2 for k, v in tensors.items()}
    others = {name: {k: v + 1 + i for k, v in tensors.items()} for i, name in enumerate(sets)}
    return Checkpoint(iteration, 20, tensors, optimizer, others)


@pytest.mark.parametrize("sets", [(), ("ema",), ("behaviour", "ema", "reference")])
def test_round_trip(tmp_path, sets: tuple[str, ...]) -> None:
    saved = state(sets=sets)
    folder = checkpoint.save(tmp_path, saved, "model: x\n")
    assert folder == tmp_path / "checkpoints" / "000010"
    expected = {"trainable.safetensors", "optimizer.safetensors", "state.json", "recipe.yaml"}
    assert {p.name for p in folder.iterdir()} == expected | {f"{name}.safetensors" for name in sets}
    assert [p.name for p in folder.parent.iterdir()] == ["000010"]  # nothing temporary stays
    loaded = checkpoint.load(folder)
    assert (loaded.iteration, loaded.steps) == (10, 20)
    assert set(loaded.sets) == set(sets)
    pairs = [
        (saved.trainable, loaded.trainable),
        (saved.optimizer, loaded.optimizer),
        *((saved.sets[name], loaded.sets[name]) for name in sets),
    ]
    for a, b in pairs:
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_first_format_is_read_as_well(tmp_path) -> None:
    folder = checkpoint.save(tmp_path, state())
    written = json.loads((folder / "state.json").read_text())
    assert written["format"] == "flowalign-checkpoint-2", "older programs must refuse what they would overlook"
    (folder / "state.json").write_text(json.dumps({**written, "format": "flowalign-checkpoint-1"}))
    assert list(checkpoint.load(folder).sets) == ["ema"]


def test_latest_and_replacement(tmp_path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for iteration in (2, 10, 9):
        checkpoint.save(tmp_path, state(iteration))
    (tmp_path / "checkpoints" / ".000020.1.tmp").mkdir()
    (tmp_path / "checkpoints" / "000030").mkdir()  # without state.json: not whole
    assert checkpoint.latest(tmp_path).name == "000010"
    again = state(10)
    checkpoint.save(tmp_path, again)
    assert torch.equal(checkpoint.load(tmp_path / "checkpoints" / "000010").trainable["b"], again.trainable["b"])


def test_torn_and_foreign_checkpoints_are_refused_in_one_sentence(tmp_path) -> None:
    good = checkpoint.save(tmp_path, state())

    def spoil(change):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        change(folder)
        with pytest.raises(FlowAlignError) as caught:
            checkpoint.load(folder)
        assert "\n" not in str(caught.value) and "copy" in str(caught.value)
        return str(caught.value)

    def cut(name, keep):
        return lambda f: (f / name).write_bytes((f / name).read_bytes()[:keep])

    def garbage(folder):
        path = folder / "ema.safetensors"
        path.write_bytes(b"\xff" * path.stat().st_size)

    assert "trainable.safetensors has 40 bytes, expected" in spoil(cut("trainable.safetensors", 40))
    assert "optimizer.safetensors is missing" in spoil(lambda f: (f / "optimizer.safetensors").unlink())
    assert "ema.safetensors cannot be read" in spoil(garbage)
    assert "no state.json in it" in spoil(lambda f: (f / "state.json").unlink())
    assert "not of format" in spoil(cut("state.json", 30))
    assert "not of format" in spoil(lambda f: (f / "state.json").write_text(json.dumps({"format": "other"})))
    assert "no such folder" in spoil(shutil.rmtree)


def test_optimizer_state_by_name() -> None:
    def trained(order):
        torch.manual_seed(0)
        parameters = {name: torch.nn.Parameter(torch.randn(3)) for name in ("x", "y")}
        optimizer = torch.optim.AdamW([parameters[n] for n in order], lr=0.1)
        for _ in range(3):
            sum((p**3).sum() for p in parameters.values()).backward()
            optimizer.step()
        return optimizer

    saved = checkpoint.optimizer_tensors(trained("xy"), ["x", "y"])
    assert set(saved) == {f"{n}|{k}" for n in "xy" for k in ("step", "exp_avg", "exp_avg_sq")}
    fresh = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3)) for _ in range(2)], lr=0.1)
    checkpoint.restore_optimizer(fresh, ["x", "y"], saved, "here")
    assert all(torch.equal(checkpoint.optimizer_tensors(fresh, ["x", "y"])[k], v) for k, v in saved.items())
    with pytest.raises(FlowAlignError, match="optimiser state of 'y'"):
        checkpoint.restore_optimizer(fresh, ["x", "z"], saved, "here")
