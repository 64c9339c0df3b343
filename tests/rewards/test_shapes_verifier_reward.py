"""The shapes verifier as a reward."""

from __future__ import annotations

import numpy as np
import torch

from flowalign.data.worlds import shapes, shapes_render
from flowalign.rewards import registry


def renders(captions):
    pictures = [shapes_render.render(shapes.parse(text), np.random.default_rng(i)) for i, text in enumerate(captions)]
    return torch.stack([torch.from_numpy(np.asarray(p)).permute(2, 0, 1) for p in pictures])[:, None].float()


CAPTIONS = ["a red circle", "two blue squares", "a green square left of a red cross"]


def test_true_renders_score_one_and_wrong_captions_less() -> None:
    media = renders(CAPTIONS)
    for score in ("soft", "strict"):
        reward = registry.create("shapes-verifier", score=score)
        other = "strict" if score == "soft" else "soft"
        right = reward(media, CAPTIONS)
        assert torch.allclose(right.score, torch.ones(3), atol=1e-3)
        assert set(right.subscores) == {other, "object", "color", "count", "position"}
        assert torch.isnan(right.subscores["position"]).tolist() == [True, True, False]
        wrong = reward(media, CAPTIONS[1:] + CAPTIONS[:1])
        assert (wrong.score < 0.9).all()


def test_captions_outside_the_grammar_are_invalid_not_zero() -> None:
    scored = registry.create("shapes-verifier")(renders(CAPTIONS[:2]), ["a photo of a cat", CAPTIONS[1]])
    assert torch.isnan(scored.score).tolist() == [True, False]
    assert "grammar" in scored.details[0]["reason"] or "not of the shapes world" in scored.details[0]["reason"]
    nothing = registry.create("shapes-verifier")(renders(CAPTIONS[:1]), ["a cat"])
    assert torch.isnan(nothing.score).all()


def test_pictures_of_another_size_have_no_score_and_do_not_hinder_the_others() -> None:
    media = [torch.zeros(1, 3, 32, 64), renders(CAPTIONS[:1])[0]]
    scored = registry.create("shapes-verifier")(media, [CAPTIONS[0]] * 2)
    assert scored.valid.tolist() == [False, True]
    assert scored.details[0]["reason"] == "shapes-verifier judges pictures of 64x64 pixels, not of 32x64"
