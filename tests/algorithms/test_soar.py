"""SOAR against its closed forms: where points lie, what they are taught, and when it is supervised fine-tuning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from flowalign.algorithms.sft import SFT, SFTSettings
from flowalign.algorithms.soar import SOAR, SOARSettings, rollout_step
from flowalign.core import rng
from flowalign.types import Batch, Conditioning, Examples, Policy, Rollout, Trajectory
from tests.algorithms.toy import SHAPE, SHIFT, Toy

GUIDANCE, STEP = 3.0, 1 / 40


def build(**fields: Any) -> SOAR:
    values = {"name": "soar", "guidance": GUIDANCE} | fields
    return SOAR(TypeAdapter(SOARSettings).validate_python(values), shift=SHIFT)


def examples(count: int = 8, name: str = "examples", negative: bool = True) -> Examples:
    generator = rng.generator(name)
    text, null = torch.randn(2, count, 1, generator=generator) * 0.3
    cond = Conditioning({"text": text}, {"text": null} if negative else None)
    keys = tuple(rng.key(name, b) for b in range(count))
    return Examples(("caption",) * count, keys, cond, torch.randn(count, *SHAPE, generator=generator))


def never(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
    raise AssertionError("not to be asked for")


def prepared(algorithm: SOAR, samples: Examples, model: Any = None) -> Batch:
    return algorithm.prepare(Policy(model or Toy(), never), samples, None)


def wide(value: Tensor) -> Tensor:
    return value.double().view(-1, 1, 1, 1)


class Levels:
    """What the base items say of each image, in float64: level u, sigma and the level and sigma after the step."""

    def __init__(self, batch: Batch, clean: Tensor, shift: float = SHIFT) -> None:
        count = clean.shape[0]
        self.clean, self.noise = clean.double(), batch.items["target"][:count].double() + clean.double()
        self.x, self.sigma = batch.items["x"][:count].double(), batch.items["sigma"][:count].double()
        self.u = self.sigma / (shift - (shift - 1) * self.sigma)
        self.u_next = (self.u - STEP).clamp(min=0)
        self.sigma_next = shift * self.u_next / (1 + (shift - 1) * self.u_next)


def guided(samples: Examples, levels: Levels) -> Tensor:
    """v_null + w (v_text - v_null) in float64, row by row."""
    model = Toy().double()
    assert samples.cond.negative is not None
    with torch.no_grad():
        text, null = (
            model(levels.x, levels.sigma, Conditioning({"text": c["text"].double()}))
            for c in (samples.cond.tensors, samples.cond.negative)
        )
    return null + GUIDANCE * (text - null)


def test_points_lie_between_the_rolled_out_state_and_the_same_noise() -> None:
    samples = examples()
    batch = prepared(build(points=5), samples)
    assert len(batch) == 8 * 6 and batch.sample.tolist() == [*range(8), *np.repeat(range(8), 5).tolist()]
    levels, row = Levels(batch, samples.clean), batch.sample[8:]
    state = levels.x + wide(levels.sigma_next - levels.sigma) * guided(samples, levels)
    sigma, after = batch.items["sigma"][8:].double(), levels.sigma_next[row]
    share = wide((sigma - after) / (1 - after))
    assert (share >= -1e-6).all() and (share <= 1).all()
    expected = (1 - share) * state[row] + share * levels.noise[row]
    torch.testing.assert_close(batch.items["x"][8:].double(), expected, atol=2e-5, rtol=0)


def test_the_target_lands_on_the_original_image_from_every_point() -> None:
    samples = examples()
    batch = prepared(build(), samples)
    landed = batch.items["x"].double() - wide(batch.items["sigma"]) * batch.items["target"].double()
    torch.testing.assert_close(landed, samples.clean[batch.sample].double(), atol=2e-6, rtol=0)


def test_the_amplification_identity() -> None:
    """v_corr - v_gt = -(s0 - s1)(1 - s') / ((1 - s1) s') (v_cfg - v_gt), derived in the specification."""
    samples = examples(16)
    batch = prepared(build(sigma_floor=1e-3), samples)
    levels, row = Levels(batch, samples.clean), batch.sample[16:]
    truth = levels.noise - levels.clean
    s0, s1, s = levels.sigma[row], levels.sigma_next[row], batch.items["sigma"][16:].double()
    factor = wide(-(s0 - s1) * (1 - s) / ((1 - s1) * s))
    expected = truth[row] + factor * (guided(samples, levels) - truth)[row]
    torch.testing.assert_close(batch.items["target"][16:].double(), expected, atol=1e-4, rtol=1e-4)
    gap = (expected - truth[row]).square().mean((1, 2, 3))
    torch.testing.assert_close(batch.items["target_gap"][16:].double(), gap, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("level", "largest"), [(0.9, 0.010), (0.5, 0.026), (0.1, 0.28), (0.05, 0.91)])
def test_the_published_shift_amplifies_as_the_specification_says(level: float, largest: float) -> None:
    """The largest factor, (s0 - s1) / s1 at s' = s1, on the model that is off by exactly one everywhere."""
    samples = examples(1)

    def off_by_one(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        clean = samples.clean.expand(x.shape)
        return (x - clean) / sigma.view(-1, 1, 1, 1) + 1

    logit = math.log(level / (1 - level))
    algorithm = build(points=4000, sigma_mean=logit, sigma_std=1e-6, sigma_floor=1e-3)
    batch = prepared(algorithm, samples, off_by_one)
    change = (batch.items["target"][1:] - batch.items["target"][:1]).mean((1, 2, 3))
    assert float(change.max()) < 1e-5  # always away from the error
    # The point nearest to s1 of 4,000 is off by a share of about 1e-3; the numbers have two digits.
    assert float(-change.min()) == pytest.approx(largest, rel=0.03)


def test_on_the_path_it_teaches_what_supervised_fine_tuning_does() -> None:
    """Data of a single point c: the exact field is (x - c) / sigma, so that a step never leaves the path."""
    samples = examples()
    point = samples.clean[:1]
    samples = Examples(samples.prompts, samples.keys, samples.cond, point.expand(8, *SHAPE).clone())
    batch = prepared(build(), samples, lambda x, sigma, cond: (x - point) / sigma.view(-1, 1, 1, 1))
    levels, row = Levels(batch, samples.clean), batch.sample
    kept = batch.weight > 0
    target = (levels.noise - levels.clean)[row]
    on_path = (1 - wide(batch.items["sigma"])) * levels.clean[row] + wide(batch.items["sigma"]) * levels.noise[row]
    torch.testing.assert_close(batch.items["x"].double()[kept], on_path[kept], atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.items["target"].double()[kept], target[kept], atol=2e-4, rtol=0)
    assert float(batch.items["target_gap"][kept].max()) < 1e-7


def test_points_are_uniform_above_the_level_after_the_step() -> None:
    samples = examples(500, "many")
    batch = prepared(build(points=8, sigma_floor=1e-3), samples)
    after = Levels(batch, samples.clean).sigma_next[batch.sample[500:]]
    share = (batch.items["sigma"][500:].double() - after) / (1 - after)
    count = share.numel()
    assert abs(float(share.mean()) - 1 / 2) < 5 * (1 / 12 / count) ** 0.5
    assert abs(float(share.var()) - 1 / 12) < 5 * (1 / 180 / count) ** 0.5  # var of the square deviation: 1/80 - 1/144
    by_image = share.view(500, 8)
    assert abs(float(torch.corrcoef(by_image.T)[0, 1])) < 5 / 500**0.5  # independent of each other


@pytest.mark.parametrize("floor", [0.2, 0.4])
def test_points_below_the_floor_are_left_out(floor: float) -> None:
    samples = examples(64)
    batch = prepared(build(sigma_floor=floor, sigma_mean=-1.5, aux_weight=0.7), samples)
    weight, sigma = batch.weight[64:], batch.items["sigma"][64:]
    assert torch.equal(weight, torch.where(sigma < floor, 0.0, 0.7))
    assert 0 < int((weight == 0).sum()) < weight.numel()
    assert (batch.weight[:64] == 1).all()
    assert torch.isfinite(batch.items["target"]).all()


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_loss_is_the_mean_over_images_and_points(weight: float) -> None:
    samples, model = examples(), Toy()
    algorithm = build(points=3, aux_weight=weight, sigma_floor=0.3)
    policy = Policy(model, never)
    batch = algorithm.prepare(policy, samples, None)
    terms = algorithm.losses(policy, batch)
    got = sum((value * batch.weight).sum() / batch.weight.sum() for value in terms.losses.values())
    exact = Toy().double()
    text = {"text": samples.cond.tensors["text"][batch.sample].double()}
    v = exact(batch.items["x"].double(), batch.items["sigma"].double(), Conditioning(text))
    error = (v - batch.items["target"].double()).square().mean((1, 2, 3))
    kept = batch.items["sigma"][8:] >= 0.3
    points = error[8:][kept]
    expected = (error[:8].sum() + weight * points.sum()) / (8 + weight * len(points))
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)
    gradients = torch.autograd.grad(got, list(model.parameters()))
    for one, other in zip(gradients, torch.autograd.grad(expected, list(exact.parameters())), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)
    share = float((error[:8].sum() / (8 + weight * len(points))).detach())
    base = (terms.losses["flow_matching"] * batch.weight).sum() / batch.weight.sum()
    assert float(base.detach()) == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("fields", [{"aux_weight": 0.0}, {"points": 0}, {"points": 0, "guidance": 1.0}])
