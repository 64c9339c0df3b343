"""The wire format: what goes in comes out bit for bit, and nothing else gets in."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from flowalign.rewards import registry, wire
from flowalign.rewards.base import Scored
from flowalign.rewards.strict_json import TooLarge, WireError
from flowalign.rewards.wire import JSON, SAFETENSORS, Limits, ScoreRequest
from flowalign.rewards.wire_answers import Answer, read_answer, read_spec, write_answer
from tests.rewards.served import pixels

LIMITS = Limits(body=1 << 20, samples=8)


def read(body: bytes, kind: str = SAFETENSORS, limits: Limits = LIMITS) -> ScoreRequest:
    return wire.read_request(body, kind, limits)


def blob(tensors: dict, fields: dict | str | None = None, **metadata: str) -> bytes:
    """A safetensors body, right but for what a test changes."""
    count = len(tensors["media"]) if set(tensors) == {"media"} and tensors["media"].ndim else len(tensors)
    known = {"protocol": 1, "reward": "meter", "prompts": ["p"] * count}
    text = fields if isinstance(fields, str) else json.dumps(known | (fields or {}))
    return save(tensors, {"request": text, **metadata})


def png(picture: np.ndarray | Image.Image, **options: object) -> str:
    stream = io.BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image.save(stream, "PNG", **options)
    return base64.b64encode(stream.getvalue()).decode()


def curl(pictures: object, **fields: object) -> bytes:
    count = len(pictures) if isinstance(pictures, list) else 1
    return json.dumps({"protocol": 1, "reward": "r", "prompts": ["p"] * count, "pictures": pictures} | fields).encode()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_requests_arrive_as_they_were_sent(dtype: torch.dtype) -> None:
    media = pixels(3, frames=2)
    media = media if dtype == torch.uint8 else media.float() / 255
    metadata = ({"a": [1, 2.5, None, {"b": "ü\n\"\\"}]}, {}, {"c": True})
    sent = ScoreRequest("meter", media, ("", "a \U0001f600 \"b\"", "\u202e"), metadata, "id-1", "d" * 64)
    came = read(wire.write_request(sent))
    assert torch.equal(came.media, media) and came.media.dtype == dtype
    assert (came.prompts, came.metadata) == (sent.prompts, metadata)
    assert (came.reward, came.request_id, came.spec_digest) == ("meter", "id-1", "d" * 64)


def test_media_of_different_sizes_keep_their_order_beyond_ten() -> None:
    media = [pixels(1, size=(2 + i, 3), seed=i)[0] for i in range(12)]
    sent = ScoreRequest("meter", media, tuple(map(str, range(12))))
    came = read(wire.write_request(sent), limits=Limits(samples=12))
    assert all(torch.equal(a, b) for a, b in zip(came.media, media, strict=True))
    assert came.metadata is None and len(came.request_id) == 32


def test_every_byte_survives_rounding() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(wire.quantise(levels.float() / 255), levels)
    assert torch.equal(wire.as_float(levels), levels.float() / 255)
    between = torch.tensor([-0.001, 0.49 / 255, 0.51 / 255, 1.001])
    assert wire.quantise(between).tolist() == [0, 0, 1, 255]


def test_pictures_in_json_are_the_pixels_of_their_png() -> None:
    colour = pixels(1, size=(5, 7))[0, 0].permute(1, 2, 0).numpy()
    grey = colour[..., 0].copy()
    clear = np.dstack([colour, np.full((5, 7), 128, np.uint8)])
    came = read(curl([png(colour), png(grey), png(clear)]), JSON)
    assert came.media.shape == (3, 1, 3, 5, 7)
    shown = came.media[:, 0].permute(0, 2, 3, 1).numpy()
    assert (shown[0] == colour).all()
    assert (shown[1] == grey[..., None]).all()
    half = 255 + (colour.astype(float) - 255) * 128 / 255  # laid on white
    assert np.abs(shown[2] - half).max() <= 1
    video = read(curl([[png(colour), png(colour[::-1])], [png(grey)]]), JSON).media
    assert [tuple(one.shape) for one in video] == [(2, 3, 5, 7), (1, 3, 5, 7)]
    assert (video[0][1].permute(1, 2, 0).numpy() == colour[::-1]).all()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"protocol": 2}, "protocol: 2"),
        ({"protocol": True}, "protocol: True"),
        ({"protocol": None}, "protocol: None"),
        ({"reward": None}, "reward: expected"),
        ({"reward": ["meter"]}, "reward: expected"),
        ({"prompts": "ab"}, "prompts: no list"),
        ({"prompts": ["a"]}, "prompts: 1 came with 2"),
        ({"prompts": ["a", None]}, "sample 1: the prompt is no text"),
        ({"prompts": ["a", "x" * 20_000]}, "at most 16384"),
        ({"prompts": ["a", "\ud800"]}, "surrogate"),
        ({"metadata": {}}, "metadata: no list"),
        ({"metadata": [{}]}, "metadata: 1 came with 2"),
        ({"metadata": [{}, None]}, "metadata are null"),
        ({"metadata": [{}, [1]]}, "are a list, expected an object"),
        ({"metadata": [{}, {"a": "x" * 70_000}]}, "more than 65536 bytes"),
        ({"metadata": [{}, {"a": {"\udfff": 1}}]}, "surrogate"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": 7}, "request_id"),
        ({"spec_digest": "../.."}, "spec_digest"),
        ({"callback": "http://x"}, "unknown key 'callback'"),
        ("[]", "is a list, expected"),
        ("{", "is not JSON"),
        ('{"protocol": 1, "protocol": 1}', "a key twice"),
        ('{"protocol": NaN}', "NaN"),
        ('{"protocol": 1e999}', "no finite number"),
        ('{"a": ' + "[" * 100_000, "is not JSON"),
        ("[" + "[]," * 150_000, "elements"),
        ('{"protocol": ' + "9" * 5000 + "}", "is not JSON"),
        ("\ud800", "is not JSON"),
    ],
)
def test_requests_with_other_fields_are_refused(fields: dict | str, said: str) -> None:
    with pytest.raises(WireError, match=said):
        if fields == "\ud800":  # which safetensors would not write
            body = blob({"media": pixels(2)}, "XXXXXX").replace(b"XXXXXX", b"\\ud800")
            read(body)
        read(blob({"media": pixels(2)}, fields))


def test_metadata_nested_too_deep_are_refused() -> None:
    deep: dict = {}
    for _ in range(40):
        deep = {"a": deep}
    with pytest.raises(WireError, match="nested deeper"):
        read(blob({"media": pixels(1)}, {"metadata": [deep]}))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "the tensors are none"),
        ({"media": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}, "expected \\(N, F, 3, H, W\\)"),
        ({"media": torch.zeros(0, 1, 3, 4, 4, dtype=torch.uint8)}, "holds no sample"),
        ({"media": torch.zeros(2, 0, 3, 4, 4, dtype=torch.uint8)}, "sides of at least 1"),
        ({"media": torch.zeros(2, 1, 4, 4, 4, dtype=torch.uint8)}, "expected \\(F, 3, H, W\\)"),
        ({"media": torch.zeros(2, 1, 3, 0, 4, dtype=torch.uint8)}, "sides of at least 1"),
        ({"media": torch.zeros(2, 1, 3, 1, 200, dtype=torch.uint8)}, "longer than 32 times"),
        ({"media": torch.zeros(1, 600, 3, 1, 1, dtype=torch.uint8)}, "600 frames"),
        ({"media": torch.zeros(2, 1, 3, 4, 4, dtype=torch.int16)}, "the media are I16"),
        ({"media": torch.zeros(2, 1, 3, 4, 4, dtype=torch.float64)}, "the media are F64"),
        ({"media": torch.full((2, 1, 3, 4, 4), 255.0)}, "expected finite values in"),
        ({"media": torch.full((2, 1, 3, 4, 4), torch.nan)}, "expected finite values in"),
        ({"media": torch.full((2, 1, 3, 4, 4), -1.0)}, "expected finite values in"),
        ({"media.0": torch.zeros(1, 3, 4, 4), "media.2": torch.zeros(1, 3, 4, 4)}, "the tensors are"),
        ({"media.0": torch.zeros(1, 3, 4, 4), "weights": torch.zeros(1)}, "the tensors are"),
        ({"media.0": torch.zeros(1, 3, 4, 4), "media.1": torch.zeros(1, 1, 3, 4, 4)}, "shape"),
        ({"media.0": torch.zeros(1, 3, 4, 4), "media.1": pixels(1)[0]}, "expected all U8, or all F32"),
    ],
)
def test_other_media_are_refused(tensors: dict, said: str) -> None:
    with pytest.raises(WireError, match=said):
        read(blob(tensors))


def test_too_many_samples_or_frames_are_told_apart_from_faults() -> None:
    with pytest.raises(TooLarge, match="9 media, at most 8"):
        read(blob({"media": pixels(9)}))
    with pytest.raises(TooLarge, match="9 media, at most 8"):
        read(blob({f"media.{i}": pixels(1)[0] for i in range(9)}))
    many = torch.zeros(20, 450, 3, 1, 1, dtype=torch.uint8)
    with pytest.raises(TooLarge, match="9000 frames"):
        read(blob({"media": many}), limits=Limits())
    with pytest.raises(TooLarge, match="9 pictures"):
        read(curl(["x"] * 9), JSON)


def raw(header: object, data: bytes = bytes(48)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


REQUEST = {"request": json.dumps({"protocol": 1, "reward": "r", "prompts": ["p"]})}
ENTRY = {"dtype": "U8", "shape": [1, 1, 3, 4, 4], "data_offsets": [0, 48]}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80\x04K\x01.",  # pickle of 1
        b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94.",
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 0),
        raw({"media": ENTRY}),
        raw({"media": ENTRY, "__metadata__": {"request": 7}}),
        raw({"media": ENTRY, "__metadata__": REQUEST | {"more": "x"}}),
        raw({"media": ENTRY, "__metadata__": REQUEST}, bytes(47)),
        raw({"media": ENTRY, "__metadata__": REQUEST}, bytes(49)),
        raw({"media": ENTRY | {"data_offsets": [0, 47]}, "__metadata__": REQUEST}),
        raw({"media": ENTRY | {"data_offsets": [-48, 0]}, "__metadata__": REQUEST}),
        raw({"media": ENTRY | {"data_offsets": [48, 0]}, "__metadata__": REQUEST}),
        raw({"media": ENTRY | {"shape": [-1, 1, 3, 4, -4]}, "__metadata__": REQUEST}),
        raw({"media": ENTRY | {"shape": [1, 1, 3, 4, 4.0]}, "__metadata__": REQUEST}),
        raw({"media": ENTRY | {"shape": [True, 1, 3, 4, 4]}, "__metadata__": REQUEST}),
        raw({"media": ENTRY | {"shape": [1, 1, 3, 2**40, 2**40]}, "__metadata__": REQUEST}),
        raw({"media": ENTRY | {"shape": None}, "__metadata__": REQUEST}),
        raw({"media": [], "__metadata__": REQUEST}),
        raw({"media": ENTRY | {"dtype": ["U8"]}, "__metadata__": REQUEST}),
        raw({"media.0": ENTRY | {"shape": [1, 3, 4, 4]}, "media.1": ENTRY | {"shape": [1, 3, 4, 4]}}),
        raw(b'{"media": {}, "media": {}}'),
        raw(b"\xff\xfe{\x00}\x00"),
    ],
)
def test_bodies_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        read(body)
    with pytest.raises(WireError):
        read(body, JSON)


def test_two_pictures_cannot_share_bytes() -> None:
    entry = ENTRY | {"shape": [1, 3, 4, 4]}
    metadata = {"request": json.dumps({"protocol": 1, "reward": "r", "prompts": ["p", "q"]})}
    with pytest.raises(WireError, match="no safetensors file"):
        read(raw({"media.0": entry, "media.1": entry, "__metadata__": metadata}))


def test_a_header_is_not_parsed_beyond_its_limit() -> None:
    with pytest.raises(TooLarge, match="at most 4194304"):
        read(raw(b" " * (wire.MAX_HEADER + 1)), limits=Limits())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_to_a_body_does_more_than_refuse_it(data: st.DataObject) -> None:
    body = bytearray(blob({"media": pixels(2)}, {"metadata": [{"a": 1}, {}]}))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body
    try:
        came = read(bytes(body))
    except WireError:
        return
    assert tuple(came.media.shape) == (2, 1, 3, 4, 4) and len(came.prompts) == 2


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int, kind: bytes = b"tEXt") -> str:
    """A PNG that announces more pixels than it has, or that holds 64 MB of notes."""
    notes = b"a\0\0" + zlib.compress(bytes(64_000_000), 1) if kind != b"tEXt" else b"a\0b"
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + head + chunk(kind, notes) + data + chunk(b"IEND", b"")).decode()


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        ("@@@", "base64"),
        ("aGFsbG8=", "base64 PNG"),
        (png(np.zeros((4, 4, 3), np.uint8))[:-60], "base64 PNG"),
        ("ünicode", "base64 PNG"),
        (7, "expected base64"),
        (None, "expected base64"),
        ([], "one frame or more"),
        ([png(np.zeros((4, 4, 3), np.uint8)), png(np.zeros((4, 5, 3), np.uint8))], "all of one size"),
        ([["x"]], "expected base64"),
        (png(Image.new("I;16", (4, 4))), "8 bits"),
        (png(np.zeros((1, 33, 3), np.uint8)), "longer than 32 times"),
        (png(Image.new("RGB", (4, 4)), save_all=True, append_images=[Image.new("RGB", (4, 4), "red")]), "animation"),
        (bomb(4, 4, b"zTXt"), "base64 PNG"),
        (bomb(4, 4, b"iCCP"), "base64 PNG"),
        (bomb(600, 600), "more than a request may hold"),
        (bomb(60_000, 60_000), "base64 PNG"),  # by Pillow's own limit
    ],
)
def test_other_pictures_are_refused(picture: object, said: str) -> None:
    with pytest.raises(WireError, match=said):
        read(curl([picture]), JSON)
    assert read(curl([png(np.zeros((4, 4, 3), np.uint8))]), JSON).media.shape == (1, 1, 3, 4, 4)


def test_many_small_pictures_have_one_limit_together() -> None:
    flat = png(np.zeros((300, 300, 3), np.uint8))  # 270 kB of pixels in a few hundred bytes
    assert len(flat) < 2000
    assert read(curl([flat] * 3), JSON).media.shape[0] == 3
    with pytest.raises(TooLarge, match=r"pictures\[3\]"):
        read(curl([flat] * 4), JSON)


def answer(score: torch.Tensor, **parts: object) -> Answer:
    return Answer(Scored(score, **parts), "digest", "id", 0.25)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=5))
def test_scores_arrive_bit_for_bit(values: list[float]) -> None:
    sent = torch.tensor(values, dtype=torch.float32)
    came = read_answer(write_answer(answer(sent, subscores={"s": sent})), len(values)).scored
    want = torch.where(torch.isfinite(sent), sent, torch.full_like(sent, torch.nan))
    for column in (came.score, came.subscores["s"]):
        assert column.numpy().tobytes() == want.numpy().tobytes() or (
            (column.isnan() == want.isnan()).all() and torch.equal(column[~want.isnan()], want[~want.isnan()])
        )


def test_answers_are_as_short_as_they_can_be_and_null_where_there_is_no_score() -> None:
    body = json.loads(write_answer(answer(torch.tensor([0.1, torch.nan, 3.0]))))
    assert body["scores"] == [0.1, None, 3.0] and body["details"] == []
    assert set(body) == {"scores", "subscores", "details", "spec_digest", "request_id", "seconds"}


def test_details_become_plain_data() -> None:
    odd = {"a": (1, {2}), "b": torch.tensor([1.5, torch.inf]), 3: math.nan, "d": {"e": np.float32(2)}, "f": "\ud800"}
    came = read_answer(write_answer(answer(torch.zeros(1), details=(odd,))), 1).scored.details[0]
    assert came == {"a": [1, [2]], "b": [1.5, None], "3": None, "d": {"e": 2.0}, "f": "?"}
    looped: dict = {}
    looped["self"] = looped
    assert read_answer(write_answer(answer(torch.zeros(1), details=(looped,))), 1)


@pytest.mark.parametrize(
    "change",
    [
        {"scores": [1.0]},
        {"scores": [1.0, "2"]},
        {"scores": [1.0, True]},
        {"scores": [1.0, 1e39]},
        {"scores": [1.0, 10**400]},
        {"scores": None},
        {"subscores": {"s": [1.0]}},
        {"subscores": []},
        {"details": [{}]},
        {"details": [{}, 1]},
        {"spec_digest": None},
        {"request_id": 7},
        {"seconds": "1"},
        {"more": 1},
    ],
)
def test_other_answers_are_refused(change: dict) -> None:
    good = json.loads(write_answer(answer(torch.tensor([1.0, 2.0]))))
    assert read_answer(json.dumps(good).encode(), 2).scored.score.tolist() == [1.0, 2.0]
    with pytest.raises(WireError):
        read_answer(json.dumps(good | change).encode(), 2)


def test_a_truncated_answer_is_refused_wherever_it_ends() -> None:
    body = write_answer(answer(torch.tensor([1.0, 2.0])))
    for end in range(len(body)):
        with pytest.raises(WireError):
            read_answer(body[:end], 2)


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_specs_survive_with_their_digest(name: str) -> None:
    spec = registry.load(name).spec
    came = read_spec(json.loads(json.dumps(spec.as_dict())))
    assert came.digest() == spec.digest() and came.native_range == spec.native_range
    assert came.weights == spec.weights and came.needs == spec.needs


@pytest.mark.parametrize(
    "change", [{"more": 1}, {"modality": "sound"}, {"native_range": 3}, {"weights": [{"x": 1}]}, {"name": None}]
)
def test_other_specs_are_refused(change: dict) -> None:
    good = registry.load("brightness").spec.as_dict()
    with pytest.raises(WireError):
        read_spec(good | change)
    for missing in ("name", "licence"):
        with pytest.raises(WireError, match=missing):
            read_spec({key: value for key, value in good.items() if key != missing})
