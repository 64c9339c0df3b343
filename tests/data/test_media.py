"""Pictures and videos from files: what Pillow and PyAV leave to the caller is done, and every fault has a sentence."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.data import media


def colours(path: Path, **save) -> np.ndarray:
    """A 3x2 picture of six pure colours, saved as ``path``; its values in 0..255."""
    pixels = np.array(
        [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[255, 255, 0], [0, 255, 255], [255, 0, 255]]], np.uint8
    )
    Image.fromarray(pixels).save(path, **save)
    return pixels


def values(path: Path, **changes) -> np.ndarray:
    """(H, W, 3) in 0..255 of the only frame."""
    found = media.read(path, **changes)
    assert found.dtype == torch.float32 and found.ndim == 4 and found.shape[:2] == (1, 3)
    assert found.min() >= 0 and found.max() <= 1
    return found[0].permute(1, 2, 0).numpy() * 255


@pytest.mark.parametrize("ending", [".png", ".bmp", ".webp", ".gif"])
def test_a_lossless_picture_keeps_its_values(tmp_path, ending) -> None:
    path = tmp_path / f"a{ending}"
    expected = colours(path, **({"lossless": True} if ending == ".webp" else {}))
    np.testing.assert_allclose(values(path), expected, atol=1e-4)


def test_grey_and_palette_become_rgb(tmp_path) -> None:
    grey = np.array([[0, 100, 255]], np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    np.testing.assert_allclose(values(tmp_path / "grey.png"), np.repeat(grey[..., None], 3, 2), atol=1e-4)
    expected = colours(tmp_path / "rgb.png")
    Image.open(tmp_path / "rgb.png").convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "palette.png")
    np.testing.assert_allclose(values(tmp_path / "palette.png"), expected, atol=1e-4)


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path) -> None:
    grey = np.array([[0, 255, 257, 32896, 65535]], np.uint16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    # clipped, all but the first would be white
    np.testing.assert_allclose(values(tmp_path / "grey.png")[0, :, 1], grey[0] / 257.0, atol=1e-4)


def test_the_clear_value_of_sixteen_bits_is_white(tmp_path) -> None:
    Image.fromarray(np.array([[1000, 257]], np.uint16)).save(tmp_path / "a.png", transparency=1000)
    np.testing.assert_allclose(values(tmp_path / "a.png")[0, :, 0], [255, 1], atol=1e-4)


def test_alpha_is_laid_on_white(tmp_path) -> None:
    pixels = np.array([[[0, 0, 0, 0], [0, 0, 0, 255], [200, 0, 0, 51]]], np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    # 51 / 255 = 0.2: 0.2 * 200 + 0.8 * 255 = 244 and 0.8 * 255 = 204
    np.testing.assert_allclose(values(tmp_path / "a.png")[0], [[255] * 3, [0] * 3, [244, 204, 204]], atol=1)


def test_cmyk(tmp_path) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=95)  # no cyan: red
    np.testing.assert_allclose(values(tmp_path / "a.jpg")[4, 4], [255, 0, 0], atol=4)


def test_orientation_of_cameras_is_applied(tmp_path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    expected = colours(tmp_path / "a.png", exif=exif)
    np.testing.assert_allclose(values(tmp_path / "a.png"), np.rot90(expected, -1), atol=1e-4)


def test_a_long_strip_keeps_its_size(tmp_path) -> None:
    Image.new("RGB", (4000, 10), (10, 20, 30)).save(tmp_path / "a.png")
    found = media.read(tmp_path / "a.png")
    assert found.shape == (1, 3, 10, 4000)


def steps(count: int, size: int = 16) -> list[Image.Image]:
    return [Image.new("RGB", (size, size), (20 * i, 255 - 20 * i, 0)) for i in range(count)]


@pytest.mark.parametrize("ending", [".gif", ".webp", ".png"])
def test_an_animation_is_a_video(tmp_path, ending) -> None:
    first, *rest = steps(5)
    lossless = {"lossless": True} if ending == ".webp" else {}
    first.save(tmp_path / f"a{ending}", save_all=True, append_images=rest, duration=100, **lossless)
    found = media.read(tmp_path / f"a{ending}")
    assert found.shape == (5, 3, 16, 16)
    np.testing.assert_allclose(found[:, 0, 8, 8].numpy() * 255, [0, 20, 40, 60, 80], atol=1e-3)


def test_fps_takes_the_frame_that_is_shown(tmp_path) -> None:
    first, *rest = steps(4)
    # shown from 0, 0.5, 0.6 and 2 s on: at 0, 1 and 2 s it is the first, the third and the last
    first.save(tmp_path / "a.gif", save_all=True, append_images=rest, duration=[500, 100, 1400, 100])
    found = media.read(tmp_path / "a.gif", fps=1)
    np.testing.assert_allclose(found[:, 0, 8, 8].numpy() * 255, [0, 40, 60], atol=1e-3)
    assert media.read(tmp_path / "a.gif", fps=100).shape[0] == 4, "no frame twice"


def video(path: Path, frames: list[np.ndarray], rate: int = 10, codec: str = "libx264") -> None:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def quarters(bright: int) -> np.ndarray:
    """Grey, with a white quarter at the top left."""
    pixels = np.full((32, 48, 3), bright, np.uint8)
    pixels[:16, :24] = 255
    return pixels


@pytest.mark.parametrize(("ending", "codec"), [(".mp4", "libx264"), (".mov", "libx264"), (".webm", "libvpx")])
def test_videos(tmp_path, ending, codec) -> None:
    video(tmp_path / f"a{ending}", [quarters(20 * i) for i in range(10)], codec=codec)
    found = media.read(tmp_path / f"a{ending}")
    assert found.shape == (10, 3, 32, 48)
    np.testing.assert_allclose(found[:, 1, 26, 40].numpy() * 255, [20 * i for i in range(10)], atol=8)
    np.testing.assert_allclose(found[:, 1, 4, 6].numpy() * 255, 255, atol=8)
    # at 10 frames a second, every fifth is shown at a multiple of half a second
    np.testing.assert_array_equal(media.read(tmp_path / f"a{ending}", fps=2).numpy(), found[::5].numpy())
    np.testing.assert_array_equal(media.middle_frame(tmp_path / f"a{ending}").numpy(), found[5].numpy())


def test_rotation_of_a_video_is_applied(tmp_path) -> None:
    path = tmp_path / "a.mp4"
    video(path, [quarters(40)] * 3)
    upright = media.read(path)
    blob = bytearray(path.read_bytes())
    matrix = blob.index(b"tkhd") + 4 + 40  # the track header's matrix, 3x3 of 16.16 numbers (ISO 14496-12)
    clockwise = [0, 0x10000, 0, 0xFFFF0000, 0, 0, 0, 0, 0x40000000]
    blob[matrix : matrix + 36] = b"".join(value.to_bytes(4, "big") for value in clockwise)
    path.write_bytes(blob)
    np.testing.assert_array_equal(media.read(path).numpy(), np.rot90(upright.numpy(), -1, (2, 3)))


def jpeg(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 80).convert("RGB").save(file, "JPEG")
    return file.getvalue()


def test_each_fault_has_a_sentence_without_the_name_of_the_file(tmp_path) -> None:
    pytest.importorskip("av")
    whole = jpeg((64, 64))
    video(tmp_path / "whole.mp4", [quarters(0)] * 5)
    files = {
        "gone.png": (None, "no such file"),
        "empty.png": (b"", "the file is empty"),
        "noise.png": (b"\x89PNG nothing", "cannot be read as a picture"),
        "text.jpg": (b"<html>", "its contents are of no known format"),
        "torn.jpg": (whole[: len(whole) // 2], "truncated"),
        "noise.mp4": (b"nothing" * 100, "cannot be read as a video"),
        "torn.mp4": ((tmp_path / "whole.mp4").read_bytes()[:600], "cannot be read as a video"),
        "photo.tiff": (b"II*\0", "files that end in .tiff are not read; convert it"),
    }
    for name, (content, sentence) in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(media.Unreadable, match=sentence) as caught:
            media.read(tmp_path / name)
        assert name not in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_too_large_is_refused_before_it_is_decoded(tmp_path, monkeypatch) -> None:
    Image.new("L", (3000, 1000)).save(tmp_path / "a.png")
    media.read(tmp_path / "a.png", max_megapixels=3)
    monkeypatch.setattr(Image.Image, "convert", lambda *args: pytest.fail("decoded"))
    with pytest.raises(media.Unreadable, match=r"3000x1000 are 3 megapixels, more than 2\.9; .* --max-megapixels"):
        media.read(tmp_path / "a.png", max_megapixels=2.9)


def test_the_frames_of_a_video_count_together(tmp_path) -> None:
    video(tmp_path / "a.mp4", [quarters(0)] * 10)  # 1536 pixels each
    assert media.read(tmp_path / "a.mp4", max_megapixels=0.01536).shape[0] == 10
    with pytest.raises(media.Unreadable, match=r"10 frames of 48x32 .* or lower --fps"):
        media.read(tmp_path / "a.mp4", max_megapixels=0.0153)
    assert media.read(tmp_path / "a.mp4", fps=5, max_megapixels=0.0153).shape[0] == 5
