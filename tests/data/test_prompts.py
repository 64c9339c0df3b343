"""Prompts from files and the world, and the K-repeat sampler."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowalign.data.prompts import SKILLS, KRepeatSampler, load_prompts
from flowalign.data.worlds import shapes, signs
from flowalign.types import FlowAlignError

GEOMETRY = st.tuples(
    st.integers(1, 6), st.integers(1, 5), st.sampled_from([1, 2, 3]), st.integers(0, 10), st.integers(0, 40)
)


@settings(max_examples=60, deadline=None)
@given(GEOMETRY)
def test_every_prompt_k_times_and_the_same_updates_whatever_the_number_of_ranks(
    geometry: tuple[int, int, int, int, int],
) -> None:
    m, k, updates, seed, iteration = geometry
    k *= 4 * updates  # n divides by U W for all W below
    total = m * k
    sets = {}
    for world in (1, 2, 4):
        sampler = KRepeatSampler(m + 5, m, k, world, seed, updates=updates)
        ranks = [sampler.samples(iteration, rank) for rank in range(world)]
        everything = [s for rank in ranks for s in rank]
        assert sorted(s.position for s in everything) == list(range(total))
        assert len({(s.prompt, s.repeat) for s in everything}) == total
        assert set(Counter(s.prompt for s in everything).values()) == {k}
        assert all(0 <= s.repeat < k for s in everything)
        local = total // world // updates
        for samples in ranks:
            assert [s.position for s in samples] == sorted(s.position for s in samples)
        sets[world] = [
            sorted((s.prompt, s.repeat) for rank in ranks for s in rank[u * local : (u + 1) * local])
            for u in range(updates)
        ]
        for u, part in enumerate(sets[world]):
            positions = range(u * total // updates, (u + 1) * total // updates)
            assert part == sorted((s.prompt, s.repeat) for s in everything if s.position in positions)
    assert sets[1] == sets[2] == sets[4]


@settings(max_examples=40, deadline=None)
@given(GEOMETRY)
def test_whole_groups_stay_on_one_rank_and_updates_do_not_depend_on_the_number_of_ranks(
    geometry: tuple[int, int, int, int, int],
) -> None:
    m, k, updates, seed, iteration = geometry
    m *= 4 * updates  # m divides by U W for all W below
    sets = {}
    for world in (1, 2, 4):
        sampler = KRepeatSampler(m + 5, m, k, world, seed, updates=updates, whole_groups=True)
        ranks = [sampler.samples(iteration, rank) for rank in range(world)]
        assert sorted(s.position for rank in ranks for s in rank) == list(range(m * k))
        for rank, samples in enumerate(ranks):
            assert [s.position for s in samples] == list(range(rank, m * k, world))
            assert set(Counter(s.prompt for s in samples).values()) == {k}
        local = m * k // world // updates
        sets[world] = [
            sorted((s.prompt, s.repeat) for rank in ranks for s in rank[u * local : (u + 1) * local])
            for u in range(updates)
        ]
    assert sets[1] == sets[2] == sets[4]
    anyhow = KRepeatSampler(m + 5, m, k, 1, seed).samples(iteration, 0)
    assert sorted(s[:2] for s in anyhow) == sorted(pair for part in sets[1] for pair in part)  # the same samples


def test_whole_groups_that_do_not_split_are_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(FlowAlignError, match=r"per_iteration 5 groups .* 2 updates x 2 processes.*: 4 or 8"):
        KRepeatSampler(50, 5, 4, 2, seed=0, updates=2, whole_groups=True)
    with pytest.raises(FlowAlignError, match="the nearest that do: 4, with as many prompts"):
        KRepeatSampler(3, 3, 4, 4, seed=0, whole_groups=True)


def test_an_epoch_shows_each_prompt_once_and_epochs_differ() -> None:
    sampler = KRepeatSampler(13, 4, 2, 1, seed=3)
    epochs = []
    for epoch in range(4):
        iterations = [{s.prompt for s in sampler.samples(3 * epoch + turn, 0)} for turn in range(3)]
        assert all(len(prompts) == 4 for prompts in iterations)
        assert len(set.union(*iterations)) == 12  # without replacement; one prompt is left over
        epochs.append(tuple(map(frozenset, iterations)))
    assert len(set(epochs)) == 4


def test_the_sampler_has_no_state() -> None:
    one, two = (KRepeatSampler(20, 4, 6, 2, seed=1, updates=2) for _ in range(2))
    later = one.samples(7, 1)
    for iteration in range(5):
        two.samples(iteration, 0)
    assert two.samples(7, 1) == later
    assert one.samples(8, 1) != later
    assert KRepeatSampler(20, 4, 6, 2, seed=2, updates=2).samples(7, 1) != later


@pytest.mark.parametrize(
    ("m", "k", "world", "updates", "words"),
    [
        (5, 3, 2, 2, ["5 x group_size 3 = 15", "per_iteration 4 or 8", "group_size 4"]),
        (3, 5, 4, 1, ["per_iteration 4", "group_size 4 or 8"]),
        (7, 2, 4, 1, ["per_iteration 6 or 8", "group_size 4"]),
    ],
)
def test_impossible_sizes_are_refused_with_the_nearest_valid_ones(
    m: int, k: int, world: int, updates: int, words: list[str]
) -> None:
    with pytest.raises(FlowAlignError) as caught:
        KRepeatSampler(50, m, k, world, seed=0, updates=updates)
    for word in words:
        assert word in str(caught.value)


def test_more_prompts_than_there_are_is_refused() -> None:
    with pytest.raises(FlowAlignError, match="only 3"):
        KRepeatSampler(3, 4, 2, 1, seed=0)


def test_text_file(tmp_path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n  a dog  \n")
    assert [p.text for p in load_prompts(str(path))] == ["a cat", "a dog"]


def test_jsonl_file_keeps_metadata(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "two cats", "count": 2}, {"text": "a dog"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    prompts = load_prompts(str(path))
    assert [p.text for p in prompts] == ["two cats", "a dog"]
    assert prompts[0].metadata == {"count": 2}


def test_count_is_a_keyed_choice_in_file_order(tmp_path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"prompt {i:02d}" for i in range(30)))
    first = [p.text for p in load_prompts(str(path), 7, seed=0)]
    assert first == [p.text for p in load_prompts(str(path), 7, seed=0)]
    assert first == sorted(first) and len(set(first)) == 7
    assert first != [p.text for p in load_prompts(str(path), 7, seed=1)]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", "holds no prompt"),
        ("a.txt", "a cat\na dog\na cat\n", "'a cat'"),
        ("a.jsonl", '{"prompt": "a cat"\n', "a.jsonl:1: not JSON"),
        ("a.jsonl", "[1]\n", "expected an object"),
        ("a.jsonl", '{"prompt": "x"}\n{"caption": "a cat"}\n', 'a.jsonl:2: no text; expected a key "prompt" or "text"'),
        ("a.csv", "a cat\n", "unknown source"),
    ],
)
def test_bad_files_give_one_sentence(tmp_path, name: str, content: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(FlowAlignError) as caught:
        load_prompts(str(path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_latin_1_and_too_few(tmp_path) -> None:
    with pytest.raises(FlowAlignError, match="no such file"):
        load_prompts(str(tmp_path / "none.txt"))
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(FlowAlignError, match="not UTF-8"):
        load_prompts(str(path))
    path.write_text("a cat\n")
    with pytest.raises(FlowAlignError, match="holds 1 prompts, fewer than count 2"):
        load_prompts(str(path), 2)


def test_shapes_sources() -> None:
    train, held_out = ([p.text for p in load_prompts(f"shapes:{split}", 40, 0)] for split in ("train", "held_out"))
    assert len(set(train)) == len(set(held_out)) == 40
    assert not set(train) & set(held_out)
    with pytest.raises(FlowAlignError, match="shapes:train and shapes:held_out"):
        load_prompts("shapes:test")
    with pytest.raises(FlowAlignError, match="held_out"):
        load_prompts("shapes:held_out", 10**6)


def test_a_world_source_may_name_its_skills() -> None:
    assert SKILLS == {"shapes": shapes.SKILLS, "signs": signs.SKILLS}
    few = [p.text for p in load_prompts("shapes:train:counting+position", 60, 0)]
    assert Counter(shapes.parse(text).skill for text in few) == {"counting": 30, "position": 30}
    phrases = load_prompts("signs:held_out:phrase", 20, 0)
    assert all(p.metadata["text"].count(" ") == 1 for p in phrases)
    with pytest.raises(FlowAlignError, match="no skill 'colour'; expected some of single, color"):
        load_prompts("shapes:train:colour")
    with pytest.raises(FlowAlignError, match="has the sources signs:train and signs:held_out"):
        load_prompts("signs:tran:word")
