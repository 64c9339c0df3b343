"""The only denoising loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowalign.core import kernels, path
from flowalign.core.kernels import Gaussian
from flowalign.types import Conditioning, KernelName, LogProbForm, StepWindow, Trajectory, VelocityFn


def integrate(
    velocity: VelocityFn,
    x: Tensor,
    cond: Conditioning,
    sigmas: Tensor,
    *,
    kernel: KernelName = "ode",
    level: float = 0.0,
    windows: Sequence[StepWindow] | None = None,
    noise: Callable[[], Tensor] | None = None,
    storage: torch.dtype = torch.float32,
    log_prob_form: LogProbForm = "gaussian",
) -> Trajectory:
    """Denoises ``x`` along ``sigmas``: steps in a sample's window are drawn from ``kernel``, others are Euler steps.

    Args:
        x: (B, C, *S) at sigmas[0].
        cond: conditioning of the B samples.
        sigmas: (T + 1,) float32, strictly descending.
        kernel, level: transition of the stochastic steps, see `kernels.transition`.
        windows: one per sample; all must record the same number K of steps. None: the whole run is deterministic.
        noise: the next standard normal draw (B, C, *S); called once per step, whatever the windows, so that a sample's
            noise does not depend on them.
        storage: every state is rounded through this dtype BEFORE its log-density is taken, so that what is stored is
            what was scored; otherwise rounding alone moves the ratio out of a clip range of 1e-4.

    Returns:
        Trajectory with K recorded steps per sample, in the order of its window (K = 0 without windows).

    Raises:
        ValueError: a grid that does not descend, windows that do not fit it or that record deterministic steps.
    """
    batch, num_steps = x.shape[0], sigmas.shape[0] - 1
    if num_steps < 1 or not bool((sigmas.diff() < 0).all()):
        raise ValueError(
            f"integrate: sigmas {sigmas.tolist()}; expected a strictly descending grid of at least one step"
        )
    stochastic, steps = _window_masks(windows, batch, num_steps, kernel, level)
    if windows is not None and noise is None:
        raise ValueError("integrate: windows came without a source of noise; pass noise=")
    slots = torch.full((batch, num_steps), -1).scatter_(1, steps, torch.arange(steps.shape[1]).expand_as(steps))
    states = x.new_zeros((batch, steps.shape[1], 2, *x.shape[1:]), dtype=storage)
    log_probs = torch.zeros(steps.shape, dtype=torch.float32, device=x.device)
    grid, sigma_cap = sigmas.to(x.device), float(sigmas[1])
    x = x.to(storage).float()
    for i in range(num_steps):
        sigma, sigma_next = grid[i].expand(batch), grid[i + 1].expand(batch)
        v = velocity(x, sigma, cond).float()
        x_next = (x - path.expand(sigma - sigma_next, x) * v).to(storage).float()
        drawn = noise() if noise is not None else None
        rows = stochastic[:, i].nonzero().flatten()
        if rows.numel() and drawn is not None:
            here = rows.to(x.device)
            gaussian = kernels.transition(
                kernel, x[here], v[here], sigma[here], sigma_next[here], level=level, sigma_cap=sigma_cap
            )
            after = (gaussian.mean + gaussian.std * drawn[here]).to(storage).float()
            x_next = x_next.index_copy(0, here, after)
            kept = (slots[rows, i] >= 0).nonzero().flatten()
            b, k = rows[kept].to(x.device), slots[rows[kept], i].to(x.device)
            kept = kept.to(x.device)
            if kept.numel():
                states[b, k] = torch.stack([x[b], after[kept]], 1).to(storage)
                recorded = Gaussian(gaussian.mean[kept], gaussian.std[kept])
                log_probs[b, k] = kernels.log_prob(recorded, after[kept], log_prob_form)
        x = x_next
    return Trajectory(x, states, steps.to(x.device), sigmas, log_probs)


def replay_transition(
    velocity: VelocityFn,
    x: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    cond: Conditioning,
    *,
    kernel: KernelName,
    level: float,
    sigma_cap: float,
) -> tuple[Gaussian, Tensor]:
    """Recomputes recorded steps under other weights: their transitions and the velocities (n, C, *S) behind them."""
    v = velocity(x.float(), sigma, cond).float()
    return kernels.transition(kernel, x.float(), v, sigma, sigma_next, level=level, sigma_cap=sigma_cap), v


def _window_masks(
    windows: Sequence[StepWindow] | None, batch: int, num_steps: int, kernel: str, level: float
) -> tuple[Tensor, Tensor]:
    """Stochastic steps as (B, T) bool and recorded steps as (B, K) int64, both on the CPU."""
    stochastic = torch.zeros(batch, num_steps, dtype=torch.bool)
    if windows is None:
        return stochastic, torch.zeros(batch, 0, dtype=torch.int64)
    if kernel == "ode" or level <= 0:
        raise ValueError(
            f"integrate: kernel {kernel!r} with level {level} has no noise in the stochastic window; choose flow, "
            "dance, cps or sage with a level above 0"
        )
    if len(windows) != batch or len({window.trained.shape[0] for window in windows}) != 1:
        raise ValueError(
            f"integrate: {len(windows)} windows for {batch} samples, recording "
            f"{sorted({w.trained.shape[0] for w in windows})} steps; expected one window per sample, all of one length"
        )
    for b, window in enumerate(windows):
        inside = (window.stochastic >= 0) & (window.stochastic < num_steps)
        if not bool(inside.all()) or not bool(torch.isin(window.trained, window.stochastic).all()):
            raise ValueError(
                f"integrate: window of sample {b} has stochastic steps {window.stochastic.tolist()} and trained steps "
                f"{window.trained.tolist()} on a {num_steps}-step grid; expected trained within stochastic within grid"
            )
        stochastic[b, window.stochastic] = True
    return stochastic, torch.stack([window.trained for window in windows]).to(torch.int64)