@pytest.mark.parametrize("shift", [1.0, SHIFT])
def test_without_points_it_is_supervised_fine_tuning_bit_for_bit(fields: dict[str, Any], shift: float) -> None:
    algorithm = build(**fields) if shift == SHIFT else build(shift=shift, **fields)
    assert algorithm.negative is None  # nothing is encoded that nobody reads
    samples = examples(negative=False)
    sft = SFT(TypeAdapter(SFTSettings).validate_python({"name": "sft", "shift": shift}))
    batch, other = prepared(algorithm, samples, never), sft.prepare(Policy(never, never), samples, None)
    assert all(torch.equal(batch.items[name], other.items[name]) for name in other.items)
    assert torch.equal(batch.sample, other.sample) and torch.equal(batch.weight, other.weight)
    losses = [a.losses(Policy(Toy(), never), b).losses for a, b in ((algorithm, batch), (sft, other))]
    assert torch.equal(torch.stack(list(losses[0].values())).sum(0), losses[1]["flow_matching"])


def test_with_points_the_images_are_still_those_of_supervised_fine_tuning() -> None:
    samples = examples()
    batch = prepared(build(), samples)
    other = SFT(SFTSettings(name="sft", shift=SHIFT)).prepare(Policy(never, never), samples, None)
    assert all(torch.equal(batch.items[name][:8], other.items[name]) for name in other.items)


