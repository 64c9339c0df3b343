"""Low-rank adapters (2106.09685) by peft, and named sets of the trainable weights."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn

from flowalign.core import rng
from flowalign.models.base import Model
from flowalign.types import FlowAlignError


def add_lora(
    model: Model, *, rank: int, alpha: float, targets: Sequence[str] | None = None, seed: int = 0
) -> list[nn.Parameter]:
    """Adds an adapter to the transformer and freezes all else.

    Its output is ``alpha / rank B A x``, with B = 0 at the start, so that the model is unchanged. A is drawn per layer
    from a key of ``seed`` and the layer's name: uniform in +-1 / sqrt(fan in), as peft does.

    Args:
        targets: endings of module names; None = the family's own.

    Returns:
        The trainable parameters, float32.

    Raises:
        FlowAlignError: no module has such a name.
    """
    transformer, names = model.transformer, list(targets or model.lora_targets)
    modules = [name for name, _ in transformer.named_modules()]
    for name in names:
        if not any(module == name or module.endswith("." + name) for module in modules):
            endings = {module.rsplit(".", 1)[-1] for module in modules} | set(model.lora_targets)
            near = difflib.get_close_matches(name, sorted(endings), 1)
            hint = f", did you mean {near[0]!r}" if near else ""
            raise FlowAlignError(
                f"tuning.targets: no module of the {model.family} transformer is called {name!r}{hint}; expected endings "
                f"such as {', '.join(model.lora_targets[:3])}"
            )
    transformer.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)  # type: ignore[arg-type]  # any number will do
    transformer.add_adapter(config)  # type: ignore[operator]
    for name, parameter in transformer.named_parameters():
        if ".lora_A." in name:
            bound = parameter[0].numel() ** -0.5
            drawn = torch.rand(parameter.shape, generator=rng.generator(seed, "lora", name)) * 2 - 1
            parameter.data = (drawn * bound).to(parameter.device)
        elif ".lora_B." in name:
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
    return [p for p in transformer.parameters() if p.requires_grad]


def load_lora(model: Model, file: str | Path) -> None:
    """Loads a diffusers LoRA file (or a folder with one) for inference.

    Raises:
        FlowAlignError: it is not there, or nothing in it fits the transformer.
    """
    path = Path(file)
    if not path.exists():
        raise FlowAlignError(f"lora {str(file)!r}: no such file or folder; give one written by 'flowalign export'")
    pipe = model.pipeline()
    try:
        pipe.load_lora_weights(str(path if path.is_dir() else path.parent), **({} if path.is_dir() else {"weight_name": path.name}))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FlowAlignError(f"lora {str(file)!r}: does not fit the model ({reason})") from None
    # diffusers ignores keys that it does not know, a folder written by peft among them, and says nothing.
    if not getattr(model.transformer, "peft_config", None):
        raise FlowAlignError(
            f"lora {str(file)!r}: holds no weight for this transformer, so that loading it changes nothing; expected a "
            "diffusers LoRA file as 'flowalign export --format diffusers' writes it"
        )
    model.transformer.requires_grad_(False)


@contextmanager
def reference(transformer: nn.Module) -> Iterator[None]:
    """The weights before training: adapters are switched off within."""
    transformer.disable_adapters()  # type: ignore[operator]
    try:
        yield
    finally:
        transformer.enable_adapters()  # type: ignore[operator]


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
        """The module has the weights of the set within, and its own again after."""
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
        return self._set(name) if name is not None else {key: p.detach() for key, p in self._parameters.items()}

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
                f"{found.get(odd[0], 'none')}, expected {expected.get(odd[0], 'none')}; they are of another model or recipe"
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
