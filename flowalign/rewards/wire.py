"""How a judge in another environment is asked: protocol version 1, and the checks of everything that comes in.

A request is one safetensors blob (``application/x-safetensors``): ``media`` (N, F, 3, H, W), or ``media.0`` to
``media.N-1`` (F, 3, H, W) where sizes differ, uint8 or float32 in [0, 1]; the metadata entry "request" holds JSON
``{protocol, reward, prompts, metadata, request_id, spec_digest}``, of which the last three may be left out. For curl
there is JSON (``application/json``) with the same keys and ``pictures``: base64 PNG, one or a list of frames a sample.
The answer is JSON; see `flowalign.rewards.wire_answers`. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import io
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowalign.rewards import strict_json
from flowalign.rewards.judge import Media
from flowalign.rewards.strict_json import TooLarge, WireError, short
from flowalign.types import Metadata

PROTOCOL = 1
SAFETENSORS = "application/x-safetensors"
JSON = "application/json"

MAX_HEADER = 4 << 20  # bytes of a safetensors header, in which prompts and metadata stand
MAX_PROMPT = 1 << 14  # characters
MAX_METADATA = 1 << 16  # bytes of JSON, of one sample
MAX_FRAMES = 512  # of one sample
MAX_ALL_FRAMES = 8192  # of one request
MAX_RATIO = 32  # long to short side: judges bring the short side to a fixed size, and the long one with it
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


class Limits(NamedTuple):
    """What a server takes in one request.

    Args:
        body: bytes of a body, and of its media once decoded.
        samples: N.
    """

    body: int = 64 << 20
    samples: int = 1024

    @property
    def json(self) -> int:
        """Bytes of a JSON body: as text, and parsed, it takes several times as much."""
        return self.body // 4


@dataclass(frozen=True)
class ScoreRequest:
    """N samples for one judge.

    Args:
        media: uint8, or float32 in [0, 1]; (N, F, 3, H, W), or N of (F, 3, H, W).
        spec_digest: of the judge that is meant; any is meant where it is None.
    """

    reward: str
    media: Media
    prompts: tuple[str, ...]
    metadata: tuple[Metadata, ...] | None = None
    request_id: str = ""
    spec_digest: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the media."""
        return self.media.nbytes if isinstance(self.media, Tensor) else sum(one.nbytes for one in self.media)


def quantise(media: Tensor) -> Tensor:
    """[0, 1] to uint8, as a saved picture is; what came from 8 bits comes back as it was, bit for bit."""
    return (media.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)


def as_float(media: Media) -> Media:
    """Media of a request as judges take them: float32 in [0, 1]."""
    if not isinstance(media, Tensor):
        return [_float(one) for one in media]
    return _float(media)


def _float(media: Tensor) -> Tensor:
    return media.float().div_(255) if media.dtype == torch.uint8 else media


def write_request(request: ScoreRequest) -> bytes:
    """The safetensors body."""
    from safetensors.torch import save

    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "reward": request.reward,
        "prompts": request.prompts,
        "metadata": request.metadata,
        "request_id": request.request_id or None,
        "spec_digest": request.spec_digest,
    }
    given = {key: value for key, value in fields.items() if value is not None}
    text = json.dumps(given, ensure_ascii=False, allow_nan=False, default=dict)
    if isinstance(request.media, Tensor):
        tensors = {"media": request.media}
    else:
        tensors = {f"media.{i}": one for i, one in enumerate(request.media)}
    return save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, {"request": text})


def read_request(body: bytes, content_type: str, limits: Limits) -> ScoreRequest:
    """The request in a body of either content type.

    Raises:
        WireError: anything but protocol version 1.
        TooLarge: more than ``limits``, or than any request holds.
    """
    if content_type == JSON:
        return _read_json(body, limits)
    from safetensors import SafetensorError
    from safetensors.torch import load

    header = _header(body)
    fields = _fields(_request_text(header), "the request", ())
    names = _check_tensors(header, limits)
    prompts, metadata = _texts(fields, header["media"]["shape"][0] if names == ["media"] else len(names))
    try:
        tensors = load(body)
    except SafetensorError as error:
        raise WireError(f"the body is no safetensors file: {short(error)}") from None
    for name in names:
        _check_values(name, tensors[name])
    media = tensors["media"] if names == ["media"] else [tensors[name] for name in names]
    return _request(fields, media, prompts, metadata)


