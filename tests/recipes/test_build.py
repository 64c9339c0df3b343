"""From recipes to objects: what a run is made of, and what is refused before a model is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flowalign.algorithms.awm import AWM
from flowalign.algorithms.diffusion_nft import DiffusionNFT
from flowalign.algorithms.flow_dpo import FlowDPO
from flowalign.algorithms.flow_grpo import FlowGRPO
from flowalign.algorithms.ram import RAM
from flowalign.algorithms.sft import SFT
from flowalign.algorithms.soar import SOAR
from flowalign.config import build
from flowalign.config.load import load_recipe, shipped_recipes
from flowalign.core import schedule
from flowalign.rewards import registry
from flowalign.rewards.base import Scale
from flowalign.training.distributed import Workers
from flowalign.types import FlowAlignError
from tests.training.toy import ToyModel


@pytest.fixture(scope="module")
def workers() -> Workers:
    return Workers(device="cpu")


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_method_is_built_for_its_model(name: str) -> None:
    recipe = load_recipe(name)
    algorithm = build.build_algorithm(recipe.algorithm, cast(Any, SimpleNamespace(shift=3.0)))
    assert algorithm.updates == recipe.algorithm.updates
    if recipe.prompts is None:
        assert isinstance(algorithm, SFT | SOAR | FlowDPO) and algorithm.plan(0) is None
        return
    plan = algorithm.plan(0)
    assert plan is not None
    torch.testing.assert_close(plan.sigmas, schedule.diffusers_shift(recipe.algorithm.num_steps, 3.0))
    forward = {"diffusion_nft": DiffusionNFT, "awm": AWM, "ram": RAM}
    if recipe.algorithm.name in forward:
        assert isinstance(algorithm, forward[recipe.algorithm.name]) and plan.window is None
        assert plan.guidance == getattr(recipe.algorithm, "guidance", 1)
    elif recipe.algorithm.name == "flow_dpo":
        assert isinstance(algorithm, FlowDPO) and plan.whole_groups and plan.guidance == recipe.algorithm.guidance
    else:
        assert isinstance(algorithm, FlowGRPO)
        assert (plan.kernel, plan.level, plan.guidance) == (
            recipe.algorithm.kernel,
            recipe.algorithm.level,
            recipe.algorithm.guidance,
        )


@pytest.mark.parametrize(
    ("name", "judge", "overrides"),
    [
        ("sd3/flow_grpo_ocr", "ocr", []),
        ("sd3/flow_grpo_geneval", "geneval", ["rewards.0.params.detector=shapes"]),  # the default one needs the hub
    ],
)
def test_the_judges_of_the_published_recipes_are_there(name: str, judge: str, overrides: list[str]) -> None:
    (one,) = build.build_rewards(load_recipe(name, overrides), "cpu")
    assert one.reward.spec.name == judge


def test_rewards_in_the_order_of_the_recipe() -> None:
    (one,) = build.build_rewards(load_recipe("shapes/flow_grpo", ["rewards.0.weight=2"]), "cpu")
    assert (one.name, one.weight, one.reward.spec.name) == ("shapes-verifier", 2.0, "shapes-verifier")


def test_judges_see_as_many_samples_at_a_time_as_the_sampler() -> None:
    (one,) = build.build_rewards(load_recipe("shapes/flow_grpo", ["training.rollout_batch_size=3"]), "cpu")
    assert one.reward.batch_size == 3


def test_prompts_of_the_recipe() -> None:
    data = build.build_prompts(load_recipe("shapes/flow_grpo_guided", ["prompts.count=12"]))
    assert len({p.text for p in data.prompts}) == 12
    assert (data.per_iteration, data.group_size, data.negative) == (8, 8, "")


def test_renders_of_the_shapes_world_are_made_once(tmp_path: Path, workers: Workers) -> None:
    recipe = load_recipe("shapes/sft", [f"training.output={tmp_path}", "dataset.count=6", "algorithm.batch_size=4"])
    (tmp_path / "dataset" / ".shapes-6-0.partial").mkdir(parents=True)  # of an earlier run that was interrupted
    data = build.build_pairs(recipe, workers)
    assert len(data.pairs) == 6 and data.batch_size == 4
    images = data.pairs.images(range(6))
    assert images.shape == (6, 1, 3, 64, 64)
    listing = tmp_path / "dataset" / "shapes-6-0" / "metadata.jsonl"
    written = listing.stat().st_mtime_ns
    torch.testing.assert_close(build.build_pairs(recipe, workers).pairs.images(range(6)), images)
    assert listing.stat().st_mtime_ns == written
    assert [p.name for p in (tmp_path / "dataset").iterdir()] == ["shapes-6-0"]


def test_nothing_to_resume(tmp_path: Path, workers: Workers) -> None:
    recipe = load_recipe("shapes/flow_grpo", [f"training.output={tmp_path / 'none'}"])
    with pytest.raises(FlowAlignError, match="holds no checkpoint"):
        build.train(recipe, resume=True, workers=workers)


@pytest.mark.parametrize("name", [n for n in shipped_recipes() if n.startswith("shapes/")])
def test_a_recipe_becomes_a_run(name: str, tmp_path: Path, workers: Workers) -> None:
    changes = [
        "training.iterations=2",
        f"training.output={tmp_path}",
        "tuning={kind: full}",
        "training.checkpoint_every=1",
    ]
    if load_recipe(name).prompts is None:
        changes += ["dataset.count=4", "algorithm.batch_size=4"]
    else:
        changes += ["prompts.count=4", "prompts.per_iteration=2", "prompts.group_size=2"]
    recipe = load_recipe(name, changes)
    model = cast(Any, ToyModel())
    result = build.train(recipe, workers=workers, model=model)
    assert result.iteration == 2 and len(result.history) == 2
    kept = result.checkpoint / "recipe.yaml"
    assert load_recipe(kept) == recipe, "what a checkpoint keeps is the recipe that made it"
    with pytest.raises(FlowAlignError, match=r"training\.output|earlier run"):
        build.train(recipe, workers=workers, model=cast(Any, ToyModel()))
    longer = load_recipe(kept, ["training.iterations=3"])
    resumed = build.train(longer, resume=True, workers=workers, model=cast(Any, ToyModel()))
    assert resumed.iteration == 3 and len(resumed.history) == 1


def test_what_a_recipe_says_of_a_reward_reaches_its_judge() -> None:
    recipe = load_recipe(
        "shapes/flow_grpo",
        ["rewards.0.gate=0.5", "rewards.0.frames=min", "rewards.0.batch_size=3", "rewards.0.device=meta"],
    )
    (one,) = build.build_rewards(recipe, "cpu")
    assert (one.gate, one.reward.frames.text, one.reward.batch_size) == (0.5, "min", 3)


def test_a_published_scale_divides_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from reward_models.shapes_verifier.reward import ShapesVerifier

    scaled = dataclasses.replace(ShapesVerifier.spec, scales={"percent": Scale(offset=3.0, divisor=0.01)})
    monkeypatch.setattr(ShapesVerifier, "spec", scaled)
    recipe = load_recipe("shapes/flow_grpo", ["rewards.0.scale=percent", "rewards.0.weight=2"])
    (one,) = build.build_rewards(recipe, "cpu")
    assert one.weight == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rewards.0.scale=flow-grpo", "unknown scale 'flow-grpo'"),
        ("rewards.0.gate=.nan", "gate"),
        ("rewards.0.frames=last", "frames: 'last', expected first"),
        ("rewards.0.weight=0", "every weight is 0"),
        ("training.combine_rewards=mean", "combine_rewards"),
    ],
)
def test_what_no_judge_can_do_is_refused_with_the_recipe(override: str, reason: str) -> None:
    with pytest.raises(FlowAlignError, match=reason):
        load_recipe("shapes/flow_grpo", [override])


@pytest.mark.parametrize("world", ["shapes", "signs"])
def test_a_world_is_rendered_as_a_dataset(world: str, workers: Workers, tmp_path: Path) -> None:
    overrides = [f"dataset.path={world}", "dataset.count=4", "algorithm.batch_size=2", f"training.output={tmp_path}"]
    pairs = build.build_pairs(load_recipe("shapes/sft", overrides), workers).pairs
    assert len(pairs) == 4 and pairs.images([0]).shape == (1, 1, 3, 64, 64)
    assert all(file.parent.name == f"{world}-4-0" or file.parent.parent.name == f"{world}-4-0" for file in pairs.files)


def test_preferences_of_the_shapes_world_are_rendered_once(tmp_path: Path, workers: Workers) -> None:
    overrides = [f"training.output={tmp_path}", "dataset.count=4", "algorithm.batch_size=2"]
    recipe = load_recipe("shapes/flow_dpo_offline", overrides)
    data = build.build_pairs(recipe, workers)
    assert data.worse is not None and data.pairs.texts == data.worse.texts and len(data.pairs) == 4
    assert not torch.equal(data.pairs.images(range(4)), data.worse.images(range(4)))
    written = {f: f.stat().st_mtime_ns for f in (tmp_path / "dataset" / "shapes-preferences-4-0").iterdir()}
    again = build.build_pairs(recipe, workers)
    assert again.worse is not None and again.worse.files == data.worse.files
    assert {f: f.stat().st_mtime_ns for f in written} == written
    # The folder that it makes is read as anyone's own.
    own = [*overrides[1:], f"dataset.path={tmp_path / 'dataset' / 'shapes-preferences-4-0'}", "dataset.count=3"]
    assert len(build.build_pairs(load_recipe("shapes/flow_dpo_offline", own), workers).pairs) == 3


def test_a_world_without_preferences_is_refused(workers: Workers) -> None:
    with pytest.raises(FlowAlignError, match=r"no metadata\.jsonl in it.*better"):
        build.build_pairs(load_recipe("shapes/flow_dpo_offline", ["dataset.path=signs"]), workers)


def test_a_reward_on_a_server_is_built_from_what_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Remote:
        spec = dataclasses.replace(registry.load("pickscore").spec, differentiable=False)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            asked.append((args, kwargs))

    monkeypatch.setattr(build, "RemoteReward", Remote)
    urls = "rewards.0={name: theirs, scale: flow-grpo, remote: {urls: ['http://a:1', 'http://b:2'], token_env: KEY}}"
    (one,) = build.build_rewards(load_recipe("shapes/flow_grpo", [urls]), "cpu")
    assert asked == [((("http://a:1", "http://b:2"), "theirs", "KEY", 60.0), {"exact": False})]
    assert one.weight == pytest.approx(1 / 26) and one.reward.batch_size == 128


def test_what_belongs_to_the_server_is_refused_here() -> None:
    with pytest.raises(FlowAlignError, match="params, device and offload belong to the server"):
        load_recipe("shapes/flow_grpo", ["rewards.0={name: theirs, offload: true, remote: {urls: ['http://a:1']}}"])
