"""Pictures and videos from files, as media: (F, 3, H, W) float32 in [0, 1]."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from flowalign.types import FlowAlignError

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
VIDEOS = (".mp4", ".mov", ".m4v", ".webm", ".mkv", ".avi")
UNSUPPORTED = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".psd", ".mpg", ".mpeg", ".wmv", ".flv")
"""Endings of pictures and videos that are not read; a folder's listing names them instead of passing over them."""
ANIMATED = ("GIF", "WEBP", "PNG")
"""Formats whose further frames are a video; those of a JPEG (MPO) are previews and depth maps."""
MAX_MEGAPIXELS = 256.0
"""Of all frames of a file together; as float32 this is 3 GB."""

Bytes = npt.NDArray[np.uint8]


class Unreadable(FlowAlignError):
    """Why a file cannot be read, without its name: the reader of a listing sees that beside it."""


def is_video(path: Path) -> bool:
    """Whether reading ``path`` needs PyAV."""
    return path.suffix.lower() in VIDEOS


def check_video_support() -> None:
    """Refuses to start on videos that could not be read.

    Raises:
        FlowAlignError: PyAV is not installed.
    """
    if importlib.util.find_spec("av") is None:
        raise FlowAlignError(
            f"videos ({', '.join(VIDEOS)}): PyAV is not installed; pip install 'flowalign[video]', or move them away"
        )


def read(path: Path, *, fps: float | None = None, max_megapixels: float = MAX_MEGAPIXELS) -> Tensor:
    """(F, 3, H, W) float32 in [0, 1]; a picture has F = 1.

    EXIF orientation and rotation of videos are applied; transparency is laid on white; grey, palette and CMYK become
    RGB; 16-bit grey is divided by 65535 (of 16-bit colour, Pillow keeps the high byte).

    Args:
        fps: frames a second to keep of a video: at each of the times k / fps the frame that is shown; None = all.
        max_megapixels: of all kept frames together, checked before they are decoded.

    Raises:
        Unreadable: not there, empty, damaged, too large, or of no known format; the message does not name the file.
    """
    if not path.is_file():
        raise Unreadable("no such file")
    if path.stat().st_size == 0:
        raise Unreadable("the file is empty")
    if path.suffix.lower() not in (*PICTURES, *VIDEOS):
        known = ", ".join((*PICTURES, *VIDEOS))
        raise Unreadable(f"files that end in {path.suffix or 'nothing'} are not read; convert it to one of {known}")
    frames = _video(path, fps, max_megapixels) if is_video(path) else _picture(path, fps, max_megapixels)
    return torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()


