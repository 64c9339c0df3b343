"""Exported weights, read by plain diffusers in a process that never imports flowalign."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from flowalign.commands import export as export_command
from flowalign.core import guidance, sampling, schedule
from flowalign.models import load_model
from flowalign.models.lora import WeightSets, add_lora
from flowalign.training import checkpoint
from flowalign.training.export import FILE, export_lora, export_merged
from flowalign.types import FlowAlignError
from tests.models import tiny_sd3

PROMPT, SEED, STEPS, SCALE = "a red circle", 11, 6, 3.0
MORE = ("attn.to_q", "attn.add_k_proj", "ff.net.2", "proj_out", "pos_embed.proj")
"""Attention, a feed-forward layer, the output layer, and a convolution."""
CASES = [(4, 8.0, None), (3, 7.0, None), (2, 0.5, MORE), (1, 1.0, MORE)]

READER = f"""
PROMPT, SEED, STEPS, SCALE = {PROMPT!r}, {SEED}, {STEPS}, {SCALE}
import json, sys
import numpy as np, torch
from diffusers import StableDiffusion3Pipeline
base, jobs, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
images = dict()
for name, job in jobs.items():
    pipe = StableDiffusion3Pipeline.from_pretrained(job.get("pipeline", base), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if "lora" in job:
        pipe.load_lora_weights(job["lora"])
    generator = torch.Generator().manual_seed(SEED)
    image = pipe(PROMPT, num_inference_steps=STEPS, guidance_scale=SCALE, generator=generator)
    images[name] = np.asarray(image.images[0])
assert "flowalign" not in sys.modules
np.savez(out, **images)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_sd3.build(tmp_path_factory.mktemp("sd3"), t5=True)


@torch.no_grad()
def trained(folder, rank=4, alpha=8.0, targets=None, dtype=torch.float32):
    """A model whose adapter does something."""
    model = load_model(folder, dtype=dtype)
    add_lora(model, rank=rank, alpha=alpha, targets=targets)
    generator = torch.Generator().manual_seed(rank)
    for name, p in model.transformer.named_parameters():
        if ".lora_B." in name:
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


@torch.no_grad()
def picture(model):
    """The picture of the model as bytes (H, W, 3), as integers."""
    field = guidance.classifier_free(lambda x, s, c: model.velocity(model.transformer, x, s, c), SCALE)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(SEED))
    sigmas = schedule.diffusers_shift(STEPS, model.shift)
    media = model.decode(sampling.integrate(field, noise, model.encode([PROMPT], ""), sigmas).final)
    return (media[0, 0].permute(1, 2, 0) * 255).round().int().numpy()


@torch.no_grad()
def velocity(model, transformer=None):
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    return model.velocity(transformer or model.transformer, x, torch.full((1,), 0.4), model.encode([PROMPT]))


