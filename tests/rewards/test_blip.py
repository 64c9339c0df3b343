"""BLIP's network from published names: against attention written out by hand, against the authors' code, and faults."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch.nn import functional

from flowalign.rewards import blip
from flowalign.types import FlowAlignError
from reward_models.cyclereward import fixture as cyclereward_fixture
from reward_models.cyclereward.reward import CycleReward
from reward_models.imagereward import fixture as imagereward_fixture
from reward_models.imagereward.reward import ImageReward
from tests.rewards import golden_blip as golden

JUDGES = {"imagereward": (ImageReward, imagereward_fixture), "cyclereward": (CycleReward, cyclereward_fixture)}
FILES = {"imagereward": "ImageReward.pt", "cyclereward": "CycleReward-Combo.pth"}
GOLDEN = Path(golden.__file__).with_suffix(".safetensors")
TOLERANCE = 1e-5
"""Of scores near 1 in float32; each negative control must exceed it tenfold."""
PROMPTS = golden.PROMPTS[:4]


@pytest.fixture(scope="module", params=sorted(JUDGES))
def judge(request, tmp_path_factory):
    """Name, reward and folder of each judge on the weights of its fixture; pictures of 48 pixels."""
    cls, fixture = JUDGES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, cls(**fixture.tiny(folder, request.param)), folder


@pytest.fixture(scope="module", params=sorted(JUDGES))
def golden_judge(request, tmp_path_factory):
    """Name, reward and folder of each judge on the golden weights; pictures of 224 pixels."""
    name, folder = request.param, tmp_path_factory.mktemp("golden")
    with safe_open(GOLDEN, "pt") as opened:
        shapes = json.loads(opened.metadata()[name])
    torch.save(golden.weights(shapes), folder / FILES[name])
    (folder / "med_config.json").write_text(json.dumps(golden.MED_CONFIG))
    (folder / "vocab.txt").write_text("\n".join(golden.VOCABULARY) + "\n")
    return name, JUDGES[name][0](path=str(folder), tokenizer=str(folder)), folder


def as_media(*arrays) -> torch.Tensor:
    """(H, W, 3) bytes to (B, 1, 3, H, W)."""
    return torch.stack([torch.from_numpy(a.copy()) for a in arrays]).permute(0, 3, 1, 2)[:, None].float() / 255


def media(count: int) -> torch.Tensor:
    """Of the fixture's own size, so that nothing is resized."""
    coarse = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(3))
    return functional.interpolate(coarse, (48, 48))[:, None] * 0.8 + 0.1


def attention(q, k, v, heads: int, mask=None):
    """(L, D) queries, (M, D) keys and values; a loop over heads, and exp over sum of exp."""
    parts = []
    for qh, kh, vh in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        logits = qh @ kh.T / math.sqrt(qh.shape[-1])
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        weights = (logits - logits.max(-1, keepdim=True).values).exp()
        parts.append(weights / weights.sum(-1, keepdim=True) @ vh)
    return torch.cat(parts, -1)


