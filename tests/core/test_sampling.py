"""The denoising loop: what it draws, what it records, and that recorded steps replay to a ratio of exactly 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from flowalign.core import kernels, rng, sampling, schedule
from flowalign.types import Conditioning, StepWindow, Trajectory

BATCH, SHAPE, STEPS = 4, (2, 4, 4), 6
GRID = schedule.linear_shift(STEPS, 3.0)
CAP = float(GRID[1])
LEVELS = {"flow": 0.7, "dance": 0.3, "sage": 0.5, "cps": 0.8}


class Toy(nn.Module):
    """A nonlinear velocity that mixes pixels and depends on sigma and text; it records the sigmas of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2, 2, 3, padding=1)
        generator = rng.generator("toy")
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        self.sigmas: list[Tensor] = []

    def forward(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        self.sigmas.append(sigma.clone())
        assert x.dtype == torch.float32
        assert len(cond) == x.shape[0] == sigma.shape[0]
        return torch.tanh(self.mix(x)) + (0.5 + 0.3 * sigma + cond.tensors["text"][:, 0])[:, None, None, None] * x


@pytest.fixture(autouse=True)
def _without_gradients() -> object:
    with torch.no_grad():
        yield


def conditioning() -> Conditioning:
    return Conditioning({"text": torch.tensor([[0.0], [0.1], [-0.2], [0.3]])})


def start() -> Tensor:
    return torch.randn(BATCH, *SHAPE, generator=rng.generator("start"))


def draws(rows: slice = slice(None)) -> list[Tensor]:
    return [torch.randn(BATCH, *SHAPE, generator=rng.generator("draw", i))[rows] for i in range(STEPS)]


def steps(*indices: int) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64)


def shared(*indices: int) -> list[StepWindow]:
    return [StepWindow(steps(*indices), steps(*indices))] * BATCH


OWN = [StepWindow(steps(i, i + 1), steps(i, i + 1)) for i in (0, 1, 3, 1)]


def sample(
    kernel: str = "flow",
    windows: Sequence[StepWindow] | None = None,
    *,
    storage: torch.dtype = torch.float32,
    form: str = "gaussian",
    velocity: Callable[..., Tensor] | None = None,
    level: float | None = None,
) -> Trajectory:
    noise = iter(draws())
    return sampling.integrate(
        velocity or Toy(),
        start(),
        conditioning(),
        GRID,
        kernel=kernel,
        level=LEVELS.get(kernel, 0.0) if level is None else level,
        windows=windows,
        noise=lambda: next(noise),
        storage=storage,
        log_prob_form=form,
    )


def simulate(kernel: str, windows: Sequence[StepWindow]) -> list[Tensor]:
    """States 0 .. N of every sample, one sample and one step at a time."""
    toy, cond, noise = Toy(), conditioning(), draws()
    rows = []
    for b, window in enumerate(windows):
        x, path = start()[b : b + 1], [start()[b : b + 1]]
        for i in range(STEPS):
            v = toy(x, GRID[i : i + 1], cond.select(steps(b)))
            name = kernel if i in window.stochastic.tolist() else "ode"
            at = {"level": LEVELS[kernel], "sigma_cap": CAP}
            gaussian = kernels.transition(name, x, v, GRID[i : i + 1], GRID[i + 1 : i + 2], **at)
            x = gaussian.mean + gaussian.std * noise[i][b : b + 1]
            path.append(x)
        rows.append(path)
    return [torch.cat([path[i] for path in rows]) for i in range(STEPS + 1)]


def replay(kernel: str, trajectory: Trajectory, rows: Tensor, form: str = "gaussian") -> Tensor:
    """(len(rows), K) log-densities recomputed from what was recorded, the k-th step of all ``rows`` in one batch."""
    columns = []
    for k in range(trajectory.steps.shape[1]):
        at = trajectory.steps[rows, k]
        before, after = trajectory.states[rows, k, 0].float(), trajectory.states[rows, k, 1].float()
        gaussian, _ = sampling.replay_transition(
            Toy(),
            before,
            trajectory.sigmas[at],
            trajectory.sigmas[at + 1],
            conditioning().select(rows),
            kernel=kernel,
            level=LEVELS[kernel],
            sigma_cap=CAP,
        )
        columns.append(kernels.log_prob(gaussian, after, form))
    return torch.stack(columns, 1)


