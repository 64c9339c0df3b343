"""What judges on Qwen2-VL (arXiv 2409.12191) share: published weights, questions, and what a head says at its tokens.

HPSv3 (arXiv 2508.03789) and VideoAlign (arXiv 2501.13918) ask Qwen2-VL to rate a picture or video, with tokens of
their own where the ratings would stand, and put a head on the last layer there. Both were tuned and measured with
transformers 4.45.2 in bfloat16, which differs from the paper and from later versions in two ways that every score
depends on: positions count tokens along one axis instead of three, and rotary frequencies are rounded to bfloat16, as
`Rotary` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flowalign.rewards.qwen2_vl_pixels import FACTOR, FRAMES, PATCH, patches, target_size
from flowalign.rewards.weights import load_strict
from flowalign.types import FlowAlignError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>{pad}<|vision_end|>"
    "{text}<|im_end|>\n<|im_start|>assistant\n"
)
"""Qwen2-VL's own form of one picture or video with one question."""
PROMPT = "{text_prompt}"
"""Stands in a question for the prompt."""
UNUSED = ("lm_head.weight",)
"""Published, since the files hold whole models, but no score depends on it."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers of the language model that a LoRA adapts."""


Head = Callable[[int], nn.Module]
"""Makes a judge's head for hidden states of a width; its layers are numbered as in the published file."""


class LoRA(NamedTuple):
    """Of the published weights: ``rank``, and by how much the product of its matrices is multiplied."""

    rank: int
    scale: float


def _frequencies(theta: float, width: int) -> Tensor:
    """(width / 2,) float32, rounded to bfloat16: `Rotary`."""
    exact = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return exact.bfloat16().float()


class Rotary(nn.Module):
    """Rotations of the language model by position, as these checkpoints were tuned with.

    Moving a model of transformers 4.45.2 to bfloat16 rounds its frequencies, by up to 0.4 %: some radians at the last
    tokens of a question. Not a buffer, so that no later move can change it.
    """

    def __init__(self, theta: float, width: int) -> None:
        super().__init__()
        self.frequencies = _frequencies(theta, width)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (3, B, L), equal along all three axes, to cosines and sines (B, L, width)."""
        phases = position_ids[0, ..., None].float() * self.frequencies.to(x.device)
        angles = torch.cat([phases, phases], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class VisionRotary(nn.Module):
    """Rotations of the vision tower by row and column; transformers 4.45.2 rounds the angles too."""

    def __init__(self, theta: float, width: int) -> None:
        super().__init__()
        self.frequencies = _frequencies(theta, width // 2)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and columns (P, 2) to cosines and sines (P, width)."""
        phases = (position_ids[..., None].float() * self.frequencies.to(x.device)).bfloat16().float().flatten(1)
        angles = torch.cat([phases, phases], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Qwen2VL(nn.Module):
    """Vision tower and language model of Qwen2-VL, without values until `load`, and a head in float32.

    Args:
        config: transformers' Qwen2VLConfig.
        head: see `Head`.
        lora: None where the weights have none.
    """

    def __init__(self, config: Any, head: Head, lora: LoRA | None = None) -> None:
        from transformers import Qwen2VLModel

        super().__init__()
        with torch.device("meta"):
            trunk = Qwen2VLModel(config)
            self.visual: Any = trunk.visual
            self.language_model: Any = trunk.language_model
        if lora is not None:
            from peft import LoraConfig, inject_adapter_in_model

            adapter = LoraConfig(r=lora.rank, lora_alpha=lora.rank * lora.scale, target_modules=list(LINEAR))  # type: ignore[arg-type]
            inject_adapter_in_model(adapter, self.language_model, low_cpu_mem_usage=True)
        text, vision = config.text_config, config.vision_config
        self.language_model.rotary_emb = Rotary(
            text.rope_parameters["rope_theta"], text.hidden_size // text.num_attention_heads
        )
        self.visual.rotary_pos_emb = VisionRotary(
            vision.rope_parameters["rope_theta"], vision.embed_dim // vision.num_heads
        )
        self.head = head(text.hidden_size)
        self.eval().requires_grad_(False)

    def features(self, media: Tensor, size: tuple[int, int]) -> Tensor:
        """(N, F, 3, H, W) in [0, 1] to (N, T, D), a token for 2 frames of 28 x 28; differentiable."""
        count, frames = media.shape[:2]
        grid = [-(-frames // FRAMES), size[0] // PATCH, size[1] // PATCH]
        pixels = patches(media.float(), size).flatten(0, 1)
        shape = torch.tensor([grid] * count, device=media.device)
        found: Tensor = self.visual(pixels, grid_thw=shape).pooler_output
        return found.view(count, -1, found.shape[-1])

    def forward(self, features: Tensor, ids: Tensor, pad: int, places: Tensor) -> Tensor:
        """What the head says at ``places``.

        Args:
            features: (N, T, D), which stand where ``ids`` are ``pad``.
            ids: (N, L) tokens, filled up on the right with any.
            places: (N, K) indices into each row.

        Returns:
            (N, K, heads) float32.
        """
        embedded = self.language_model.embed_tokens(ids)
        embedded = embedded.masked_scatter((ids == pad)[..., None], features.to(embedded.dtype))
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, ids.shape[0], -1)
        # Attention is causal and ``places`` lie before what a row is filled up with: no mask is needed.
        hidden = self.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state
        found: Tensor = self.head(hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])).float())
        return found


