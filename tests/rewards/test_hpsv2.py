"""HPSv2 and HPSv2.1 on tiny random weights in the published form, against open_clip and torchvision themselves."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as vision

from flowalign.rewards import contract, tiny_clip
from flowalign.rewards.judge import Judge
from flowalign.rewards.openclip import CONFIG
from flowalign.rewards.weights import checksum
from flowalign.types import FlowAlignError
from reward_models.hpsv2.fixture import tiny
from reward_models.hpsv2.reward import HPSv2, HPSv21
from reward_models.pickscore.fixture import tiny as tiny_pickscore
from reward_models.pickscore.reward import PickScore
from tests.rewards.pictures import media, pil

FILE = "HPS_v2.1_compressed.pt"
TOLERANCE = 1e-5
"""Of a cosine in float32, computed in batches of another size."""
FITTED = {  # by hand: height and width in 32 pixels, and the bars above and left
    (48, 48): (32, 32, 0, 0),
    (40, 56): (23, 32, 4, 0),  # 22.86
    (97, 64): (32, 21, 0, 5),  # 21.11
    (9, 13): (22, 32, 5, 0),  # 22.15
}
PROMPTS = ("a red cat", "an astronaut’s “helmet”", "two dogs and a very " + "long " * 90 + "sentence", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hpsv2")
    tiny(made, "hpsv2.1")
    return made


@pytest.fixture(scope="module")
def reward(folder):
    return HPSv21(path=str(folder))


def transformed(height: int, width: int, seed: int = 0, mean=None, std=None) -> torch.Tensor:
    """The published preparation in torchvision: tensor first, longest side to 32, zeros around, normalise."""
    to_height, to_width, top, left = FITTED[height, width]
    tensor = vision.to_tensor(pil(height, width, seed))
    tensor = vision.resize(tensor, [to_height, to_width], InterpolationMode.BICUBIC, antialias=True)
    tensor = vision.pad(tensor, [left, top, 32 - to_width - left, 32 - to_height - top])
    return vision.normalize(tensor, mean or open_clip.OPENAI_DATASET_MEAN, std or open_clip.OPENAI_DATASET_STD)[None]


def cosine(model, pixels: torch.Tensor, tokens: torch.Tensor) -> float:
    """In float64, from open_clip's own features."""
    with torch.no_grad():
        image, text = (f.double().numpy()[0] for f in (model.encode_image(pixels), model.encode_text(tokens)))
    return float(image @ text / np.linalg.norm(image) / np.linalg.norm(text))


def loaded(folder):
    model = open_clip.CLIP(**json.loads((folder / CONFIG).read_text())["model_cfg"]).eval()
    model.load_state_dict(torch.load(folder / FILE, weights_only=True)["state_dict"])
    return model


def test_scores_equal_an_independent_computation(folder, reward) -> None:
    model, tokenizer = loaded(folder), open_clip.get_tokenizer("ViT-H-14")
    scores = []
    for size in FITTED:
        got = reward(media(*size, 0, 1, 2, 3), PROMPTS).score
        expected = [cosine(model, transformed(*size, i), tokenizer([text])) for i, text in enumerate(PROMPTS)]
        assert got.dtype == torch.float32
        assert got.tolist() == pytest.approx(expected, abs=TOLERANCE)
        scores += expected
    assert np.std(scores) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["hpsv2", "hpsv2.1"])
def test_both_versions_keep_the_contract_and_read_their_own_file(tmp_path, name: str) -> None:
    params = tiny(tmp_path, name)
    made, other = (HPSv2, HPSv21) if name == "hpsv2" else (HPSv21, HPSv2)
    judge = Judge(made(**params))
    assert judge.spec.name == name
    found = contract.check(judge, contract.default_example("image"))
    assert not [f for f in found if not f.passed]
    with pytest.raises(FlowAlignError, match=f"no file .*{other.spec.weights[0].file}"):
        other(**params)


def test_there_is_no_temperature(folder, reward, tmp_path) -> None:
    state = torch.load(folder / FILE, weights_only=True)["state_dict"]
    torch.save({"state_dict": state | {"logit_scale": torch.tensor(4.6)}}, tmp_path / FILE)
    hot = HPSv21(path=str(tmp_path / FILE), model=str(folder))
    pictures = media(40, 56, 0, 1)
    assert torch.equal(hot(pictures, PROMPTS[:2]).score, reward(pictures, PROMPTS[:2]).score)


def test_quotes_are_mended_here_and_not_in_pickscore(reward, tmp_path) -> None:
    picture = media(32, 32)
    texts = "an astronaut’s helmet", "an astronaut's helmet"
    curly, plain = (reward(picture, [text]).score for text in texts)
    assert torch.equal(curly, plain)
    pickscore = PickScore(**tiny_pickscore(tmp_path, "pickscore"))
    curly, plain = (pickscore(picture, [text]).score for text in texts)
    assert abs(curly - plain) > 1e-3


