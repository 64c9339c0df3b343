"""What judges of the BLIP family share: published weights in transformers' classes, and a score of pictures and texts.

ImageReward (arXiv 2304.05977) and CycleReward (arXiv 2506.02095) are BLIP (arXiv 2201.12086): a vision transformer,
whose tokens a BERT attends to in every layer, and a perceptron on BERT's first token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.rewards.base import WeightFile
from flowalign.rewards.clip import preprocess
from flowalign.rewards.weights import load_strict, locate, read
from flowalign.types import FlowAlignError

TOKENIZER = "google-bert/bert-base-uncased"
SPECIAL_TOKENS = ("[DEC]", "[ENC]")
"""BLIP's two tokens beyond BERT's: 30522 and 30523. The judges never put them in, but a prompt may spell them."""
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
HEAD_WIDTH = 64
"""Of an attention head of the pictures' transformer: a fact of its code that no file of weights holds."""
VISION_EPS = 1e-6
"""Of its layer norms; transformers' default for BLIP is 1e-5."""
CONFIG = "med_config.json"
CONFIG_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "layer_norm_eps",
    "hidden_act",
    "pad_token_id",
)
UNUSED_TOKENS = ("bos_token_id", "eos_token_id", "sep_token_id")
"""Of generation only; transformers warns where its defaults lie outside a small vocabulary."""
UNUSED = (
    "text_encoder.embeddings.position_ids",
    "vision_proj.weight",
    "vision_proj.bias",
    "text_proj.weight",
    "text_proj.bias",
)
"""Of BLIP's pretraining, or no weights at all: published, but no score depends on them."""
PUBLISHED = (
    ("vision.embeddings.class_embedding", "visual_encoder.cls_token"),
    ("vision.embeddings.position_embedding", "visual_encoder.pos_embed"),
    ("vision.embeddings.patch_embedding", "visual_encoder.patch_embed.proj"),
    ("vision.encoder.layers", "visual_encoder.blocks"),
    ("vision.post_layernorm", "visual_encoder.norm"),
    ("self_attn.projection", "attn.proj"),
    ("self_attn.qkv", "attn.qkv"),
    ("layer_norm", "norm"),
    ("text.", "text_encoder."),
    ("head.", "mlp.layers."),
)
"""Names of transformers' classes, and what the published files call the same."""

Head = Callable[[int], nn.Sequential]
"""Makes the perceptron for features of a width; its layers are numbered as in the published file."""


class BLIP(nn.Module):
    """The network of a judge, without values until `load`: random ones would take longer than reading the file.

    Args:
        vision, text: arguments of transformers' BlipVisionConfig and BlipTextConfig.
        head: see `Head`.
    """

    def __init__(self, vision: Mapping[str, Any], text: Mapping[str, Any], head: Head) -> None:
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        with torch.device("meta"):
            self.vision: Any = BlipVisionModel(BlipVisionConfig(**vision, hidden_act="gelu", layer_norm_eps=VISION_EPS))
            # Only a decoder is given cross-attention, but these judges read both ways: see `forward`.
            self.text: Any = BlipTextModel(BlipTextConfig(**text, is_decoder=True), add_pooling_layer=False)
            self.head = head(int(text["hidden_size"]))
        self.eval().requires_grad_(False)

    def allocate(self) -> None:
        """Makes room on the CPU, and the one value that is neither a weight nor a parameter.

        Raises:
            FlowAlignError: transformers has come to keep others, which would stay undefined.
        """
        self.to_empty(device="cpu")
        self.text.embeddings.position_ids = torch.arange(self.text.config.max_position_embeddings)[None]
        others = {key for key, _ in self.named_buffers()} - {*self.state_dict(), "text.embeddings.position_ids"}
        if others:
            raise FlowAlignError(
                f"transformers: its BLIP keeps {', '.join(sorted(others))}, which flowalign does not know; install "
                "transformers 5.24"
            )

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Pixels (N, 3, S, S), normalised, and tokens (N, L) with their mask to (N,); differentiable in the pixels."""
        image = self.vision(pixel_values=pixels).last_hidden_state
        text = self.text(input_ids=ids, attention_mask=mask, encoder_hidden_states=image, is_decoder=False)
        score: Tensor = self.head(text.last_hidden_state[:, 0]).squeeze(-1)
        return score


def published_names(module: BLIP) -> dict[str, str]:
    """What the published files call each weight, without the "blip." that they put before all but the head's."""
    names = {}
    for key in module.state_dict():
        name = key
        for ours, theirs in PUBLISHED:
            name = name.replace(ours, theirs)
        names[key] = name
    return names


