"""What is read in the answers of vision-language models, against a real server on the loopback."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flowalign.rewards.judge import Judge
from flowalign.types import FlowAlignError
from reward_models.unifiedreward.reward import UnifiedReward, UnifiedRewardVideo
from reward_models.vlm_judge.reward import VLMJudge, VLMJudgeVideo
from tests.rewards.chat_server import judge, media, said, server

__all__ = ["server"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<html>bad gateway", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "holds no message"),
        ("[]", "holds no message"),
        ("null", "holds no message"),
        ('{"choices": []}', "holds no message"),
        ('{"choices": null}', "holds no message"),
        ('{"choices": [{"text": "Score: 3"}]}', "holds no message"),
        ('{"choices": [{"message": "Score: 3"}]}', "holds no message"),
        ('{"choices": [{"message": {"content": null}, "finish_reason": "content_filter"}]}', "content_filter"),
        ('{"choices": [{"message": {"content": "  "}}]}', "said nothing"),
        ('{"choices": [{"message": {"content": null, "refusal": "I will not judge"}}]}', "refused: 'I will not"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("x" * 2_000_000, "longer than 1048576 bytes"),
    ],
)
def test_what_is_no_chat_completion_is_invalid(server, body, words: str) -> None:
    server.answer = lambda text, attempt: (200, {}, body) if text.endswith("bad") else said("Score: 3")
    scored = judge(server)(media(2), ["bad", "good"])
    assert torch.isnan(scored.score).tolist() == [True, False]
    assert words in scored.details[0]["reason"] and len(scored.details[0]["reason"]) < 800


GOOD = {
    "Score: 7": 7.0,
    "score:7.5": 7.5,
    "**Score:** 7": 7.0,
    "**Score**: **7**": 7.0,
    "It fits. Score: 7.": 7.0,
    "Score: 7/10": 7.0,
    "Score: 7 / 10, since the cat is there": 7.0,
    "Score: 0": 0.0,
    "Score: 10": 10.0,
    "I say\n\nScore: 3\n\nFinal\nScore: 3.0": 3.0,
}
BAD = {
    "I would rather not say.": "gives no score",
    "7": "gives no score",
    "Score: seven": "gives no score",
    "Score: N": "gives no score",
    "Score: 7,5": "gives no score",
    "Score: 70%": "gives no score",
    "Score: 7th": "gives no score",
    "Score: 1.2.3": "gives no score",
    "Score: 11": "gives 11, outside [0, 10]",
    "Score: 45": "gives 45, outside",
    "Score: -1": "gives -1, outside",
    "Score: 4/5": "gives 4 of 5, expected of 10",
    "Score: 3 for the cat. Score: 8 for the dog.": "several scores: 3, 8",
    "Subscore 3 of high_score: 4": "gives no score",
}


@pytest.mark.parametrize("text", [*GOOD, *BAD])
def test_a_score_is_one_plain_number_in_its_range(server, text: str) -> None:
    server.answer = lambda question, attempt: said(text)
    scored = judge(server)(media(), ["a cat"])
    assert scored.details[0]["answer"] == text
    if text in GOOD:
        assert scored.score.tolist() == [GOOD[text]] and "reason" not in scored.details[0]
    else:
        assert torch.isnan(scored.score).all() and BAD[text] in scored.details[0]["reason"]


def test_an_answer_that_was_cut_off_says_so_and_is_kept_in_part(server) -> None:
    server.answer = lambda text, attempt: said("word " * 1000, "length")
    (detail,) = judge(server)(media(), ["a cat"]).details
    assert detail["reason"].endswith("(it was cut off at max_tokens)") and len(detail["answer"]) == 500


def test_an_own_pattern_and_range(server) -> None:
    server.answer = lambda text, attempt: said("<Score>4</Score> of <Score>4</Score>")
    scored = judge(server, pattern=r"<Score>(\d+)</Score>", low=1, high=5)(media(), ["a cat"])
    assert scored.score.tolist() == [4]
    server.answer = lambda text, attempt: said("<Score>high</Score>")
    scored = judge(server, pattern=r"<Score>(\w*)</Score>")(media(), ["a cat"])
    assert "'high' as its score, which is no number" in scored.details[0]["reason"]
    server.answer = lambda text, attempt: said("<Score>nan</Score>")
    scored = judge(server, pattern=r"<Score>(\w*)</Score>")(media(), ["a cat"])
    assert "gives nan, outside" in scored.details[0]["reason"]


def test_unifiedreward_reads_its_final_score(server) -> None:
    cases = {"Final Score: 4.0": 4.0, "cat (object): 1\nFinal Score: 2.5\n": 2.5, "Final Score: 45": None}
    cases |= {"Final Score: 0": None, "Score: 3": None, "Final Score: 3/5": 3.0, "Final Score: 3/10": None}
    server.answer = lambda text, attempt: said(next(c for c in cases if f"[{list(cases).index(c)}]" in text))
    scored = UnifiedReward(server.url, "m")(media(len(cases)), [str(i) for i in range(len(cases))])
    for value, expected in zip(scored.score.tolist(), cases.values(), strict=True):
        assert value == expected if expected is not None else np.isnan(value)
    assert scored.subscores == {}
    assert server.content()[-1]["text"].startswith("<image>\nYou are given a text caption and a generated image")


@pytest.mark.parametrize(
    ("cls", "second"), [(UnifiedReward, "coherence"), (UnifiedRewardVideo, "physics")], ids=["picture", "video"]
)
def test_unifiedreward_2_scores_the_mean_of_its_axes(server, cls, second: str) -> None:
    whole = f"Alignment Score (1-5): 2.5\n{second.title()} Score (1-5): 3.25\nStyle Score (1-5): 4.0"
    part = whole.replace("Style Score (1-5): 4.0", "")
    server.answer = lambda text, attempt: said(part if text.endswith("[part]") else whole)
    scored = cls(server.url, "m", version="2.0")(media(2), ["part", "whole"])
    assert scored.score[1] == pytest.approx(3.25) and torch.isnan(scored.score[0])
    assert {name: float(value[1]) for name, value in scored.subscores.items()} == {
        "alignment": 2.5,
        second: 3.25,
        "style": 4.0,
    }
    assert all(torch.isnan(value[0]) for value in scored.subscores.values())
    assert f"{second.title()} Score (1-5): Y" in server.content()[-1]["text"]


def test_behind_the_contract_one_failure_spoils_no_other_sample(server) -> None:
    server.answer = lambda text, attempt: said("Final Score: 4") if "[good]" in text else (400, {}, "no")
    scored = Judge(UnifiedReward(server.url, "m"), batch_size=2)(media(5), ["good", "bad", "good", "bad", "good"])
    assert scored.valid.tolist() == [True, False, True, False, True]
    assert scored.score[scored.valid].tolist() == [4, 4, 4]


# ---------------------------------------------------------------- mistakes of the recipe


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: VLMJudge("localhost:8000", "m"), "url 'localhost:8000', expected one like"),
        (lambda: VLMJudge("ftp://host/v1", "m"), "expected one like"),
        (lambda: VLMJudge("http://h/v1", "m", template="Is it good?"), "the template has no {prompt}"),
        (lambda: VLMJudge("http://h/v1", "m", pattern="("), "is no regular expression"),
        (lambda: VLMJudge("http://h/v1", "m", pattern="a"), "has 0 groups, expected one"),
        (lambda: VLMJudge("http://h/v1", "m", low=5, high=5), "expected low below high"),
        (lambda: VLMJudge("http://h/v1", "m", timeout=0), "timeout 0, expected more than 0"),
        (lambda: VLMJudge("http://h/v1", "m", retries=-1), "retries -1"),
        (lambda: VLMJudge("http://h/v1", "m", max_frames=4), "use 'vlm-judge-video'"),
        (lambda: VLMJudgeVideo("http://h/v1", "m", max_frames=0), "max_frames 0, expected 1 or more"),
        (lambda: UnifiedReward("http://h/v1", "m", version="3"), "version '3', expected '1.5' or '2.0'"),
        (lambda: UnifiedRewardVideo("http://h/v1", "m", version="1.5"), "version '1.5', expected '2.0'"),
    ],
)
def test_mistakes_are_one_sentence(make, words: str) -> None:
    with pytest.raises(FlowAlignError) as caught:
        make()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_package_names_its_extra(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(FlowAlignError, match=r"'vlm-judge': needs httpx; pip install 'flowalign\[server\]'"):
        VLMJudge("http://h/v1", "m")
