"""The processes of a run, one per device. The only module that imports accelerate."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import yaml
from torch import Tensor, nn

from flowalign.types import FlowAlignError

STARTED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""torchrun and MPI tell each process that there are others."""


def launched_count(command: Sequence[str]) -> int | None:
    """Processes that an ``accelerate launch`` command line, or its configuration file, asks for.

    Returns:
        The number, or None where it does not say.
    """
    words = [part for word in command for part in word.split("=", 1)]
    options = {name.lstrip("-").replace("-", "_"): value for name, value in pairwise(words) if name.startswith("--")}
    count = options.get("num_processes")
    if count is None and "config_file" in options:
        count = yaml.safe_load(Path(options["config_file"]).read_text(encoding="utf-8")).get("num_processes")
    return None if count is None else int(count)


def start_missing_processes() -> None:
    """Replaces this process by all that ``accelerate launch --cpu --num_processes N`` was asked for.

    accelerate (1.15) sets up the rendezvous for N processes on a CPU, but starts only one, without a word: a run would
    silently be a run of one process. Everywhere else this does nothing.

    Raises:
        FlowAlignError: more than one was asked for, but how many cannot be found out.
    """
    asked = "MASTER_PORT" in os.environ and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    if not asked or any(name in os.environ for name in STARTED):
        return
    import psutil  # type: ignore[import-untyped]

    count = launched_count(psutil.Process(os.getppid()).cmdline())
    if count is None:
        raise FlowAlignError(
            "accelerate launch --cpu: started one process where more were asked for; give --num_processes on the "
            "command line, or use torchrun --nproc_per_node"
        )
    if count > 1:
        script = ["--module", *sys.orig_argv[2:]] if sys.orig_argv[1] == "-m" else sys.orig_argv[1:]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
        os.execv(sys.executable, [sys.executable, *launcher, *script])


class Workers:
    """This process among all of a run: alone, under ``accelerate launch --cpu`` (gloo), or one per GPU (nccl).

    Args:
        device: "cpu" to leave GPUs alone; None = what accelerate chooses, a GPU where there is one.
    """

    def __init__(self, device: Literal["cpu"] | None = None) -> None:
        start_missing_processes()
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        # Precision is the model's affair: rollout and learning must not differ by a launcher's setting.
        # Buffers are constants of the architecture, so there is nothing to broadcast at every forward pass.
        handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)]
        try:
            self._accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no", kwargs_handlers=handlers)
        except ValueError as error:  # accelerate's state is one per process and cannot change its device
            raise FlowAlignError(f"accelerate: {error}; start a new Python process to change the device") from None
        if str(self._accelerator.distributed_type).rsplit(".")[-1] not in ("NO", "MULTI_GPU", "MULTI_CPU"):
            raise FlowAlignError(
                f"accelerate: {self._accelerator.distributed_type} is not supported, expected plain data parallelism; "
                "launch with --multi_gpu or --cpu"
            )

    @property
    def rank(self) -> int:
        return int(self._accelerator.process_index)

    @property
    def world_size(self) -> int:
        return int(self._accelerator.num_processes)

    @property
    def device(self) -> torch.device:
        device = self._accelerator.device
        return device if isinstance(device, torch.device) else torch.device(device)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def prepare(self, module: nn.Module) -> nn.Module:
        """``module`` whose backward pass averages gradients over all processes; itself where there is but one."""
        with warnings.catch_warnings():  # torch 2.14 renames broadcast_buffers; accelerate passes the old name
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            prepared: nn.Module = self._accelerator.prepare_model(module)
        return prepared

    def unwrap(self, module: nn.Module) -> nn.Module:
        unwrapped: nn.Module = self._accelerator.unwrap_model(module)
        return unwrapped

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def no_sync(self, module: nn.Module, active: bool = True) -> AbstractContextManager[None]:
        """Gradients stay local within; the next backward pass outside averages them all."""
        if not active:
            return nullcontext()
        context: AbstractContextManager[None] = self._accelerator.no_sync(module)
        return context

    def gather(self, value: Tensor) -> Tensor:
        """(B, ...) of each process, equal shapes, to (W B, ...) in the order of ranks, on the device of ``value``."""
        if self.world_size == 1:
            return value
        gathered: Tensor = self._accelerator.gather(value.to(self.device).contiguous())
        return gathered.to(value.device)

    def reduce(self, value: Tensor, how: Literal["sum", "max"] = "sum") -> Tensor:
        """Elementwise over processes, in the order of ranks, so that every process gets the very same number."""
        stacked = self.gather(value[None])
        return stacked.sum(0) if how == "sum" else stacked.amax(0)

    def union(self, texts: Iterable[str]) -> list[str]:
        """Sorted, all texts of all processes; as bytes, so that nothing is unpickled."""
        own = sorted(set(texts))
        if self.world_size == 1:
            return own
        encoded = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([encoded.numel()]))
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: encoded.numel()] = encoded
        rows = self.gather(padded[None])
        parts = [bytes(row[:length].tolist()) for row, length in zip(rows, lengths.tolist(), strict=True)]
        return sorted({text for part in parts for text in json.loads(part)})

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scales gradients in place to a total norm of at most ``max_norm``; returns the norm before."""
        norm: Tensor = self._accelerator.clip_grad_norm_(list(parameters), max_norm)
        return norm.detach().float()

    def barrier(self) -> None:
        self._accelerator.wait_for_everyone()