def load(weights: Path, config: Path, head: Head, name: str) -> BLIP:
    """The network of a published file; sizes are those of the file, and for the text those of ``config``.

    Args:
        name: of the reward, for messages.

    Raises:
        FlowAlignError: either file is damaged, or they do not fit each other or ``head``.
    """
    state = {key.removeprefix("blip."): value for key, value in read(weights, name).items()}
    vision = _vision_config(state, name)
    text = _text_config(config, name) | {"encoder_hidden_size": vision["hidden_size"]}
    module = BLIP(vision, text, head)
    module.allocate()
    ours = {theirs: key for key, theirs in published_names(module).items()}
    load_strict(module, {ours.get(key, key): value for key, value in state.items() if key not in UNUSED}, name)
    return module


def _vision_config(state: Mapping[str, Tensor], name: str) -> dict[str, int]:
    def shape(key: str, rank: int) -> Sequence[int]:
        full = f"visual_encoder.{key}"
        if full not in state or state[full].ndim != rank:
            what = f"has shape {tuple(state[full].shape)}" if full in state else "is missing"
            raise FlowAlignError(f"reward {name!r}: the weights are not BLIP's: {full} {what}; give the published file")
        return state[full].shape

    width, patch = shape("cls_token", 3)[-1], shape("patch_embed.proj.weight", 4)[-1]
    patches = shape("pos_embed", 3)[1] - 1
    side = math.isqrt(max(patches, 0))
    if width % HEAD_WIDTH or side * side != patches or not patches:
        raise FlowAlignError(
            f"reward {name!r}: the weights are for {patches} patches of width {width}, expected a square number of "
            f"patches and a multiple of {HEAD_WIDTH}; give the published file"
        )
    blocks = {key.split(".")[2] for key in state if key.startswith("visual_encoder.blocks.")}
    return {
        "hidden_size": width,
        "intermediate_size": shape("blocks.0.mlp.fc1.weight", 2)[0],
        "num_hidden_layers": len(blocks),
        "num_attention_heads": width // HEAD_WIDTH,
        "image_size": side * patch,
        "patch_size": patch,
    }


def _text_config(path: Path, name: str) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text())
        return {key: given[key] for key in CONFIG_KEYS} | dict.fromkeys(UNUSED_TOKENS)
    except (ValueError, KeyError, TypeError) as error:
        raise FlowAlignError(
            f"reward {name!r}: {str(path)!r} is no configuration of BLIP's text encoder ({type(error).__name__}: "
            f"{error}); give the published {CONFIG}"
        ) from None


def _tokenizer(source: str, vocabulary: int, name: str) -> Any:
    """BERT's tokenizer with BLIP's two tokens."""
    from transformers import BertTokenizer

    advice = "check the connection, or give a folder of bert-base-uncased as params.tokenizer"
    try:
        tokenizer = BertTokenizer.from_pretrained(source)
    except (OSError, TypeError, ValueError) as error:  # TypeError: no vocabulary, transformers 4
        reason = str(error).splitlines()[0]
        raise FlowAlignError(f"reward {name!r}: {source!r} cannot be loaded ({reason}); {advice}") from None
    dec, enc = SPECIAL_TOKENS
    tokenizer.add_special_tokens({"bos_token": dec})
    tokenizer.add_special_tokens({"additional_special_tokens": [enc]})
    # transformers 5 makes a tokenizer of 5 tokens where a folder has none, and says nothing.
    if len(tokenizer) != vocabulary:
        raise FlowAlignError(
            f"reward {name!r}: the tokenizer of {source!r} has {len(tokenizer)} tokens, expected {vocabulary} as the "
            f"weights have; {advice}"
        )
    return tokenizer


