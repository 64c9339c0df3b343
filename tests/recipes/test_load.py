"""Reading a recipe: types, overrides, all errors at once with file and line, and files that mean harm."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowalign.config import document
from flowalign.config.load import RecipeError, dump_recipe, load_recipe, resolve_recipe_path
from flowalign.types import FlowAlignError

GOOD = textwrap.dedent(
    """\
    model:
      path: shapes-sd3
      precision: fp32
      height: 64
      width: 64
    algorithm:
      name: flow_grpo
      clip_range: 1e-4
    prompts:
      source: shapes:train
      per_iteration: 4
      group_size: 4
    rewards:
      - name: shapes-verifier
        weight: 2
    optimizer:
      lr: 3e-4
    training:
      iterations: 3
      rollout_batch_size: 8
      micro_batch_size: 8
      output: runs/x
    """
)


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    return file


def problems(file: Path | str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, overrides)
    return str(caught.value).splitlines()


def spoilt(folder: Path, old: str, new: str) -> Path:
    assert old in GOOD
    file = folder / "bad.yaml"
    file.write_text(GOOD.replace(old, new, 1))
    return file


def test_values_and_defaults(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.algorithm.name == "flow_grpo"
    assert recipe.algorithm.clip_range == 1e-4, "1e-4 is a number, which YAML 1.1 would read as text"
    assert recipe.optimizer.lr == 3e-4
    assert recipe.rewards[0].weight == 2.0 and isinstance(recipe.rewards[0].weight, float)
    assert recipe.optimizer.betas == (0.9, 0.999)
    assert recipe.tuning.kind == "lora" and recipe.tuning.targets is None
    assert recipe.dataset is None and recipe.notes is None
    with pytest.raises(AttributeError):
        recipe.optimizer.lr = 1.0  # type: ignore[misc]


def test_all_errors_at_once_with_file_line_and_the_nearest_name(tmp_path: Path) -> None:
    text = (
        GOOD.replace("clip_range", "clip_rnage")
        .replace("height: 64", "height: tall")
        .replace("iterations: 3", "iterations: 0")
    )
    text = text.replace("shapes-verifier", "shapes-verifer").replace("  micro_batch_size: 8\n", "") + "surprise: 1\n"
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert problems(file, "training.seed=x") == [
        f"{file}:4: model.height: got 'tall', expected a whole number",
        f"{file}:8: algorithm.clip_rnage: unknown key (did you mean 'clip_range'?)",
        f"{file}:14: rewards.0.name: unknown reward 'shapes-verifer' (did you mean 'shapes-verifier'?)",
        f"{file}:18: training.micro_batch_size: missing key, it has no default",
        f"{file}:19: training.iterations: got 0, expected a value > 0",
        f"{file}:22: surprise: unknown key; expected one of model, tuning, algorithm, prompts, dataset, rewards, "
        "optimizer, training, notes",
        "command line: training.seed: got 'x', expected a whole number",
    ]


def test_a_required_key_that_is_misspelt_is_reported_once(tmp_path: Path) -> None:
    file = spoilt(tmp_path, "iterations", "iteratoins")
    assert problems(file) == [f"{file}:19: training.iteratoins: unknown key (did you mean 'iterations'?)"]


def test_a_key_in_the_wrong_section_is_sent_home(tmp_path: Path) -> None:
    file = spoilt(tmp_path, "training:\n", "training:\n  lr: 1e-3\n")
    assert problems(file) == [f"{file}:19: training.lr: unknown key (did you mean 'optimizer.lr'?)"]
    file = spoilt(tmp_path, "optimizer:\n", "optimizer:\n  seed: 1\n")
    homes = "'dataset.seed' or 'prompts.seed' or 'training.seed'"
    assert problems(file) == [f"{file}:17: optimizer.seed: unknown key (did you mean {homes}?)"]


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    file = spoilt(tmp_path, "  lr: 3e-4\n", "  lr: 3e-4\n  lr: 1e-4\n")
    assert problems(file) == [f"{file}:18: optimizer.lr: given twice, first on line 17; keep one"]


def test_the_settings_own_checks_name_their_key(tmp_path: Path) -> None:
    (only,) = problems(spoilt(tmp_path, "clip_range: 1e-4", "kl_weight: 0.1"))
    assert only.startswith(f"{tmp_path}/bad.yaml:8: algorithm.kl_weight: 0.1 with kl 'none'")
    (only,) = problems(spoilt(tmp_path, "rewards:", "tuning: {kind: full, targets: [to_q]}\nrewards:"))
    assert only.startswith(f"{tmp_path}/bad.yaml:13: tuning.targets: full fine-tuning")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=1e-5", lambda r: r.optimizer.lr == 1e-5),
        ("optimizer.lr=2", lambda r: r.optimizer.lr == 2.0),
        ("optimizer.betas=[0.8, 0.9]", lambda r: r.optimizer.betas == (0.8, 0.9)),
        ("tuning.rank=4", lambda r: r.tuning.rank == 4),
        ("tuning.targets=[to_q, to_k]", lambda r: r.tuning.targets == ("to_q", "to_k")),
        ("rewards.0.weight=0.5", lambda r: r.rewards[0].weight == 0.5),
        ("rewards=[{name: pickscore}]", lambda r: [x.name for x in r.rewards] == ["pickscore"]),
        ("training.output=runs/a=b", lambda r: r.training.output == "runs/a=b"),
        ("training.log=[wandb, tensorboard]", lambda r: r.training.log == ("wandb", "tensorboard")),
        ("prompts.negative=", lambda r: r.prompts.negative is None),
        ("prompts.negative=''", lambda r: r.prompts.negative == ""),
        ("algorithm.share_noise=true", lambda r: r.algorithm.share_noise is True),
        ("notes={verified: no, source: 'me'}", lambda r: r.notes.verified == "no"),
    ],
)
def test_overrides(recipe_file: Path, override: str, expected: object) -> None:
    assert expected(load_recipe(recipe_file, [override]))  # type: ignore[operator]


def test_the_last_override_wins(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["training.seed=1", "training.seed=2"]).training.seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", "optimizer.lr: got 'fast', expected a number"),
        ("optimizer.lr='1e-4'", "optimizer.lr: got '1e-4', expected a number"),
        ("training.iterations=2.0", "training.iterations: got 2.0, expected a whole number"),
        ("training.iterations=true", "training.iterations: got true, expected a whole number"),
        ("training.iterations=", "training.iterations: got null, expected a whole number"),
        ("algorithm.share_noise=yes", "algorithm.share_noise: got 'yes', expected true or false"),
        ("training.output=12", "training.output: got 12, expected a text (put it in quotes)"),
        ("optimizr.lr=1", "optimizr: unknown key (did you mean 'optimizer'?)"),
        ("rewards.0.wieght=1", "rewards.0.wieght: unknown key (did you mean 'weight'?)"),
        ("rewards.1.weight=1", "rewards.1.weight: rewards is a list of 1 items, counted from 0"),
        (
            "rewards.first.weight=1",
            "rewards.first.weight: rewards is a list; give the number of an item, counted from 0",
        ),
        ("model.path.x=1", "model.path.x: model.path is 'shapes-sd3', which has no keys of its own"),
        ("optimizer.betas.0=x", "optimizer: missing"),
        ("algorithm.name=dpo", "algorithm.name: got 'dpo', expected one of sft, flow_grpo"),
        ("model.height=60", "model.height: got 60, expected a multiple of 8"),
        ("nonsense", "nonsense: got 'nonsense', expected key=value such as training.seed=1"),
        ("=1", "got '=1', expected key=value such as training.seed=1"),
        ("a..b=1", "a..b: got 'a..b=1', expected key=value such as training.seed=1"),
        ("training.seed=[1", "training.seed: got '[1': "),
        ("training.seed=*x", "training.seed: got '*x': aliases (*name) are not allowed"),
        (
            "training.seed=!!python/name:os.system",
            "training.seed: the tag 'tag:yaml.org,2002:python/name:os.system' is not",
        ),
        ("training.output=' '", "training.output: got an empty text, expected a name"),
        ("training.log=[wandb, wandb]", "training.log: names a place twice; keep one"),
        ("prompts.source=../x.png", "prompts.source: got '../x.png', expected shapes:train, shapes:held_out, signs:"),
    ],
)
def test_overrides_are_typed_and_reported_like_keys(recipe_file: Path, override: str, message: str) -> None:
    if override.startswith("optimizer.betas.0"):  # betas is not in the file: a section would have to be made up
        message = "optimizer.betas: got a section of keys, expected a list"
    rows = problems(recipe_file, override)
    assert any(row.startswith(f"command line: {message}") for row in rows), rows


def test_parts_must_fit_together(recipe_file: Path) -> None:
    assert problems(recipe_file, "algorithm={name: sft, batch_size: 33, updates: 2}") == [
        f"{recipe_file}:1: dataset: missing section, sft learns from captioned images",
        f"{recipe_file}:9: prompts: sft learns from a dataset and never samples; remove it",
        f"{recipe_file}:13: rewards: sft learns from a dataset, not from rewards; remove them",
        "command line: algorithm.batch_size: 33 images do not split evenly over 2 updates; use a multiple of 2",
    ]
    assert problems(recipe_file, "prompts=null", "rewards=[]", "dataset={path: shapes}") == [
        "command line: dataset: flow_grpo samples from prompts and reads no dataset; remove it",
        "command line: prompts: missing section, flow_grpo samples from prompts",
        "command line: rewards: missing, flow_grpo learns from at least one reward",
    ]
    (row,) = problems(recipe_file, "algorithm={name: flow_dpo_offline}", "prompts=null", "rewards=[]")
    assert row.endswith("dataset: missing section, flow_dpo_offline learns from preferences")
    (row,) = problems(recipe_file, "algorithm={name: flow_dpo, updates: 8}")
    assert row.endswith(
        "prompts.per_iteration: 4 whole groups do not split evenly over algorithm.updates 8; change one of the two"
    )
    (row,) = problems(recipe_file, "algorithm.updates=3")
    assert row.startswith(
        f"{recipe_file}:11: prompts.per_iteration: 4 prompts x group_size 4 = 16 samples do not split"
    )
    (row,) = problems(recipe_file, "rewards=[{name: pickscore}, {name: pickscore}]")
    assert row == "command line: rewards: 'pickscore' is given 2 times; keep one and adapt its weight"
    sft = load_recipe(recipe_file, ["algorithm={name: sft}", "prompts=null", "rewards=[]", "dataset={path: shapes}"])
    assert sft.algorithm.name == "sft"


def test_a_reward_of_ones_own_is_not_imported(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    assert (
        load_recipe(recipe_file, ["rewards=[{name: 'trap:Reward', params: {a: 1}}]"]).rewards[0].name == "trap:Reward"
    )
    assert "trap" not in sys.modules


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", ":1: is empty"),
        (b"# only a comment\n", ":1: is empty"),
        (b"just words", ":1: does not consist of keys and values"),
        (b"- a\n- b\n", ":1: does not consist of keys and values"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\xff\xfe", ": is not a text file in UTF-8"),
        (b"\x00\x01\x02", ":1: is not a valid recipe: "),
        (b"model: {path: [unclosed\n", ":2: is not a valid recipe: "),
        (b"a: 1\n---\nb: 2\n", ":2: is not a valid recipe: but found another document"),
        (b"model: {path: shapes-sd3\n  height: 1}", ":2: is not a valid recipe: "),
        (b"a: &a [x]\nb: *a\n", ":2: is not a valid recipe: aliases (*name) are not allowed"),
        (b"a: " + b"[" * 100_000, ":1: is not a valid recipe: nested more than 20 levels deep"),
        (b"{" * 100_000, ":1: is not a valid recipe: nested more than 20 levels deep"),
        (b"x: " + b"y" * 1_000_001, ": 1,000,004 bytes are too many for a recipe"),
    ],
)
def test_a_file_that_is_no_recipe_gives_one_sentence(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "no.yaml"
    file.write_bytes(content)
    (row,) = problems(file)
    assert row.startswith(f"{file}{reason}")
    assert len(row) < 400


def test_an_anchor_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    rows = ["a0: &a0 [lol, lol]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(rows))
    assert problems(file) == [f"{file}:2: is not a valid recipe: aliases (*name) are not allowed"]


def test_tags_and_odd_keys_are_refused_and_nothing_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    file = tmp_path / "evil.yaml"
    file.write_text(
        GOOD
        + f"notes: !!python/object/apply:os.system ['touch {marker}']\n"
        + "? [1, 2]\n: x\n"
        + f"tuning: !!python/object/apply:pathlib.Path.touch ['{marker}']\n"
        + "3: x\n"
        + "<<: {model: 1}\n"
        + f"dataset: {'9' * 5000}\n"
    )
    rows = problems(file)
    assert not marker.exists()
    for start in (
        ":23: notes: ",
        ":24: a key must be a plain word",
        ":26: tuning: ",
        ":27: 3: unknown key",
        ":28: <<: ",
        ":29: dataset: ",
    ):
        assert any(row.startswith(f"{file}{start}") for row in rows), (start, rows)


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    assert problems(tmp_path) == [f"{tmp_path}: is a folder; give a recipe file in it"]
    (row,) = problems("shapes/flow_grop")
    assert row.endswith("(did you mean 'shapes/flow_grpo'?)")
    (row,) = problems("recipes/shapes/stf.yaml")
    assert row.endswith("(did you mean 'shapes/sft'?)")
    (row,) = problems("zzzzzzz")
    assert "the shipped ones are sd3/" in row and ", sd3/flow_grpo_clipscore, " in row
    assert problems("a\0b") and problems("x" * 5000)
    assert issubclass(RecipeError, FlowAlignError)
    assert resolve_recipe_path("shapes/sft").name == "sft.yaml"


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=12)
TRICKY = st.sampled_from(
    [
        "1e-4",
        "null",
        "true",
        "yes",
        "~",
        "1",
        ".5",
        "a: b",
        "- a",
        "",
        "# x",
        "'",
        "1_000",
        "12:30",
        "2020-01-01",
        "&a",
        "*a",
        "!!int",
        "<<",
    ]
)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        TEXTS
        | TRICKY
        | st.integers(-(10**9), 10**9)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.booleans()
        | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | TRICKY.filter(bool), inner, max_size=3),
        max_leaves=8,
    )
)
def test_what_is_dumped_is_read_back(data: object) -> None:
    again = document.parse(document.dump({"x": data}))
    assert again.problems == []
    assert again.data == {"x": data}
    assert repr(again.data) == repr({"x": data}), "not even a type changes"


def test_a_resolved_recipe_is_complete(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, ["prompts.negative='1e-4'", "training.wandb_project='null'"])
    text = dump_recipe(recipe)
    assert "advantage_clip: 5.0" in text and "max_grad_norm: 1.0" in text, "defaults are written out"
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_recipe(again) == recipe


def test_settings_and_recipes_do_not_need_a_model_library() -> None:
    code = "import sys; from flowalign.config.load import load_recipe; load_recipe('shapes/flow_grpo'); "
    code += "print([m for m in ('diffusers', 'transformers', 'accelerate', 'peft', 'wandb') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