# ---- stochastic rollouts


def spec_step(kind: str, z: np.ndarray, v: np.ndarray, s0: float, s1: float, n: float) -> tuple[np.ndarray, float]:
    """Mean and std in the words of the specification."""
    dt, image, noise = s1 - s0, z - s0 * v, z + (1 - s0) * v
    if kind == "simple":
        return z + v * dt, n * math.sqrt(abs(dt))
    if kind == "sde":
        return (1 - s1) * image, s1
    if kind == "cps":
        sd = s1 * math.sin(n * math.pi / 2)
        return (1 - s1) * image + math.sqrt(s1**2 - sd**2) * noise, sd
    sd = n * math.sqrt(s0 / (1 - s0))
    mean = z * (1 + sd**2 * dt / (2 * s0)) + v * (1 + sd**2 * (1 - s0) / (2 * s0)) * dt
    return mean, sd * math.sqrt(-dt)


@pytest.mark.parametrize("kind", ["simple", "sde", "flow", "cps"])
def test_stochastic_steps_have_the_mean_and_spread_of_their_formulas(kind: Any) -> None:
    x, v = torch.randn(2, 3, *SHAPE, generator=rng.generator("step"))
    sigma, after = torch.tensor([0.95, 0.6, 0.2]), torch.tensor([0.9, 0.5, 0.05])
    got = rollout_step(kind, x, v, sigma, after, level=0.5, sigma_cap=0.99)
    for b in range(3):
        mean, std = spec_step(kind, x[b].numpy(), v[b].numpy(), float(sigma[b]), float(after[b]), 0.5)
        np.testing.assert_allclose(got.mean[b].numpy(), mean, atol=2e-6)
        np.testing.assert_allclose(got.std[b].flatten().numpy(), std, rtol=1e-5)


