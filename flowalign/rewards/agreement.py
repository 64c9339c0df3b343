"""How well a reward agrees with preferences, and rewards with one another: accuracy, calibration, correlation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import rankdata

from flowalign.core import rng

FloatArray = npt.NDArray[np.float64]
PART = 1_000_000
"""Numbers drawn at a time by the bootstrap, so that memory stays small."""


@dataclass(frozen=True)
class Accuracy:
    """Share of pairs in which the better one has the better score; a tie counts half.

    Args:
        low, high: 95 % interval; None where there are fewer than two prompts.
        pairs: with both scores. ``invalid``: without.
    """

    mean: float | None
    low: float | None
    high: float | None
    pairs: int
    ties: int
    invalid: int
    prompts: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Bin:
    """Pairs that a reward is about equally sure of, in [0.5, 1], and how often it was right.

    Args:
        low, high: 95 % interval of ``observed`` (Wilson).
    """

    predicted: float
    observed: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Calibration:
    """``sigmoid(difference / temperature)`` against what was preferred.

    Args:
        temperature: by maximum likelihood; None where there is none, and ``reason`` says why.
        error: mean distance of predicted and observed over bins, weighted by their counts.
    """

    temperature: float | None
    reason: str
    bins: tuple[Bin, ...] = ()
    error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def accuracy(difference: FloatArray, prompts: Sequence[str], resamples: int = 10_000, seed: int = 0) -> Accuracy:
    """Pairwise accuracy with a percentile bootstrap that resamples PROMPTS.

    Pairs of one prompt are right or wrong together; resampled one by one, they would make the interval too narrow.
    Where all pairs are right (or all wrong), no resample differs, and the bound is the exact binomial one over prompts.

    Args:
        difference: (N,) score of the better one minus that of the worse; negated for a reward that is lower for better
            media; nan = invalid.
        prompts: of the N pairs.
    """
    known = np.isfinite(difference)
    right = np.where(difference > 0, 1.0, np.where(difference == 0, 0.5, 0.0))[known]
    _, group = np.unique(np.asarray(prompts, object)[known].astype(str), return_inverse=True)
    counts = np.bincount(group) if group.size else np.zeros(0, np.int64)
    ties, invalid = int((difference[known] == 0).sum()), int((~known).sum())
    mean = float(right.mean()) if right.size else None
    low, high = None, None
    if len(counts) >= 2 and mean is not None:
        if mean in (0.0, 1.0):
            bound = 0.025 ** (1 / len(counts))
            low, high = (bound, 1.0) if mean == 1.0 else (0.0, 1 - bound)
        else:
            low, high = _interval(np.bincount(group, weights=right).astype(np.float64), counts, resamples, seed)
    return Accuracy(mean, low, high, int(right.size), ties, invalid, len(counts))


def _interval(sums: FloatArray, counts: npt.NDArray[np.int64], resamples: int, seed: int) -> tuple[float, float]:
    generator = np.random.default_rng(rng.key(seed, "agreement"))
    means = []
    size = max(1, PART // len(counts))
    for start in range(0, resamples, size):
        drawn = generator.integers(len(counts), size=(min(size, resamples - start), len(counts)))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def calibrate(difference: FloatArray, votes: FloatArray | None = None, bins: int = 10) -> Calibration:
    """The temperature of a Bradley-Terry model with the reward as its strength, and how well that fits.

    ``P(better is preferred) = sigmoid(difference / T)``; 1 / T maximises the likelihood of ``votes``, which is concave.

    Args:
        difference: as in `accuracy`.
        votes: (N,) share in [0.5, 1] that preferred the better one; None: all.
        bins: of equal count, over how sure the reward is.

    Source: Bradley and Terry, 1952; reliability diagrams: Guo et al., arXiv 1706.04599.
    """
    known = np.isfinite(difference)
    d = difference[known].astype(np.float64)
    share = np.ones_like(d) if votes is None else votes[known].astype(np.float64)
    scale = float(np.abs(d).mean()) if d.size else 0.0
    if scale == 0.0:
        return Calibration(None, "no pair has different scores")
    x = d / scale

    def slope(beta: float) -> float:
        return float((x * (share - expit(beta * x))).sum())

    if slope(0.0) <= 0:
        return Calibration(None, "the reward agrees with the preferences no better than chance")
    if not np.any(np.where(x > 0, 1 - share, np.where(x < 0, share, 0.0))):
        return Calibration(None, "no pair contradicts the reward: the larger its scale, the likelier the data")
    high = 1.0
    while slope(high) > 0:  # ends: the slope falls to minus the weight of what contradicts
        high *= 2
    temperature = scale / float(brentq(slope, 0.0, high, xtol=1e-12))
    found = _bins(expit(d / temperature), share, bins)
    error = sum(b.count * abs(b.predicted - b.observed) for b in found) / d.size
    return Calibration(temperature, "", found, error)


def _bins(predicted: FloatArray, share: FloatArray, count: int) -> tuple[Bin, ...]:
    """Each pair is turned so that the reward prefers the first: how sure it is, and how often it is right."""
    sure = np.maximum(predicted, 1 - predicted)
    # A tie prefers neither, and is right in half of the cases.
    right = np.where(predicted > 0.5, share, np.where(predicted < 0.5, 1 - share, 0.5))
    order = np.argsort(sure, kind="stable")
    found = []
    for part in np.array_split(order, min(count, max(1, order.size // 5))):
        low, high = wilson(float(right[part].mean()), part.size)
        found.append(Bin(float(sure[part].mean()), float(right[part].mean()), low, high, int(part.size)))
    return tuple(found)


def wilson(share: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share of ``count`` (Wilson, 1927)."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return middle - half, middle + half


def spearman(columns: Mapping[str, FloatArray]) -> FloatArray:
    """(K, K) rank correlations of K rewards over the media that both could score; nan where one of them is constant.

    Args:
        columns: {reward: (N,) scores}, nan = invalid.
    """
    values = list(columns.values())
    matrix = np.full((len(values), len(values)), np.nan)
    for i, first in enumerate(values):
        for j, second in enumerate(values[: i + 1]):
            known = np.isfinite(first) & np.isfinite(second)
            a, b = rankdata(first[known]), rankdata(second[known])
            if known.sum() >= 2 and np.ptp(a) > 0 and np.ptp(b) > 0:
                matrix[i, j] = matrix[j, i] = np.corrcoef(a, b)[0, 1]
    return matrix
