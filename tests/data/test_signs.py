"""The signs world: grammar, splits, prompts and renders. That its texts can be read is in tests/rewards/test_ocr.py."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowalign.data.pairs import load_pairs
from flowalign.data.prompts import load_prompts
from flowalign.data.worlds import signs, signs_render
from flowalign.types import FlowAlignError

SPLITS: tuple[signs.Split, ...] = ("train", "held_out")
FONTS = Path(signs_render.__file__).parent / "fonts"


def luminance(color: tuple[float, float, float]) -> float:
    """Relative luminance of sRGB (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# ---------------------------------------------------------------- grammar and splits


def test_caption_and_parse_are_inverse() -> None:
    specs = [spec for skill in signs.SKILLS for split in SPLITS for spec in signs.all_specs(skill, split)]
    assert len({signs.caption(spec) for spec in specs}) == len(specs)
    for spec in specs:
        assert signs.parse(signs.caption(spec)) == spec


def test_a_caption_quotes_the_text_as_it_is_written() -> None:
    assert signs.caption(signs.SignSpec("OPEN", "red")) == 'a red sign that says "OPEN"'
    spec = signs.parse('"Wet Paint" in yellow letters on a blue plate')
    assert (spec.text, spec.color, spec.ink, signs.skill(spec)) == ("Wet Paint", "blue", "yellow", "phrase")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a red sign",
        'a red sign that says "open',
        'a red sign that says ""',
        'a red sign that says "oPEN"',
        'a red sign that says "WORD OF NO LIST"',
        'a pink sign that says "OPEN"',
        'a red sign with "OPEN" in red letters',
        'two red signs that say "OPEN"',
    ],
)
def test_captions_outside_the_grammar_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the signs world"):
        signs.parse(text)


def test_held_out_texts_have_a_word_that_training_never_shows_of_letters_that_it_does() -> None:
    seen = {word for skill in signs.SKILLS for text in signs.TEXTS[skill, "train"] for word in text.split()}
    letters = {case(letter) for word in seen for letter in word for case in (str.upper, str.lower)}
    for skill in signs.SKILLS:
        for text in signs.TEXTS[skill, "held_out"]:
            assert set(text.split()) - seen, text
            assert set(text) - {" "} <= letters, text
    for skill in signs.SKILLS:
        assert {signs.is_held_out(s) for s in signs.all_specs(skill, "train")} == {False}
        assert {signs.is_held_out(s) for s in signs.all_specs(skill, "held_out")} == {True}


def test_letters_stand_out_from_their_plates() -> None:
    for plate, inks in signs.LETTERS.items():
        for ink in inks:
            dark, light = sorted(luminance(signs.COLORS[name]) for name in (plate, ink))
            assert (light + 0.05) / (dark + 0.05) >= 3.0, (plate, ink)  # WCAG's least contrast of large letters


def test_prompts_are_distinct_balanced_deterministic_and_of_their_split() -> None:
    for split in SPLITS:
        texts = signs.prompts(split, 100, seed=3)
        assert texts == signs.prompts(split, 100, seed=3) != signs.prompts(split, 100, seed=4)
        assert len(set(texts)) == 100
        specs = [signs.parse(text) for text in texts]
        assert all(signs.is_held_out(spec) == (split == "held_out") for spec in specs)
        assert sum(signs.skill(spec) == "word" for spec in specs) == 50
    assert {signs.skill(signs.parse(text)) for text in signs.prompts("train", 9, 0, ["phrase"])} == {"phrase"}


def test_prompts_refuse_what_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"n is 100000, but the held_out split has \d+ captions of word, phrase"):
        signs.prompts("held_out", 100_000, 0)
    with pytest.raises(ValueError, match="expected a skill"):
        signs.sample_spec(np.random.default_rng(0), "sentence")


