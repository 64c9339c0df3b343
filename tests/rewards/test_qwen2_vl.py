"""Qwen2-VL as a judge's trunk, against transformers' own pixels, vision tower and text-only language model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    Qwen2Config,
    Qwen2Model,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLModel,
    Qwen2VLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from flowalign.rewards.qwen2_vl import CHAT, Qwen2VLScores
from flowalign.rewards.qwen2_vl_pixels import patches, target_size
from flowalign.types import FlowAlignError
from reward_models.hpsv3.fixture import tiny
from reward_models.hpsv3.reward import TOKEN, head
from tests.rewards.pictures import images, pil

TOLERANCE = 1e-5
ROUNDING = 1.5 / 255 / 0.2577
"""Of bytes after a resize, in normalised units: half a step, and one more where two passes each round."""
SIZE = (56, 84)
QUESTION = "Rate it <|Reward|>: {text_prompt}"
PROMPTS = ("a red cat", "two dogs and a very long sentence", "x")


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("qwen2_vl"), "hpsv3")


def made(params, **others) -> Qwen2VLScores:
    """The tiny trunk with a question of one line and small pictures."""
    given = {
        "state": load_file(f"{params['path']}/HPSv3.safetensors"),
        "head": head,
        "base": params["base"],
        "tokens": (TOKEN,),
        "template": QUESTION,
        "pixels": (SIZE[0] * SIZE[1],) * 2,
        "modality": "image",
        "precision": "fp32",
        "device": "cpu",
        "name": "judge",
    }
    return Qwen2VLScores(**given | others)


@pytest.fixture(scope="module")
def scores(params):
    return made(params)


def stock(params) -> Qwen2VLModel:
    """Transformers' own model with the same weights, positions on three axes and exact frequencies."""
    state = load_file(f"{params['path']}/HPSv3.safetensors")
    config = Qwen2VLConfig.from_pretrained(params["base"])
    config.text_config.vocab_size = state["model.embed_tokens.weight"].shape[0]
    with torch.random.fork_rng(devices=[]):
        model = Qwen2VLModel(config).eval()
    names = {"model.": "language_model.", "visual.": "visual."}
    model.load_state_dict(
        {
            ours + key.removeprefix(theirs): value
            for key, value in state.items()
            for theirs, ours in names.items()
            if key.startswith(theirs)
        }
    )
    return model


class RotaryOf445(torch.nn.Module):
    """Angles of rows and columns as transformers 4.45.2 looks them up, once its table is in bfloat16."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.outer(torch.arange(64, dtype=torch.bfloat16), frequencies.bfloat16()).float()

    def forward(self, x, position_ids):
        angles = torch.cat([self.table[position_ids[:, 0]], self.table[position_ids[:, 1]]], -1).repeat(1, 2)
        return angles.cos(), angles.sin()


# pixels


@pytest.mark.parametrize("limits", [(200704, 200704), (100352, 200704), (56 * 56, 28 * 28 * 1280)])
def test_sizes_are_those_of_transformers(limits) -> None:
    sides = [7, 13, 28, 42, 64, 97, 224, 336, 448, 512, 719, 1080, 1400, 1920, 4096]
    for height in sides:
        for width in sides:
            if max(height, width) <= 200 * min(height, width):
                wanted = smart_resize(height, width, 28, *limits)
                assert target_size(height, width, *limits) == wanted, (height, width)
    assert target_size(200, 1, *limits) and target_size(201, 1, *limits) is None


def theirs(picture, pixels: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """(P, 1176) of transformers' processor, and the size that it chose."""
    found = Qwen2VLImageProcessor(size={"shortest_edge": pixels, "longest_edge": pixels})(picture, return_tensors="pt")
    _, high, wide = found.image_grid_thw[0].tolist()
    return found.pixel_values, (14 * high, 14 * wide)