def test_without_windows_it_is_the_euler_method() -> None:
    trajectory = sampling.integrate(Toy(), start(), conditioning(), GRID)
    toy, x = Toy(), start()
    for i in range(STEPS):
        x = x - (GRID[i] - GRID[i + 1]) * toy(x, GRID[i].expand(BATCH), conditioning())
    torch.testing.assert_close(trajectory.final, x, atol=2e-6, rtol=1e-6)  # the same operations up to their order
    assert trajectory.final.dtype == torch.float32
    assert trajectory.states.shape[:2] == trajectory.steps.shape == trajectory.log_probs.shape == (BATCH, 0)
    assert torch.equal(trajectory.sigmas, GRID)
    assert torch.equal(trajectory.final, sampling.integrate(Toy(), start(), conditioning(), GRID).final)


def test_windows_without_stochastic_steps_are_the_euler_method() -> None:
    expected = sampling.integrate(Toy(), start(), conditioning(), GRID).final
    assert torch.equal(sample("flow", shared()).final, expected)


def test_one_velocity_call_for_each_step_at_the_sigma_of_the_grid() -> None:
    toy = Toy()
    sample("flow", OWN, velocity=toy)
    assert len(toy.sigmas) == STEPS
    for i, sigma in enumerate(toy.sigmas):
        assert torch.equal(sigma, GRID[i].expand(BATCH))


@pytest.mark.parametrize("windows", [shared(1, 2), OWN, shared(0, 1, 2, 3, 4)])
def test_noise_is_drawn_once_for_each_step_whatever_the_windows(windows: list[StepWindow]) -> None:
    calls = []

    def noise() -> Tensor:
        calls.append(1)
        return torch.zeros(BATCH, *SHAPE)

    sampling.integrate(Toy(), start(), conditioning(), GRID, kernel="flow", level=0.7, windows=windows, noise=noise)
    assert len(calls) == STEPS


