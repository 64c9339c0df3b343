"""Unit features of open_clip models with published weights, for judges that were tuned with open_clip."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flowalign.rewards import weights
from flowalign.rewards.base import WeightFile
from flowalign.rewards.clip import cosines, preprocess_padded
from flowalign.types import FlowAlignError

CONFIG = "open_clip_config.json"
FOLDER_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""Of a folder as open_clip itself writes it."""
DEFAULT_VOCABULARY = 49_408
"""Of a configuration that does not say."""


class OpenCLIPFeatures:
    """An open_clip CLIP, in float32 and without gradients to its weights, and its own tokenizer.

    Only the given weights are read: none of the model that they were tuned from.

    Args:
        file: the published weights, a torch file with open_clip's names under "state_dict".
        path: None = the hub; a file of weights; or a folder with the published file or in open_clip's own layout.
        model: an architecture of open_clip, or a JSON configuration or the folder that holds ``open_clip_config.json``.
            Size, statistics and tokenizer are those of the configuration.
        sha256: of the local file of weights.
        name: of the reward, for messages.

    Raises:
        FlowAlignError: open_clip cannot be imported, the model is unknown, or the weights do not fit it.
    """

    def __init__(
        self,
        file: WeightFile,
        path: str | None,
        model: str,
        sha256: str | None,
        device: torch.device | str,
        name: str,
    ) -> None:
        library = _library(name)
        config, folder = _config(library, model, name)
        self.tokenizer = _tokenizer(library, config["model_cfg"]["text_cfg"], folder, name)
        found = weights.locate(_file_in(file, path), path, name, sha256)
        built = _build(library, config["model_cfg"], model, name)
        self.size = _square(built.visual.image_size, model, name)
        # Of torch files, those of open_clip's own layout hold the state dict itself, training checkpoints under a key.
        key = None if found.suffix == ".bin" else "state_dict"
        weights.load_strict(built, weights.read(found, name, key), name)
        self.model = built.to(device).eval().requires_grad_(False)
        pictures = config.get("preprocess_cfg", {})
        self.mean = tuple(pictures.get("mean") or library.OPENAI_DATASET_MEAN)
        self.std = tuple(pictures.get("std") or library.OPENAI_DATASET_STD)
        self.device = torch.device(device)

    def images(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) in [0, 1] to unit vectors (N, D), differentiable."""
        pixels = preprocess_padded(images.to(self.device).float(), self.size, self.mean, self.std)
        return functional.normalize(self.model.encode_image(pixels).float(), dim=-1)

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """N texts, cut off at the model's length, to unit vectors (N, D)."""
        tokens = self.tokenizer(list(texts)).to(self.device)
        return functional.normalize(self.model.encode_text(tokens).float(), dim=-1)

    def cosine(self, media: Tensor, texts: Sequence[str]) -> Tensor:
        """(B, F, 3, H, W) and B texts to (B,) float32: the cosine, as the mean over frames."""
        frames = self.images(media.flatten(0, 1)).view(media.shape[0], media.shape[1], -1)
        return cosines(frames, self.texts(texts))

    def to(self, device: torch.device | str) -> None:
        """Moves the weights."""
        self.device = torch.device(device)
        self.model.to(self.device)


def _library(name: str) -> Any:
    try:
        import open_clip
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision's operators, where it is of another torch
        raise FlowAlignError(
            f"reward {name!r}: open_clip cannot be imported ({str(error).splitlines()[0]}); run `pip install "
            "open_clip_torch`, with torch and torchvision of one release"
        ) from error
    return open_clip


