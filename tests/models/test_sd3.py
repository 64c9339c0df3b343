"""The SD3 adapter against diffusers' own pipeline on a tiny random one."""

from __future__ import annotations

import argparse
import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from flowalign.commands import sample
from flowalign.core import guidance, sampling, schedule
from flowalign.models import ASSETS, load_model, resolve
from flowalign.models.sd3 import SD3
from flowalign.types import FlowAlignError
from tests.models.tiny_sd3 import SIDE

PROMPTS = ["a red circle", "two blue squares, one left of the other", "3 cats"]
NEGATIVE = "a dog"


def diffusers_pipeline(folder, dtype=torch.float32):
    index = json.loads((folder / "model_index.json").read_text())
    parts = {} if index["text_encoder_3"][0] else {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=dtype, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe(folder):
    return diffusers_pipeline(folder)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def noise(count, seed=0):
    return torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


def velocity_of(model):
    return lambda x, sigma, cond: model.velocity(model.transformer, x, sigma, cond)


@torch.no_grad()
def test_encodes_as_the_pipeline_does(model, pipe):
    cond = model.encode(PROMPTS, NEGATIVE)
    embeds, negative, pooled, negative_pooled = pipe.encode_prompt(PROMPTS, None, None, negative_prompt=[NEGATIVE] * 3)
    assert torch.equal(cond.tensors["embeds"], embeds) and torch.equal(cond.tensors["pooled"], pooled)
    assert torch.equal(cond.negative["embeds"], negative) and torch.equal(cond.negative["pooled"], negative_pooled)
    assert embeds.shape == (3, 16 + 256, 32) and pooled.shape == (3, 16) and len(cond) == 3
    t5 = embeds[:, 16:]
    assert bool(t5.any()) == (pipe.text_encoder_3 is not None)
    assert (embeds[0] - embeds[1]).abs().max() > 0.1, "prompts must matter, or this test shows nothing"


@torch.no_grad()
def test_encodes_without_a_negative_and_with_an_empty_one(model, pipe):
    assert model.encode(PROMPTS).negative is None
    _, expected, _, _ = pipe.encode_prompt(PROMPTS, None, None, negative_prompt=[""] * 3)
    assert torch.equal(model.encode(PROMPTS, "").negative["embeds"], expected)


@torch.no_grad()
def test_sequence_length_of_the_t5(folder, pipe):
    short = load_model(folder, max_sequence_length=12).encode(PROMPTS)
    expected = pipe.encode_prompt(PROMPTS, None, None, max_sequence_length=12, do_classifier_free_guidance=False)[0]
    assert short.tensors["embeds"].shape == (3, 28, 32) and torch.equal(short.tensors["embeds"], expected)


@torch.no_grad()
def test_velocity_is_the_transformer_at_1000_sigma(model, pipe):
    x, sigma, cond = noise(3), torch.tensor([1.0, 0.55, 0.01]), model.encode(PROMPTS)
    expected = pipe.transformer(
        x,
        timestep=torch.tensor([1000.0, 550.0, 10.0]),
        encoder_hidden_states=cond.tensors["embeds"],
        pooled_projections=cond.tensors["pooled"],
    ).sample
    found = model.velocity(model.transformer, x, sigma, cond)
    assert found.dtype == torch.float32 and (found - expected).abs().max() < 1e-5
    alone = [
        model.velocity(model.transformer, x[i : i + 1], sigma[i : i + 1], model.encode([PROMPTS[i]])) for i in range(3)
    ]
    assert (torch.cat(alone) - found).abs().max() < 1e-5
    assert (found[0] - found[1]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize(("scale", "negative", "count"), [(4.5, NEGATIVE, 3), (4.5, "", 1), (1.0, None, 1)])
def test_picture_equals_the_pipelines(model, pipe, scale, negative, count):
    prompts = PROMPTS[:count]
    expected = pipe(
        prompts,
        negative_prompt=None if negative is None else [negative] * count,
        num_inference_steps=28,
        guidance_scale=scale,
        generator=[torch.Generator().manual_seed(5 + i) for i in range(count)],
        output_type="pt",
    ).images
    x = torch.cat([noise(1, 5 + i) for i in range(count)])
    field = guidance.classifier_free(velocity_of(model), scale)
    final = sampling.integrate(
        field, x, model.encode(prompts, negative), schedule.diffusers_shift(28, model.shift)
    ).final
    found = model.decode(final)
    assert found.shape == (count, 1, 3, SIDE, SIDE) and expected.std() > 0.02
    assert (found[:, 0] - expected).abs().max() <= 1e-4


def test_decodes_as_the_pipeline_does_and_differentiably(model, pipe):
    latents = noise(2).requires_grad_()
    media = model.decode(latents)
    with torch.no_grad():
        plain = pipe.vae.decode(latents / 1.5 + 0.06, return_dict=False)[0]
        expected = pipe.image_processor.postprocess(plain, output_type="pt")
    assert media.shape == (2, 1, 3, SIDE, SIDE) and media.dtype == torch.float32
    assert torch.allclose(media[:, 0], expected, atol=1e-6) and media.min() >= 0 and media.max() <= 1
    assert ((media > 0) & (media < 1)).float().mean() > 0.5, "clamping must not hide the comparison"
    weight = noise(2, 1)[:, :3].repeat_interleave(2, 2).repeat_interleave(2, 3)[:, None]
    (media * weight).sum().backward()
    index, step = (1, 2, 3, 4), 1e-2
    with torch.no_grad():
        shifted = [latents.detach().clone() for _ in range(2)]
        shifted[0][index] += step
        shifted[1][index] -= step
        up, down = ((model.decode(x).double() * weight).sum() for x in shifted)
    assert float(latents.grad[index]) == pytest.approx(float((up - down) / (2 * step)), rel=0.05, abs=1e-3)


@torch.no_grad()
def test_encodes_media_to_the_mean_of_the_posterior(model, pipe):
    media = torch.rand(2, 1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    mean = pipe.vae.encode(media[:, 0] * 2 - 1).latent_dist.mean
    found = model.encode_media(media)
    assert found.shape == (2, 4, 8, 8) and torch.allclose(found, (mean - 0.06) * 1.5, atol=1e-6)
    with pytest.raises(ValueError, match=r"\(2, 3, 3, 16, 16\), expected \(B, 1, 3, H, W\)"):
        model.encode_media(media.expand(2, 3, 3, SIDE, SIDE))


def test_encoding_keeps_no_graph(model):
    assert not model.encode(PROMPTS, "").tensors["embeds"].requires_grad


def test_everything_is_frozen_and_in_eval_mode(model):
    modules = [m for m in model.pipeline().components.values() if isinstance(m, torch.nn.Module)]
    assert len(modules) >= 4
    assert not any(p.requires_grad for module in modules for p in module.parameters())
    assert not any(module.training for module in modules)
    assert model.shift == 3.0 and model.family == "sd3" and model.pipeline().transformer is model.transformer


def test_sizes(model):
    assert model.latent_shape(16, 24) == (4, 8, 12)
    for height, width, near in [(18, 16, "16 and 16"), (16, 3, "16 and 4"), (16, 28, "16 and 24"), (0, 16, "4 and 16")]:
        with pytest.raises(
            FlowAlignError, match=f"height {height} and width {width}; expected multiples of 4 up to 24"
        ):
            model.latent_shape(height, width)
        with pytest.raises(FlowAlignError, match=f"such as {near}"):
            model.latent_shape(height, width)


@torch.no_grad()
def test_bf16_computes_what_a_bf16_pipeline_does(plain_folder):
    model, pipe = load_model(plain_folder, dtype=torch.bfloat16), diffusers_pipeline(plain_folder, torch.bfloat16)
    cond = model.encode(PROMPTS, NEGATIVE)
    assert cond.tensors["embeds"].dtype == torch.bfloat16
    x = noise(3)
    expected = pipe.transformer(
        x.bfloat16(),
        timestep=torch.full((3,), 600.0),
        encoder_hidden_states=cond.tensors["embeds"],
        pooled_projections=cond.tensors["pooled"],
    ).sample
    found = model.velocity(model.transformer, x, torch.full((3,), 0.6), cond)
    assert found.dtype == torch.float32 and torch.equal(found, expected.float())
    full = load_model(plain_folder)
    exact = full.velocity(full.transformer, x, torch.full((3,), 0.6), full.encode(PROMPTS))
    assert (found - exact).abs().max() < 0.05 * exact.abs().max()
    media = model.decode(x)
    assert media.dtype == torch.float32 and (media - full.decode(x)).abs().max() < 0.1


@torch.no_grad()
def test_t5_can_be_left_out(plain_folder):
    found = SD3.from_pretrained(plain_folder, text_encoder_3=False).encode(PROMPTS)
    pipe = StableDiffusion3Pipeline.from_pretrained(plain_folder, text_encoder_3=None, tokenizer_3=None)
    assert torch.equal(found.tensors["embeds"], pipe.encode_prompt(PROMPTS, None, None)[0])
    assert not found.tensors["embeds"][:, 16:].any()


def one_sentence(error):
    text = str(error.value)
    assert "\n" not in text and ";" in text and len(text) < 500
    return text


def test_what_cannot_be_loaded_is_told_in_one_sentence(plain_folder, tmp_path):
    for path in ("nobody/nothing", tmp_path / "missing", tmp_path, "shapes-sd4", ""):
        with pytest.raises(FlowAlignError) as error:
            load_model(path)
        assert f"model {str(path)!r}" in one_sentence(error)
    copy = tmp_path / "copy"
    shutil.copytree(plain_folder, copy)
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(FlowAlignError) as error:
        load_model(copy)
    assert "diffusers cannot load it" in one_sentence(error)
    shutil.copytree(plain_folder / "transformer", copy / "transformer", dirs_exist_ok=True)
    scheduler = copy / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace('"use_dynamic_shifting": false', '"use_dynamic_shifting": true'))
    with pytest.raises(FlowAlignError) as error:
        load_model(copy)
    assert "use_dynamic_shifting" in one_sentence(error)
    shutil.rmtree(copy / "vae")
    with pytest.raises(FlowAlignError) as error:
        load_model(copy)
    one_sentence(error)
    index = copy / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusion3Pipeline", "FluxPipeline"))
    with pytest.raises(FlowAlignError, match="is a FluxPipeline, expected one of StableDiffusion3Pipeline"):
        load_model(copy)
    index.write_text("{")
    with pytest.raises(FlowAlignError) as error:
        load_model(copy)
    one_sentence(error)


def test_bare_names_are_embedded_models(tmp_path, monkeypatch):
    assert resolve("shapes-sd3") == str(ASSETS / "shapes-sd3")
    assert resolve("some/shapes-sd3") == "some/shapes-sd3" and resolve("..") == ".." and resolve("") == ""
    (tmp_path / "shapes-sd3").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("./shapes-sd3") == "./shapes-sd3"


def options(model, **changes):
    defaults = {
        "model": str(model),
        "prompt": [],
        "prompts": None,
        "lora": None,
        "steps": 7,
        "guidance": 4.5,
        "negative": NEGATIVE,
        "seed": 3,
        "num_images": 1,
        "max_sequence_length": None,
        "height": None,
        "width": None,
        "precision": "fp32",
    }
    return argparse.Namespace(**{**defaults, **changes})


def png(path):
    return np.asarray(Image.open(path)).astype(int)


def test_sample_writes_the_pipelines_pictures(folder, pipe, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text(f"{PROMPTS[1]}\n")
    args = options(
        folder, prompt=PROMPTS[:1], prompts=str(tmp_path / "prompts.txt"), num_images=2, out=str(tmp_path / "o")
    )
    assert sample.run(args) == 0
    names = ["00000_3.png", "00000_4.png", "00001_3.png", "00001_4.png", "grid.png"]
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == names
    assert capsys.readouterr().out.split() == [str(tmp_path / "o" / name) for name in names]
    for prompt, seed, name in [(PROMPTS[0], 3, names[0]), (PROMPTS[0], 4, names[1]), (PROMPTS[1], 4, names[3])]:
        generator = torch.Generator().manual_seed(seed)
        picture = pipe(
            prompt, negative_prompt=NEGATIVE, guidance_scale=4.5, num_inference_steps=7, generator=generator
        ).images[0]
        assert abs(np.asarray(picture).astype(int) - png(tmp_path / "o" / name)).max() <= 1
    assert abs(png(tmp_path / "o" / names[0]) - png(tmp_path / "o" / names[1])).max() > 5


def test_sample_in_another_size_and_in_bf16(plain_folder, tmp_path):
    args = options(
        plain_folder, prompt=PROMPTS[:1], height=8, width=24, precision="bf16", guidance=1.0, out=str(tmp_path)
    )
    assert sample.run(args) == 0 and png(tmp_path / "00000_3.png").shape == (8, 24, 3)


def test_sample_without_a_prompt_or_with_a_bad_size(plain_folder, tmp_path):
    with pytest.raises(FlowAlignError, match="no prompt came"):
        sample.run(options(plain_folder, out=str(tmp_path)))
    with pytest.raises(FlowAlignError, match="expected multiples of 4"):
        sample.run(options(plain_folder, prompt=["a"], height=7, out=str(tmp_path)))