def by_hand(state, pixels, ids, mask, *, activation, vision_eps=1e-6, causal=False, text_heads=4):
    """The head's answer to one picture (3, S, S) and one text (L,), from names of the published file alone.

    In double precision, from: Dosovitskiy et al. (ViT, norm first), Devlin et al. (BERT, norm last), Li et al. (BLIP:
    cross-attention between self-attention and feed-forward).
    """
    state = {name.removeprefix("blip."): value.double() for name, value in state.items()}

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x, name, eps):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    kernel = state["visual_encoder.patch_embed.proj.weight"]
    patch, width = kernel.shape[-1], kernel.shape[0]
    grid = pixels.shape[-1] // patch
    cut = pixels.double().view(3, grid, patch, grid, patch).permute(1, 3, 0, 2, 4).reshape(grid * grid, -1)
    tokens = cut @ kernel.view(width, -1).T + state["visual_encoder.patch_embed.proj.bias"]
    image = torch.cat([state["visual_encoder.cls_token"][0], tokens]) + state["visual_encoder.pos_embed"][0]
    for i in range(len({name.split(".")[2] for name in state if name.startswith("visual_encoder.blocks")})):
        at = f"visual_encoder.blocks.{i}"
        q, k, v = linear(norm(image, f"{at}.norm1", vision_eps), f"{at}.attn.qkv").chunk(3, -1)
        image = image + linear(attention(q, k, v, width // 64), f"{at}.attn.proj")
        image = image + linear(gelu(linear(norm(image, f"{at}.norm2", vision_eps), f"{at}.mlp.fc1")), f"{at}.mlp.fc2")
    image = norm(image, "visual_encoder.norm", vision_eps)

    seen = mask.bool()[None].expand(len(ids), -1)
    seen = seen.tril() if causal else seen
    at = "text_encoder.embeddings"
    text = state[f"{at}.word_embeddings.weight"][ids] + state[f"{at}.position_embeddings.weight"][: len(ids)]
    text = norm(text, f"{at}.LayerNorm", 1e-12)
    for i in range(len({name.split(".")[3] for name in state if name.startswith("text_encoder.encoder.layer")})):
        at = f"text_encoder.encoder.layer.{i}"
        for block, source, allowed in (("attention", None, seen), ("crossattention", image, None)):
            other = text if source is None else source
            q = linear(text, f"{at}.{block}.self.query")
            k, v = (linear(other, f"{at}.{block}.self.{x}") for x in ("key", "value"))
            mixed = linear(attention(q, k, v, text_heads, allowed), f"{at}.{block}.output.dense")
            text = norm(mixed + text, f"{at}.{block}.output.LayerNorm", 1e-12)
        inner = linear(gelu(linear(text, f"{at}.intermediate.dense")), f"{at}.output.dense")
        text = norm(inner + text, f"{at}.output.LayerNorm", 1e-12)

    x = text[0]
    layers = sorted({int(m[1]) for name in state if (m := re.match(r"mlp\.layers\.(\d+)\.", name))})
    for i in layers:
        x = linear(x, f"mlp.layers.{i}")
        x = activation(x) if i != layers[-1] else x
    return x[0]


def identity(x):
    return x


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


ACTIVATION = {"imagereward": identity, "cyclereward": gelu}
LENGTH = {"imagereward": 35, "cyclereward": 128}
OFFSET_DIVISOR = {"imagereward": (0.16717362830052426, 1.0333394966054072), "cyclereward": (0.0, 1.0)}


def expected(judge, pictures, prompts=PROMPTS, affine=None, **changes):
    """Scores by hand, but for the tokenizer, which is checked against the authors' below."""
    name, reward, folder = judge
    state = torch.load(folder / FILES[name], weights_only=True)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    ids, mask = reward.blip.tokens(prompts)
    assert ids.shape == (len(prompts), LENGTH[name])
    options = {"activation": ACTIVATION[name]} | changes
    triples = zip(pictures, ids, mask, strict=True)
    raw = torch.stack([by_hand(state, (one[0] - mean) / std, i, m, **options) for one, i, m in triples])
    offset, divisor = OFFSET_DIVISOR[name] if affine is None else affine
    return (raw - offset) / divisor


def test_scores_equal_attention_written_out_by_hand_and_each_likely_mistake_would_be_seen(golden_judge) -> None:
    name, reward, _ = golden_judge
    pictures = as_media(*(golden.picture(i) for i in range(len(PROMPTS))))
    scores = reward(pictures, PROMPTS).score.double()
    reference = expected(golden_judge, pictures)
    assert reference.std() > 0.1
    assert (scores - reference).abs().max() <= TOLERANCE
    mistakes = {
        "transformers' default eps": {"vision_eps": 1e-5},
        "a decoder that reads left to right": {"causal": True},
        "heads of another width": {"text_heads": 2},
        "another activation in the head": {"activation": torch.relu},
        "the head of the other judge": {"activation": identity if name == "cyclereward" else gelu},
    }
    if name == "imagereward":
        mistakes["not normalised"] = {"affine": (0.0, 1.0)}
    for label, change in mistakes.items():
        wrong = (scores - expected(golden_judge, pictures, **change)).abs().max()
        assert wrong > 10 * TOLERANCE, f"{label}: {wrong}"


def test_scores_and_tokens_equal_those_of_the_authors_code(golden_judge) -> None:
    name, reward, _ = golden_judge
    with safe_open(GOLDEN, "pt") as opened:
        score, ids = (opened.get_tensor(f"{name}.{key}") for key in ("score", "ids"))
    assert torch.equal(reward.blip.tokens(golden.PROMPTS)[0], ids)
    assert score.std() > 0.1
    arrays = [golden.picture(i) for i in range(len(golden.PROMPTS))]
    *square, wide = arrays
    # Resized as the authors do, by Pillow, in bytes: ours keeps fractions of bytes, for the sake of gradients.
    resized = np.array(Image.fromarray(wide).resize((398, 224), Image.Resampling.BICUBIC))[:, 87 : 87 + 224]
    got = reward(as_media(*square, resized), golden.PROMPTS).score
    assert (got - score).abs().max() <= TOLERANCE
    assert (reward(as_media(wide), golden.PROMPTS[-1:]).score - score[-1]).abs() <= 0.01


def test_the_gradient_to_pixels_is_that_of_the_computation_by_hand(judge) -> None:
    """Central differences of the double-precision reference: those of float32 are too coarse."""
    _, reward, _ = judge
    prompts = PROMPTS[:2]
    pictures = media(2).requires_grad_(True)
    (gradient,) = torch.autograd.grad(reward(pictures, prompts).score.sum(), pictures)
    assert not any(p.requires_grad for p in reward.blip.model.parameters())
    step = 1e-5 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    up, down = (expected(judge, pictures.detach().double() + s * step, prompts).sum() for s in (1, -1))
    assert float(up - down) == pytest.approx(float(2 * (gradient.double() * step).sum()), rel=1e-4)


def test_prompts_are_tokenised_once_each_and_scores_follow_their_own(judge) -> None:
    _, reward, _ = judge
    asked = []
    tokens = reward.blip.tokens
    reward.blip.tokens = lambda texts: asked.append(list(texts)) or tokens(texts)
    try:
        repeated = reward(media(4), ["a cat", "red", "a cat", "red"]).score
    finally:
        reward.blip.tokens = tokens
    assert asked == [["a cat", "red"]]
    single = [reward(media(4)[i : i + 1], [p]).score for i, p in enumerate(["a cat", "red", "a cat", "red"])]
    assert torch.allclose(repeated, torch.cat(single), atol=TOLERANCE)


def test_frames_given_directly_are_averaged(judge) -> None:
    _, reward, _ = judge
    frames = media(2)
    video = reward(frames.transpose(0, 1), ["red cat"]).score
    assert torch.allclose(video, reward(frames, ["red cat"] * 2).score.mean(), atol=TOLERANCE)


def test_making_a_judge_draws_no_global_random_numbers(judge, tmp_path) -> None:
    name, _, folder = judge
    before = torch.get_rng_state()
    JUDGES[name][0](path=str(folder), tokenizer=str(folder / "tokenizer"))
    assert torch.equal(torch.get_rng_state(), before)


def faulty(name: str, folder: Path, target: Path, change) -> Path:
    """A copy of the tiny weights with one thing changed."""
    state = torch.load(folder / FILES[name], weights_only=True)
    change(state)
    torch.save(state, target / FILES[name])
    (target / "med_config.json").write_text((folder / "med_config.json").read_text())
    return target / FILES[name]


FAULTS = {
    "a missing weight": (lambda s: s.pop("blip.text_encoder.encoder.layer.1.crossattention.self.key.bias"), "missing"),
    "a missing part": (lambda s: s.pop("blip.visual_encoder.cls_token"), "cls_token is missing"),
    "a missing block": (
        lambda s: [s.pop(k) for k in list(s) if "visual_encoder.blocks.0." in k],
        "blocks.0.mlp.fc1.weight is missing",
    ),
    "a wrong shape": (
        lambda s: s.update({"blip.visual_encoder.norm.bias": torch.zeros(3)}),
        r"\(3,\), expected \(128,\)",
    ),
    "a wrong rank": (
        lambda s: s.update({"blip.visual_encoder.pos_embed": torch.zeros(3)}),
        r"pos_embed has shape \(3,\)",
    ),
    "no square of patches": (
        lambda s: s.update({"blip.visual_encoder.pos_embed": torch.zeros(1, 12, 128)}),
        "11 patches",
    ),
    "an unknown weight": (lambda s: s.update({"blip.decoder.bias": torch.zeros(3)}), "decoder.bias is unknown"),
    "unknown position ids": (lambda s: s.update({"position_ids": torch.zeros(3)}), "position_ids is unknown"),
    "the other judge's head": (
        lambda s: s.update({"mlp.layers.9.weight": s.pop("mlp.layers.0.weight")}),
        "layers.9.weight is unknown",
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_weights_that_do_not_fit_give_one_sentence(judge, fault: str, tmp_path) -> None:
    name, _, folder = judge
    change, message = FAULTS[fault]
    path = faulty(name, folder, tmp_path, change)
    with pytest.raises(FlowAlignError, match=message) as caught:
        JUDGES[name][0](path=str(path), tokenizer=str(folder / "tokenizer"))
    assert "\n" not in str(caught.value) and f"'{name}'" in str(caught.value)


class Payload:
    """Something that only unpickling could read."""


def test_files_that_hold_more_than_weights_are_refused(judge, tmp_path) -> None:
    name, _, folder = judge
    (tmp_path / "med_config.json").write_text((folder / "med_config.json").read_text())
    torch.save({"blip.visual_encoder.cls_token": Payload()}, tmp_path / FILES[name])
    with pytest.raises(FlowAlignError, match="no plain weights") as caught:
        JUDGES[name][0](path=str(tmp_path), tokenizer=str(folder / "tokenizer"))
    assert "\n" not in str(caught.value)


def test_a_changed_file_does_not_pass_its_checksum(judge) -> None:
    name, _, folder = judge
    with pytest.raises(FlowAlignError, match="expected 000000000000"):
        JUDGES[name][0](path=str(folder), tokenizer=str(folder / "tokenizer"), sha256="0" * 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "no configuration"), ("{}", "vocab_size"), ("[]", "no configuration"), (None, "no file")],
)
def test_a_wrong_configuration_gives_one_sentence(judge, text, message: str, tmp_path) -> None:
    name, _, folder = judge
    path = faulty(name, folder, tmp_path, lambda state: None)
    (tmp_path / "med_config.json").unlink()
    if text is not None:
        (tmp_path / "med_config.json").write_text(text)
    with pytest.raises(FlowAlignError, match=message) as caught:
        JUDGES[name][0](path=str(path), tokenizer=str(folder / "tokenizer"))
    assert "\n" not in str(caught.value) and "med_config.json" in str(caught.value)


def test_a_folder_without_a_tokenizer_is_not_taken_for_one(judge, tmp_path) -> None:
    """transformers 5 makes a tokenizer of 5 tokens there."""
    name, _, folder = judge
    with pytest.raises(FlowAlignError, match=r"params\.tokenizer") as caught:
        JUDGES[name][0](path=str(folder), tokenizer=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_projections_of_pretraining_may_be_left_out(judge, tmp_path) -> None:
    name, reward, folder = judge

    def without(state) -> None:
        for key in [k for k in state if "_proj." in k or k.endswith("position_ids")]:
            del state[key]

    path = faulty(name, folder, tmp_path, without)
    other = JUDGES[name][0](path=str(path), tokenizer=str(folder / "tokenizer"))
    assert torch.equal(other(media(4), PROMPTS).score, reward(media(4), PROMPTS).score)


def test_published_names_are_one_to_one(judge) -> None:
    names = blip.published_names(judge[1].blip.model)
    assert len(set(names.values())) == len(names)
