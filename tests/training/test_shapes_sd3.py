"""The loop on the pipeline that ships with flowalign, by way of a shipped recipe."""

from __future__ import annotations

import pytest
import torch

from flowalign.config import build
from flowalign.config.load import load_recipe
from flowalign.models import ASSETS
from flowalign.training import checkpoint

pytestmark = pytest.mark.skipif(
    not (ASSETS / "shapes-sd3" / "model_index.json").is_file(), reason="shapes-sd3 is not built yet"
)

SMALL = (
    "training.iterations=2",
    "prompts.per_iteration=2",
    "prompts.group_size=4",
    "training.rollout_batch_size=4",
    "training.micro_batch_size=4",
    "training.checkpoint_every=1",
    "training.preview_every=2",
    "training.preview_prompts=2",
)


def test_two_iterations_and_a_resume(workers, tmp_path) -> None:
    def recipe(name):
        return load_recipe("shapes/flow_grpo_fast", [*SMALL, f"training.output={tmp_path / name}"])

    result = build.train(recipe("a"), workers=workers)
    first, second = result.history
    assert first["invalid_share"] == 0 and 0 <= first["reward_mean"] <= 1 and first["grad_norm"] > 0
    assert (tmp_path / "a" / "previews" / "000002.png").is_file()
    whole = checkpoint.load(result.checkpoint)
    assert whole.steps == 4 - int(first["skipped_updates"] + second["skipped_updates"])
    assert any(float(v.abs().max()) > 0 for k, v in whole.trainable.items() if ".lora_B." in k)

    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    (result.checkpoint.parent / "000001").rename(tmp_path / "b" / "checkpoints" / "000001")
    resumed = checkpoint.load(build.train(recipe("b"), resume=True, workers=workers).checkpoint)
    assert all(torch.equal(resumed.trainable[k], v) for k, v in whole.trainable.items())