class BLIPScores:
    """A judge's network in float32, without gradients to its weights, with its tokenizer and preprocessing.

    Args:
        file: the published file; ``path`` and ``sha256`` as in `flowalign.rewards.weights.locate`. med_config.json is
            looked for beside it.
        head: see `Head`.
        tokenizer: folder or hub name of bert-base-uncased's tokenizer.
        length: in tokens, to which every text is cut off or filled up.
        name: of the reward, for messages.

    Raises:
        FlowAlignError: weights, configuration or tokenizer cannot be loaded, or do not fit each other.
    """

    def __init__(
        self,
        file: WeightFile,
        path: str | None,
        head: Head,
        *,
        tokenizer: str,
        length: int,
        sha256: str | None,
        device: torch.device | str,
        name: str,
    ) -> None:
        weights = locate(file, path, name, sha256)
        config = locate(file._replace(file=CONFIG, sha256=None), path and str(weights.parent), name)
        self.model = load(weights, config, head, name)
        self.tokenizer = _tokenizer(tokenizer, self.model.text.config.vocab_size, name)
        self.length = length
        self.size = int(self.model.vision.config.image_size)
        self.to(device)

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.device = torch.device(device)
        self.model.to(self.device)

    def tokens(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """N texts to ids and mask (N, length)."""
        encoded = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        return encoded.input_ids.to(self.device), encoded.attention_mask.to(self.device)

    def __call__(self, media: Tensor, texts: Sequence[str]) -> Tensor:
        """(B, F, 3, H, W) in [0, 1] and B texts to (B,) float32: what the head says, as the mean over frames."""
        count, frames = media.shape[:2]
        unique = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        ids, mask = self.tokens(list(unique))
        rows = torch.tensor([unique[text] for text in texts], device=self.device).repeat_interleave(frames)
        pixels = preprocess(media.flatten(0, 1).to(self.device).float(), self.size, MEAN, STD)
        scores: Tensor = self.model(pixels, ids[rows], mask[rows])
        return scores.view(count, frames).mean(1)


def tiny(folder: Path, file: str, head: Head) -> dict[str, Any]:
    """Writes a judge of 0.6 million random weights into ``folder``, in the format of the published ones.

    Args:
        file: name of the file of weights.

    Returns:
        Parameters that load it.
    """
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters), "red", "cat", "##ed"]
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer" / "vocab.txt").write_text("\n".join(words) + "\n")
    text: dict[str, Any] = {
        "vocab_size": len(words) + len(SPECIAL_TOKENS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "pad_token_id": 0,
    }
    (folder / CONFIG).write_text(json.dumps(text))
    width = 2 * HEAD_WIDTH
    vision = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 48,
        "patch_size": 16,
    }
    module = BLIP(vision, text | {"encoder_hidden_size": width} | dict.fromkeys(UNUSED_TOKENS), head)
    generator = torch.Generator().manual_seed(0)
    state = {}
    for key, name in published_names(module).items():
        shape = module.state_dict()[key].shape
        # Sums of inputs keep their variance, or gain: pictures and prompts must make a difference.
        gain, inputs = (1.2 if name.startswith("mlp.") else 1.5), math.prod(shape[1:]) if len(shape) > 1 else 100
        noise = torch.randn(shape, generator=generator) * gain / math.sqrt(inputs)
        is_gain = len(shape) == 1 and "norm" in key.lower() and key.endswith("weight")
        state[name if name.startswith("mlp.") else f"blip.{name}"] = noise + 1 if is_gain else noise
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(text["max_position_embeddings"])[None]
    for name, inputs in (("vision_proj", width), ("text_proj", 32)):
        state |= {f"blip.{name}.weight": torch.zeros(16, inputs), f"blip.{name}.bias": torch.zeros(16)}
    torch.save(state, folder / file)
    return {"path": str(folder), "tokenizer": str(folder / "tokenizer")}