def _base(source: str, tokens: Sequence[str], rows: int, name: str) -> tuple[Any, Any]:
    """Configuration and tokenizer of Qwen2-VL, with ``tokens`` added.

    Raises:
        FlowAlignError: either cannot be loaded, or the tokens are not as many as the ``rows`` of the weights.
    """
    from transformers import AutoTokenizer, Qwen2VLConfig

    advice = "check the connection, or give a folder of Qwen2-VL's configuration and tokenizer as params.base"
    try:
        config: Any = Qwen2VLConfig.from_pretrained(source)
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except (OSError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FlowAlignError(f"reward {name!r}: {source!r} cannot be loaded ({reason}); {advice}") from None
    if config.vision_config.patch_size != PATCH or config.vision_config.spatial_merge_size * PATCH != FACTOR:
        raise FlowAlignError(
            f"reward {name!r}: {source!r} has patches of {config.vision_config.patch_size} pixels, expected {PATCH}; "
            f"{advice}"
        )
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    if len(tokenizer) != rows:
        raise FlowAlignError(
            f"reward {name!r}: the tokenizer of {source!r} has {len(tokenizer)} tokens with those of the judge, the "
            f"weights {rows}; {advice}"
        )
    config.text_config.vocab_size = rows
    return config, tokenizer


class Qwen2VLScores:
    """A judge's network without gradients to its weights, with its question and preprocessing.

    Args:
        state: the published weights, by the names of transformers 4.45.2; emptied on the way, for the sake of memory.
        head: makes what is called "rm_head" in ``state``; kept in float32.
        base: folder or hub name of Qwen2-VL's configuration and tokenizer.
        tokens: where the head is asked, in the order in which they stand in ``template``.
        template: the question, with {text_prompt} in place of the prompt.
        pixels: least and most pixels of a frame.
        modality: which of Qwen2-VL's two placeholders stands for the media.
        precision: of all but the head: "bf16" as published, or "fp32".
        name: of the reward, for messages.

    Raises:
        FlowAlignError: weights, configuration and tokenizer do not fit each other.
    """

    def __init__(
        self,
        state: dict[str, Tensor],
        head: Head,
        *,
        base: str,
        tokens: Sequence[str],
        template: str,
        pixels: tuple[int, int],
        modality: Literal["image", "video"],
        precision: str,
        device: torch.device | str,
        name: str,
        lora: LoRA | None = None,
    ) -> None:
        if precision not in DTYPES:
            raise FlowAlignError(f"reward {name!r}: precision is {precision!r}, expected {' or '.join(DTYPES)}")
        self.name, self.template, self.pixels = name, template, pixels
        rows = state["model.embed_tokens.weight"].shape[0] if "model.embed_tokens.weight" in state else 0
        config, self.tokenizer = _base(base, tokens, rows, name)
        self.pad = int(config.image_token_id if modality == "image" else config.video_token_id)
        self.tokens: list[int] = self.tokenizer.convert_tokens_to_ids(list(tokens))
        self.model = Qwen2VL(config, head, lora)
        self._load(state, DTYPES[precision])
        self.to(device)

    def _load(self, state: dict[str, Tensor], dtype: torch.dtype) -> None:
        model = self.model
        for trunk in (model.visual, model.language_model):
            trunk.to(dtype)
        model.to_empty(device="cpu")
        model.head.float()
        if left := {key for key, _ in model.named_buffers()} - {*model.state_dict()}:
            raise FlowAlignError(
                f"transformers: its Qwen2-VL keeps {', '.join(sorted(left))}, which flowalign does not know; install "
                "transformers 5.24"
            )
        ours = {published(key): key for key in model.state_dict()}
        renamed = {ours.get(key, key): state.pop(key) for key in list(state)}
        load_strict(model, renamed, self.name, UNUSED)

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.device = torch.device(device)
        self.model.to(self.device)

    def question(self, prompt: str, count: int) -> tuple[list[int], list[int]] | None:
        """Tokens with ``count`` placeholders, and where the judge's own stand.

        None where the prompt spells one of these, since it would be read instead.
        """
        pad = self.tokenizer.convert_ids_to_tokens(self.pad)
        text = CHAT.format(pad=pad, text=self.template.replace(PROMPT, prompt))
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        if any(ids.count(token) != 1 for token in (self.pad, *self.tokens)):
            return None
        start = ids.index(self.pad)
        ids = ids[:start] + [self.pad] * count + ids[start + 1 :]
        return ids, [ids.index(token) for token in self.tokens]

    def __call__(self, media: Tensor, prompts: Sequence[str]) -> tuple[Tensor, list[str | None]]:
        """(N, F, 3, H, W) in [0, 1] and N prompts to (N, tokens, heads) float32, and why a row is nan."""
        height, width = media.shape[-2:]
        size = target_size(height, width, *self.pixels)
        if size is None:
            reason = f"the frames are {height} x {width}, expected at most 200 times as long as wide"
            return self._nothing(len(prompts)), [reason] * len(prompts)
        count = -(-media.shape[1] // FRAMES) * size[0] * size[1] // FACTOR**2
        asked = [self.question(prompt, count) for prompt in prompts]
        reasons = [None if one else "the prompt spells a token that the judge is asked by" for one in asked]
        rows = [i for i, one in enumerate(asked) if one]
        scores = self._nothing(len(prompts))
        if not rows:
            return scores, reasons
        chosen = torch.tensor(rows, device=self.device)
        given = [one for one in asked if one]
        longest = max(len(ids) for ids, _ in given)
        filler = self.tokens[0]
        ids = torch.tensor([ids + [filler] * (longest - len(ids)) for ids, _ in given], device=self.device)
        places = torch.tensor([at for _, at in given], device=self.device)
        features = self.model.features(media.to(self.device)[chosen], size)
        found = self.model(features, ids, self.pad, places)
        return scores.index_copy(0, chosen, found), reasons

    def _nothing(self, count: int) -> Tensor:
        last = [one for one in self.model.head.modules() if isinstance(one, nn.Linear)][-1]
        return torch.full((count, len(self.tokens), last.out_features), torch.nan, device=self.device)


def published(key: str) -> str:
    """What the published files call a weight."""
    for ours, theirs in (("language_model.", "model."), ("head.", "rm_head.")):
        if key.startswith(ours):
            return theirs + key.removeprefix(ours)
    return key


def with_reasons(reasons: Sequence[str | None]) -> tuple[Mapping[str, Any], ...]:
    """Details of a `Scored`: nothing where every sample has a score."""
    return tuple({"reason": one} if one else {} for one in reasons) if any(reasons) else ()
