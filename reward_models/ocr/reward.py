"""Edit distance between the text that a prompt quotes and the text that is read off the picture; see card.md."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from flowalign.rewards import weights
from flowalign.rewards.base import RewardSpec, Scored, WeightFile, check_media
from flowalign.types import FlowAlignError, Metadata
from reward_models.ocr.reading import Line, in_reading_order, plain, similarity, wanted

VERSION = "3.10.0"
DETECTOR = WeightFile(
    "PyPI rapidocr",
    "PP-OCRv6_det_small.onnx",
    VERSION,
    "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f",
)
RECOGNISER = WeightFile(
    "PyPI rapidocr",
    "PP-OCRv6_rec_small.onnx",
    VERSION,
    "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
)
LONGEST = 8
"""Sides of a picture beyond this ratio leave the detector less than one of its cells."""


class OCR:
    """Score in [0, 1]: how much of the quoted text can be read. Pictures are read one by one, on the CPU.

    Args:
        side: longest side of what the detector sees, in pixels; smaller pictures are enlarged to it.
        threads: that read one picture; at most as many as the machine has.
    """

    spec: ClassVar[RewardSpec] = RewardSpec(
        name="ocr",
        description="whether the text that the prompt quotes can be read in the picture",
        modality="image",
        higher_is_better=True,
        native_range=(0.0, 1.0),
        differentiable=False,
        needs=("prompt", "metadata"),
        preprocess="rounded to bytes; longest side enlarged to 256 by PIL's bicubic; text found at longest side 256",
        weights=(DETECTOR, RECOGNISER),
        licence="Apache-2.0",
        citation="rule of Flow-GRPO (Liu et al., arXiv 2505.05470), read by PP-OCRv6 through rapidocr",
        verified="real weights: 995 of 1000 renders of the signs world score 1",
        extra="ocr",
    )

    def __init__(self, side: int = 256, threads: int = 1, device: torch.device | str = "cpu") -> None:
        if side < 32 or threads < 1:
            raise FlowAlignError(f"reward 'ocr': side {side} and threads {threads}, expected at least 32 and 1")
        self.side = side
        self._engine = _engine(side, min(threads, os.cpu_count() or 1))
        self._lock = threading.Lock()  # the engine keeps what it is doing on itself

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None) -> Scored:
        """(B, 1, 3, H, W) in [0, 1] and B prompts to B scores; nan where no text is asked for.

        Raises:
            FlowAlignError: more than one frame.
        """
        check_media(media, prompts, self.spec.name)
        if media.shape[1] != 1:
            raise FlowAlignError(f"ocr: got {media.shape[1]} frames, expected one; score videos through a Judge")
        score, exact = (torch.full((len(prompts),), torch.nan) for _ in range(2))
        details: list[dict[str, str]] = []
        for i, prompt in enumerate(prompts):
            try:
                target = wanted(prompt, None if metadata is None else metadata[i])
                read = self._read(media[i, 0])
            except ValueError as error:
                details.append({"reason": str(error)})
                continue
            score[i] = similarity(plain(read), plain(target))
            exact[i] = float(plain(read) == plain(target))
            details.append({"target": target, "read": read})
        return Scored(score, {"exact": exact}, tuple(details))

    def _read(self, picture: Tensor) -> str:
        """The text in (3, H, W); "" if there is none.

        Raises:
            ValueError: the picture cannot be read.
        """
        pixels = (picture.float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        image = Image.fromarray(pixels)
        if max(image.size) > LONGEST * min(image.size):
            raise ValueError(f"picture of {image.height}x{image.width} pixels is too narrow to be read")
        if max(image.size) < self.side:
            scale = self.side / max(image.size)
            width, height = (round(scale * length) for length in image.size)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        try:
            with self._lock:
                found = self._engine(image, use_det=True, use_cls=False, use_rec=True)
        except Exception as error:  # rapidocr, onnxruntime and OpenCV have exceptions of their own
            raise ValueError(f"the engine failed: {(str(error).splitlines() or [type(error).__name__])[-1]}") from error
        if found.txts is None:
            return ""
        lines = [
            Line(text, float(box[:, 0].min()), float(box[:, 1].min()), float(box[:, 1].max()))
            for text, box in zip(found.txts, found.boxes, strict=True)
        ]
        return " ".join(line.text for line in in_reading_order(lines))


def _engine(side: int, threads: int) -> Any:
    """A reader with both models loaded.

    Raises:
        FlowAlignError: rapidocr or onnxruntime is not installed, or brings other models.
    """
    try:
        import onnxruntime  # noqa: F401  # rapidocr itself asks for it late, in a long message
        import rapidocr
    except ImportError as error:
        raise FlowAlignError(f"reward 'ocr': {error}; pip install 'flowalign[ocr]'") from error
    folder = Path(rapidocr.__file__).parent / "models"
    for file in (DETECTOR, RECOGNISER):
        model = folder / file.file
        if not model.is_file() or weights.checksum(model) != file.sha256:
            raise FlowAlignError(
                f"reward 'ocr': the installed rapidocr does not bring {file.file} of version {VERSION}; "
                f"pip install rapidocr=={VERSION}"
            )
    engine = rapidocr.RapidOCR(
        params={
            "Global.log_level": "critical",  # it warns of each picture without text
            "Global.use_cls": False,
            "Det.limit_type": "max",
            "Det.limit_side_len": side,
            "Det.model_path": str(folder / DETECTOR.file),  # paths given: nothing is ever fetched
            "Rec.model_path": str(folder / RECOGNISER.file),
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )
    # Models are loaded at first use: a broken one must fail here, not make every picture invalid.
    empty = Image.new("RGB", (96, 48))
    engine(empty, use_det=True, use_cls=False, use_rec=False)
    engine(empty, use_det=False, use_cls=False, use_rec=True)
    return engine