def test_frames_are_averaged_and_a_direct_call_checks_media(reward) -> None:
    frames = media(40, 56, 0, 1, 2)
    singles = reward(frames, PROMPTS[:1] * 3).score
    assert reward(frames.transpose(0, 1), PROMPTS[:1]).score == pytest.approx(float(singles.mean()), abs=TOLERANCE)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        reward(frames * 255, PROMPTS[:3])


@pytest.mark.parametrize("size", [(40, 56), (97, 64), (9, 13)])
def test_the_gradient_to_pixels_is_that_of_finite_differences(reward, size: tuple[int, int]) -> None:
    pictures = (media(*size, 0, 1) * 0.8 + 0.1).requires_grad_(True)
    (gradient,) = torch.autograd.grad(reward(pictures, PROMPTS[:2]).score.sum(), pictures)
    assert not any(p.requires_grad for p in reward.clip.model.parameters())
    # A random direction and the gradient's own, in a step where neither the score's bend nor rounding reaches 1%.
    direction = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    direction = torch.nn.functional.normalize((direction + gradient / gradient.std()).flatten(), dim=0)
    step, direction = 1e-2, direction.view_as(pictures)
    with torch.no_grad():
        up, down = (reward(pictures + s * step * direction, PROMPTS[:2]).score.double().sum() for s in (1, -1))
    numeric, analytic = float(up - down) / (2 * step), float((gradient * direction).sum())
    assert abs(numeric) > 1e-2
    assert analytic == pytest.approx(numeric, rel=1e-2)


def own_folder(folder, suffix: str) -> dict:
    """A model as open_clip saves one, with statistics, length and a tokenizer of its own; returns its configuration."""
    tiny_clip.write(folder, "gelu")  # for its tokenizer of 515 tokens
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {
            "context_length": 12,
            "vocab_size": 515,
            "width": 32,
            "heads": 2,
            "layers": 1,
            "hf_tokenizer_name": "somebody/elsewhere",
        },
    }
    statistics = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    (folder / CONFIG).write_text(json.dumps({"model_cfg": config, "preprocess_cfg": statistics}))
    (folder / "model.safetensors").unlink()  # of transformers
    model = open_clip.CLIP(**{**config, "quick_gelu": False})
    tiny_clip.randomise(model)
    if suffix == "safetensors":
        save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    else:
        torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return config


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_folder_of_open_clip_is_read_as_open_clip_reads_it(tmp_path, suffix: str) -> None:
    own_folder(tmp_path, suffix)
    with contract.no_sockets():
        reward = HPSv21(path=str(tmp_path))
        theirs = open_clip.create_model(f"local-dir:{tmp_path}").eval()
        tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path}")
    texts = ["a cat", "a text that is far longer than twelve tokens"]
    assert tokenizer(texts).shape == (2, 12)
    got = reward(media(40, 56, 0, 1), texts).score.tolist()
    pixels = [transformed(40, 56, i, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]) for i in (0, 1)]
    expected = [cosine(theirs, pixels[i], tokenizer([texts[i]])) for i in (0, 1)]
    assert got == pytest.approx(expected, abs=TOLERANCE)
    plain = [cosine(theirs, transformed(40, 56, i), tokenizer([texts[i]])) for i in (0, 1)]
    assert max(abs(a - b) for a, b in zip(plain, expected, strict=True)) > 100 * TOLERANCE


