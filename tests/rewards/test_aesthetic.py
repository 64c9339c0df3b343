"""The aesthetic predictor on tiny random weights in the published form, against an independent computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPModel

from flowalign.rewards import contract, tiny_clip
from flowalign.rewards.clip import preprocess
from flowalign.rewards.judge import Judge
from flowalign.rewards.weights import checksum
from flowalign.types import FlowAlignError
from reward_models.aesthetic.fixture import tiny
from reward_models.aesthetic.reward import Aesthetic, AestheticHead
from tests.rewards.pictures import media

FILE = "sac+logos+ava1-l14-linearMSE.pth"
LINEAR = (0, 2, 4, 6, 7)
"""Layers of the published file; dropout stands between the others."""
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("aesthetic")
    tiny(made, "aesthetic")
    return made


@pytest.fixture(scope="module")
def reward(folder):
    return Aesthetic(path=str(folder), clip=str(folder))


def affine(state: dict[str, torch.Tensor]) -> tuple[np.ndarray, float]:
    """The five layers multiplied out in float64: without activations they are one vector and one number."""
    weight, bias = np.eye(state["layers.0.weight"].shape[1]), np.zeros(state["layers.0.weight"].shape[1])
    for i in LINEAR:
        matrix = state[f"layers.{i}.weight"].double().numpy()
        weight, bias = matrix @ weight, matrix @ bias + state[f"layers.{i}.bias"].double().numpy()
    return weight[0], float(bias[0])


def test_the_head_is_one_affine_map() -> None:
    generator = torch.Generator().manual_seed(0)
    head = AestheticHead(768).eval()
    shapes = {key: tuple(value.shape) for key, value in head.state_dict().items() if key.endswith("weight")}
    widths = (768, 1024, 128, 64, 16, 1)
    assert shapes == {f"layers.{i}.weight": (widths[n + 1], widths[n]) for n, i in enumerate(LINEAR)}
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
    vectors = torch.nn.functional.normalize(torch.randn(50, 768, generator=generator), dim=-1)
    weight, bias = affine(head.state_dict())
    expected = vectors.double().numpy() @ weight + bias
    with torch.no_grad():
        assert head(vectors).numpy() == pytest.approx(expected, abs=1e-5)
    assert expected.std() > 1e-2


def test_scores_equal_an_independent_computation(folder, reward) -> None:
    pictures = media(40, 56, 0, 1, 2, 3)
    weight, bias = affine(torch.load(folder / FILE, weights_only=True))
    with torch.no_grad():
        pixels = preprocess(pictures[:, 0], 32, MEAN, STD)  # checked in test_preprocess
        features = CLIPModel.from_pretrained(folder).eval().get_image_features(pixel_values=pixels).pooler_output
    features = features.double().numpy()
    lengths = np.linalg.norm(features, axis=-1, keepdims=True)
    expected = (features / lengths) @ weight + bias
    got = reward(pictures, [""] * 4).score
    assert got.dtype == torch.float32 and got.numpy() == pytest.approx(expected, abs=1e-5)
    assert expected.std() > 1e-2
    assert abs(features @ weight + bias - expected).max() > 0.1, "vectors that are not scaled to length 1 are seen"
    assert (abs(expected - bias) <= np.linalg.norm(weight)).all()


def test_it_keeps_the_contract_and_reads_no_prompt(folder) -> None:
    judge = Judge(Aesthetic(path=str(folder), clip=str(folder)))
    found = contract.check(judge, contract.default_example("image"))
    assert not [f for f in found if not f.passed]
    assert judge.spec.needs == ()
    pictures = media(32, 32, 0, 1)
    assert torch.equal(judge(pictures, ["a", "b"]).score, judge(pictures, ["", "c"]).score)


def test_frames_are_averaged(reward) -> None:
    frames = media(40, 56, 0, 1, 2)
    singles = reward(frames, [""] * 3).score
    assert reward(frames.transpose(0, 1), [""]).score == pytest.approx(float(singles.mean()), abs=1e-5)


def test_nothing_of_it_is_trained_or_dropped(reward) -> None:
    assert not any(p.requires_grad for module in (reward.head, reward.clip.model) for p in module.parameters())
    assert not any(module.training for module in reward.head.modules())


def test_a_file_on_its_own_with_its_checksum(folder) -> None:
    file = folder / FILE
    Aesthetic(path=str(file), clip=str(folder), sha256=checksum(file))
    with pytest.raises(FlowAlignError, match=r"'aesthetic'.*has sha256 .*expected 000000000000"):
        Aesthetic(path=str(file), clip=str(folder), sha256="0" * 64)


def test_only_the_published_file_is_fetched_and_another_in_its_place_is_refused(folder, monkeypatch) -> None:
    asked = []

    def fetch(repository, file, *, revision):
        asked.append((repository, file))
        return str(folder / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    with contract.no_sockets(), pytest.raises(FlowAlignError, match=r"has sha256 .*, expected 21dd590f3ccd"):
        Aesthetic(clip=str(folder))
    assert asked == [("camenduru/improved-aesthetic-predictor", FILE)]


class Code:
    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("one linear layer", "layers.0.weight is missing"),  # the head of VBench
        ("another CLIP", r"layers.0.weight is \(1024, 12\), expected \(1024, 16\)"),
        ("training checkpoint", "no state dict"),
        ("code", "no plain weights"),
    ],
)
def test_other_heads_are_refused_in_one_sentence(folder, tmp_path, capfd, kind: str, words: str) -> None:
    state = torch.load(folder / FILE, weights_only=True)
    broken = {
        "one linear layer": {"weight": torch.zeros(1, 16), "bias": torch.zeros(1)},
        "another CLIP": state | {"layers.0.weight": torch.zeros(1024, 12)},
        "training checkpoint": {"state_dict": state, "epoch": 3},
        "code": state | {"layers.7.bias": Code()},
    }
    torch.save(broken[kind], tmp_path / FILE)
    with pytest.raises(FlowAlignError, match=f"'aesthetic'.*{words}") as caught:
        Aesthetic(path=str(tmp_path), clip=str(folder))
    assert "\n" not in str(caught.value) and "unpickled" not in capfd.readouterr().out


def test_weights_move_where_they_are_told(folder) -> None:
    made = Aesthetic(path=str(folder), clip=str(folder))
    pictures = media(32, 32, 0)
    before = made(pictures, [""]).score
    assert torch.equal(Judge(made, offload="cpu")(pictures, [""]).score, before)
    made.to("meta")
    devices = {p.device.type for module in (made.head, made.clip.model) for p in module.parameters()}
    assert devices == {"meta"} and made.clip.device.type == "meta"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "lacks visual_projection.weight; give .* params.clip"),
        ("shape", "cannot be loaded .* params.clip and params.processor"),
        ("damaged", "cannot be loaded"),
    ],
)
def test_a_clip_that_is_not_whole_is_refused_in_one_sentence(folder, tmp_path, kind: str, words: str) -> None:
    tiny_clip.write(tmp_path, "quick_gelu")
    file, key = tmp_path / "model.safetensors", "visual_projection.weight"
    state = load_file(file)
    projection = state.pop(key)
    if kind == "shape":
        state[key] = projection[:8].clone()
    save_file(state, file, metadata={"format": "pt"})
    if kind == "damaged":
        file.write_bytes(b"no weights" * 20)
    with pytest.raises(FlowAlignError, match=f"'aesthetic'.*{words}") as caught:
        Aesthetic(path=str(folder), clip=str(tmp_path))
    assert "\n" not in str(caught.value)
