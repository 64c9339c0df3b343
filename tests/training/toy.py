"""A generator of a few hundred parameters behind the Model protocol, and rewards that need no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.core import rng
from flowalign.rewards.base import RewardSpec, Scored
from flowalign.training.settings import OptimizerSettings, TrainingSettings
from flowalign.types import Conditioning

COLORS = ("red", "green", "blue")


class ToyTransformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inside = nn.Conv2d(3, 8, 3, padding=1)
        self.text = nn.Linear(4, 8)
        self.level = nn.Linear(1, 8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        shift = self.text(text) + self.level(sigma[:, None])
        return self.out(self.dropout(torch.tanh(self.inside(x) + shift[:, :, None, None])))


class ToyModel:
    """Latents (3, h/8, w/8); pictures are latents, scaled and repeated."""

    family = "toy"
    lora_targets = ()
    shift = 3.0

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        torch.manual_seed(seed)
        self.transformer = ToyTransformer(dropout)
        self.encoded: list[str] = []

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (3, height // 8, width // 8)

    def encode(self, prompts: Sequence[str], negative: str | None = None) -> Conditioning:
        self.encoded += prompts

        def rows(texts: Sequence[str]) -> dict[str, Tensor]:
            return {"text": torch.stack([torch.randn(4, generator=rng.generator("toy", text)) for text in texts])}

        return Conditioning(rows(prompts), None if negative is None else rows([negative] * len(prompts)))

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        return transformer(x, sigma, cond.tensors["text"]).float()

    def decode(self, latents: Tensor) -> Tensor:
        pictures = (0.5 + 0.25 * latents).clamp(0, 1)
        return pictures.repeat_interleave(8, -1).repeat_interleave(8, -2)[:, None]

    def encode_media(self, media: Tensor) -> Tensor:
        return (media[:, 0, :, ::8, ::8] - 0.5) * 4

    def pipeline(self) -> Any:
        raise NotImplementedError


def spec(name: str, higher_is_better: bool = True) -> RewardSpec:
    return RewardSpec(name, "", "image", higher_is_better, (-1.0, 1.0), True, "Apache-2.0", "", "exact")


class ColorReward:
    """How much of the colour that the prompt names a picture has over the others; nan for prompts in ``invalid``."""

    def __init__(self, invalid: Sequence[str] = (), device: object = "cpu") -> None:
        self.spec, self.invalid = spec("color"), set(invalid)

    def __call__(
        self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> Scored:
        means = media.mean((1, 3, 4)).float()
        wanted = torch.tensor([COLORS.index(prompt.split()[-1]) for prompt in prompts])
        score = means.gather(1, wanted[:, None])[:, 0] - means.mean(1)
        for i, prompt in enumerate(prompts):
            if prompt in self.invalid:
                score[i] = torch.nan
        return Scored(score, {"brightness": means.mean(1)})


PROMPTS = tuple(f"{shape} {color}" for shape in ("square", "circle", "star", "cross") for color in COLORS)


def training(output: Path | str, **changes: Any) -> TrainingSettings:
    values: dict[str, Any] = {"iterations": 3, "output": str(output), "rollout_batch_size": 4, "micro_batch_size": 4}
    return TrainingSettings(**{**values, **changes})


def optimizer(**changes: Any) -> OptimizerSettings:
    return OptimizerSettings(**{"lr": 1e-3, **changes})
