"""Weights of judges: from the hub or a local path, checked, never unpickled, loaded strictly."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from flowalign.rewards.base import WeightFile
from flowalign.types import FlowAlignError


def locate(file: WeightFile, path: str | None, name: str, sha256: str | None = None) -> Path:
    """The file of weights, with its checksum checked.

    Args:
        file: what the spec says; fetched from the hub where ``path`` is None.
        path: a local file, or a folder that holds one of the same name.
        name: of the reward, for messages.
        sha256: of a local file; the spec's own holds for the published file only.

    Raises:
        FlowAlignError: there is no such file, it cannot be fetched, or its checksum differs.
    """
    if path is None:
        found, expected = _fetch(file, name), sha256 or file.sha256
    else:
        local = Path(path)
        found, expected = (local / Path(file.file).name if local.is_dir() else local), sha256
        if not found.is_file():
            raise FlowAlignError(
                f"reward {name!r}: no file {str(found)!r}; give the path of {file.file} of {file.repository}"
            )
    if expected is not None and (got := checksum(found)) != expected:
        raise FlowAlignError(
            f"reward {name!r}: {str(found)!r} has sha256 {got[:12]}..., expected {expected[:12]}...; fetch it again"
        )
    return found


def _fetch(file: WeightFile, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(file.repository, file.file, revision=file.revision))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise FlowAlignError(
            f"reward {name!r}: {file.file} of {file.repository} cannot be fetched ({str(error).splitlines()[0]}); "
            "check the connection, or give a local file as params.path"
        ) from None


def checksum(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def read(path: Path, name: str, key: str | None = None) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a torch file that holds nothing but tensors.

    Args:
        key: under which the weights stand in a torch file, such as "state_dict".

    Raises:
        FlowAlignError: the file is damaged, or would have to be unpickled.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has exceptions of its own, some of private modules
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FlowAlignError(
            f"reward {name!r}: {str(path)!r} holds no plain weights ({reason}); fetch it again, or convert it to "
            "safetensors in the environment that wrote it"
        ) from None
    if key is not None and isinstance(loaded, Mapping):
        loaded = loaded.get(key)
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        inside = f" under {key!r}" if key else ""
        raise FlowAlignError(f"reward {name!r}: {str(path)!r} holds no state dict{inside}; give the published file")
    return dict(loaded)


def load_strict(module: nn.Module, state: Mapping[str, Tensor], name: str, unused: Collection[str] = ()) -> None:
    """Puts ``state`` into ``module``: every weight, of the right shape, and nothing left over.

    Args:
        unused: keys of ``state`` that newer code no longer keeps, such as position ids.

    Raises:
        FlowAlignError: names the first keys that do not fit.
    """
    wanted = module.state_dict()
    given = {key: value for key, value in state.items() if key not in unused}
    faults = [f"{key} is missing" for key in wanted if key not in given]
    faults += [f"{key} is unknown" for key in given if key not in wanted]
    faults += [
        f"{key} is {tuple(given[key].shape)}, expected {tuple(value.shape)}"
        for key, value in wanted.items()
        if key in given and given[key].shape != value.shape
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise FlowAlignError(
            f"reward {name!r}: the weights do not fit {type(module).__name__}: {', '.join(faults[:3])}{more}; give the "
            "published file"
        )
    module.load_state_dict(given)
