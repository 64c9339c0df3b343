"""Captioned images to learn from: the common folder of pictures with a metadata.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowalign.core import rng
from flowalign.data import media
from flowalign.types import FlowAlignError

METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class Pairs:
    """N images and their captions; images are read when asked for.

    Args:
        files: N paths.
        texts: N captions.
        height, width: of what `images` returns, in pixels.
    """

    files: tuple[Path, ...]
    texts: tuple[str, ...]
    height: int
    width: int

    def __len__(self) -> int:
        return len(self.files)

    def images(self, indices: Sequence[int]) -> Tensor:
        """(len(indices), 1, 3, height, width) float32 in [0, 1].

        Raises:
            FlowAlignError: a file is missing or is not an image.
        """
        return torch.stack([read_image(self.files[i], self.height, self.width) for i in indices])[:, None]


@dataclass(frozen=True)
class PairData:
    """Pairs to learn from, ``batch_size`` an iteration over all ranks."""

    pairs: Pairs
    batch_size: int


def load_pairs(path: str | Path, *, height: int, width: int, count: int | None = None, seed: int = 0) -> Pairs:
    """Reads the list of a folder's pairs.

    Args:
        path: folder with metadata.jsonl; each line holds "file_name" (relative to the folder) and "text".
        height, width: images are resized to cover this and cropped at the centre.
        count: only so many, the first of a keyed permutation; None = all.

    Raises:
        FlowAlignError: no such folder, no or bad metadata, a missing image, or fewer pairs than ``count``.
    """
    folder = Path(path)
    listing = folder / METADATA
    if not listing.is_file():
        raise FlowAlignError(
            f"dataset {str(path)!r}: no {METADATA} in it; expected a folder of images with a {METADATA} whose lines "
            "read "
            '{"file_name": "0001.png", "text": "a caption"}'
        )
    files, texts = [], []
    for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            name, text = _record(line, f"{listing}:{number}")
            if not (folder / name).is_file():
                raise FlowAlignError(
                    f"{listing}:{number}: image {name!r} is not in {folder}; add it or delete the line"
                )
            files.append(folder / name)
            texts.append(text)
    if not files:
        raise FlowAlignError(f"{listing}: holds no pair; write one object a line")
    if count is not None and count > len(files):
        raise FlowAlignError(f"dataset {str(path)!r}: holds {len(files)} pairs, fewer than count {count}; lower count")
    if count is not None:
        kept = sorted(torch.randperm(len(files), generator=rng.generator(seed, "pairs"))[:count].tolist())
        files, texts = [files[i] for i in kept], [texts[i] for i in kept]
    return Pairs(tuple(files), tuple(texts), height, width)


def _record(line: str, where: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise FlowAlignError(
            f"{where}: not JSON ({error.msg}, column {error.colno}); write one object a line"
        ) from None
    values = (record.get("file_name"), record.get("text")) if isinstance(record, dict) else (None, None)
    if not all(isinstance(value, str) and value.strip() for value in values):
        raise FlowAlignError(f'{where}: expected an object with the texts "file_name" and "text"')
    return str(values[0]), str(values[1])


def read_image(path: str | Path, height: int | None = None, width: int | None = None) -> Tensor:
    """(3, H, W) float32 in [0, 1]; with a size, scaled to cover it (Lanczos, antialiased) and cropped at the centre.

    What `media.read` says of transparency, grey, 16 bits and orientation holds here too.

    Raises:
        FlowAlignError: missing, or not an image.
    """
    try:
        picture = media.read(Path(path))[0]
    except media.Unreadable as error:
        raise FlowAlignError(
            f"image {str(path)!r}: cannot be read ({error}); replace it by a png, jpg or webp"
        ) from None
    if height is None or width is None or picture.shape[1:] == (height, width):
        return picture
    image = Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())
    scale = max(width / image.width, height / image.height)
    size = (math.ceil(image.width * scale - 1e-6), math.ceil(image.height * scale - 1e-6))
    image = image.resize(size, Image.Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.asarray(image, np.float32) / 255.0).permute(2, 0, 1).contiguous()


def keyed_batch(count: int, batch_size: int, iteration: int, seed: int) -> list[int]:
    """The pairs of an iteration, over all ranks: the next ``batch_size`` of an endless walk through keyed permutations.

    An epoch shows every pair once; a batch may straddle two epochs, so that none is left out and any size is allowed.
    """
    start = iteration * batch_size
    chosen: list[int] = []
    while len(chosen) < batch_size:
        epoch, offset = divmod(start + len(chosen), count)
        order = torch.randperm(count, generator=rng.generator(seed, "pairs", epoch))
        chosen += order[offset : offset + batch_size - len(chosen)].tolist()
    return chosen
