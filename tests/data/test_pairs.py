"""Image-caption folders."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.data.pairs import keyed_batch, load_pairs, load_preferences, read_image
from flowalign.data.worlds import shapes, shapes_render
from flowalign.data.worlds.shapes_verifier import verify
from flowalign.types import FlowAlignError


def folder(tmp_path, sizes=((32, 32), (64, 32), (32, 64))):
    lines = []
    for i, (width, height) in enumerate(sizes):
        picture = np.zeros((height, width, 3), np.uint8)
        picture[:, : width // 2] = (255, 0, 0)
        picture[:, width // 2 :] = (0, 0, 255)
        Image.fromarray(picture).save(tmp_path / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": f"picture {i}"}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_images_cover_the_size_and_are_cropped_at_the_centre(tmp_path) -> None:
    pairs = load_pairs(folder(tmp_path), height=32, width=32)
    assert pairs.texts == ("picture 0", "picture 1", "picture 2")
    images = pairs.images([0, 1, 2])
    assert images.shape == (3, 1, 3, 32, 32)
    assert images.dtype == torch.float32 and images.min() == 0 and images.max() == 1
    # 64 x 32 cropped to its middle: the border of the two colours stays in the middle.
    for image in images[:2, 0]:
        assert torch.allclose(image[0].mean(0)[:14], torch.ones(14), atol=0.02)
        assert torch.allclose(image[2].mean(0)[18:], torch.ones(14), atol=0.02)


def test_grey_palette_and_transparent_pictures_become_rgb(tmp_path) -> None:
    Image.new("L", (4, 4), 128).save(tmp_path / "grey.png")
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert torch.allclose(read_image(tmp_path / "grey.png"), torch.full((3, 4, 4), 128 / 255))
    assert torch.allclose(read_image(tmp_path / "clear.png"), torch.ones(3, 4, 4))
    Image.fromarray(np.full((4, 4), 0x4000, np.uint16)).save(tmp_path / "deep.png")
    assert torch.allclose(read_image(tmp_path / "deep.png"), torch.full((3, 4, 4), 0x4000 / 0xFFFF))


def test_the_folder_that_the_world_writes(tmp_path) -> None:
    shapes_render.write_folder(tmp_path, 5, seed=0)
    pairs = load_pairs(tmp_path, height=64, width=64, count=3, seed=1)
    assert len(pairs) == 3
    for text in pairs.texts:
        shapes.parse(text)
    assert pairs.images([0]).shape == (1, 1, 3, 64, 64)


def test_walks_through_epochs_without_replacement() -> None:
    walk = [i for iteration in range(14) for i in keyed_batch(10, 5, iteration, seed=0)]
    assert all(sorted(walk[e : e + 10]) == list(range(10)) for e in range(0, 70, 10))
    assert walk[:10] != walk[10:20]
    straddling = [i for iteration in range(10) for i in keyed_batch(7, 4, iteration, seed=0)]
    assert all(sorted(straddling[e : e + 7]) == list(range(7)) for e in range(0, 35, 7))
    assert keyed_batch(7, 4, 3, seed=0) == straddling[12:16]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "metadata.jsonl:1: not JSON"),
        ('{"file_name": "0.png"}', 'expected an object with the texts "file_name" and "text"'),
        ('{"file_name": "none.png", "text": "x"}', "'none.png' is not in"),
        ("", "holds no pair"),
    ],
)
def test_bad_metadata_gives_one_sentence(tmp_path, line: str, words: str) -> None:
    (tmp_path / "metadata.jsonl").write_text(line + "\n")
    with pytest.raises(FlowAlignError) as caught:
        load_pairs(tmp_path, height=8, width=8)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_metadata_too_few_and_broken_picture(tmp_path) -> None:
    with pytest.raises(FlowAlignError, match=r"no metadata\.jsonl"):
        load_pairs(tmp_path, height=8, width=8)
    with pytest.raises(FlowAlignError, match="holds 3 pairs, fewer than count 4"):
        load_pairs(folder(tmp_path), height=8, width=8, count=4)
    (tmp_path / "0.png").write_bytes(b"not a picture")
    with pytest.raises(FlowAlignError, match=r"0\.png.*cannot be read"):
        load_pairs(tmp_path, height=8, width=8).images([0])


def test_preferences_keep_better_and_worse_together(tmp_path) -> None:
    folder(tmp_path)
    rows = [
        {"prompt": "one", "better": "0.png", "worse": "1.png", "votes": 0.7},
        {"text": "two", "better": "2.png", "worse": "0.png"},
        {"prompt": "three", "better": "1.png", "worse": "2.png"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    better, worse = load_preferences(tmp_path, height=32, width=32)
    assert better.texts == worse.texts == ("one", "two", "three")
    assert [f.name for f in better.files] == ["0.png", "2.png", "1.png"]
    assert [f.name for f in worse.files] == ["1.png", "0.png", "2.png"]
    assert better.images([0, 2]).shape == (2, 1, 3, 32, 32)
    some = load_preferences(tmp_path, height=32, width=32, count=2, seed=3)
    assert len(some[0]) == 2
    for text, one, other in zip(some[0].texts, some[0].files, some[1].files, strict=True):
        row = next(r for r in rows if text in r.values())
        assert (one.name, other.name) == (row["better"], row["worse"])


def test_the_preferences_that_the_shapes_world_writes(tmp_path) -> None:
    shapes_render.write_preferences(tmp_path, 6, seed=0)
    better, worse = load_preferences(tmp_path, height=64, width=64)
    assert not any(shapes.is_held_out(shapes.parse(text)) for text in better.texts)
    assert verify(better.images(range(6))[:, 0], better.texts).strict.tolist() == [1] * 6
    assert verify(worse.images(range(6))[:, 0], better.texts).strict.tolist() == [0] * 6
    again = tmp_path / "again"
    shapes_render.write_preferences(again, 4, seed=0)  # a longer run begins with the shorter one
    assert torch.equal(load_preferences(again, height=64, width=64)[1].images(range(4)), worse.images(range(4)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", 'expected an object with the texts "prompt", "better" and "worse"'),
        ('{"prompt": "x", "better": "0.png"}', 'expected an object with the texts "prompt", "better" and "worse"'),
        ('{"prompt": 3, "better": "0.png", "worse": "1.png"}', "expected an object with the texts"),
        ('{"file_name": "0.png", "text": "x"}', "expected an object with the texts"),
        ('{"prompt": "x", "better": "0.png", "worse": "none.png"}', "'none.png' is not in"),
        ('{"prompt": "x", "better": "0.png", "worse": "0.png"}', "'0.png' is both better and worse"),
        ("{", "metadata.jsonl:1: not JSON"),
        ("", "holds no pair"),
    ],
)
def test_bad_preferences_give_one_sentence(tmp_path, line: str, words: str) -> None:
    folder(tmp_path)
    (tmp_path / "metadata.jsonl").write_text(line + "\n")
    with pytest.raises(FlowAlignError) as caught:
        load_preferences(tmp_path, height=8, width=8)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(FlowAlignError, match=r'no metadata\.jsonl.*"better"'):
        load_preferences(tmp_path / "none", height=8, width=8)
