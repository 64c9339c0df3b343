"""GenEval's rules against scores worked out by hand, and the whole judge on renders whose content is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flowalign.data.worlds import shapes, shapes_render, shapes_verifier
from flowalign.types import FlowAlignError
from reward_models.geneval import fixture, rules
from reward_models.geneval.reward import GenEval
from reward_models.geneval.rules import Detection

LABELS, COLOURS = ("cat", "dog", "bus"), ("red", "blue")


def at(label, x=0.0, y=0.0, colour=None, score=0.95, size=20.0):
    """An object whose box of 20 pixels a side has its centre at (x, y)."""
    half = size / 2
    return Detection(label, score, (x - half, y - half, x + half, y + half), colour=colour)


def ask(tag, *include, exclude=()):
    names = ("class", "count", "color", "position")
    clauses = [{k: v for k, v in zip(names, clause, strict=False) if v is not None} for clause in include]
    return {"tag": tag, "include": clauses, "exclude": [{"class": label, "count": n} for label, n in exclude]}


CAT = ask("single_object", ("cat", 1))
RED_CAT = ask("colors", ("cat", 1, "red"))
TWO_RED = ask("color_attr", ("cat", 2, "red"))
BOTH = ask("two_object", ("cat", 1), ("dog", 1))
LEFT = ask("position", ("dog", 1), ("cat", 1, None, ["left of", 0]))
RED_LEFT = ask("position", ("dog", 1), ("cat", 1, "red", ["left of", 0]))
TWO_LEFT = ask("position", ("dog", 1), ("cat", 2, None, ["left of", 0]))
THREE = ask("counting", ("cat", 3), exclude=[("cat", 4)])
AT_LEAST = ask("counting", ("cat", 3))
NO_DOG = ask("single_object", ("cat", 1), exclude=[("dog", 1)])
COLOURED = ask("color_attr", ("cat", 1, "red"), ("dog", 1, "blue"))
CHAIN = ask("position", ("dog", 1), ("bus", 1), ("cat", 1, None, ["above", 1]))
DOG = at("dog", 100)

# what is asked, what is found, soft, flow-grpo (where it differs), strict, official
TABLE = {
    "right": (CAT, [at("cat")], 1, None, 1, 1),
    "missing": (CAT, [at("dog")], 0, None, 0, 0),
    "one too many: official counts at least": (CAT, [at("cat"), at("cat", 50)], 0, None, 0, 1),
    "sixteen of one": (CAT, [at("cat", i) for i in range(16)], -14, None, 0, 1),
    "no more than sixteen count": (CAT, [at("cat", i) for i in range(30)], -14, None, 0, 1),
    "confidence at the limit is too low": (CAT, [at("cat", score=0.3)], 0, None, 0, 0),
    "confidence above the limit": (CAT, [at("cat", score=0.31)], 1, None, 1, 1),
    "a doubtful second does not count": (CAT, [at("cat"), at("cat", score=0.2)], 1, None, 1, 1),
    "three": (THREE, [at("cat", i) for i in range(3)], 1, None, 1, 1),
    "two of three": (THREE, [at("cat", i) for i in range(2)], 2 / 3, None, 0, 0),
    "five of three: excluded": (THREE, [at("cat", i) for i in range(5)], 1 / 3, None, 0, 0),
    "five of three: not excluded": (AT_LEAST, [at("cat", i) for i in range(5)], 1 / 3, None, 0, 1),
    "counting asks for more confidence": (
        THREE,
        [at("cat"), at("cat", 9), at("cat", 50, score=0.9)],
        2 / 3,
        None,
        0,
        0,
    ),
    "right colour": (RED_CAT, [at("cat", colour="red")], 1, None, 1, 1),
    "wrong colour": (RED_CAT, [at("cat", colour="blue")], (1 + 0) / 2, None, 0, 0),
    "too many, the surest is red": (
        RED_CAT,
        [at("cat", colour="blue", score=0.8), at("cat", 50, colour="red")],
        (0 + 0) / 2,
        None,
        0,
        1,
    ),
    "too many, the surest is blue": (
        RED_CAT,
        [at("cat", colour="blue"), at("cat", 50, colour="red", score=0.8)],
        (0 + 0) / 2,
        None,
        0,
        0,
    ),
    "no cat and so no colour": (RED_CAT, [], (0 + 0) / 2, None, 0, 0),
    "one of two is red": (
        TWO_RED,
        [at("cat", colour="red"), at("cat", 50, colour="blue")],
        (1 + 1 / 2) / 2,
        None,
        0,
        0,
    ),
    "three of two, the surest are red": (
        TWO_RED,
        [at("cat", colour="red"), at("cat", 50, colour="red"), at("cat", 90, colour="blue", score=0.5)],
        (1 / 2 + 0) / 2,
        None,
        0,
        1,
    ),
    "one of two objects": (BOTH, [at("cat")], (1 + 0) / 2, None, 0, 0),
    "colours swapped": (
        COLOURED,
        [at("cat", colour="blue"), at("dog", 50, colour="red")],
        (1 + 0 + 1 + 0) / 4,
        None,
        0,
        0,
    ),
    "right position": (LEFT, [at("cat", 20), DOG], 1, None, 1, 1),
    "wrong position": (LEFT, [at("cat", 180), DOG], (1 + 1 + 0) / 3, (1 + 1 + 0 + 1) / 4, 0, 0),
    "offset within a tenth of the sides": (LEFT, [at("cat", 97), DOG], 2 / 3, 3 / 4, 0, 0),
    "a diagonal is left of, and above": (LEFT, [at("cat", 40, -60), DOG], 1, None, 1, 1),
    "steeper than 60 degrees": (LEFT, [at("cat", 70, -60), DOG], 2 / 3, 3 / 4, 0, 0),
    "position of nothing": (LEFT, [DOG], (1 + 0 + 0) / 3, None, 0, 0),
    "two targets, the surest is met": (
        LEFT,
        [at("cat", 20), DOG, at("dog", -90, score=0.5)],
        (0 + 1 + 0) / 3,
        None,
        0,
        1,
    ),
    "two objects, the surest is left": (
        LEFT,
        [at("cat", 20), at("cat", 190, score=0.5), DOG],
        (1 + 0 + 0) / 3,
        None,
        0,
        1,
    ),
    "one of two is not left": (TWO_LEFT, [at("cat", 20), at("cat", 190), DOG], (1 + 1 + 0) / 3, 3 / 4, 0, 0),
    "wrong colour: the place is not looked at": (
        RED_LEFT,
        [at("cat", 20, colour="blue"), DOG],
        (1 + 1 + 0) / 3,
        None,
        0,
        0,
    ),
    "right colour in the wrong place": (
        RED_LEFT,
        [at("cat", 180, colour="red"), DOG],
        (1 + 1 + 1 + 0) / 4,
        (1 + 1 + 1 + 0 + 1) / 5,
        0,
        0,
    ),
    "position to the second clause": (CHAIN, [at("bus", 0, 50), at("cat", 0, -50), DOG], 1, None, 1, 1),
    "position to the first instead": (CHAIN, [at("bus", 0, -150), at("cat", 100, -80), DOG], 3 / 4, 4 / 5, 0, 0),
    "excluded and there: the soft rule does not look": (NO_DOG, [at("cat"), DOG], 1, None, 0, 0),
    "excluded and not there": (NO_DOG, [at("cat"), at("bus")], 1, None, 1, 1),
}


@pytest.mark.parametrize("row", TABLE)
def test_scores_are_those_worked_out_by_hand(row: str) -> None:
    metadata, found, soft, published, strict, official = TABLE[row]
    request = rules.read(metadata, LABELS, COLOURS)
    for order in (found, found[::-1]):
        verdict = rules.judge(request, rules.keep(order, request.tag))
        assert verdict.soft == pytest.approx(soft)
        assert verdict.flow_grpo == pytest.approx(soft if published is None else published)
        assert (verdict.strict, verdict.official) == (strict, official)
        assert bool(verdict.wrong) == (strict == 0)
        assert [verdict.by(rule) for rule in rules.RULES] == list(verdict[:4])


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (0, {"right of"}),
        (59, {"right of", "below"}),
        (61, {"below"}),
        (90, {"below"}),
        (149, {"left of", "below"}),
        (151, {"left of"}),
        (239, {"left of", "above"}),
        (241, {"above"}),
        (301, {"above", "right of"}),
        (331, {"right of"}),
    ],
)
def test_a_relation_holds_within_sixty_degrees_of_its_axis(degrees: float, expected: set[str]) -> None:
    x, y = 100 * math.cos(math.radians(degrees)), 100 * math.sin(math.radians(degrees))
    assert rules.relations(at("cat", x, y, size=0), at("dog", size=0)) == expected


def test_large_boxes_shorten_the_offset() -> None:
    # 60 apart and 200 wide each: 60 - 0.1 * 400 = 20, which is a third of the offset; 100 wide each: 40, two thirds.
    assert rules.relations(at("cat", 60, size=200), at("dog", size=200)) == set()
    assert rules.relations(at("cat", 60, size=100), at("dog", size=100)) == {"right of"}
    assert rules.relations(at("cat"), at("cat")) == set()


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (None, "no GenEval metadata"),
        ({}, "no GenEval metadata"),
        ({"tag": "colors"}, "no GenEval metadata"),
        ({**CAT, "tag": "color"}, "tag is 'color', expected one of single_object"),
        ({**CAT, "include": []}, "at least one clause"),
        ({**CAT, "include": "cat"}, "expected a list"),
        ({**CAT, "exclude": "dog"}, "expected a list"),
        ({**CAT, "include": ["cat"]}, r"include\[0\] is 'cat'"),
        (ask("colors", ("cat", 0)), "count 0"),
        (ask("colors", ("cat", True)), "count True"),
        (ask("colors", ("cat", 17)), "expected 1 to 16"),
        (ask("colors", ("cats", 1)), "'cats', which the detector does not know; did you mean 'cat'"),
        (ask("colors", ("cat", 1, "pink")), "color 'pink', expected one of red, blue"),
        (ask("position", ("cat", 1, None, ["left of", 0])), "earlier clause"),
        (ask("position", ("dog", 1), ("cat", 1, None, ["beside", 0])), "expected one of left of"),
        (ask("position", ("dog", 1), ("cat", 1, None, "left of")), "expected one of left of"),
        (ask("position", ("dog", 1), ("cat", 1, None, ["left of", -1])), "earlier clause"),
        ({"tag": "colors", "include": [{"class": "cat", "count": 1, "colour": "red"}]}, "maybe 'color'"),
        ({**CAT, "exclude": [{"class": "cat", "count": 1, "color": "red"}]}, "exclude names a color"),
    ],
)
def test_metadata_that_cannot_be_judged_says_why(metadata, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        rules.read(metadata, LABELS, COLOURS)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- the whole judge, on the shapes world


def renders(n: int, split: shapes.Split):
    pictures, texts = shapes_render.render_many(n, 11, split)
    return torch.from_numpy(pictures).permute(0, 3, 1, 2)[:, None].float() / 255, texts


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_strict_agrees_with_the_verifier_of_the_shapes_world(split: shapes.Split) -> None:
    media, right = renders(150, split)
    rng = np.random.default_rng(5)
    wrong = [shapes.caption(shapes.alter(shapes.parse(text), rng)) for text in right]
    reward = GenEval("strict", detector="shapes")
    for captions, truth in ((right, 1.0), (wrong, 0.0)):
        expected = torch.from_numpy(shapes_verifier.verify(media, captions).strict)
        assert (expected == truth).float().mean() >= 0.99
        scored = reward(media, captions)
        known = scored.valid
        assert (scored.score[known] == expected[known]).float().mean() >= 0.99
        # What cannot be said in GenEval's metadata is one shape in two colours, and nothing else.
        objects = [shapes.parse(text).objects for text in captions]
        twice = [len(set(pair)) == 2 and len({obj.shape for obj in pair}) == 1 for pair in objects]
        assert known.tolist() == [not one for one in twice]


def test_subscores_are_of_the_prompt_s_own_tag_and_the_other_rules() -> None:
    media, captions = fixture.example("geneval").media[:3], list(fixture.CAPTIONS[:3])
    scored = GenEval(detector="shapes")(media[[0, 0, 2]], captions)
    # A red circle; a red circle where two blue squares are asked for: counts 1 - 2/2, and the colour's 0.
    assert scored.score.tolist() == pytest.approx([1.0, 0.0, 1.0])
    assert set(scored.subscores) == {"soft", "flow-grpo", "strict", "official", *rules.TAGS} - {"soft"}
    for tag, values in scored.subscores.items():
        if tag in rules.TAGS:
            own = {"colors": [0], "counting": [1], "position": [2]}.get(tag, [])
            assert torch.isfinite(values).nonzero().flatten().tolist() == own
            assert torch.equal(values[own], scored.score[own])
    assert scored.details[1]["found"] == [{"circle": 1}]
    assert scored.details[1]["wrong"] == ["expected 2 square, found 0", "expected fewer than 1 circle, found 1"]


def test_metadata_wins_over_the_caption_and_one_bad_sample_spoils_no_other() -> None:
    media, _ = renders(3, "train")
    metadata = [{"tag": "single_object", "include": [{"class": "hexagon", "count": 1}]}, {}, {}]
    media[1:] = fixture.example("geneval").media[0]
    scored = GenEval(detector="shapes")(media, ["a red circle", "a red circle", "a cat"], metadata)
    assert scored.valid.tolist() == [False, True, False]
    assert "'hexagon'" in scored.details[0]["reason"] and "a cat" in scored.details[2]["reason"]
    assert scored.score[1] == 1


def test_several_frames_score_their_mean() -> None:
    one, other = fixture.example("geneval").media[:2]
    video = torch.stack([one, other, one, one], 1)
    scored = GenEval("strict", detector="shapes")(video, ["a red circle"])
    assert scored.score.tolist() == [0.75]


def test_mistakes_of_the_recipe_are_one_sentence() -> None:
    for params, words in (
        ({"rule": "hard"}, "rule 'hard', expected one of soft, flow-grpo, strict, official"),
        ({"detector": "yolo"}, "detector 'yolo', expected 'mask2former' or 'shapes'"),
        ({"detector": "reward_models.geneval.rules:Yolo"}, "cannot be imported"),
        ({"detector": "shapes", "path": "weights"}, "has no weights; leave path out"),
    ):
        with pytest.raises(FlowAlignError, match=words) as caught:
            GenEval(**params)
        assert "\n" not in str(caught.value)
    with pytest.raises(FlowAlignError, match="32x64 came, expected 64x64"):
        GenEval(detector="shapes")(torch.zeros(1, 1, 3, 32, 64), ["a red circle"])
