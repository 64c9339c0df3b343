"""Low-rank adapters (2106.09685) by peft, and named sets of the trainable weights."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from torch import Tensor, nn

from flowalign.core import rng
from flowalign.models.base import Model
from flowalign.models.verbosity import quiet
from flowalign.types import FlowAlignError

ADAPTER = "default"
"""Name of the adapter in training."""


def add_lora(
    model: Model,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] | None = None,
    seed: int = 0,
    init: Literal["kaiming", "gaussian"] = "kaiming",
) -> list[nn.Parameter]:
    """Adds an adapter to the transformer and freezes all else.

    Its output is ``alpha / rank B A x``, with B = 0 at the start, so that the model is unchanged. A is drawn per layer
    from a key of ``seed`` and the layer's name, whatever the global random state and however many layers there are.

    Args:
        targets: endings of module names; None = the family's own.
        init: of A: "kaiming" uniform in +-1 / sqrt(fan in), or "gaussian" of standard deviation 1 / rank; both as peft
            names and defines them.

    Returns:
        The trainable parameters, float32.

    Raises:
        FlowAlignError: no module has such a name, or one that cannot take an adapter; or there is an adapter already.
    """
    transformer, names = model.transformer, list(targets or model.lora_targets)
    if getattr(transformer, "peft_config", None):
        raise FlowAlignError(f"lora: the {model.family} transformer has an adapter already; load the model afresh")
    _check_targets(model, names)
    transformer.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)  # type: ignore[arg-type]  # any number will do
    device = next(transformer.parameters()).device
    try:
        # peft draws before we do: what it draws must not move the global random state.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            transformer.add_adapter(config)  # type: ignore[operator]
    except ValueError as error:
        raise FlowAlignError(f"tuning.targets: {_first_line(error)}; name linear or convolution layers") from None
    for name, parameter in transformer.named_parameters():
        if ".lora_A." in name:
            generator = rng.generator(seed, "lora", name)
            if init == "gaussian":
                drawn = torch.randn(parameter.shape, generator=generator) / rank
            else:
                drawn = (torch.rand(parameter.shape, generator=generator) * 2 - 1) * parameter[0].numel() ** -0.5
            parameter.data = drawn.to(parameter.device)
        elif ".lora_B." in name:
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
    return [p for p in transformer.parameters() if p.requires_grad]


def _check_targets(model: Model, names: Sequence[str]) -> None:
    modules = [name for name, _ in model.transformer.named_modules()]
    for name in names:
        if not any(module == name or module.endswith("." + name) for module in modules):
            endings = {module.rsplit(".", 1)[-1] for module in modules} | set(model.lora_targets)
            near = difflib.get_close_matches(name, sorted(endings), 1)
            hint = f", did you mean {near[0]!r}" if near else ""
            raise FlowAlignError(
                f"tuning.targets: no module of the {model.family} transformer is called {name!r}{hint}; expected "
                f"endings such as {', '.join(model.lora_targets[:3])}"
            )


def load_lora(model: Model, file: str | Path) -> None:
    """Loads a diffusers LoRA file (or a folder with one) for inference.

    Raises:
        FlowAlignError: it is not there, or not all of it fits the model.
    """
    path = Path(file)
    if not path.exists():
        raise FlowAlignError(f"lora {str(file)!r}: no such file or folder; give one written by 'flowalign export'")
    if getattr(model.transformer, "peft_config", None):
        raise FlowAlignError(f"lora {str(file)!r}: the model has an adapter already; load the model afresh")
    pipe = model.pipeline()
    where: dict[str, Any] = {} if path.is_dir() else {"weight_name": path.name}
    try:
        # Without use_safetensors, diffusers falls back to unpickling.
        with quiet():
            folder = str(path if path.is_dir() else path.parent)
            state, _ = pipe.lora_state_dict(folder, use_safetensors=True, return_lora_metadata=True, **where)
            pipe.load_lora_weights(folder, use_safetensors=True, **where)
    except Exception as error:  # peft, diffusers and safetensors each raise their own
        raise FlowAlignError(f"lora {str(file)!r}: does not fit the model ({_first_line(error)})") from None
    # diffusers ignores keys that it does not know, a folder written by peft among them, and says nothing.
    known = tuple(f"{name}." for name in pipe.components)
    parts = [pipe.transformer, getattr(pipe, "text_encoder", None), getattr(pipe, "text_encoder_2", None)]
    loaded = sum(".lora_" in name for part in parts if part is not None for name, _ in part.named_parameters())
    foreign = next((key for key in state if not key.startswith(known)), None)
    if loaded < len(state) or foreign is not None or not state:
        example = f", such as {foreign!r}" if foreign else ""
        raise FlowAlignError(
            f"lora {str(file)!r}: {max(len(state) - loaded, 0)} of its {len(state)} tensors fit nothing in this model"
            f"{example}; expected a diffusers LoRA file as 'flowalign export --format diffusers' writes it"
        )
    for part in parts:
        if part is not None:
            part.requires_grad_(False)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")


def lora_state(transformer: nn.Module) -> dict[str, Tensor]:
    """{parameter name: tensor} of what is trained; views of the parameters, not to be changed."""
    return {name: p.detach() for name, p in transformer.named_parameters() if p.requires_grad}


@contextmanager
def reference(transformer: nn.Module) -> Iterator[None]:
    """The weights before training: adapters are switched off within."""
    required = {name: p.requires_grad for name, p in transformer.named_parameters() if ".lora_" in name}
    transformer.disable_adapters()  # type: ignore[operator]
    try:
        yield
    finally:
        transformer.enable_adapters()  # type: ignore[operator]
        # peft turns the gradients of adapters off, and all of them on again, those that were off before included.
        for name, p in transformer.named_parameters():
            if name in required:
                p.requires_grad_(required[name])


class WeightSets:
    """Named copies of the trainable parameters of a module, such as "ema" or "reference".

    Copies are never aliased: changing the module leaves every set as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._sets: dict[str, dict[str, Tensor]] = {}

    def copy(self, name: str) -> None:
        """Makes or overwrites the set ``name`` with the present weights."""
        self._sets[name] = {key: p.detach().clone() for key, p in self._parameters.items()}

    @torch.no_grad()
    def ema(self, name: str, decay: float) -> None:
        """``set <- decay set + (1 - decay) present``; the set must exist."""
        for key, averaged in self._set(name).items():
            averaged.lerp_(self._parameters[key].detach(), 1 - decay)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """The module has the weights of the set within, and its own again after; no weight may be changed within.

        Storages are exchanged, nothing is copied: it costs no memory, and a graph made before stays valid within.
        """
        chosen = self._set(name)
        own = {key: p.data for key, p in self._parameters.items()}
        try:
            for key, p in self._parameters.items():
                p.data = chosen[key]
            yield
        finally:
            for key, p in self._parameters.items():
                p.data = own[key]

    def names(self) -> list[str]:
        return list(self._sets)

    def state_dict(self, name: str | None = None) -> dict[str, Tensor]:
        """The tensors of a set, or of the present weights where ``name`` is None; not to be changed."""
        return dict(self._set(name)) if name is not None else {key: p.detach() for key, p in self._parameters.items()}

    def load(self, name: str | None, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites a set, or the present weights where ``name`` is None.

        Raises:
            FlowAlignError: other names or shapes than those of the trainable parameters.
        """
        expected = {key: tuple(p.shape) for key, p in self._parameters.items()}
        found = {key: tuple(t.shape) for key, t in tensors.items()}
        if expected != found:
            odd = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
            raise FlowAlignError(
                f"weights: {len(odd)} of {len(expected)} tensors do not fit, first {odd[0]}: got "
                f"{found.get(odd[0], 'none')}, expected {expected.get(odd[0], 'none')}; they are of another model or "
                "recipe"
            )
        if name is None:
            with torch.no_grad():
                for key, p in self._parameters.items():
                    p.copy_(tensors[key])
        else:
            self._sets[name] = {
                key: tensors[key].detach().to(device=p.device, dtype=p.dtype, copy=True)
                for key, p in self._parameters.items()
            }

    def _set(self, name: str) -> dict[str, Tensor]:
        if name not in self._sets:
            raise ValueError(f"weight set {name!r}: unknown; known are {', '.join(self._sets) or 'none'}")
        return self._sets[name]
