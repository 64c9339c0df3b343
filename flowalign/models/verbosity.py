"""Keeps diffusers, transformers and peft from talking about what flowalign checks by itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

LOGGERS: tuple[Any, ...] = (diffusers_logging, transformers_logging)


@contextmanager
def quiet() -> Iterator[None]:
    """Within, only errors are shown: no bars of files being read, no "No LoRA keys associated to CLIPTextModel"."""
    before = [(logger, logger.get_verbosity(), logger.is_progress_bar_enabled()) for logger in LOGGERS]
    for logger in LOGGERS:
        logger.set_verbosity_error()
        logger.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            # Its new name, dtype, is not known to the oldest diffusers that flowalign runs with.
            warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated")
            yield
    finally:
        for logger, verbosity, bars in before:
            logger.set_verbosity(verbosity)
            if bars:
                logger.enable_progress_bar()