def middle_frame(path: Path, fps: float | None = None, max_megapixels: float = MAX_MEGAPIXELS) -> Tensor:
    """(3, H, W) in [0, 1]; see `read`."""
    frames = read(path, fps=fps, max_megapixels=max_megapixels)
    return frames[frames.shape[0] // 2]


def _check_size(count: int, width: int, height: int, limit: float) -> None:
    size = count * width * height / 1e6
    if size > limit:
        frames = f"{count} frames of {width}x{height}" if count > 1 else f"{width}x{height}"
        raise Unreadable(
            f"{frames} are {size:.0f} megapixels, more than {limit:g}; make it smaller, or raise --max-megapixels"
            + (" or lower --fps" if count > 1 else "")
        )


def _picture(path: Path, fps: float | None, limit: float) -> npt.NDArray[np.float32]:
    """(F, H, W, 3) float32 by Pillow."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # there is a limit of our own
            with Image.open(path) as opened:
                count = int(getattr(opened, "n_frames", 1)) if opened.format in ANIMATED else 1
                if fps is None or count == 1:
                    _check_size(count, *opened.size, limit)
                shown = _animation(opened, count) if count > 1 else iter([(0.0, opened)])
                return _stack(((time, _rgb(frame)) for time, frame in _resampled(shown, fps)), limit)
    except Unreadable:
        raise
    except Exception as error:  # each format of Pillow has exceptions of its own
        raise Unreadable(f"cannot be read as a picture ({_reason(error)}); replace it") from None


def _animation(opened: Image.Image, count: int) -> Iterator[tuple[float, Image.Image]]:
    """(time in seconds, frame); frames without a duration are shown for a tenth of a second, as browsers do."""
    time = 0.0
    for index in range(count):
        opened.seek(index)
        opened.load()  # a duration may be known only then
        yield time, opened
        time += (opened.info.get("duration") or 100) / 1000


def _rgb(image: Image.Image) -> npt.NDArray[np.float32]:
    """(H, W, 3) float32 in [0, 1]."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey, whose conversion to RGB by Pillow clips at 255
        grey = np.asarray(image).astype(np.float32) / 65535.0
        clear = image.info.get("transparency")
        if isinstance(clear, int):
            grey = np.where(np.asarray(image) == clear, np.float32(1), grey)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.mode not in ("RGB", "L", "CMYK", "YCbCr") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"), np.float32) / 255.0


def _resampled(frames: Iterable[tuple[float, Any]], fps: float | None) -> Iterator[tuple[float, Any]]:
    """The frames that are shown at 0, 1 / fps, 2 / fps, ..., each no more than once."""
    if fps is None:
        yield from frames
        return
    held: tuple[float, Any] | None = None
    tick = 0  # the next time to show is tick / fps
    for time, frame in frames:
        if held is not None and tick / fps < time - 1e-6:
            yield held
            tick = math.ceil((time - 1e-6) * fps)
        held = (time, frame.copy() if isinstance(frame, Image.Image) else frame)
    if held is not None and tick / fps <= held[0] + 1e-6:
        yield held


def _stack(frames: Iterable[tuple[float, npt.NDArray[Any]]], limit: float) -> npt.NDArray[np.float32]:
    """(F, H, W, 3) float32, refused as soon as it grows too large."""
    kept: list[npt.NDArray[Any]] = []
    for _, frame in frames:
        if kept and frame.shape != kept[0].shape:
            raise Unreadable(
                f"its frames change from {kept[0].shape[1]}x{kept[0].shape[0]} to {frame.shape[1]}x{frame.shape[0]}; "
                "encode it anew at one size"
            )
        kept.append(frame)
        _check_size(len(kept), frame.shape[1], frame.shape[0], limit)
    if not kept:
        raise Unreadable("no frame in it; encode it anew")
    whole = np.stack(kept)
    return whole if whole.dtype == np.float32 else whole.astype(np.float32) / np.float32(255.0)


def _video(path: Path, fps: float | None, limit: float) -> npt.NDArray[np.float32]:
    """(F, H, W, 3) float32 by PyAV."""
    check_video_support()
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise Unreadable("no video in it")
            stream = container.streams.video[0]
            if fps is None:
                _check_size(max(1, stream.frames), stream.codec_context.width, stream.codec_context.height, limit)
            stream.thread_type = "AUTO"
            return _stack(((time, _pixels(frame)) for time, frame in _resampled(_decoded(container), fps)), limit)
    except Unreadable:
        raise
    except Exception as error:  # PyAV derives its errors from OSError, ValueError, EOFError and others
        raise Unreadable(f"cannot be read as a video ({_reason(error)}); replace it") from None


def _decoded(container: Any) -> Iterator[tuple[float, Any]]:
    """(time in seconds since the first frame, frame)."""
    start = None
    for frame in container.decode(video=0):
        time = float(frame.time or 0.0)
        start = time if start is None else start
        yield time - start, frame


def _pixels(frame: Any) -> Bytes:
    """(H, W, 3) bytes, upright."""
    # Older PyAV does not tell the rotation.
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns))


def _reason(error: Exception) -> str:
    """One line; without the path, which Pillow and PyAV repeat."""
    if isinstance(error, UnidentifiedImageError):
        return "its contents are of no known format"
    text = getattr(error, "strerror", None)  # of OSError, and of all of PyAV's errors
    if isinstance(text, str) and text:
        return text
    return " ".join(str(error).split()) or type(error).__name__
