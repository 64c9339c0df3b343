"""Writes tests/rewards/golden_blip.safetensors: what the authors of ImageReward and CycleReward compute.

Their packages need an old transformers, so this runs in an environment of its own:

    python -m venv old
    old/bin/pip install transformers==4.45.2 torch torchvision "numpy<2" safetensors timm fairscale
    old/bin/pip install --no-deps image-reward==1.5 cyclereward==0.1.7
    old/bin/python scripts/golden_blip.py

Their classes are used as they are, but smaller: the published sizes would not fit into a repository.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
golden = importlib.import_module("tests.rewards.golden_blip")
TARGET = ROOT / "tests" / "rewards" / "golden_blip.safetensors"


def empty_init(package: str) -> None:
    """Keeps the ``__init__`` of a package from running: theirs import what no score needs, such as OpenAI's clip."""
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        raise SystemExit(f"{package} is not installed; see the top of this file")
    bare = types.ModuleType(package)
    bare.__path__ = list(found.submodule_search_locations)
    sys.modules[package] = bare


def smaller(package: str) -> None:
    """Makes their BLIP with our sizes."""
    blip, pretrain = (importlib.import_module(f"{package}.{module}") for module in ("blip", "blip_pretrain"))
    sizes = golden.SIZES

    def create_vit(*args: Any, **kwargs: Any) -> tuple[Any, int]:
        vit = blip.VisionTransformer(
            img_size=sizes["image_size"],
            patch_size=sizes["patch_size"],
            embed_dim=sizes["embed_dim"],
            depth=sizes["depth"],
            num_heads=sizes["num_heads"],
        )
        return vit, sizes["embed_dim"]

    pretrain.create_vit = create_vit


def fill(model: torch.nn.Module) -> dict[str, list[int]]:
    """Gives a model the golden weights; returns names and shapes."""
    shapes = {name: list(value.shape) for name, value in model.state_dict().items() if value.is_floating_point()}
    missing, unexpected = model.load_state_dict(golden.weights(shapes), strict=False)
    if unexpected or any(not name.endswith("position_ids") for name in missing):
        raise SystemExit(f"weights do not fit: {missing}, {unexpected}")
    model.eval()
    return shapes


@torch.no_grad()
def imagereward(config: str) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """Names and shapes of weights, and what their ``score`` says."""
    empty_init("ImageReward")
    empty_init("ImageReward.models")
    smaller("ImageReward.models.BLIP")
    theirs = importlib.import_module("ImageReward.ImageReward")
    model = theirs.ImageReward(med_config=config)
    model.mlp = theirs.MLP(golden.MED_CONFIG["hidden_size"])
    shapes = fill(model)
    scores = [model.score(p, Image.fromarray(golden.picture(i))) for i, p in enumerate(golden.PROMPTS)]
    tokens = model.blip.tokenizer(list(golden.PROMPTS), padding="max_length", truncation=True, max_length=35)
    return shapes, {"score": torch.tensor(scores), "ids": torch.tensor(tokens.input_ids)}


@torch.no_grad()
def cyclereward(config: str) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """As above; their pretrained BLIP is left out, since the weights are replaced anyway."""
    theirs = importlib.import_module("cyclereward.model")
    smaller("cyclereward.blip")
    theirs.cyclereward_args.update(blip_path="", mlp_dim=golden.MED_CONFIG["hidden_size"])
    model = theirs.CycleReward(med_config=config)
    shapes = fill(model)
    pictures = [model.preprocess(Image.fromarray(golden.picture(i)))[None] for i in range(len(golden.PROMPTS))]
    scores = [model.score(pixels, p).item() for pixels, p in zip(pictures, golden.PROMPTS)]  # noqa: B905
    tokens = model.blip.tokenizer(list(golden.PROMPTS), padding="max_length", truncation=True, max_length=128)
    return shapes, {"score": torch.tensor(scores), "ids": torch.tensor(tokens.input_ids)}


def main() -> None:
    """Runs both in a folder where "bert-base-uncased" is a tokenizer of a few words."""
    tensors, metadata = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("bert-base-uncased").mkdir()
        Path("bert-base-uncased/vocab.txt").write_text("\n".join(golden.VOCABULARY) + "\n")
        Path("med_config.json").write_text(json.dumps(golden.MED_CONFIG))
        for name, run in (("imagereward", imagereward), ("cyclereward", cyclereward)):
            shapes, values = run("med_config.json")
            metadata[name] = json.dumps(shapes)
            tensors |= {f"{name}.{key}": value for key, value in values.items()}
            print(name, values["score"].tolist())
        save_file(tensors, TARGET, metadata)
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
