"""Captioned images and preferences to learn from: the common folder of pictures with a metadata.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
    """Pairs to learn from, ``batch_size`` an iteration over all ranks.

    ``worse``: of preferences, the images that people liked less than those of ``pairs``, for the same captions.
    """

    pairs: Pairs
    batch_size: int
    worse: Pairs | None = None


def load_pairs(path: str | Path, *, height: int, width: int, count: int | None = None, seed: int = 0) -> Pairs:
    """Reads the list of a folder's pairs.

    Args:
        path: folder with metadata.jsonl; each line holds "file_name" (relative to the folder) and "text".
        height, width: images are resized to cover this and cropped at the centre.
        count: only so many, the first of a keyed permutation; None = all.

    Raises:
        FlowAlignError: no such folder, no or bad metadata, a missing image, or fewer pairs than ``count``.
    """
    rows = _rows(Path(path), '{"file_name": "0001.png", "text": "a caption"}', _record, count, seed)
    return _pairs(rows, 0, height, width)


def load_preferences(
    path: str | Path, *, height: int, width: int, count: int | None = None, seed: int = 0
) -> tuple[Pairs, Pairs]:
    """Reads the list of a folder's preferences: the better images and, in the same order, the worse ones.

    Args:
        path: folder with metadata.jsonl; each line holds "prompt" (or "text"), "better" and "worse", the files relative
            to the folder.
        others: as in `load_pairs`.

    Raises:
        FlowAlignError: as `load_pairs`, or a line that prefers an image to itself.
    """
    example = '{"prompt": "a caption", "better": "0001.png", "worse": "0002.png"}'
    rows = _rows(Path(path), example, _preference, count, seed)
    return _pairs(rows, 0, height, width), _pairs(rows, 1, height, width)


class _Row(NamedTuple):
    """A line of the metadata: a caption and the images that it comes with."""

    text: str
    files: tuple[Path, ...]


def _pairs(rows: Sequence[_Row], which: int, height: int, width: int) -> Pairs:
    return Pairs(tuple(row.files[which] for row in rows), tuple(row.text for row in rows), height, width)


def _rows(
    folder: Path, example: str, read: Callable[[object, str], tuple[str, tuple[str, ...]]], count: int | None, seed: int
) -> list[_Row]:
    listing = folder / METADATA
    if not listing.is_file():
        raise FlowAlignError(
            f"dataset {str(folder)!r}: no {METADATA} in it; expected a folder of images with a {METADATA} whose lines "
            f"read {example}"
        )
    rows = []
    for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            text, names = read(_parsed(line, f"{listing}:{number}"), f"{listing}:{number}")
            for name in names:
                if not (folder / name).is_file():
                    raise FlowAlignError(
                        f"{listing}:{number}: image {name!r} is not in {folder}; add it or delete the line"
                    )
            rows.append(_Row(text, tuple(folder / name for name in names)))
    if not rows:
        raise FlowAlignError(f"{listing}: holds no pair; write one object a line")
    if count is not None and count > len(rows):
        raise FlowAlignError(f"dataset {str(folder)!r}: holds {len(rows)} pairs, fewer than count {count}; lower count")
    if count is not None:
        kept = sorted(torch.randperm(len(rows), generator=rng.generator(seed, "pairs"))[:count].tolist())
        rows = [rows[i] for i in kept]
    return rows


def _parsed(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise FlowAlignError(
            f"{where}: not JSON ({error.msg}, column {error.colno}); write one object a line"
        ) from None


def _texts(record: object, keys: Sequence[str]) -> list[str] | None:
    """The values of ``keys``, or None where one of them is not a text."""
    values = [record.get(key) for key in keys] if isinstance(record, dict) else [None]
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    return texts if len(texts) == len(keys) else None


def _record(record: object, where: str) -> tuple[str, tuple[str, ...]]:
    texts = _texts(record, ["text", "file_name"])
    if texts is None:
        raise FlowAlignError(f'{where}: expected an object with the texts "file_name" and "text"')
    return texts[0], (texts[1],)


def _preference(record: object, where: str) -> tuple[str, tuple[str, ...]]:
    caption = "prompt" if isinstance(record, dict) and "prompt" in record else "text"
    texts = _texts(record, [caption, "better", "worse"])
    if texts is None:
        raise FlowAlignError(f'{where}: expected an object with the texts "prompt", "better" and "worse"')
    if texts[1] == texts[2]:
        raise FlowAlignError(f"{where}: {texts[1]!r} is both better and worse; name two images, or delete the line")
    return texts[0], (texts[1], texts[2])


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