def test_only_the_published_file_is_fetched(folder, monkeypatch) -> None:
    asked = []

    def fetch(repository, file, *, revision):
        asked.append((repository, file, revision))
        return str(folder / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    with contract.no_sockets():
        HPSv21(model=str(folder / CONFIG))
    assert asked == [("xswu/HPSv2", FILE, "main")]


def test_the_published_architecture_is_vit_h_14(folder, monkeypatch) -> None:
    tower = {"layers": 32, "width": 1280, "head_width": 80, "patch_size": 14, "image_size": 224}
    text = {"context_length": 77, "vocab_size": 49408, "width": 1024, "heads": 16, "layers": 24}
    with torch.device("meta"):  # shapes only: a billion weights are not made
        state = open_clip.CLIP(1024, tower, text).state_dict()
        monkeypatch.setattr("flowalign.rewards.weights.read", lambda path, name, key: state)
        model = HPSv21(path=str(folder / FILE), device="meta").clip.model
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 986.11  # as open_clip lists it
    assert {type(block.mlp.gelu) for block in model.transformer.resblocks} == {torch.nn.GELU}
    assert {type(block.mlp.gelu) for block in model.visual.transformer.resblocks} == {torch.nn.GELU}


def test_global_random_numbers_are_left_alone(folder) -> None:
    before = torch.random.get_rng_state()
    HPSv21(path=str(folder))
    assert torch.equal(before, torch.random.get_rng_state())


class Code:
    def __reduce__(self):
        return (print, ("unpickled",))


def broken(kind: str, state: dict[str, torch.Tensor]):
    first = "visual.conv1.weight"
    rest = {key: value for key, value in state.items() if key != first}
    return {
        "missing": {"state_dict": rest},
        "unknown": {"state_dict": {**state, "module.extra": torch.zeros(1)}},
        "prefixed": {"state_dict": {f"module.{key}": value for key, value in state.items()}},
        "shape": {"state_dict": {**rest, first: state[first][:, :, :4, :4]}},
        "no key": state,
        "code": {"state_dict": {**state, first: Code()}},
        "namespace": {"state_dict": state, "args": SimpleNamespace(a=1)},
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "visual.conv1.weight is missing"),
        ("unknown", "module.extra is unknown"),
        ("prefixed", "and .* more; give the published file"),
        ("shape", r"conv1.weight is \(32, 3, 4, 4\), expected \(32, 3, 8, 8\)"),
        ("no key", "no state dict under 'state_dict'"),
        ("code", "no plain weights"),
        ("namespace", "no plain weights"),
    ],
)
def test_other_weights_are_refused_in_one_sentence(folder, tmp_path, capfd, kind: str, words: str) -> None:
    state = torch.load(folder / FILE, weights_only=True)["state_dict"]
    torch.save(broken(kind, state), tmp_path / FILE)
    with pytest.raises(FlowAlignError, match=f"'hpsv2.1'.*{words}") as caught:
        HPSv21(path=str(tmp_path), model=str(folder))
    assert "\n" not in str(caught.value) and "unpickled" not in capfd.readouterr().out


def test_the_checksum_is_that_of_the_file(folder) -> None:
    HPSv21(path=str(folder), sha256=checksum(folder / FILE))
    with pytest.raises(FlowAlignError, match=r"'hpsv2.1'.*has sha256 .*expected 000000000000"):
        HPSv21(path=str(folder), sha256="0" * 64)


@pytest.mark.parametrize(
    ("tower", "change", "words"),
    [
        ("", {"vision_cfg": None}, "does not hold embed_dim, text_cfg, vision_cfg"),
        ("", {"invented": 1}, "makes no CLIP"),
        ("text_cfg", {"hf_model_name": "bert"}, "text_cfg.hf_model_name"),
        ("vision_cfg", {"timm_model_name": "vit"}, "vision_cfg.timm_model_name"),
        ("vision_cfg", {"image_size": [32, 64]}, "expected a square"),
        ("text_cfg", {"vocab_size": 500}, "the tokenizer has 515 tokens, but the model 500"),
        ("text_cfg", {"pool_type": "eos"}, "ends a text with token 514, but the model .* at 2"),
        ("text_cfg", {"hf_tokenizer_name": ""}, "the tokenizer has 49408 tokens, but the model 515"),
    ],
)
def test_configurations_that_make_no_judge_are_refused(tmp_path, tower: str, change: dict, words: str) -> None:
    config = own_folder(tmp_path, "bin")
    (config[tower] if tower else config).update(change)
    (tmp_path / CONFIG).write_text(json.dumps({"model_cfg": config}))
    with pytest.raises(FlowAlignError, match=f"'hpsv2.1'.*{words}") as caught:
        HPSv21(path=str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"embed_dim": 16}', '{"model_cfg": {"text_cfg": {}}}'])
def test_files_that_are_no_configuration_are_refused(folder, tmp_path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(FlowAlignError, match=r"'hpsv2.1': .*model.json.*give a configuration of open_clip") as caught:
        HPSv21(path=str(folder), model=str(tmp_path / "model.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [("ViT-H-14-gelu", "did you mean 'ViT-H-14"), ("zzz", "a folder or a JSON file"), ("none.json", "cannot be read")],
)
def test_unknown_architectures_are_refused(folder, model: str, words: str) -> None:
    with pytest.raises(FlowAlignError, match=f"'hpsv2.1'.*{words}"):
        HPSv21(path=str(folder), model=model)


def test_a_tokenizer_that_does_not_end_its_texts_is_refused(tmp_path) -> None:
    own_folder(tmp_path, "bin")
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    made["post_processor"] = None  # adds start and end
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # CLIPTokenizer makes its own post-processor
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(FlowAlignError, match=r"not with its end 514; give one that ends every text"):
        HPSv21(path=str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path) -> None:
    own_folder(tmp_path, "bin")
    for file in tmp_path.glob("*token*"):
        file.unlink()
    (tmp_path / "config.json").unlink()
    with contract.no_sockets(), pytest.raises(FlowAlignError, match=r"no tokenizer in .*beside open_clip_config.json"):
        HPSv21(path=str(tmp_path))
