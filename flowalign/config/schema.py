"""What a recipe may say: every key, its type, range and default; a method's own keys stand beside the method."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, MinLen, MultipleOf
from pydantic import Discriminator

from flowalign.algorithms.awm import AWMSettings
from flowalign.algorithms.diffusion_nft import DiffusionNFTSettings
from flowalign.algorithms.flow_dpo import FlowDPOSettings, OfflineFlowDPOSettings
from flowalign.algorithms.flow_grpo import FlowGRPOSettings
from flowalign.algorithms.ram import RAMSettings
from flowalign.algorithms.sft import SFTSettings
from flowalign.algorithms.soar import SOARSettings
from flowalign.rewards.judge import FramePolicy
from flowalign.training.settings import Name, OptimizerSettings, TrainingSettings
from flowalign.types import FlowAlignError, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, settings

Pixels: TypeAlias = Annotated[int, Gt(0), MultipleOf(8)]
"""No autoencoder and patch size in use divides a picture more finely."""

AlgorithmSettings: TypeAlias = Annotated[
    SFTSettings
    | FlowGRPOSettings
    | DiffusionNFTSettings
    | AWMSettings
    | RAMSettings
    | SOARSettings
    | FlowDPOSettings
    | OfflineFlowDPOSettings,
    Discriminator("name"),
]
LEARNS_FROM_DATA = (SFTSettings, SOARSettings, OfflineFlowDPOSettings)
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
        source: "shapes:train", "shapes:held_out", "signs:train", "signs:held_out" or, as in "shapes:train:counting",
            only some skills of a world; or a .txt (one prompt a line) or .jsonl file.
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
    """Captioned images: a folder with metadata.jsonl (file_name, text), or "shapes" or "signs" for fresh renders.

    For methods that learn from preferences: a folder with metadata.jsonl (prompt, better, worse), or "shapes".
    """

    path: Name
    count: PositiveInt | None = None
    seed: NonNegativeInt = 0


@settings
class RemoteSettings:
    """Servers of ``flowalign rewards serve`` that hold a judge.

    Args:
        urls: such as "http://judges:8000"; several share the work.
        token_env: name of the environment variable that holds their token.
        timeout: seconds that a batch may take, repetitions included.
        exact: send float32 in place of 8 bits.
    """

    urls: Annotated[tuple[Name, ...], MinLen(1)]
    token_env: Name | None = None
    timeout: PositiveFloat = 60.0
    exact: bool = False


@settings
class RewardSettings:
    """One judge.

    Args:
        name: built in, of a plug-in, or "module:Class"; with ``remote``, as the servers call it.
        weight: of the raw score, or of the scaled one where ``scale`` is given; 0 = only logged, or only a gate.
        params: of its constructor.
        scale: a published scaling that ``flowalign rewards show NAME`` lists, such as "flow-grpo". An offset changes no
            advantage and is left out.
        gate: raw score; a sample with a worse one counts as the worst of its group.
        frames: what an image judge sees of a video: first, middle, mean, min or uniform:K.
        batch_size: media (of image judges: frames) judged at a time; null = training.rollout_batch_size.
        device: such as cpu or cuda:1; null = that of the model.
        offload: its weights wait on the CPU between calls.
        remote: where the judge runs, if not here.
    """

    name: Name
    weight: NonNegativeFloat = 1.0
    params: dict[str, Any] = field(default_factory=dict)
    scale: Name | None = None
    gate: float | None = None
    frames: Name = "mean"
    batch_size: PositiveInt | None = None
    device: Name | None = None
    offload: bool = False
    remote: RemoteSettings | None = None

    def __post_init__(self) -> None:
        if self.remote is not None and (self.params or self.device is not None or self.offload):
            raise ValueError("remote: params, device and offload belong to the server; give them to it")
        if self.gate is not None and not math.isfinite(self.gate):
            raise ValueError(f"gate: got {self.gate}, expected a number")
        try:
            FramePolicy(self.frames)
        except FlowAlignError as error:
            raise ValueError(str(error)) from None


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
