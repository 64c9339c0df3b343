"""Two libraries, one model: open_clip and transformers agree on weights, and where their tokenizers differ."""

from __future__ import annotations

import gzip

import open_clip
import pytest
import torch
from open_clip.tokenizer import default_bpe
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from flowalign.rewards import tiny_clip

WORDS, LENGTH, LAYERS = 96, 20, 2
START, END = WORDS - 2, WORDS - 1
TOLERANCE = 1e-5
"""Float32 of some hundred sums on vectors of size 1, in two orders."""


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of open_clip in the names of transformers, by the meaning of each weight."""
    out = {
        "logit_scale": state["logit_scale"],
        "text_projection.weight": state["text_projection"].T,
        "visual_projection.weight": state["visual.proj"].T,
        "text_model.embeddings.token_embedding.weight": state["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": state["positional_embedding"],
        "vision_model.embeddings.class_embedding": state["visual.class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": state["visual.conv1.weight"],
        "vision_model.embeddings.position_embedding.weight": state["visual.positional_embedding"],
    }
    norms = {"ln_final": "text_model.final_layer_norm", "visual.ln_pre": "vision_model.pre_layrnorm"}
    norms["visual.ln_post"] = "vision_model.post_layernorm"
    for i in range(LAYERS):
        for own, other in (("", "text_model"), ("visual.", "vision_model")):
            source, target = f"{own}transformer.resblocks.{i}", f"{other}.encoder.layers.{i}"
            norms |= {f"{source}.ln_1": f"{target}.layer_norm1", f"{source}.ln_2": f"{target}.layer_norm2"}
            norms |= {f"{source}.mlp.c_fc": f"{target}.mlp.fc1", f"{source}.mlp.c_proj": f"{target}.mlp.fc2"}
            norms[f"{source}.attn.out_proj"] = f"{target}.self_attn.out_proj"
            for kind in ("weight", "bias"):
                parts = state[f"{source}.attn.in_proj_{kind}"].chunk(3)
                out |= {f"{target}.self_attn.{n}_proj.{kind}": p for n, p in zip("qkv", parts, strict=True)}
    for source, target in norms.items():
        out |= {f"{target}.{kind}": state[f"{source}.{kind}"] for kind in ("weight", "bias")}
    return out


def open_clip_model(quick: bool, vocabulary: int = WORDS, length: int = LENGTH):
    vision = {"image_size": 32, "layers": LAYERS, "width": 32, "head_width": 16, "patch_size": 8, "mlp_ratio": 2.0}
    text = {"context_length": length, "vocab_size": vocabulary, "width": 24, "heads": 2, "layers": LAYERS}
    model = open_clip.CLIP(16, vision, text, quick_gelu=quick).eval()
    tiny_clip.randomise(model)
    return model


def transformers_model(state, activation: str, end: int = END) -> CLIPModel:
    shared = {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "hidden_act": activation}
    words, width = state["token_embedding.weight"].shape
    length = state["positional_embedding"].shape[0]
    text = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": words}
    text |= {"max_position_embeddings": length, "bos_token_id": end - 1, "eos_token_id": end, "pad_token_id": end}
    vision = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=shared | text, vision_config=shared | vision, projection_dim=16)
    model = CLIPModel(config).eval()
    model.load_state_dict(renamed(state))  # strict: a weight forgotten or made up fails
    return model


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 3, 32, 32, generator=generator)
    tokens = torch.randint(0, START, (3, LENGTH), generator=generator)
    tokens[:, 0] = START
    for row, end in enumerate((5, 12, LENGTH - 1)):
        tokens[row, end:] = END
    return pixels, tokens


def distances(quick: bool, activation: str) -> tuple[float, float]:
    """Largest differences between image vectors and between text vectors, each scaled to length 1."""
    pixels, tokens = inputs()
    ours = open_clip_model(quick)
    theirs = transformers_model(ours.state_dict(), activation)
    with torch.no_grad():
        image = ours.encode_image(pixels), theirs.get_image_features(pixel_values=pixels).pooler_output
        text = ours.encode_text(tokens), theirs.get_text_features(input_ids=tokens).pooler_output
    unit = [[torch.nn.functional.normalize(one, dim=-1) for one in pair] for pair in (image, text)]
    assert all(pair[0].std(0).max() > 0.01 for pair in unit), "inputs are told apart"
    first, second = (float((a - b).abs().max()) for a, b in unit)
    return first, second


@pytest.mark.parametrize(("quick", "activation"), [(False, "gelu"), (True, "quick_gelu")])
def test_equal_weights_give_equal_vectors_in_both_libraries(quick: bool, activation: str) -> None:
    assert max(distances(quick, activation)) <= TOLERANCE


@pytest.mark.parametrize(("quick", "activation"), [(False, "quick_gelu"), (True, "gelu")])
def test_the_wrong_activation_is_seen(quick: bool, activation: str) -> None:
    assert min(distances(quick, activation)) > 10 * TOLERANCE


@pytest.fixture(scope="module")
def tokenizers():
    """open_clip's tokenizer, and that of transformers made of the same merges."""
    with gzip.open(default_bpe(), "rt", encoding="utf-8") as opened:
        lines = opened.read().split("\n")
    merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    own = open_clip.SimpleTokenizer()
    vocab = {token: i for token, i in own.encoder.items() if i < 49406}
    vocab |= {"<|startoftext|>": 49406, "<|endoftext|>": 49407}
    return own, CLIPTokenizer(vocab=vocab, merges=merges)