def test_an_altered_sign_differs_in_its_text_alone() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        spec = signs.sample_spec(rng)
        other = signs.alter(spec, rng)
        assert other.text.lower() != spec.text.lower()
        assert (other.color, other.ink, other.wording) == (spec.color, spec.ink, spec.wording)
        assert (signs.skill(other), signs.is_held_out(other)) == (signs.skill(spec), signs.is_held_out(spec))
        assert [c.isupper() for c in spec.text[:2]] == [c.isupper() for c in other.text[:2]]


# ---------------------------------------------------------------- prompt sources


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_of_a_source_carry_the_text_to_write(split: signs.Split) -> None:
    prompts = load_prompts(f"signs:{split}", 40, seed=1)
    assert [p.text for p in prompts] == signs.prompts(split, 40, 1)
    for prompt in prompts:
        assert re.findall('"(.*)"', prompt.text) == [prompt.metadata["text"]]
    assert len(load_prompts(f"signs:{split}")) == 256


def test_a_source_that_the_world_does_not_have_is_refused() -> None:
    with pytest.raises(FlowAlignError, match="the signs world has the sources signs:train and signs:held_out"):
        load_prompts("signs:test")
    with pytest.raises(FlowAlignError, match="n is 100000, but"):
        load_prompts("signs:train", 100_000)


def test_a_file_of_prompts_may_say_which_text_is_to_be_written(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a shop with its name on it", "text": "OPEN"}))
    (prompt,) = load_prompts(str(file))
    assert (prompt.text, prompt.metadata) == ("a shop with its name on it", {"text": "OPEN"})


# ---------------------------------------------------------------- renders


def test_renders_are_seeded_and_in_range() -> None:
    spec = signs.parse('a red sign that says "OPEN"')
    first, again, other = (signs_render.render(spec, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (64, 64, 3) and first.dtype == np.float32
    assert first.min() >= 0.0 and first.max() <= 1.0
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_longer_runs_begin_with_shorter_ones() -> None:
    short, long = signs_render.render_many(3, seed=5), signs_render.render_many(6, seed=5)
    assert np.array_equal(short[0], long[0][:3]) and short[1] == long[1][:3]


def test_a_render_shows_plate_and_letters_in_the_colours_of_its_caption_and_cuts_nothing_off() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        spec = signs.sample_spec(rng)
        image = signs_render.render(spec, rng)
        ring = np.concatenate([image[[0, -1]].reshape(-1, 3), image[:, [0, -1]].reshape(-1, 3)])
        assert np.ptp(ring, 0).max() == 0.0, "the sign touches the border"
        for name in [spec.color] + ([spec.ink] if spec.ink else []):
            near = np.abs(image - np.asarray(signs.COLORS[name])).max(-1) < 0.12
            assert near.sum() >= (150 if name == spec.color else 15), (signs.caption(spec), name)


def test_every_typeface_draws_letters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    for name, face in signs_render.TYPEFACES.items():
        monkeypatch.setattr(signs_render, "TYPEFACES", {name: face})  # the only one to choose
        drawn[name] = signs_render.render(signs.SignSpec("OPEN", "red", "white"), np.random.default_rng(0))
    assert len(drawn) == 6
    for a, b in combinations(drawn, 2):
        assert np.abs(drawn[a] - drawn[b]).max() > 0.2, (a, b)


def test_fonts_are_the_files_that_their_licences_are_noted_for() -> None:
    noted = dict(re.findall(r"^\| `(\S+\.ttf)` .* `([0-9a-f]{64})` \|$", (FONTS / "README.md").read_text(), re.M))
    assert noted == {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in FONTS.glob("*.ttf")}
    used = {face.file for face in signs_render.TYPEFACES.values()}
    assert used == {None, *noted}


def test_folder_has_the_common_format(tmp_path: Path) -> None:
    signs_render.write_folder(tmp_path / "set", 5, seed=2, split="held_out")
    images, texts = signs_render.render_many(5, seed=2, split="held_out")
    pairs = load_pairs(tmp_path / "set", height=64, width=64)
    assert list(pairs.texts) == texts
    assert np.array_equal(np.asarray(Image.open(pairs.files[4])), images[4])