@pytest.mark.parametrize("windows", [shared(1, 2), OWN, shared(0, 1, 2, 3, 4)], ids=["shared", "own", "full"])
@pytest.mark.parametrize("kernel", list(LEVELS))
def test_draws_and_records_what_a_simulation_step_by_step_does(kernel: str, windows: list[StepWindow]) -> None:
    trajectory = sample(kernel, windows)
    expected = simulate(kernel, windows)
    # Rounding differs between one sample at a time and all of them; six steps with slopes of about 1 pass it on.
    torch.testing.assert_close(trajectory.final, expected[-1], atol=1e-5, rtol=1e-5)
    trained = torch.stack([window.trained for window in windows])
    assert torch.equal(trajectory.steps, trained)
    assert trajectory.states.shape == (BATCH, trained.shape[1], 2, *SHAPE)
    for b in range(BATCH):
        for k, i in enumerate(trained[b].tolist()):
            torch.testing.assert_close(trajectory.states[b, k, 0], expected[i][b], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(trajectory.states[b, k, 1], expected[i + 1][b], atol=1e-5, rtol=1e-5)


def test_noise_enters_only_inside_the_window() -> None:
    """The samples of OWN start at steps 0, 1, 3 and 1; before its window each follows the ode, and after it as well."""
    windows = [StepWindow(steps(i), steps(i)) for i in (0, 1, 3, 4)]
    trajectory = sample("flow", windows)
    ode = simulate("flow", shared())
    for b, i in enumerate((0, 1, 3, 4)):
        torch.testing.assert_close(trajectory.states[b, 0, 0], ode[i][b], atol=1e-5, rtol=1e-5)
        assert float((trajectory.states[b, 0, 1] - ode[i + 1][b]).abs().max()) > 0.05


def test_trained_steps_may_be_fewer_than_the_stochastic_ones() -> None:
    windows = [StepWindow(steps(1, 2, 3), steps(2))] * BATCH
    trajectory = sample("flow", windows)
    everything = sample("flow", shared(1, 2, 3))
    assert torch.equal(trajectory.final, everything.final)
    assert torch.equal(trajectory.steps, torch.full((BATCH, 1), 2))
    assert torch.equal(trajectory.states[:, 0], everything.states[:, 1])
    assert torch.equal(trajectory.log_probs[:, 0], everything.log_probs[:, 1])


@pytest.mark.parametrize("kernel", list(LEVELS))
def test_recorded_log_probs_are_those_of_the_noise_that_was_drawn(kernel: str) -> None:
    """log p = -mean(z^2) / 2 - ln s - ln(2 pi) / 2, with s from the transition."""
    windows = shared(1, 2, 3)
    trajectory = sample(kernel, windows)
    noise = torch.stack([draws()[i] for i in (1, 2, 3)], 1).double()
    zero = torch.zeros(1, *SHAPE)
    for k, i in enumerate((1, 2, 3)):
        at = {"level": LEVELS[kernel], "sigma_cap": CAP}
        s = float(kernels.transition(kernel, zero, zero, GRID[i : i + 1], GRID[i + 1 : i + 2], **at).std.flatten()[0])
        expected = -noise[:, k].pow(2).mean((1, 2, 3)) / 2 - torch.tensor(s).double().log() - 0.9189385332
        # x' = mean + s z is rounded to 1e-7, which is 1e-6 of z where s = .1.
        torch.testing.assert_close(trajectory.log_probs[:, k].double(), expected, atol=1e-5, rtol=0)
    assert trajectory.log_probs.dtype == torch.float32


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("windows", [shared(1, 2), OWN, shared(0, 1, 2, 3, 4)], ids=["shared", "own", "full"])
@pytest.mark.parametrize("kernel", list(LEVELS))
def test_replay_gives_a_ratio_of_exactly_one(kernel: str, windows: list[StepWindow], storage: torch.dtype) -> None:
    trajectory = sample(kernel, windows, storage=storage)
    again = replay(kernel, trajectory, torch.arange(BATCH))
    assert torch.equal(again, trajectory.log_probs)
    assert bool(((again - trajectory.log_probs).exp() == 1).all())


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["flow", "dance"])
def test_replay_in_other_batches_changes_the_ratio_by_rounding_only(kernel: str, storage: torch.dtype) -> None:
    trajectory = sample(kernel, OWN, storage=storage)
    parts = [replay(kernel, trajectory, rows) for rows in (steps(0), steps(1, 2), steps(3))]
    assert float(((torch.cat(parts) - trajectory.log_probs).exp() - 1).abs().max()) <= 1e-6
    order = steps(2, 0, 3, 1)
    shuffled = replay(kernel, trajectory, order) - trajectory.log_probs[order]
    assert float((shuffled.exp() - 1).abs().max()) <= 1e-6


def test_unscaled_log_probs_are_recorded_and_replayed() -> None:
    trajectory = sample("cps", shared(1, 2), form="unscaled")
    assert torch.equal(replay("cps", trajectory, torch.arange(BATCH), "unscaled"), trajectory.log_probs)
    assert bool((trajectory.log_probs < 0).all())
    assert not torch.allclose(trajectory.log_probs, sample("cps", shared(1, 2)).log_probs, atol=0.1)


def test_bfloat16_storage_rounds_the_states_that_are_kept() -> None:
    trajectory = sample("flow", shared(1, 2, 3), storage=torch.bfloat16)
    states = trajectory.states.float()
    assert torch.equal(states, states.bfloat16().float())
    assert torch.equal(states[:, :-1, 1], states[:, 1:, 0])
    exact = sample("flow", shared(1, 2, 3))
    assert not torch.equal(exact.states, exact.states.bfloat16().float())
    # bfloat16 has 8 bits: states of about 3 move by up to .008, and a run goes on from the rounded ones.
    torch.testing.assert_close(states, exact.states, atol=0.05, rtol=0.02)
    assert not torch.equal(trajectory.final, exact.final)