def test_patches_without_a_resize_are_those_of_transformers() -> None:
    wanted, size = theirs(pil(*SIZE, 3), SIZE[0] * SIZE[1])
    assert size == SIZE
    assert (patches(images(*SIZE, 3)[:, None], SIZE)[0] - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("source", [(150, 230), (30, 45), (90, 140)])
def test_resized_patches_are_those_of_transformers_within_the_rounding_of_bytes(source) -> None:
    # Away from black and white: bytes are also cut off between the passes, where bicubic overshoots.
    shown = (images(*source, 3) * 0.6 * 255 + 51).round().byte()
    wanted, target = theirs(shown[0], 112 * 168)
    ours = shown[:, None].float() / 255
    assert (patches(ours, target)[0] - wanted).abs().max() < ROUNDING

    def resized(**how) -> torch.Tensor:
        return functional.interpolate(ours[:, 0], target, align_corners=False, **how).clamp(0, 1)[:, None]

    wrong = {"bilinear": resized(mode="bilinear", antialias=True), "rescaled twice": ours / 255}
    if source[0] > target[0]:  # it makes no difference where a picture grows
        wrong["not antialiased"] = resized(mode="bicubic")
    for name, media in wrong.items():
        assert (patches(media, target)[0] - wanted).abs().max() > 2 * ROUNDING, name


@pytest.mark.parametrize("count", [4, 5])
def test_frames_are_paired_as_by_transformers_and_an_odd_last_one_is_shown_twice(count) -> None:
    video = images(*SIZE, *range(count))
    limits = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 768}
    processor = Qwen2VLVideoProcessor(size=limits, do_sample_frames=False)
    wanted = processor((video * 255).round().byte(), return_tensors="pt")
    assert wanted.video_grid_thw.tolist() == [[-(-count // 2), 4, 6]]
    assert (patches(video[None], SIZE)[0] - wanted.pixel_values_videos).abs().max() < 1e-6


# questions


def test_a_question_is_the_chat_of_qwen2_vl_with_a_place_for_every_token(scores) -> None:
    ids, places = scores.question("a cat", 3)
    assert scores.tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|>"
        "<|image_pad|><|image_pad|><|vision_end|>Rate it <|Reward|>: a cat<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [scores.tokenizer.decode([ids[i]]) for i in places] == ["<|Reward|>"]


def test_a_prompt_that_spells_a_token_has_no_score_and_hinders_no_other(scores) -> None:
    media = images(*SIZE, 1, 2, 3)[:, None]
    found, reasons = scores(media, ["a cat", "a <|Reward|> cat", "<|image_pad|>"])
    assert found.isfinite().all(-1)[:, 0].tolist() == [True, False, False]
    assert reasons[0] is None and "spells a token" in reasons[1] and "spells a token" in reasons[2]
    assert (found[0] - scores(media[:1], ["a cat"])[0][0]).abs().max() < TOLERANCE
    assert scores(media[1:2], ["<|Reward|>"])[0].isnan().all()


def test_braces_in_a_prompt_are_its_own(scores) -> None:
    ids, _ = scores.question("{text_prompt} {0} {pad}", 1)
    assert "Rate it <|Reward|>: {text_prompt} {0} {pad}<|im_end|>" in scores.tokenizer.decode(ids)


# network


def test_vision_features_are_those_of_transformers_tower(params, scores) -> None:
    tower = stock(params).visual
    tower.rotary_pos_emb = RotaryOf445(tower.rotary_pos_emb.inv_freq)
    pictures = [pil(*SIZE, seed) for seed in (1, 2)]
    given = Qwen2VLImageProcessor(size={"shortest_edge": 4704, "longest_edge": 4704})(pictures, return_tensors="pt")
    with torch.no_grad():
        wanted = tower(given.pixel_values, grid_thw=given.image_grid_thw).pooler_output
    assert (scores.model.features(images(*SIZE, 1, 2)[:, None], SIZE).flatten(0, 1) - wanted).abs().max() < TOLERANCE


def reference(params, scores, media: torch.Tensor, prompt: str, rounded: bool) -> np.ndarray:
    """One sample through transformers' text-only Qwen2, which knows one axis of positions, and a head in numpy."""
    state = load_file(f"{params['path']}/HPSv3.safetensors")
    text = Qwen2VLConfig.from_pretrained(params["base"]).text_config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = Qwen2Config(
        **{name: getattr(text, name) for name in names},
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen2Model(config).eval()
    model.load_state_dict({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")})
    if rounded:
        model.rotary_emb.inv_freq = model.rotary_emb.inv_freq.bfloat16().float()
    features = scores.model.features(media, SIZE)[0]
    chat = CHAT.format(pad="<|image_pad|>" * len(features), text=QUESTION.replace("{text_prompt}", prompt))
    ids = torch.tensor(scores.tokenizer(chat).input_ids)
    embedded = state["model.embed_tokens.weight"][ids]
    embedded[ids == scores.tokenizer.convert_tokens_to_ids("<|image_pad|>")] = features
    with torch.no_grad():
        hidden = model(inputs_embeds=embedded[None]).last_hidden_state[0]
    x = hidden[ids == scores.tokenizer.convert_tokens_to_ids("<|Reward|>")].double().numpy()
    for layer in (0, 3, 5):
        weight, bias = (state[f"rm_head.{layer}.{kind}"].double().numpy() for kind in ("weight", "bias"))
        x = (x if layer == 0 else x.clip(0)) @ weight.T + bias
    return x[0]


def test_scores_are_those_of_a_text_only_qwen2_and_of_plain_matrices(params, scores) -> None:
    media = images(*SIZE, 1, 2, 3)[:, None]
    found = scores(media, PROMPTS)[0][:, 0].numpy()
    for i, prompt in enumerate(PROMPTS):
        assert abs(found[i] - reference(params, scores, media[i : i + 1], prompt, rounded=True)).max() < TOLERANCE
    exact = reference(params, scores, media[:1], PROMPTS[0], rounded=False)
    assert abs(found[0] - exact).max() > 100 * TOLERANCE  # the frequencies of the checkpoint are part of its score


def test_positions_on_three_axes_would_give_another_score(params, scores) -> None:
    media = images(*SIZE, 1)[:, None]
    ids, places = scores.question(PROMPTS[0], 6)
    ids = torch.tensor([ids])
    model = stock(params)
    model.visual.rotary_pos_emb = RotaryOf445(model.visual.rotary_pos_emb.inv_freq)
    rotary = model.language_model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": patches(media, SIZE)[0],
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "mm_token_type_ids": (ids == scores.pad).int(),
    }
    with torch.no_grad():
        line = model(**given, position_ids=torch.arange(ids.shape[1]).expand(3, 1, -1)).last_hidden_state
        space = model(**given).last_hidden_state
    found = scores(media, PROMPTS[:1])[0][0, 0]
    one, three = (scores.model.head(hidden[0, places[0]]) for hidden in (line, space))
    assert (found - one).abs().max() < TOLERANCE < 100 * TOLERANCE < (found - three).abs().max()


def test_a_score_does_not_depend_on_longer_neighbours(scores) -> None:
    media = images(*SIZE, 1, 2, 3)[:, None]
    together = scores(media, PROMPTS)[0]
    alone = torch.cat([scores(media[i : i + 1], PROMPTS[i : i + 1])[0] for i in range(3)])
    assert (together - alone).abs().max() < TOLERANCE
    assert (together[0] - together[2]).abs().max() > 100 * TOLERANCE


def test_gradients_reach_the_picture_and_no_weight(scores) -> None:
    generator = torch.Generator().manual_seed(0)
    media = torch.rand(1, 1, 3, 40, 60, generator=generator).mul(0.8).add(0.1).requires_grad_(True)
    (gradient,) = torch.autograd.grad(scores(media, PROMPTS[:1])[0].sum(), media)
    assert not any(weight.requires_grad for weight in scores.model.parameters())
    step = 1e-2 * gradient / gradient.norm()
    with torch.no_grad():
        up, down = (scores(media + sign * step, PROMPTS[:1])[0].double().sum() for sign in (1, -1))
    assert float(up - down) == pytest.approx(float(2 * (step * gradient).sum()), rel=0.01)


def test_bfloat16_is_of_the_trunk_alone(params, scores) -> None:
    half = made(params, precision="bf16")
    media = images(*SIZE, 1, 2, 3)[:, None]
    kinds = {name: {weight.dtype for weight in getattr(half.model, name).parameters()} for name in ("visual", "head")}
    assert kinds == {"visual": {torch.bfloat16}, "head": {torch.float32}}
    assert half.model.language_model.embed_tokens.weight.dtype == torch.bfloat16
    found, wanted = half(media, PROMPTS)[0], scores(media, PROMPTS)[0]
    assert found.dtype == torch.float32
    assert 0 < (found - wanted).abs().max() < 0.05 * wanted.abs().max()  # 8 bits of precision, some layers deep


# weights


def test_what_does_not_fit_is_refused_in_one_sentence(params, tmp_path) -> None:
    with pytest.raises(FlowAlignError, match="precision is 'fp8', expected bf16 or fp32"):
        made(params, precision="fp8")
    with pytest.raises(FlowAlignError, match=r"'judge'.*cannot be loaded.*params\.base") as caught:
        made(params, base=str(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(FlowAlignError, match=r"tokens with those of the judge, the weights \d+"):
        made(params, tokens=(TOKEN, "<|Another|>"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("visual.merger.ln_q.bias"), r"visual\.merger\.ln_q\.bias is missing"),
        (lambda state: state.update({"model.layers.7.x": torch.zeros(1)}), r"model\.layers\.7\.x is unknown"),
        (lambda state: state.update({"rm_head.0.bias": torch.zeros(3)}), r"head\.0\.bias is \(3,\), expected"),
        (lambda state: state.pop("model.embed_tokens.weight"), "the weights 0"),
    ],
)
def test_weights_that_do_not_fit_are_named(params, change, message) -> None:
    state = load_file(f"{params['path']}/HPSv3.safetensors")
    change(state)
    with pytest.raises(FlowAlignError, match=message):
        made(params, state=state)
