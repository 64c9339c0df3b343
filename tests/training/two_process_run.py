"""Trains for three iterations under ``accelerate launch``; test_two_processes compares the results."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flowalign.algorithms.flow_dpo import FlowDPO, FlowDPOSettings
from flowalign.algorithms.flow_grpo import FlowGRPO, FlowGRPOSettings
from flowalign.data.prompts import Prompt, PromptData
from flowalign.models import load_model
from flowalign.models.lora import add_lora
from flowalign.rewards.combine import WeightedReward
from flowalign.training.distributed import Workers
from flowalign.training.trainer import train
from tests.models import tiny_sd3
from tests.training.toy import PROMPTS, ColorReward, ToyModel, optimizer, training


def main(output: Path) -> None:
    torch.set_num_threads(1)
    workers = Workers("cpu")
    (output / f"rank-{workers.rank}").touch()
    if workers.is_main:  # under torch.distributed, transformers saves on the first process only
        tiny_sd3.build(output / "pipeline", t5=False)
    workers.barrier()
    sd3 = load_model(output / "pipeline")
    add_lora(sd3, rank=4, alpha=8, seed=0)
    for name, model, size in (("toy", ToyModel(), (32, 32)), ("sd3", sd3, (16, 16))):
        settings = FlowGRPOSettings(
            name="flow_grpo", num_steps=4, window="random", window_size=2, window_range=(0, 3), kl="v", kl_weight=0.01
        )
        # One prompt is never scored and one group has no spread: ranks get different numbers of items.
        train(
            model,
            FlowGRPO(settings, shift=model.shift),
            PromptData([Prompt(text) for text in PROMPTS[:6]], per_iteration=4, group_size=4),
            [WeightedReward("color", ColorReward(invalid=(PROMPTS[1],)))],
            optimizer=optimizer(lr=1e-3),
            training=training(output / name, iterations=3, ema_decay=0.9, rollout_batch_size=4, micro_batch_size=3),
            workers=workers,
            lora=name == "sd3",
            size=size,
        )
    # Best against worst of each group, whose members must not be torn apart.
    model = ToyModel()
    train(
        model,
        FlowDPO(FlowDPOSettings(name="flow_dpo", num_steps=4, updates=2), shift=model.shift),
        PromptData([Prompt(text) for text in PROMPTS[:6]], per_iteration=4, group_size=3),
        [WeightedReward("color", ColorReward(invalid=(PROMPTS[1],)))],
        optimizer=optimizer(lr=1e-3),
        training=training(output / "dpo", iterations=3, ema_decay=0.9, rollout_batch_size=4, micro_batch_size=3),
        workers=workers,
        lora=False,
        size=(32, 32),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