@pytest.mark.parametrize("kind", ["simple", "sde", "flow", "cps"])
def test_other_paths_are_drawn_from_their_kernel_with_one_noise_per_rollout(kind: Any) -> None:
    count, points = 64, 3
    samples = examples(count, "paths")
    batch = prepared(build(paths=2, points=points, path_kernel=kind, path_level=0.5, sigma_floor=1e-3), samples)
    ode, own = slice(count, count * 4), slice(count * 4, count * 7)
    alone = prepared(build(points=points, sigma_floor=1e-3), samples)
    assert torch.equal(batch.items["x"][: count * 4], alone.items["x"])  # the ODE path is as it was
    assert len(batch) == count * 7 and batch.sample[own].tolist() == batch.sample[ode].tolist()
    levels, row = Levels(batch, samples.clean), batch.sample[own]
    velocity, after = guided(samples, levels), levels.sigma_next[batch.sample[own]]
    share = wide((batch.items["sigma"][own].double() - after) / (1 - after))
    state = (batch.items["x"][own].double() - share * levels.noise[row]) / (1 - share)
    steps = [
        spec_step(kind, levels.x[b].numpy(), velocity[b].numpy(), *sigmas, 0.5)
        for b, sigmas in enumerate(zip(levels.sigma.tolist(), levels.sigma_next.tolist(), strict=True))
    ]
    mean = torch.tensor(np.stack([step[0] for step in steps]))[row]
    std = wide(torch.tensor([step[1] for step in steps]))[row]
    drawn = ((state - mean) / std).view(count, points, -1)
    # Near share 1 the state cannot be told from the noise, nor can a std near 0 be divided by.
    clear = ((share < 0.9) & (std > 0.01)).view(count, points)
    first = [drawn[b][clear[b]] for b in range(count) if clear[b].sum() > 1]
    assert len(first) > 20
    for rows in first:
        torch.testing.assert_close(rows, rows[:1].expand_as(rows), atol=5e-3, rtol=0)
    values = torch.stack([rows[0] for rows in first]).flatten()
    assert abs(float(values.mean())) < 5 / values.numel() ** 0.5
    assert abs(float(values.var()) - 1) < 5 * (2 / values.numel()) ** 0.5
    landed = batch.items["x"].double() - wide(batch.items["sigma"]) * batch.items["target"].double()
    torch.testing.assert_close(landed, samples.clean[batch.sample].double(), atol=1e-5, rtol=1e-5)


def test_stochastic_paths_skip_images_whose_step_ends_without_noise() -> None:
    samples = examples(64, "low")
    batch = prepared(build(paths=2, points=2, sigma_mean=-3.7, sigma_std=0.5), samples)
    ends = Levels(batch, samples.clean).u <= STEP
    assert 10 < int(ends.sum()) < 54
    weight, high = batch.weight[64:], batch.items["sigma"][64:] >= 0.02
    assert torch.equal(weight[:128], high[:128].float())
    assert torch.equal(weight[128:], (high[128:] & ~ends[batch.sample[192:]]).float())


# ---- habits


