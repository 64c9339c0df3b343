"""The values that flow through flowalign; every other module speaks in these.

Conventions: ``sigma`` is the noise level in [0, 1] (1 = noise, 0 = clean);
``x_sigma = (1 - sigma) clean + sigma noise``; ``velocity = noise - clean``. Latents are (B, C, *S), media
(B, F, 3, H, W) float32 in [0, 1] where an image has F = 1. All values are immutable: functions return new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, dataclass_transform, get_type_hints

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

KernelName = Literal["ode", "flow", "dance", "cps", "sage"]
LogProbForm = Literal["gaussian", "unscaled"]

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]

T = TypeVar("T")


class FlowAlignError(Exception):
    """A mistake that the user can mend; one sentence says where, what came, what was expected and what to do."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Frozen keyword-only dataclass whose unknown keys and wrong types are refused when a recipe is read."""
    # Resolved here: pydantic would read a field's default where a module of the same name is meant (schedule.Name).
    cls.__annotations__ = get_type_hints(cls, include_extras=True)
    cls.__pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


@dataclass(frozen=True)
class Conditioning:
    """What a velocity is conditioned on.

    Args:
        tensors: named tensors, each (B, ...), in the names of the model adapter.
        negative: the same names for classifier-free guidance, or None where the model runs without.
    """

    tensors: Mapping[str, Tensor]
    negative: Mapping[str, Tensor] | None = None

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def _map(self, function: Callable[[Tensor], Tensor]) -> Conditioning:
        negative = None if self.negative is None else {k: function(v) for k, v in self.negative.items()}
        return Conditioning({k: function(v) for k, v in self.tensors.items()}, negative)

    def select(self, index: Tensor | slice) -> Conditioning:
        """Rows ``index``; a row may be taken more than once."""
        return self._map(lambda v: v[index.to(v.device) if isinstance(index, Tensor) else index])

    def to(self, device: torch.device | str) -> Conditioning:
        return self._map(lambda v: v.to(device))

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """Rows of all ``parts`` in order; all must have the same names, and all or none a negative."""

        def join(maps: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
            return {key: torch.cat([m[key] for m in maps]) for key in maps[0]}

        negatives = [part.negative for part in parts if part.negative is not None]
        if negatives and len(negatives) != len(parts):
            raise ValueError("Conditioning.cat: some parts carry a negative and some do not, expected all or none")
        return Conditioning(join([part.tensors for part in parts]), join(negatives) if negatives else None)


VelocityFn = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""``velocity(x (B, C, *S), sigma (B,) in [0, 1], cond) -> (B, C, *S)`` float32."""


class StepWindow(NamedTuple):
    """Which denoising steps of a trajectory are stochastic, and which of these are learnt from (a subset)."""

    stochastic: Tensor  # (J,) int64
    trained: Tensor  # (K,) int64


@dataclass(frozen=True)
class RolloutPlan:
    """How samples are drawn in one iteration.

    Args:
        sigmas: (T + 1,) float32, descending from 1 to 0.
        kernel: transition of the stochastic steps; all others are deterministic (ode).
        level: noise level of the kernel (a, eta, ...).
        window: from a generator keyed by (seed, iteration, group) to the steps of that group. Every group must get the
            same number of trained steps. None: every step is deterministic and nothing but the end is recorded.
        guidance: classifier-free guidance scale; 1 = off.
        share_noise: all members of a group start from the same x at sigma = 1.
        log_prob: form of the log-density that is recorded.
        storage: dtype that recorded states are rounded through before their log-density is taken.
        whole_groups: all members of a group are drawn by one process, for methods that compare their latents.
    """

    sigmas: Tensor
    kernel: KernelName = "ode"
    level: float = 0.0
    window: Callable[[torch.Generator], StepWindow] | None = None
    guidance: float = 1.0
    share_noise: bool = False
    log_prob: LogProbForm = "gaussian"
    storage: torch.dtype = torch.float32
    whole_groups: bool = False


@dataclass(frozen=True)
class Trajectory:
    """One denoising run of B samples.

    Args:
        final: (B, C, *S) float32 latents at sigma = 0.
        states: (B, K, 2, C, *S), x before and x after each recorded step.
        steps: (B, K) int64, index i of the recorded step from sigmas[i] to sigmas[i + 1]; it may differ by sample.
        sigmas: (T + 1,) float32.
        log_probs: (B, K) float32, mean over non-batch dimensions, under the policy that drew the samples.
    """

    final: Tensor
    states: Tensor
    steps: Tensor
    sigmas: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class Rollout:
    """The samples of this rank.

    Args:
        prompts: B texts.
        group: (B,) int64; samples of one prompt in one iteration share it, on every rank.
        keys: B integers, the random key of each sample; equal whatever the number of ranks or the batch split.
        cond: conditioning of the B samples (on the compute device).
        trajectory: how they came about.
        media: (B, F, 3, H, W) float32 in [0, 1].
    """

    prompts: tuple[str, ...]
    group: Tensor
    keys: tuple[int, ...]
    cond: Conditioning
    trajectory: Trajectory
    media: Tensor


@dataclass(frozen=True)
class Examples:
    """Captioned clean latents of this rank, for methods that learn from data; fields as in `Rollout`.

    Args:
        clean: (B, C, *S) float32.
        worse: (B, C, *S) float32, of preferences: what people liked less than ``clean`` for the same caption.
    """

    prompts: tuple[str, ...]
    keys: tuple[int, ...]
    cond: Conditioning
    clean: Tensor
    worse: Tensor | None = None


Combination = Literal["sum", "normalise", "ranks"]
"""How several rewards become one number; see `core.combination.total`."""


@dataclass(frozen=True)
class Scores:
    """Rewards of the samples of ALL ranks, in one global order.

    Args:
        values: {reward name: (N,) float32}; nan = could not be scored.
        weights: {reward name: weight in the total}.
        group: (N,) int64.
        local: (B,) int64, where this rank's samples stand in the global order, in the order of its Rollout.
        subscores: {"reward/sub-score": (N,) float32}, for the log only; nan where one does not apply.
        combination: how the rewards become one number; see `core.combination.total`.
        gated: (N,) bool, samples that must count as the worst of their group; None = no reward is a gate.
    """

    values: Mapping[str, Tensor]
    weights: Mapping[str, float]
    group: Tensor
    local: Tensor
    subscores: Mapping[str, Tensor] = field(default_factory=dict)
    combination: Combination = "sum"
    gated: Tensor | None = None


WeightSet = Literal["behaviour", "anchor", "reference"]
"""Weights that a method may keep besides those in training; see `Policy`."""


@dataclass(frozen=True)
class Policy:
    """All of the model that an algorithm may touch. No velocity applies guidance; only ``current`` has gradients.

    Args:
        current: the weights in training.
        reference: the weights before training, or of the last renewal where a method renews them.
        behaviour: the weights that draw the samples; left out, those in training.
        anchor: weights that follow those in training, for a loss to pull to; left out, those in training.
    """

    current: VelocityFn
    reference: VelocityFn
    behaviour: VelocityFn = field(default=None)  # type: ignore[assignment]  # never None once it is made
    anchor: VelocityFn = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        def without_gradient(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            with torch.no_grad():
                return self.current(x, sigma, cond)

        for name in ("behaviour", "anchor"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, without_gradient)


@dataclass(frozen=True)
class Batch:
    """n items to learn from, made of B samples (an item is, say, one recorded step of one sample).

    Args:
        items: named tensors (n, ...).
        sample: (n,) int64, the sample that an item comes from, in [0, B).
        cond: conditioning of the B samples.
        weight: (n,) float32 >= 0; the learner takes the weighted mean of the losses over all ranks; 0 = masked.
    """

    items: Mapping[str, Tensor]
    sample: Tensor
    cond: Conditioning
    weight: Tensor

    def __len__(self) -> int:
        return self.sample.shape[0]

    def select(self, index: Tensor) -> Batch:
        """Items ``index`` (m,), each with its own row of conditioning: in the result ``sample`` = 0 .. m - 1."""
        return replace(
            self,
            items={key: value[index] for key, value in self.items.items()},
            sample=torch.arange(index.shape[0], device=self.sample.device),
            cond=self.cond.select(self.sample[index]),
            weight=self.weight[index],
        )


@dataclass(frozen=True)
class Terms:
    """What an algorithm says of a batch of n items.

    Args:
        losses: {name: (n,) float32}; the learner adds the terms up.
        metrics: {name: (n,) float32 without gradient}; the log shows weighted means.
    """

    losses: Mapping[str, Tensor]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


Metadata = Mapping[str, Any]
