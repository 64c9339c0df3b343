"""What a recipe may say: every key, its type, range and default; a method's own keys stand beside the method."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, MinLen, MultipleOf
from pydantic import Discriminator

from flowalign.algorithms.diffusion_nft import DiffusionNFTSettings
from flowalign.algorithms.flow_grpo import FlowGRPOSettings
from flowalign.algorithms.sft import SFTSettings
from flowalign.training.settings import Name, OptimizerSettings, TrainingSettings
from flowalign.types import NonNegativeInt, PositiveFloat, PositiveInt, settings

Pixels: TypeAlias = Annotated[int, Gt(0), MultipleOf(8)]
"""No autoencoder and patch size in use divides a picture more finely."""

AlgorithmSettings: TypeAlias = Annotated[SFTSettings | FlowGRPOSettings | DiffusionNFTSettings, Discriminator("name")]
LEARNS_FROM_DATA = (SFTSettings,)
"""These need a dataset; all others sample from prompts and need rewards."""


@settings
class ModelSettings:
    """``path``: "shapes-sd3" is the embedded model; else a diffusers folder or a hub name.

    ``max_sequence_length``: tokens of the long text encoder; null = the pipeline's own default (256 for SD3).
    """

    path: Name
    precision: Literal["fp32", "bf16"]
    height: Pixels
    width: Pixels
    max_sequence_length: PositiveInt | None = None
    activation_checkpointing: bool = False


@settings
class TuningSettings:
    """``targets``: modules that get an adapter; null = the model family's own choice."""

    kind: Literal["lora", "full"] = "lora"
    rank: PositiveInt = 32
    alpha: PositiveFloat = 64.0
    targets: Annotated[tuple[Name, ...], MinLen(1)] | None = None

    def __post_init__(self) -> None:
        if self.kind == "full" and self.targets is not None:
            raise ValueError("targets: full fine-tuning trains every module; leave targets out or use kind: lora")


@settings
class PromptSettings:
    """Prompts to sample from; ``per_iteration`` prompts with ``group_size`` samples each, over all ranks.

    Args:
        source: "shapes:train", "shapes:held_out", or a .txt (one prompt a line) or .jsonl file.
        count: only so many prompts of the source; null = all of a file.
        negative: text that guidance steers away from; read only where guidance is not 1.
    """

    source: Name
    per_iteration: PositiveInt
    group_size: Annotated[int, Ge(2)]
    count: PositiveInt | None = None
    seed: NonNegativeInt = 0
    negative: str | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.per_iteration > self.count:
            raise ValueError(f"per_iteration: {self.per_iteration} prompts of {self.count}; lower it or raise count")


@settings
class DatasetSettings:
    """Captioned images: a folder with metadata.jsonl (file_name, text), or "shapes" for ``count`` fresh renders."""

    path: Name
    count: PositiveInt | None = None
    seed: NonNegativeInt = 0


@settings
class RewardSettings:
    """One judge: a built-in name or "module:Class"; ``params`` go to its constructor."""

    name: Name
    weight: Annotated[float, Gt(0)] = 1.0
    params: dict[str, Any] = field(default_factory=dict)


@settings
class NotesSettings:
    """Provenance: how the numbers of a recipe were checked and where they come from."""

    verified: Name
    source: Name


@settings
class Recipe:
    """One run, whole."""

    model: ModelSettings
    tuning: TuningSettings = field(default_factory=TuningSettings)
    algorithm: AlgorithmSettings
    prompts: PromptSettings | None = None
    dataset: DatasetSettings | None = None
    rewards: tuple[RewardSettings, ...] = ()
    optimizer: OptimizerSettings
    training: TrainingSettings
    notes: NotesSettings | None = None