def test_plain_diffusers_in_another_process_gives_the_trained_picture(folder, tmp_path):
    jobs, expected = {"base": {}}, {"base": picture(load_model(folder))}
    for i, (rank, alpha, targets) in enumerate(CASES):
        model = trained(folder, rank, alpha, targets)
        name = f"lora{i}"
        file = export_lora(model, tmp_path / name)
        assert [p.name for p in (tmp_path / name).iterdir()] == [FILE]
        jobs[name] = {"lora": str(file if i == 1 else file.parent)}
        expected[name] = picture(model)
    jobs["merged"] = {"pipeline": str(export_merged(trained(folder, *CASES[1]), tmp_path / "merged"))}
    expected["merged"] = expected["lora1"]
    full = load_model(folder)
    with torch.no_grad():
        for p in full.transformer.parameters():
            p.mul_(1.05)
    jobs["full"] = {"pipeline": str(export_merged(full, tmp_path / "full"))}
    expected["full"] = picture(full)
    command = [sys.executable, "-c", READER, str(folder), json.dumps(jobs), str(tmp_path / "images.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "images.npz") as found:
        for name in jobs:
            assert abs(found[name].astype(int) - expected[name]).max() <= 1, name
            if name != "base":
                assert abs(found[name].astype(int) - expected["base"]).max() > 10, f"{name} must not be the base"


def test_alpha_is_folded_because_diffusers_loses_it(folder, tmp_path):
    model = trained(folder, 4, 6.0)
    expected = velocity(model)
    file = export_lora(model, tmp_path)
    with safe_open(str(file), "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    tensors = load_file(file)
    assert all(name.startswith("transformer.") and t.dtype == torch.float32 for name, t in tensors.items())
    # The same file as tensors in memory, where no metadata can be: still the trained model.
    other = load_model(folder)
    other.pipeline().load_lora_weights(tensors)
    assert (velocity(other) - expected).abs().max() < 1e-5
    # What diffusers itself would write, alpha in metadata, is wrong when it is read this way.
    StableDiffusion3Pipeline.save_lora_weights(
        tmp_path / "theirs",
        transformer_lora_layers=get_peft_model_state_dict(model.transformer),
        transformer_lora_adapter_metadata=model.transformer.peft_config["default"].to_dict(),
    )
    other = load_model(folder)
    other.pipeline().load_lora_weights(load_file(tmp_path / "theirs" / FILE))
    assert (velocity(other) - expected).abs().max() > 1e-2


def test_a_folder_of_peft_is_silently_ignored_by_diffusers(folder, tmp_path):
    """Why no such folder is written: diffusers loads it without an error, and draws with the base model."""
    model = trained(folder)
    state = {f"base_model.model.{k}": v for k, v in get_peft_model_state_dict(model.transformer).items()}
    StableDiffusion3Pipeline.write_lora_layers(
        state, str(tmp_path), is_main_process=True, weight_name="adapter_model.safetensors", save_function=None,
        safe_serialization=True,
    )  # fmt: skip
    other = load_model(folder)
    before = velocity(other)
    other.pipeline().load_lora_weights(str(tmp_path), weight_name="adapter_model.safetensors")
    assert torch.equal(velocity(other), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_leaves_the_model_as_it_was(folder, tmp_path, dtype):
    model = trained(folder, 3, 7.0, dtype=dtype)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.transformer.named_parameters()}
    expected = velocity(model)
    export_lora(model, tmp_path / "lora")
    export_merged(model, tmp_path / "merged")
    after = dict(model.transformer.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], p) and after[n].requires_grad == r for n, (p, r) in before.items())
    assert torch.equal(velocity(model), expected) and list(model.transformer.peft_config) == ["default"]


def test_the_file_may_be_named(folder, tmp_path):
    assert export_lora(trained(folder), tmp_path / "a" / "mine.safetensors") == tmp_path / "a" / "mine.safetensors"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["mine.safetensors"]


def test_a_file_that_does_not_reproduce_the_model_is_reported(folder, tmp_path, monkeypatch):
    model = trained(folder)
    write = StableDiffusion3Pipeline.save_lora_weights

    def scaled(folder, transformer_lora_layers, weight_name):
        layers = {k: 1.001 * v if ".lora_B." in k else v for k, v in transformer_lora_layers.items()}
        write(folder, transformer_lora_layers=layers, weight_name=weight_name)

    def lacking(folder, transformer_lora_layers, weight_name):
        layers = {k: v for k, v in transformer_lora_layers.items() if "transformer_blocks.0.attn.to_q" not in k}
        write(folder, transformer_lora_layers=layers, weight_name=weight_name)

    pipe = model.pipeline()
    for broken in (scaled, lacking):
        monkeypatch.setattr(pipe, "save_lora_weights", broken, raising=False)
        with pytest.raises(FlowAlignError, match="do not use it, and report this"):
            export_lora(model, tmp_path)
        assert list(model.transformer.peft_config) == ["default"]
    export_lora(model, tmp_path, verify=False)


def test_a_merged_folder_that_does_not_reproduce_the_model_is_reported(folder, tmp_path, monkeypatch):
    model = trained(folder)
    monkeypatch.setattr(type(model.transformer), "fuse_lora", lambda self: None)
    with pytest.raises(FlowAlignError, match="do not use it, and report this"):
        export_merged(model, tmp_path)


def test_no_adapter_no_lora_file(folder, tmp_path):
    with pytest.raises(FlowAlignError, match="has no LoRA adapter; use --format merged"):
        export_lora(load_model(folder), tmp_path)


# ---------------------------------------------------------------- the command

RECIPE = """
model: {{path: {path}, precision: fp32, height: 16, width: 16}}
tuning: {{kind: {kind}{rest}}}
algorithm: {{name: sft, batch_size: 2}}
dataset: {{path: shapes, count: 4}}
optimizer: {{lr: 1.0e-3}}
training: {{iterations: 1, output: {output}, rollout_batch_size: 2, micro_batch_size: 2}}
"""


def saved(model, folder, output, kind, *, ema=True):
    """A checkpoint as the trainer writes it, whose averaged weights are 0 in all B (or as they were)."""
    sets = WeightSets(model.transformer)
    averaged = {k: 0 * v if ".lora_B." in k else v for k, v in sets.state_dict().items()}
    rest = ", rank: 4, alpha: 8.0" if kind == "lora" else ""
    text = RECIPE.format(path=folder, kind=kind, output=output, rest=rest)
    others = {"ema": averaged} if ema else {}
    state = checkpoint.Checkpoint(1, 1, trainable=sets.state_dict(), optimizer={}, sets=others)
    return checkpoint.save(output, state, text)


def run(path, out, form="diffusers", weights="current"):
    return export_command.run(argparse.Namespace(checkpoint=str(path), format=form, weights=weights, out=str(out)))


def test_command_exports_a_checkpoint(folder, tmp_path, capsys):
    model = trained(folder)
    path = saved(model, folder, tmp_path / "run", "lora")
    assert run(path, tmp_path / "lora") == 0
    assert f"{tmp_path / 'lora' / FILE}: the current weights after 1 iterations" in capsys.readouterr().out
    assert run(path, tmp_path / "averaged", weights="ema") == 0
    assert "the ema weights" in capsys.readouterr().out
    assert run(path, tmp_path / "merged", form="merged") == 0
    base = velocity(load_model(folder))
    for name, expected in (("lora", velocity(model)), ("averaged", base)):
        other = load_model(folder)
        other.pipeline().load_lora_weights(str(tmp_path / name))
        assert (velocity(other) - expected).abs().max() < 1e-5
    assert (velocity(load_model(tmp_path / "merged")) - velocity(model)).abs().max() < 1e-5
    assert (velocity(model) - base).abs().max() > 0.05


def test_command_exports_full_fine_tuning(folder, tmp_path):
    model = load_model(folder)
    model.transformer.requires_grad_(True)
    with torch.no_grad():
        for p in model.transformer.parameters():
            p.mul_(1.05)
    path = saved(model, folder, tmp_path / "run", "full", ema=False)
    with pytest.raises(FlowAlignError, match="has no LoRA; use --format merged"):
        run(path, tmp_path / "lora")
    with pytest.raises(FlowAlignError, match="holds no 'ema' weights; it has current"):
        run(path, tmp_path / "merged", form="merged", weights="ema")
    assert run(path, tmp_path / "merged", form="merged") == 0
    assert torch.equal(velocity(load_model(tmp_path / "merged")), velocity(model))


def test_command_refuses_what_is_no_checkpoint(tmp_path):
    with pytest.raises(FlowAlignError, match="no such folder"):
        run(tmp_path / "nothing", tmp_path / "out")