def test_the_rollout_is_one_guided_call_without_gradient() -> None:
    shown: list[tuple[Tensor, bool]] = []

    def model(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        shown.append((cond.tensors["text"], torch.is_grad_enabled()))
        return x * cond.tensors["text"][:, :, None, None]

    samples = examples()
    batch = prepared(build(), samples, model)
    assert samples.cond.negative is not None
    ((text, grad),) = shown
    assert torch.equal(text, torch.cat([samples.cond.negative["text"], samples.cond.tensors["text"]])) and not grad
    assert not any(value.requires_grad for value in batch.items.values())
    assert batch.cond.negative is None  # learning is never guided


def test_distilled_guidance_takes_one_plain_forward() -> None:
    rows = []

    def model(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        rows.append(x.shape[0])
        return x

    algorithm = build(guidance=1.0, guidance_distilled=True)
    assert algorithm.negative is None
    prepared(algorithm, examples(negative=False), model)
    assert rows == [8]


def test_keys_decide_whatever_the_split() -> None:
    samples = examples()
    whole = prepared(build(paths=2), samples)
    torch.manual_seed(5)
    at = torch.tensor([6, 1, 3])
    part = Examples(("c",) * 3, tuple(samples.keys[i] for i in at), samples.cond.select(at), samples.clean[at])
    got = prepared(build(paths=2), part)
    order = torch.cat([(whole.sample == i).nonzero().flatten() for i in at])
    for name in ("x", "sigma", "target"):
        mine = torch.cat([got.items[name][got.sample == i] for i in range(3)])
        torch.testing.assert_close(mine, whole.items[name][order], atol=1e-5, rtol=1e-5)


def test_a_conditioning_without_negative_is_refused() -> None:
    with pytest.raises(ValueError, match="no negative"):
        prepared(build(), examples(negative=False))


def test_foreign_samples_are_refused() -> None:
    trajectory = Trajectory(*(torch.zeros(1),) * 5)
    cond = Conditioning({"text": torch.zeros(1, 1)})
    rollout = Rollout(("p",), torch.zeros(1), (0,), cond, trajectory, torch.zeros(1))
    with pytest.raises(TypeError, match="learns from Examples"):
        build().prepare(Policy(never, never), rollout, None)


def test_what_the_source_of_data_asks() -> None:
    algorithm = build(negative="blurry", updates=3)
    assert algorithm.plan(0) is None
    assert (algorithm.negative, algorithm.guidance, algorithm.updates) == ("blurry", GUIDANCE, 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guidance": 1.0}, r"guidance: 1.0 rolls out without guidance.*blurry.*4\.5.*guidance_distilled"),
        ({"guidance": 0.5}, "guidance: 0.5"),
        ({"guidance_distilled": True}, "guidance: 3.0 on top of"),
        ({"sigma_floor": 0.0}, "sigma_floor: 0.0"),
        ({"sigma_floor": 1.0}, "sigma_floor: 1.0"),
        ({"path_kernel": "cps", "path_level": 1.5}, "path_level: 1.5"),
        ({"path_kernel": "ode"}, "path_kernel"),
        ({"points": -1}, "points"),
        ({"aux_weight": -1.0}, "aux_weight"),
        ({"rollout_steps": 0}, "rollout_steps"),
        ({"paths": 0}, "paths"),
        ({"shift": 0.0}, "shift"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        build(**fields)


def test_the_defaults_are_the_published_numbers() -> None:
    s = SOARSettings(name="soar")
    assert (s.guidance, s.rollout_steps, s.points, s.aux_weight, s.paths) == (4.5, 40, 6, 1.0, 1)
    assert (s.batch_size, s.sigma_mean, s.sigma_std, s.path_level, s.negative) == (32, 0.0, 1.0, 0.5, "")


def test_it_teaches_the_way_back_where_supervised_fine_tuning_cannot() -> None:
    """A field that is right on the path and wrong beside it, v = noise - clean + k off e: off is the distance along e.

    On the path off is 0 and so is the gradient in k. A guided step that drifts by d along e leaves the path by
    -(sigma - sigma_1) d; the way back from x' has the slope 1 / sigma', so the gradient at k = 0 is -2 off^2 / sigma'.
    """
    direction = torch.zeros(1, *SHAPE)
    direction[0, 0, 0, 0] = 1.0
    k, drift = torch.nn.Parameter(torch.tensor(0.0)), 1.5
    clean, noise = torch.zeros(1, *SHAPE), torch.zeros(1, *SHAPE)

    def model(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        off = ((x - sigma.view(-1, 1, 1, 1) * noise) * direction).sum((1, 2, 3), keepdim=True)
        return noise + (k * off + cond.tensors["text"].view(-1, 1, 1, 1)) * direction

    text = torch.zeros(1, 1)  # right with the caption, so that guidance alone drifts: (1 - w) times the null's error
    samples = Examples(("c",), (7,), Conditioning({"text": text}, {"text": text + drift / (1 - GUIDANCE)}), clean)
    algorithm, policy = build(points=16), Policy(model, never)
    noise = prepared(algorithm, samples, model).items["target"][:1]
    batch = algorithm.prepare(policy, samples, None)
    terms = algorithm.losses(policy, batch)
    (alone,) = torch.autograd.grad(terms.losses["flow_matching"].sum(), k, retain_graph=True)
    assert float(alone.abs()) < 1e-9
    (gradient,) = torch.autograd.grad(terms.losses["correction"].sum(), k)
    levels, sigma = Levels(batch, samples.clean), batch.items["sigma"][1:].double()
    share = (sigma - levels.sigma_next) / (1 - levels.sigma_next)
    off = -(1 - share) * (levels.sigma - levels.sigma_next) * drift
    expected = (-2 * off**2 / sigma).sum() / clean.numel()
    assert float(gradient) == pytest.approx(float(expected), rel=1e-3) and float(expected) < -1e-5
