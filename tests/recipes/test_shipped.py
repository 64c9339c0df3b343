"""Every shipped recipe loads, says where its numbers come from, and is refused once any of its leaves is spoilt."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowalign.cli import main
from flowalign.config import document
from flowalign.config.load import RecipeError, dump_recipe, load_recipe, shipped_recipes

RECIPES = shipped_recipes()
SD3 = [name for name in RECIPES if name.startswith("sd3/")]
FREE_SECTIONS = {"params"}
"""Sections without a schema of their own; what stands in them is checked against the judge's constructor."""

Key = tuple[str | int, ...]


@functools.cache
def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = document.read(RECIPES[name]).data
    return data


def plain(name: str) -> dict[str, Any]:
    return copy.deepcopy(_read(name))


def leaves(data: Any, path: Key = ()) -> Iterator[Key]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from leaves(value, (*path, key))
    elif isinstance(data, list) and data:
        for position, value in enumerate(data):
            yield from leaves(value, (*path, position))
    else:
        yield path


def sections(data: Any, path: Key = ()) -> Iterator[Key]:
    """Paths of all keys whose value is a section or a list."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if isinstance(value, dict | list):
            yield (*path, key)
            yield from sections(value, (*path, key))


def at(data: Any, path: Key) -> Any:
    for part in path:
        data = data[part]
    return data


def misspelt(data: dict[str, Any], path: Key) -> tuple[dict[str, Any], str]:
    """A copy in which the last word of ``path`` has two letters swapped, and its new dotted name."""
    word = next(part for part in reversed(path) if isinstance(part, str))
    stem = path[: len(path) - 1 - path[::-1].index(word)]
    wrong = word[:-2] + word[-1] + word[-2] if word[-1] != word[-2] else word + "x"
    spoilt = copy.deepcopy(data)
    section = at(spoilt, stem)
    at(spoilt, stem[:-1])[stem[-1]] = {wrong if k == word else k: v for k, v in section.items()} if stem else None
    if not stem:
        spoilt = {wrong if k == word else k: v for k, v in data.items()}
    return spoilt, ".".join(map(str, (*stem, wrong)))


def mistyped(value: Any) -> list[Any]:
    """Values of every other type than that of ``value``; a text is no number and a number no text."""
    wrong: list[Any] = [{"a": 1}]
    if not isinstance(value, list):
        wrong.append([1])
    if isinstance(value, str):
        wrong += [7, 1.5, True]
    elif isinstance(value, bool):
        wrong += ["true", 1]
    elif isinstance(value, int | float):
        wrong += ["abc", str(value), True]
    return wrong


def write(folder: Path, data: Any) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(document.dump(data))
    return file


def refusal(file: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    return str(caught.value)


CASES = [(name, path) for name in RECIPES for path in leaves(plain(name))]
IDS = [f"{name}:{'.'.join(map(str, path))}" for name, path in CASES]


def test_there_are_recipes() -> None:
    assert {"shapes/demo", "shapes/flow_grpo", "shapes/flow_grpo_fast", "shapes/flow_grpo_guided", "shapes/sft"} <= set(
        RECIPES
    )
    forward = {f"{method}{suffix}" for method in ("diffusion_nft", "awm", "ram") for suffix in ("", "_geneval")}
    assert {f"{'sd3' if name.endswith('_geneval') else 'shapes'}/{name}" for name in forward} <= set(RECIPES)
    assert set(PUBLISHED) <= set(SD3)
    assert len(CASES) > 200


@pytest.mark.parametrize("name", RECIPES)
def test_loads_and_survives_a_dump(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES[name])
    assert load_recipe(name) == recipe, "by its short name"
    file = tmp_path / "dumped.yaml"
    file.write_text(dump_recipe(recipe))
    assert load_recipe(file) == recipe
    assert recipe.notes is not None
    assert recipe.notes.source.startswith("https://")


@pytest.mark.parametrize("name", SD3)
def test_an_unverified_recipe_says_so(name: str) -> None:
    text = RECIPES[name].read_text()
    assert text.splitlines()[0] == "# not yet verified on real weights"
    notes = load_recipe(name).notes
    assert notes is not None and notes.verified == "not yet verified on real weights"
    numbers = [line for line in text.splitlines() if re.search(r": \[?[\d.]", line) and "weight: 1.0" not in line]
    unsourced = [line for line in numbers if "# published" not in line and "# ours" not in line]
    assert not unsourced, "every hyper-parameter says where it comes from"


# From the table of published configurations: kernel, level, clip range, KL weight, guidance.
PUBLISHED = {
    "sd3/flow_grpo_geneval": ("flow", 0.7, 1e-4, 0.04, 4.5),
    "sd3/flow_grpo_ocr": ("flow", 0.7, 1e-4, 0.04, 4.5),
    "sd3/flow_grpo_pickscore": ("flow", 0.7, 1e-4, 0.01, 4.5),
    "sd3/flow_grpo_clipscore": ("flow", 0.7, 1e-4, 0.02, 4.5),
    "sd3/flow_grpo_fast_geneval": ("cps", 0.8, 1e-5, 0.0, 1.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_flow_grpo(name: str) -> None:
    recipe = load_recipe(name)
    a, p, o, t = recipe.algorithm, recipe.prompts, recipe.optimizer, recipe.training
    assert a.name == "flow_grpo" and p is not None
    assert (a.kernel, a.level, a.clip_range, a.kl_weight, a.guidance) == PUBLISHED[name]
    assert (a.num_steps, a.updates, a.advantage_std, a.schedule) == (10, 2, "global", "diffusers")
    assert (p.per_iteration, p.group_size, t.rollout_batch_size) == (48, 24, 9)
    assert (o.lr, o.betas, o.eps, o.weight_decay, o.max_grad_norm) == (3e-4, (0.9, 0.999), 1e-8, 1e-4, 1.0)
    assert (recipe.tuning.rank, recipe.tuning.alpha, t.ema_decay, t.ema_every) == (32, 64.0, 0.9, 8)
    assert a.share_noise == (name == "sd3/flow_grpo_clipscore")
    if name == "sd3/flow_grpo_fast_geneval":
        assert (a.window, a.window_size, a.window_range, a.log_prob) == ("random", 3, (0, 5), "unscaled")


def test_published_numbers_of_soar() -> None:
    recipe = load_recipe("sd3/soar")
    a, o, t = recipe.algorithm, recipe.optimizer, recipe.training
    assert a.name == "soar" and recipe.tuning.kind == "full"
    assert (a.guidance, a.negative, a.rollout_steps, a.points, a.aux_weight, a.paths) == (4.5, "", 40, 6, 1.0, 1)
    assert (a.batch_size, a.sigma_mean, a.sigma_std, a.shift, a.updates) == (32, 0.0, 1.0, 3.0, 1)
    assert (o.lr, o.betas, o.weight_decay, o.max_grad_norm, o.warmup) == (2e-5, (0.9, 0.999), 1e-2, 1.0, 0)
    assert (recipe.model.height, recipe.model.max_sequence_length, t.iterations) == (512, 77, 5000)


def test_published_numbers_of_flow_dpo() -> None:
    recipe = load_recipe("sd3/flow_dpo_pickscore")
    a, p, o, t = recipe.algorithm, recipe.prompts, recipe.optimizer, recipe.training
    assert a.name == "flow_dpo" and p is not None
    assert (a.beta, a.beta_form, a.num_steps, a.guidance, a.noisings, a.updates) == (100.0, "constant", 40, 1.0, 1, 1)
    assert (a.sigma_mean, a.sigma_std, p.per_iteration, p.group_size) == (0.0, 1.0, 48, 4)
    assert (o.lr, o.betas, o.eps, o.weight_decay, o.max_grad_norm) == (1e-5, (0.9, 0.999), 1e-8, 1e-4, 1.0)
    assert (recipe.tuning.rank, recipe.tuning.alpha, t.ema_decay, t.ema_every) == (32, 64.0, 0.99, 4)


def test_published_numbers_of_the_forward_process() -> None:
    nft, awm, ram = (load_recipe(f"sd3/{name}_geneval") for name in ("diffusion_nft", "awm", "ram"))
    a = nft.algorithm
    assert a.name == "diffusion_nft" and (a.num_steps, a.noisings, a.old_policy, a.nft_beta) == (10, 9, "slow", 1.0)
    assert (a.kl_weight, a.advantage_clip, a.advantage_mode, a.updates) == (1e-4, 5, "all", 1)
    a = awm.algorithm
    assert a.name == "awm" and (a.num_steps, a.noisings, a.levels, a.weighting) == (14, 6, (1, 12), "ghuber")
    assert (a.ghuber_power, a.clip_range, a.anchor_weight, a.anchor_cap, a.kl_weight) == (0.25, 1, 1, 0.3, 3e-3)
    a = ram.algorithm
    assert a.name == "ram" and (a.num_steps, a.noisings, a.reward_multiplier, a.target) == (20, 8, 100, "old")
    assert (a.sigma_power, a.decay_rate, a.decay_cap, a.advantage_clip, a.guidance) == (1, 0.01, 0.9, None, 4.5)
    for recipe, prompts in ((nft, 48), (awm, 72), (ram, 48)):
        p = recipe.prompts
        assert p is not None and (p.per_iteration, p.group_size, recipe.optimizer.lr) == (prompts, 24, 3e-4)


@pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
def test_a_misspelt_key_is_refused(name: str, path: Key, tmp_path: Path) -> None:
    data, dotted = misspelt(plain(name), path)
    file = write(tmp_path, data)
    message = refusal(file)
    line = next(row for row in message.splitlines() if f" {dotted}: unknown key" in row)
    word = next(part for part in reversed(path) if isinstance(part, str))
    assert re.match(re.escape(str(file)) + r":\d+: ", line)
    number = int(line.removeprefix(f"{file}:").split(":")[0])
    assert dotted.rpartition(".")[2] + ":" in file.read_text().splitlines()[number - 1], "the line that it names"
    assert word in line, "the right name is told"


@pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
def test_a_mistyped_value_is_refused(name: str, path: Key, tmp_path: Path) -> None:
    dotted = ".".join(map(str, path))
    for wrong in mistyped(at(plain(name), path)):
        data = plain(name)
        at(data, path[:-1])[path[-1]] = wrong
        file = write(tmp_path, data)
        message = refusal(file)
        assert re.search(rf"^{re.escape(str(file))}:\d+: {re.escape(dotted)}\b", message, re.M), (wrong, message)


@pytest.mark.parametrize("name", RECIPES)
def test_a_section_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    for path in sections(plain(name)):
        for wrong in (3, "text", [[1]]):
            data = plain(name)
            at(data, path[:-1])[path[-1]] = wrong
            assert re.search(rf":\d+: {re.escape('.'.join(map(str, path)))}\b", refusal(write(tmp_path, data)))


IMPOSSIBLE = [
    "model.height=0", "model.height=63", "model.width=-64", "model.precision=fp17", "model.path=''",
    "tuning.rank=0", "tuning.alpha=-1", "tuning.kind=lroa", "training.iterations=0", "training.seed=-1",
    "training.ema_decay=1", "training.ema_decay=-0.1", "training.rollout_batch_size=0", "training.micro_batch_size=0",
    "training.output=''", "training.log=[wandbb]", "training.max_invalid=1.5", "training.checkpoint_every=-1",
    "optimizer.lr=0", "optimizer.lr=-1e-4", "optimizer.lr=.inf", "optimizer.lr=.nan", "optimizer.lr=1e999",
    "optimizer.betas=[0.9, 1.0]", "optimizer.betas=[0.9]", "optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.eps=0",
    "optimizer.max_grad_norm=0", "optimizer.weight_decay=-1",
]  # fmt: skip
IMPOSSIBLE_ROLLOUTS = [
    "prompts.group_size=1", "prompts.group_size=0", "prompts.per_iteration=0", "prompts.source=shapes:trian",
    "prompts.source=prompts.png", "prompts.count=0", "prompts.count=2", "rewards.0.weight=0", "rewards.0.weight=-1",
    "rewards.0.name=shapes-verifer", "rewards=[]", "algorithm.num_steps=1", "algorithm.level=0", "algorithm.kernel=ode",
    "algorithm.kernel=flwo", "algorithm.clip_range=0", "algorithm.window=rnadom", "algorithm.window_range=[0, 5, 6]",
    "algorithm.updates=0", "algorithm.updates=7", "algorithm.guidance=0", "algorithm.kl=l2", "algorithm.name=flow_grop",
    "algorithm.storage=float16", "algorithm.advantage_std=batch", "dataset={path: shapes}", "prompts=null",
]  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_an_impossible_value_is_refused(name: str) -> None:
    rollouts = [] if load_recipe(name).prompts is None else IMPOSSIBLE_ROLLOUTS
    for override in IMPOSSIBLE + rollouts:
        with pytest.raises(RecipeError) as caught:
            load_recipe(name, [override])
        key = override.partition("=")[0]
        assert key.partition(".")[0] in str(caught.value), override
        assert len(str(caught.value)) < 500, "one sentence"


@pytest.mark.parametrize(("name", "path"), CASES[::7], ids=IDS[::7])
def test_the_command_line_exits_with_2(
    name: str, path: Key, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, dotted = misspelt(plain(name), path)
    file = write(tmp_path, data)
    assert main(["train", str(file)]) == 2
    out, err = capsys.readouterr()
    assert re.search(rf"^{re.escape(str(file))}:\d+: {re.escape(dotted)}: unknown key", err, re.M)
    assert "Traceback" not in err and out == ""


def test_settings_for_accelerate_are_what_accelerate_reads() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    from flowalign.config.load import recipe_folder

    found = {f.stem: load_config_from_file(str(f)) for f in (recipe_folder() / "accelerate").glob("*.yaml")}
    kinds = {name: (c.distributed_type.value, c.num_processes, bool(c.use_cpu)) for name, c in found.items()}
    assert kinds == {"single": ("NO", 1, False), "cpu2": ("MULTI_CPU", 2, True), "ddp": ("MULTI_GPU", 8, False)}
    assert {c.mixed_precision for c in found.values()} == {"no"}
