"""Folders to score; one as users have them, with pictures and videos, three kinds of captions and seven odd files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from PIL import Image

from flowalign.commands import score_listing
from flowalign.data.worlds import shapes, shapes_render

ODD = {
    "odd/corrupt.png": "cannot be read",
    "odd/empty.jpg": "the file is empty",
    "odd/uncaptioned.png": "no caption",
    "odd/grey.png": "",
    "odd/alpha.png": "",
    "odd/deep.png": "",
    "odd/strip.png": "",
}
"""File -> why it is invalid; empty where it is scored by a judge that takes any size."""


def picture(path: Path, caption: str, seed: int = 0) -> None:
    """A render of the shapes world."""
    pixels = shapes_render.render(shapes.parse(caption), np.random.default_rng(seed))
    Image.fromarray(np.round(np.asarray(pixels) * 255).astype(np.uint8)).save(path)


def video(path: Path, caption: str, seed: int, frames: int = 5) -> None:
    """Renders of one caption, one after another."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.height = stream.width = shapes.SIZE
        # Colours at full resolution: edges of small shapes would bleed, and the verifier would be right to object.
        stream.pix_fmt, stream.options = "yuv444p", {"crf": "12"}
        for i in range(frames):
            pixels = shapes_render.render(shapes.parse(caption), np.random.default_rng([seed, i]))
            whole = np.round(np.asarray(pixels) * 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(whole, format="rgb24")))
        container.mux(stream.encode())


def animation(path: Path, caption: str, seed: int, frames: int = 5) -> None:
    """As `video`, by Pillow."""
    shown = [shapes_render.render(shapes.parse(caption), np.random.default_rng([seed, i])) for i in range(frames)]
    first, *rest = [Image.fromarray(np.round(np.asarray(p) * 255).astype(np.uint8)) for p in shown]
    first.save(path, save_all=True, append_images=rest, duration=125)


def build(folder: Path, pictures: int, videos: int) -> None:
    """``pictures`` pictures, of which the seven of ODD are a part, and ``videos`` videos, half of them GIF."""
    for name in ("images", "videos", "odd"):
        (folder / name).mkdir(parents=True)
    captions = shapes.prompts("train", pictures - len(ODD) + videos, seed=0)
    lines = []
    for i, caption in enumerate(captions[: pictures - len(ODD)]):
        name = f"images/{i:04d}.{'webp' if i % 5 == 1 else 'png'}"
        picture(folder / name, caption, seed=i)
        if i % 2:
            (folder / name).with_suffix(".txt").write_text(caption + "\n")
        else:
            lines.append({"file_name": name, "text": caption, "seed": i})
    for i, caption in enumerate(captions[pictures - len(ODD) :]):
        name = f"videos/{i:04d}.{'gif' if i % 2 else 'mp4'}"
        (animation if i % 2 else video)(folder / name, caption, i)
        lines.append({"file_name": name, "text": caption})
    lines += [{"file_name": name, "text": captions[0]} for name in ODD if name != "odd/uncaptioned.png"]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    picture(folder / "odd/uncaptioned.png", captions[0])
    render = np.asarray(shapes_render.render(shapes.parse(captions[0]), np.random.default_rng(0)))
    whole = (folder / "odd/uncaptioned.png").read_bytes()
    (folder / "odd/corrupt.png").write_bytes(whole[: len(whole) // 2])
    (folder / "odd/empty.jpg").write_bytes(b"")
    Image.fromarray(np.round(render.mean(2) * 255).astype(np.uint8)).save(folder / "odd/grey.png")
    clear = np.concatenate([render, (render.min(2, keepdims=True) < 0.7)], 2)
    Image.fromarray(np.round(clear * 255).astype(np.uint8)).save(folder / "odd/alpha.png")
    Image.fromarray(np.round(render.mean(2) * 65535).astype(np.uint16)).save(folder / "odd/deep.png")
    Image.fromarray(np.tile(np.arange(4000, dtype=np.uint8), (10, 1))).save(folder / "odd/strip.png")


def grey(folder: Path, values, size=(8, 8)) -> list[score_listing.Row]:
    """Rows of plain pictures, captioned by number."""
    folder.mkdir(exist_ok=True)
    lines = []
    for i, value in enumerate(values):
        Image.new("L", size, value).save(folder / f"{i:03d}.png")
        lines.append(json.dumps({"file_name": f"{i:03d}.png", "text": str(i), "number": i}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return score_listing.list_media(folder)


def table(path: Path) -> dict[str, dict[str, str]]:
    """{file: row} of a CSV."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["file_name"]: row for row in csv.DictReader(file)}