def _header(body: bytes) -> dict[str, Any]:
    """The header of a safetensors file, whose length is looked at before anything is made of it."""
    length = int.from_bytes(body[:8], "little") if len(body) >= 8 else -1
    if not 2 <= length <= len(body) - 8:
        raise WireError("the body is no safetensors file: its header is longer than the body, or missing")
    if length > MAX_HEADER:
        raise TooLarge(f"the header of the safetensors file has {length} bytes, at most {MAX_HEADER} are taken")
    return strict_json.parse(body[8 : 8 + length], "the header of the safetensors file")


def _request_text(header: dict[str, Any]) -> bytes:
    metadata = header.pop("__metadata__", None)
    text = metadata.get("request") if isinstance(metadata, dict) else None
    if not isinstance(text, str) or set(metadata) - {"request", "format"}:
        raise WireError('the metadata of the safetensors file must hold "request", the JSON of the request, only')
    return text.encode("utf-8", "surrogatepass")  # which the parser refuses


def _check_tensors(header: Mapping[str, Any], limits: Limits) -> list[str]:
    """The names of the media in order, after a look at what the header says of them."""
    if len(header) > limits.samples:
        raise TooLarge(f"{len(header)} media, at most {limits.samples} are taken in a request")
    names = ["media"] if set(header) == {"media"} else [f"media.{i}" for i in range(len(header))]
    if not names or set(names) != set(header):
        shown = ", ".join(repr(short(name)) for name in list(header)[:3]) or "none"
        raise WireError(f"the tensors are {shown}, expected 'media', or 'media.0' to 'media.N-1'")
    kinds = set()
    frames = 0
    for name in names:
        tensor = header[name] if isinstance(header[name], dict) else {}
        shape, rank = tensor.get("shape"), 5 if name == "media" else 4
        if not isinstance(shape, list) or not all(type(side) is int for side in shape) or len(shape) != rank:
            expected = "(N, F, 3, H, W)" if rank == 5 else "(F, 3, H, W)"
            raise WireError(f"{name}: shape {short(shape)}, expected {expected}")
        samples = shape[0] if rank == 5 else 1
        if samples > limits.samples:
            raise TooLarge(f"{short(samples)} media, at most {limits.samples} are taken in a request")
        if (fault := media_fault(shape[-4:])) or samples < 1:
            raise WireError(f"{name}: {fault or 'holds no sample'}")
        kinds.add(short(tensor.get("dtype")))
        frames += samples * shape[-4]
    if len(kinds) != 1 or not kinds <= {"U8", "F32"}:
        raise WireError(f"the media are {short(', '.join(sorted(kinds)))}, expected all U8, or all F32")
    if frames > MAX_ALL_FRAMES:
        raise TooLarge(f"{frames} frames in all, at most {MAX_ALL_FRAMES} are taken in a request")
    return names


def media_fault(shape: Sequence[int]) -> str | None:
    """Why media of this shape (F, 3, H, W) are not taken, or None."""
    frames, channels, height, width = shape
    if channels != 3 or min(shape) < 1:
        return f"shape {short(list(shape))}, expected (F, 3, H, W) with sides of at least 1"
    if frames > MAX_FRAMES:
        return f"{short(frames)} frames, at most {MAX_FRAMES} are taken"
    if max(height, width) > MAX_RATIO * min(height, width):
        return f"a picture of {short(width)}x{short(height)}, longer than {MAX_RATIO} times its short side"
    return None


