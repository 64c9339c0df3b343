"""Agreement of rewards with preferences, against closed forms and simulations of known truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flowalign.rewards import agreement


def test_a_reward_of_known_noise_has_the_known_accuracy() -> None:
    generator = np.random.default_rng(0)
    gap, noise, count = 0.8, 1.3, 40_000
    difference = gap + noise * (generator.normal(size=count) - generator.normal(size=count))
    found = agreement.accuracy(difference, [str(i) for i in range(count)], resamples=500)
    truth = stats.norm.cdf(gap / (noise * np.sqrt(2)))
    error = np.sqrt(truth * (1 - truth) / count)
    assert found.mean == pytest.approx(truth, abs=4 * error)
    # of independent pairs the bootstrap's interval is the normal one
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert (found.pairs, found.ties, found.invalid, found.prompts) == (count, 0, 0, count)


def test_ties_count_half_and_invalid_pairs_not_at_all() -> None:
    difference = np.array([1.0, -1.0, 0.0, np.nan, 2.0])
    found = agreement.accuracy(difference, list("abcde"))
    assert found.mean == (1 + 0 + 0.5 + 1) / 4
    assert (found.pairs, found.ties, found.invalid, found.prompts) == (4, 1, 1, 4)


def test_the_interval_covers_the_truth_where_pairs_of_a_prompt_fall_together() -> None:
    generator = np.random.default_rng(1)
    trials, prompts, each, truth = 300, 60, 5, 0.7
    covered = naive = 0
    for trial in range(trials):
        # A prompt has its own difficulty, of mean 0.7: Beta(1.4, 0.6).
        difficulty = generator.beta(1.4, 0.6, size=prompts)
        right = generator.random((prompts, each)) < difficulty[:, None]
        difference = np.where(right, 1.0, -1.0).ravel()
        names = [str(i) for i in range(prompts) for _ in range(each)]
        found = agreement.accuracy(difference, names, resamples=1000, seed=trial)
        covered += found.low <= truth <= found.high
        singly = agreement.accuracy(difference, [str(i) for i in range(difference.size)], resamples=300, seed=trial)
        naive += singly.low <= truth <= singly.high
    # 95 % with a standard error of 1.3 %, and a little less for the percentile method at 60 prompts
    assert 0.90 <= covered / trials <= 0.985
    assert naive / trials < 0.87, "an interval that takes pairs for independent is too narrow here"


def test_without_a_mistake_the_bound_is_that_of_the_binomial() -> None:
    found = agreement.accuracy(np.ones(40), [str(i // 2) for i in range(40)])
    assert found.low == pytest.approx(stats.beta.ppf(0.025, 20, 1)) and found.high == 1.0
    assert agreement.accuracy(-np.ones(40), [str(i) for i in range(40)]).high == pytest.approx(
        stats.beta.ppf(0.975, 1, 40)
    )
    alone = agreement.accuracy(np.array([1.0, -1.0]), ["a", "a"])
    assert alone.mean == 0.5 and alone.low is None and alone.high is None


def preferences(count: int, temperature: float) -> np.ndarray:
    """Differences towards the preferred one, under a Bradley-Terry model."""
    generator = np.random.default_rng(2)
    raw = generator.normal(0, 2, count)
    first = generator.random(count) < 1 / (1 + np.exp(-raw / temperature))
    return np.where(first, raw, -raw)


@pytest.mark.parametrize("temperature", [0.3, 1.7, 20.0])
def test_the_temperature_is_recovered_and_the_fit_is_calibrated(temperature: float) -> None:
    count = 20_000
    d = preferences(count, temperature)
    found = agreement.calibrate(d)
    p = 1 / (1 + np.exp(-np.abs(d) / temperature))
    error = 1 / np.sqrt((d**2 * p * (1 - p)).sum())  # of 1 / T, by Fisher's information
    assert 1 / found.temperature == pytest.approx(1 / temperature, abs=4 * error)
    assert sum(b.count for b in found.bins) == count and len(found.bins) == 10
    assert found.error < 0.02
    assert sum(b.low <= b.predicted <= b.high for b in found.bins) >= 8


def test_a_reward_that_is_surer_than_right_is_seen() -> None:
    d = preferences(20_000, 1.0)
    bent = np.sign(d) * np.abs(d) ** 3  # no temperature mends that
    assert agreement.calibrate(bent).error > 3 * agreement.calibrate(d).error


def test_votes_are_shares() -> None:
    d = np.array([2.0, 2.0, 2.0, 2.0])
    # sigmoid(2 / T) = 0.75: 2 / T = log 3
    found = agreement.calibrate(d, np.array([1.0, 0.5, 0.75, 0.75]))
    assert found.temperature == pytest.approx(2 / np.log(3), rel=1e-9)
    # three of four hard preferences are the same thing
    assert agreement.calibrate(np.array([2.0, 2.0, 2.0, -2.0])).temperature == pytest.approx(found.temperature)


def test_where_there_is_no_temperature_the_reason_is_told() -> None:
    for d, reason in (
        (np.array([1.0, 2.0]), "no pair contradicts"),
        (np.array([1.0, -2.0]), "no better than chance"),
        (np.zeros(3), "different scores"),
        (np.full(3, np.nan), "different scores"),
    ):
        found = agreement.calibrate(d)
        assert found.temperature is None and reason in found.reason and not found.bins


def test_wilson() -> None:
    # the share p at an end of the interval solves |0.3 - p| = z sqrt(p (1 - p) / n)
    for p in agreement.wilson(0.3, 50):
        assert abs(0.3 - p) == pytest.approx(1.959964 * np.sqrt(p * (1 - p) / 50), rel=1e-9)


def test_rank_correlation() -> None:
    generator = np.random.default_rng(3)
    a = np.round(generator.normal(size=200), 1)  # with ties
    b = a + generator.normal(size=200)
    b[:5] = np.nan
    found = agreement.spearman({"a": a, "b": b, "-a": -np.exp(a), "constant": np.ones(200)})
    assert found[0, 1] == pytest.approx(stats.spearmanr(a[5:], b[5:]).statistic, abs=1e-12)
    assert found[0, 2] == pytest.approx(-1) and found[0, 0] == pytest.approx(1)
    assert np.isnan(found[3]).all()
    np.testing.assert_array_equal(found, found.T)