def ids(tokenizers, text: str) -> tuple[list[int], list[int]]:
    """Of both, up to the end of the text."""
    own, other = tokenizers
    first = own([text])[0].tolist()
    second = other([text], padding="max_length", truncation=True, max_length=77).input_ids[0]
    assert len(first) == len(second) == 77
    return first[: first.index(49407) + 1], second[: second.index(49407) + 1]


@pytest.mark.parametrize(
    "text",
    [
        "a photo of an astronaut riding a horse",
        "An Astronaut's helmet, 35mm; f/1.8",
        "  two\n spaces\tand 100 dogs!?  ",
        "it's they'll we've",
        "naïve café",
    ],
)
def test_both_tokenizers_agree_on_plain_text(tokenizers, text: str) -> None:
    first, second = ids(tokenizers, text)
    assert first == second and len(first) > 4


def test_known_tokens(tokenizers) -> None:
    # Of OpenAI's vocabulary: start, a, photo, of, a, cat, end.
    assert ids(tokenizers, "a photo of a cat")[0] == [49406, 320, 1125, 539, 320, 2368, 49407]


@pytest.mark.parametrize("text", ["an astronaut’s helmet", "“flow” on a sign", "fish &amp; chips", "cafÃ©"])
def test_open_clip_mends_text_and_hugging_face_does_not(tokenizers, text: str) -> None:
    first, second = ids(tokenizers, text)
    assert first != second
    mended = {"’": "'", "“": '"', "”": '"', "&amp;": "&", "cafÃ©": "café"}
    for wrong, right in mended.items():
        text = text.replace(wrong, right)
    assert ids(tokenizers, text) == (first, first)


def test_long_texts_are_cut_off_with_their_end_kept_and_empty_ones_are_texts(tokenizers) -> None:
    first, second = ids(tokenizers, "dog " * 100)
    assert first == second == [49406, *[1929] * 75, 49407]
    assert ids(tokenizers, "") == ([49406, 49407],) * 2


def test_padding_does_not_change_the_text_vector(tokenizers) -> None:
    own, other = tokenizers
    model = open_clip_model(False, vocabulary=49408, length=77)
    theirs = transformers_model(model.state_dict(), "gelu", end=49407)
    texts = ["a photo of a cat", "", "dog " * 100]
    zeros = own(texts)
    padded = other(texts, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    assert (zeros[0, 7:] == 0).all() and (padded.input_ids[0, 7:] == 49407).all()
    with torch.no_grad():
        expected = model.encode_text(zeros)
        found = [
            model.encode_text(padded.input_ids),
            theirs.get_text_features(input_ids=zeros).pooler_output,
            theirs.get_text_features(input_ids=padded.input_ids).pooler_output,
            theirs.get_text_features(**padded).pooler_output,
        ]
    size = expected.norm(dim=-1).max()
    assert all((one - expected).abs().max() <= TOLERANCE * size for one in found)
    assert (expected[0] - expected[1]).abs().max() > 0.01 * size