def _check_values(name: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.uint8:
        return
    low, high = torch.aminmax(tensor)
    if not -1e-3 <= float(low) <= float(high) <= 1 + 1e-3:  # nan compares false
        raise WireError(f"{name}: lies in [{float(low):.3g}, {float(high):.3g}], expected finite values in [0, 1]")


def _read_json(body: bytes, limits: Limits) -> ScoreRequest:
    fields = _fields(body, "the body", ("pictures",))
    pictures = fields.get("pictures")
    if not isinstance(pictures, list) or not pictures:
        raise WireError("pictures: expected a list with base64 PNG, one or a list of frames for each prompt")
    if len(pictures) > limits.samples:
        raise TooLarge(f"{len(pictures)} pictures, at most {limits.samples} are taken in a request")
    prompts, metadata = _texts(fields, len(pictures))
    left, count = limits.body, 0
    media = []
    for i, given in enumerate(pictures):
        frames = given if isinstance(given, list) else [given]
        count += len(frames)
        if len(frames) > MAX_FRAMES or count > MAX_ALL_FRAMES:
            raise TooLarge(f"pictures[{i}]: more than {MAX_FRAMES} frames, or with those before {MAX_ALL_FRAMES}")
        decoded = []
        for frame in frames:
            decoded.append(_png(frame, f"pictures[{i}]", left))
            left -= decoded[-1].nbytes
        if len({one.shape for one in decoded}) != 1:
            raise WireError(f"pictures[{i}]: expected one frame or more, all of one size")
        media.append(torch.stack(decoded))
        if fault := media_fault(media[-1].shape):
            raise WireError(f"pictures[{i}]: {fault}")
    same = len({one.shape for one in media}) == 1
    return _request(fields, torch.stack(media) if same else media, prompts, metadata)


def _png(text: Any, where: str, limit: int) -> Tensor:
    """(3, H, W) uint8; transparency is laid on white."""
    if not isinstance(text, str):
        raise WireError(f"{where}: expected base64 PNG, or a list of them")
    try:
        data = base64.b64decode(text, validate=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # there is a limit of our own
            image: Image.Image = Image.open(io.BytesIO(data), formats=("PNG",))
        if image.width * image.height * 3 > limit:
            raise TooLarge(f"{where}: {image.width}x{image.height} pixels are more than a request may hold")
        if image.mode not in _MODES or getattr(image, "n_frames", 1) != 1:
            raise WireError(f"{where}: expected one PNG of 8 bits, got mode {image.mode} or an animation")
        if image.mode in ("LA", "P", "RGBA") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        pixels = np.array(image.convert("RGB"))
    except WireError:
        raise
    except Exception as error:  # Pillow has many exceptions of its own
        raise WireError(f"{where}: cannot be read as a base64 PNG ({short(error)})") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _fields(text: bytes, what: str, more: tuple[str, ...]) -> dict[str, Any]:
    fields = strict_json.parse(text, what)
    known = {"protocol", "reward", "prompts", "metadata", "request_id", "spec_digest", *more}
    if unknown := set(fields) - known:
        raise WireError(f"{what}: unknown key {short(min(unknown))!r}, expected {', '.join(sorted(known))}")
    if type(fields.get("protocol")) is not int or fields["protocol"] != PROTOCOL:
        raise WireError(f"protocol: {short(fields.get('protocol'))}, expected {PROTOCOL}")
    if not isinstance(fields.get("reward"), str):
        raise WireError("reward: expected the name of a judge")
    for key in ("request_id", "spec_digest"):
        value = fields.get(key)
        if value is not None and not (isinstance(value, str) and _ID.fullmatch(value)):
            raise WireError(f"{key}: expected 1 to 128 letters, digits, '.', '_', ':' or '-'")
    return fields


def _texts(fields: Mapping[str, Any], count: int) -> tuple[tuple[str, ...], tuple[Metadata, ...] | None]:
    """Prompts and metadata of ``count`` samples."""
    prompts, metadata = fields.get("prompts"), fields.get("metadata")
    for key, value in (("prompts", prompts), ("metadata", [{}] * count if metadata is None else metadata)):
        if not isinstance(value, list) or len(value) != count:
            came = f"{len(value)}" if isinstance(value, list) else "no list"
            raise WireError(f"{key}: {came} came with {count} media, expected as many of each")
    assert isinstance(prompts, list)
    for i in range(count):
        if fault := sample_fault(prompts[i], None if metadata is None else metadata[i]):
            raise WireError(f"sample {i}: {fault}")
        if metadata is not None and metadata[i] is None:
            raise WireError(f"sample {i}: the metadata are null, expected an object")
    return tuple(prompts), None if metadata is None else tuple(metadata)


def sample_fault(prompt: Any, metadata: Any) -> str | None:
    """Why this prompt, or this metadata (None = none), cannot be sent; None where it can."""
    if not isinstance(prompt, str) or len(prompt) > MAX_PROMPT:
        return f"the prompt is no text of at most {MAX_PROMPT} characters"
    if fault := strict_json.fault(prompt):
        return f"the prompt {fault}"
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        return f"the metadata are a {type(metadata).__name__}, expected an object"
    if fault := strict_json.fault(metadata):
        return f"something in the metadata {fault}"
    if len(json.dumps(metadata, default=dict, ensure_ascii=False).encode()) > MAX_METADATA:
        return f"the metadata take more than {MAX_METADATA} bytes of JSON"
    return None


def _request(
    fields: Mapping[str, Any], media: Media, prompts: tuple[str, ...], metadata: tuple[Metadata, ...] | None
) -> ScoreRequest:
    number, digest = fields.get("request_id") or uuid4().hex, fields.get("spec_digest")
    return ScoreRequest(fields["reward"], media, prompts, metadata, number, digest)