def test_recorded_neighbours_meet() -> None:
    trajectory = sample("flow", shared(0, 1, 2, 3, 4))
    assert torch.equal(trajectory.states[:, :-1, 1], trajectory.states[:, 1:, 0])
    assert torch.equal(trajectory.states[:, 0, 0], start())


def test_splitting_the_batch_changes_nothing_but_rounding() -> None:
    whole = sample("flow", OWN)
    for rows in (slice(0, 1), slice(1, 4)):
        noise = iter(draws(rows))
        part = sampling.integrate(
            Toy(),
            start()[rows],
            conditioning().select(rows),
            GRID,
            kernel="flow",
            level=0.7,
            windows=OWN[rows],
            noise=lambda noise=noise: next(noise),
        )
        torch.testing.assert_close(part.final, whole.final[rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part.states, whole.states[rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part.log_probs, whole.log_probs[rows], atol=1e-5, rtol=0)
        assert torch.equal(part.steps, whole.steps[rows])


@pytest.mark.parametrize("kernel", list(LEVELS))
def test_images_approach_those_of_the_ode_as_the_level_falls(kernel: str) -> None:
    ode = sampling.integrate(Toy(), start(), conditioning(), GRID).final
    apart = [float((sample(kernel, shared(0, 1, 2, 3, 4), level=a).final - ode).abs().max()) for a in (1e-3, 1e-4)]
    # Proportional to the level: noise of at most 4 level sqrt(1 / .06) a step, carried on by slopes of about 1.
    assert 0 < apart[0] < 0.05
    assert apart[1] < apart[0] / 5


@pytest.mark.parametrize(
    ("kernel", "level", "windows"),
    [("flow", 0.0, shared(1)), ("ode", 0.7, shared(1)), ("cps", 0.8, shared(STEPS - 1))],
    ids=["level 0", "ode", "last step of cps"],
)
def test_a_step_without_density_cannot_be_trained(kernel: str, level: float, windows: list[StepWindow]) -> None:
    with pytest.raises(ValueError, match=r"std|stochastic|density|level|kernel"):
        sample(kernel, windows, level=level)


def test_windows_that_do_not_fit_are_refused() -> None:
    uneven = [*shared(1, 2)[:3], StepWindow(steps(1), steps(1))]
    outside = shared(STEPS)
    not_stochastic = [StepWindow(steps(1), steps(2))] * BATCH
    for windows in (shared(1)[:2], uneven, outside, not_stochastic):
        with pytest.raises(ValueError, match=r"window|step"):
            sample("flow", windows)
    with pytest.raises(ValueError, match="noise"):
        sampling.integrate(Toy(), start(), conditioning(), GRID, kernel="flow", level=0.7, windows=shared(1))


def test_replay_returns_the_velocity_and_carries_gradients() -> None:
    trajectory, toy = sample("flow", shared(1)), Toy()
    with torch.enable_grad():
        sigma, sigma_next = GRID[1].expand(BATCH), GRID[2].expand(BATCH)
        before, after = trajectory.states[:, 0, 0], trajectory.states[:, 0, 1]
        gaussian, v = sampling.replay_transition(
            toy, before, sigma, sigma_next, conditioning(), kernel="flow", level=0.7, sigma_cap=CAP
        )
        (gradient,) = torch.autograd.grad(kernels.log_prob(gaussian, after).sum(), toy.mix.bias, retain_graph=True)
        torch.testing.assert_close(v, toy(before, sigma, conditioning()), atol=0, rtol=0)
        jacobian = kernels.jacobian("flow", sigma, sigma_next, level=0.7, sigma_cap=CAP)[:, None, None, None]
        # d log p / d v = z J / (s D), chained through the velocity by hand.
        z = (after - gaussian.mean) / gaussian.std
        weight = (z * jacobian / gaussian.std / z[0].numel()).detach()
        (expected,) = torch.autograd.grad((weight * v).sum(), toy.mix.bias)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