def _config(library: Any, model: str, name: str) -> tuple[dict[str, Any], Path | None]:
    """{"model_cfg": ..., "preprocess_cfg": ...}, and the folder that it was read from."""
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        path = path / CONFIG if path.is_dir() else path
        try:
            read = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise FlowAlignError(
                f"reward {name!r}: {str(path)!r} cannot be read ({error}); give a configuration of open_clip"
            ) from None
        config = read if isinstance(read, dict) and "model_cfg" in read else {"model_cfg": read}
        wanted = {"embed_dim": int, "text_cfg": dict, "vision_cfg": dict}
        inner = config["model_cfg"]
        if not isinstance(inner, dict) or not all(isinstance(inner.get(key), kind) for key, kind in wanted.items()):
            raise FlowAlignError(
                f"reward {name!r}: {str(path)!r} does not hold {', '.join(wanted)}; give a configuration of open_clip"
            )
        return config, path.parent
    known = library.list_models()
    if model not in known:
        near = difflib.get_close_matches(model, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "expected such as 'ViT-H-14', a folder or a JSON file"
        raise FlowAlignError(f"reward {name!r}: open_clip has no model {model!r}; {hint}")
    return {"model_cfg": library.get_model_config(model)}, None


def _build(library: Any, config: Mapping[str, Any], model: str, name: str) -> Any:
    """The model with weights still to be loaded. No ``create_model``: it would look for others on the hub."""
    for tower, key in (("text_cfg", "hf_model_name"), ("vision_cfg", "timm_model_name")):
        if config[tower].get(key):
            raise FlowAlignError(
                f"reward {name!r}: the configuration {model!r} takes a tower from elsewhere ({tower}.{key}), expected "
                "one with open_clip's own; choose another model"
            )
    try:
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn globally, and are overwritten
            return library.CLIP(**config)
    except (TypeError, ValueError, ArithmeticError, AssertionError) as error:
        raise FlowAlignError(
            f"reward {name!r}: the configuration {model!r} makes no CLIP ({error}); give a configuration of open_clip"
        ) from None


def _file_in(file: WeightFile, path: str | None) -> WeightFile:
    """The file to look for: of a folder without the published one, that of open_clip's own layout."""
    if path is None or not (folder := Path(path)).is_dir() or (folder / Path(file.file).name).is_file():
        return file
    own = [other for other in FOLDER_WEIGHTS if (folder / other).is_file()]
    return file._replace(file=own[0]) if own else file


def _tokenizer(library: Any, config: Mapping[str, Any], folder: Path | None, name: str) -> Any:
    """open_clip's own, which mends the text's encoding first; or the Hugging Face one that the configuration names."""
    module = library.tokenizer
    length = config.get("context_length", module.DEFAULT_CONTEXT_LENGTH)
    kwargs = dict(config.get("tokenizer_kwargs") or {})
    hub = config.get("hf_tokenizer_name")
    if not hub:
        own = module.SimpleTokenizer(context_length=length, **kwargs)
        _check_vocabulary(own.vocab_size, own.eot_token_id, config, name)
        return own
    source = str(folder) if folder is not None else hub  # as open_clip does: a folder holds its tokenizer
    try:
        other = module.HFTokenizer(source, length, tokenizer_mode=config.get("tokenizer_mode"), **kwargs)
        long = other(["a " * length])[0].tolist()
    except (OSError, ValueError) as error:
        raise FlowAlignError(
            f"reward {name!r}: no tokenizer in {source!r} ({str(error).splitlines()[0]}); put its files beside {CONFIG}"
        ) from None
    end = other.tokenizer.eos_token_id
    if end not in long:
        raise FlowAlignError(
            f"reward {name!r}: the tokenizer in {source!r} ends a text that is too long with token {long[-1]}, not "
            f"with its end {end}; give one that ends every text"
        )
    _check_vocabulary(len(other.tokenizer), end, config, name)
    return other


def _check_vocabulary(count: int, end: int, config: Mapping[str, Any], name: str) -> None:
    """A token that the model lacks would fail in the middle of a run; and features are read off at the end of a text,
    which the model takes to be its largest token, or a configured one."""
    size = config.get("vocab_size", DEFAULT_VOCABULARY)
    if count > size:
        raise FlowAlignError(
            f"reward {name!r}: the tokenizer has {count} tokens, but the model {size}; give those that belong together"
        )
    pool = config.get("pool_type", "argmax")
    expected = {"argmax": count - 1, "eos": config.get("eos_id", 2)}.get(pool, end)
    if end != expected:
        raise FlowAlignError(
            f"reward {name!r}: the tokenizer ends a text with token {end}, but the model (pool_type {pool!r}) reads "
            f"its features at {expected}; give those that belong together"
        )


def _square(size: Any, model: str, name: str) -> int:
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) != 1:
        raise FlowAlignError(f"reward {name!r}: the configuration {model!r} takes {size} pixels, expected a square")
    return int(sides.pop())
