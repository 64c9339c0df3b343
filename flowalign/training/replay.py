"""The check before the first update: replaying the samples must give their own densities back.

The ratio of the current policy to the one that drew the samples must then be 1. If it is not, every advantage is
weighted with noise and the clip range cuts at random, yet training goes on and looks alive. So a run stops, and names
the culprit by changing one thing at a time until the ratio is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from flowalign.core import guidance, kernels, sampling
from flowalign.training.distributed import Workers
from flowalign.training.learn import Learner
from flowalign.training.source import Drawn
from flowalign.types import Batch, Conditioning, FlowAlignError, Policy, Rollout, RolloutPlan

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
PASSES = 0.1
"""Share of the deviation that may be left for a change of one thing to count as the cause."""

DEFAULT_TOLERANCE = 1e-4
"""Of |ratio - 1| for algorithms that do not clip."""


@runtime_checkable
class Replays(Protocol):
    """An algorithm with importance ratios. Its items are named x, x_next, sigma, sigma_next, log_prob."""

    def replay(self, policy: Policy, batch: Batch) -> Tensor:
        """Log-ratio (n,) of the current weights to those that drew the samples."""
        ...


def fingerprint(module: nn.Module) -> dict[str, tuple[float, float]]:
    """Two sums of every trainable parameter, to notice that weights changed."""
    return {
        name: (float(p.detach().double().sum()), float(p.detach().double().square().sum()))
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def check_windows(rollout: Rollout) -> None:
    """Refuses samples of one prompt with different recorded steps: their rewards differ for that reason alone.

    Raises:
        FlowAlignError: names the prompt and the steps.
    """
    steps = rollout.trajectory.steps.cpu()
    first: dict[int, int] = {}
    for b, group in enumerate(rollout.group.tolist()):
        a = first.setdefault(group, b)
        if not torch.equal(steps[a], steps[b]):
            raise FlowAlignError(
                f"replay check: windows are mixed within the group of {rollout.prompts[b]!r}: steps "
                f"{steps[a].tolist()} and {steps[b].tolist()}, expected one window per group; key the window's "
                "generator by the prompt alone"
            )


def check(
    module: nn.Module,
    learner: Learner,
    drawn: Drawn,
    batch: Batch,
    index: Tensor,
    before: Mapping[str, tuple[float, float]],
    rollout_batch_size: int,
) -> float:
    """Runs `ReplayCheck` on the items ``index`` of the first update; 0 where the algorithm has no ratios.

    Raises:
        FlowAlignError: the ratio is not 1.
    """
    algorithm = learner.algorithm
    if not isinstance(algorithm, Replays) or drawn.plan is None or not isinstance(drawn.samples, Rollout):
        return 0.0
    parts = torch.split(index, learner.micro_batch_size) if index.numel() else ()
    tolerance = float(getattr(getattr(algorithm, "settings", None), "clip_range", DEFAULT_TOLERANCE))
    return ReplayCheck(
        module=module,
        policy=learner.policy,
        algorithm=algorithm,
        plan=drawn.plan,
        rollout=drawn.samples,
        batch=batch,
        micro_batches=parts,
        before=before,
        tolerance=tolerance,
        rollout_batch_size=rollout_batch_size,
    ).run(learner.workers)


@dataclass(frozen=True)
class ReplayCheck:
    """All that a replay depends on.

    Args:
        module: the transformer, unwrapped.
        policy, algorithm, plan, rollout: as in the iteration.
        batch: what the algorithm made of the rollout.
        micro_batches: the learner's own split of the first update.
        before: `fingerprint` of the module when the samples were drawn.
        tolerance: largest |ratio - 1|; the clip range.
        rollout_batch_size: samples per forward pass when they were drawn.
    """

    module: nn.Module
    policy: Policy
    algorithm: Replays
    plan: RolloutPlan
    rollout: Rollout
    batch: Batch
    micro_batches: Sequence[Tensor]
    before: Mapping[str, tuple[float, float]]
    tolerance: float
    rollout_batch_size: int

    @torch.no_grad()
    def run(self, workers: Workers) -> float:
        """The largest |ratio - 1| over all ranks.

        Raises:
            FlowAlignError: above the tolerance or not finite, with the cause by name.
        """
        check_windows(self.rollout)
        own = self.deviation(self.micro_batches)
        worst = float(workers.reduce(torch.tensor(own).nan_to_num(torch.inf).double(), "max"))
        if worst <= self.tolerance:
            return worst
        if own <= self.tolerance:
            raise FlowAlignError(
                f"replay check: max |ratio - 1| = {worst:.8f} on another process, whose message says why"
            )
        raise FlowAlignError(
            f"replay check: before the first update max |ratio - 1| = {own:.8f}, expected at most the clip range "
            f"{self.tolerance:g}: {self.culprit()}"
        )

    def deviation(self, parts: Sequence[Tensor], replay: Callable[[Batch], Tensor] | None = None) -> float:
        """Largest |ratio - 1| when items are replayed in these parts; infinite where not finite."""
        replay = replay or (lambda batch: self.algorithm.replay(self.policy, batch))
        worst = 0.0
        for part in parts:
            off = torch.expm1(replay(self.batch.select(part)).float()).abs()
            worst = max(worst, float(off.nan_to_num(torch.inf, torch.inf).amax()))
        return worst

    def mended(self, parts: Sequence[Tensor], replay: Callable[[Batch], Tensor] | None = None) -> bool:
        """Whether this way of replaying brings the ratio back to 1."""
        limit = max(self.tolerance * PASSES, min(self.tolerance, 1e-6))
        return self.deviation(parts, replay) <= limit

    # ------------------------------------------------------------ one thing at a time

    def culprit(self) -> str:
        """What is wrong and what to do, as the second half of a sentence."""
        for cause in (
            self._not_finite,
            self._dropout,
            self._weights,
            self._storage,
            self._sigma,
            self._autocast,
            self._batch_size,
            self._guidance,
            self._rounding,
        ):
            found = cause()
            if found:
                return found
        return (
            "the cause was not found (not dropout, weights, storage, step index, autocast, batch size or guidance); "
            "compare the algorithm's replay with core.sampling.integrate: kernel, level, conditioning, log_prob form"
        )

    def _first(self) -> Sequence[Tensor]:
        """Enough items to see a cause: the first micro-batches that are off."""
        off = [part for part in self.micro_batches if self.deviation([part]) > self.tolerance]
        return off[:2] or self.micro_batches[:2]

    def _not_finite(self) -> str | None:
        for name, value in self.batch.items.items():
            if value.is_floating_point() and not bool(torch.isfinite(value[torch.cat(list(self.micro_batches))]).all()):
                return f"the recorded {name!r} is not finite; look for overflow in the rollout, or use precision fp32"
        return None

    def _dropout(self) -> str | None:
        active = [name for name, m in self.module.named_modules() if isinstance(m, DROPOUTS) and m.training and m.p > 0]
        part = self._first()[0]
        first, second = (self.algorithm.replay(self.policy, self.batch.select(part)) for _ in range(2))
        if not active and torch.equal(first, second):
            return None
        if not active:
            return (
                "two replays of one micro-batch differ; something in the transformer draws random numbers, call eval()"
            )
        return (
            f"dropout is active in train mode ({active[0]} and {len(active) - 1} more); call eval() and set dropout to "
            "0"
        )

    def _weights(self) -> str | None:
        now = fingerprint(self.module)
        changed = [name for name in self.before if now.get(name) != self.before[name]]
        if not changed and now.keys() == self.before.keys():
            return None
        example = changed[0] if changed else next(iter(now.keys() ^ self.before.keys()))
        return (
            f"weights changed between rollout and replay ({example} and {max(len(changed) - 1, 0)} more of "
            f"{len(now)}); prepare() and rewards must not touch them, and both must use the same weight set"
        )

    def _storage(self) -> str | None:
        dtype = self.plan.storage
        for name in ("x", "x_next"):
            value = self.batch.items[name]
            if not torch.equal(value.to(dtype).to(value.dtype), value):
                return (
                    f"states {name!r} are not representable in storage {dtype}: round them through it during the "
                    "rollout"
                )
        states = self.rollout.trajectory.states
        if states.dtype.itemsize < dtype.itemsize or self.batch.items["x"].dtype.itemsize < dtype.itemsize:
            return f"states are stored in {states.dtype}, but the plan says {dtype}: store what was scored"
        return None

    def _sigma(self) -> str | None:
        items, trajectory = self.batch.items, self.rollout.trajectory
        for j in torch.cat(list(self._first())).tolist():
            b = int(self.batch.sample[j])
            same = (trajectory.states[b, :, 0].float() == items["x"][j].float()).flatten(1).all(1).nonzero().flatten()
            if not same.numel():
                return (
                    f"item {j} is not a recorded state of its sample {b}; check how prepare() orders samples and steps"
                )
            step = int(trajectory.steps[b, same[0]])
            recorded = (float(self.plan.sigmas[step]), float(self.plan.sigmas[step + 1]))
            replayed = (float(items["sigma"][j]), float(items["sigma_next"][j]))
            if recorded != replayed:
                return (
                    f"wrong step index: item {j} is step {step}, drawn from sigma {recorded[0]:.6f} to "
                    f"{recorded[1]:.6f}, but replayed from {replayed[0]:.6f} to {replayed[1]:.6f}; use sigmas[steps] "
                    "in float32"
                )
        return None

    def _autocast(self) -> str | None:
        device = self.batch.sample.device.type
        enabled = torch.is_autocast_enabled(device)
        tries = [None] if enabled else [torch.bfloat16, torch.float16]
        for dtype in tries:

            def replay(batch: Batch, dtype: torch.dtype | None = dtype) -> Tensor:
                with torch.autocast(device, enabled=dtype is not None, dtype=dtype):
                    return self.algorithm.replay(self.policy, batch)

            if self.mended(self._first(), replay):
                drawn = "without autocast" if dtype is None else f"under autocast {dtype}"
                now = f"under autocast {torch.get_autocast_dtype(device)}" if enabled else "without"
                return f"autocast precision differs: samples were drawn {drawn} and replayed {now}; use one for both"
        return None

    def _batch_size(self) -> str | None:
        """Replays exactly the batches of the rollout: one step of the samples of one chunk at a time."""
        steps = self.rollout.trajectory.steps.shape[1]
        chunk = self.batch.sample // self.rollout_batch_size
        order = torch.arange(len(self.batch), device=chunk.device)
        rank_in_sample = order - torch.searchsorted(self.batch.sample.contiguous(), self.batch.sample.contiguous())
        parts = [
            order[(chunk == c) & (rank_in_sample == k)] for c in sorted(set(chunk.tolist()))[:2] for k in range(steps)
        ]
        parts = [part for part in parts if part.numel()]
        if self.deviation(parts) <= self.tolerance and self.mended(parts):
            return (
                f"results depend on the batch size: batches of {self.rollout_batch_size} samples as in the rollout "
                f"replay exactly, the learner's of {self.micro_batches[0].numel()} items do not; set "
                "training.micro_batch_size to training.rollout_batch_size, or use precision fp32"
            )
        return None

    def _guidance(self) -> str | None:
        """Replays by the plan's own words, apart from the algorithm."""
        scale = self.plan.guidance
        if self.mended(self._first(), lambda batch: self._by_plan(batch, scale)):
            rows = self._rows_per_item()
            if rows == 1 and scale != 1:
                return (
                    f"guidance differs: samples were drawn with guidance {scale:g} and replayed without; use the same"
                )
            if rows == 2 and scale == 1:
                return "guidance differs: samples were drawn without guidance and replayed with it; use the same"
            return (
                "the algorithm replays other than its plan says, while the plan replays exactly; compare its guidance "
                f"(plan: {scale:g}), kernel ({self.plan.kernel}), level ({self.plan.level:g}) and log_prob form "
                f"({self.plan.log_prob})"
            )
        if scale != 1 and self.mended(self._first(), lambda batch: self._by_plan(batch, 1.0)):
            return f"guidance differs: samples were drawn without guidance, the plan and the replay have {scale:g}"
        return None

    def _rounding(self) -> str | None:
        """Rounding by e after the log-density moves the log-ratio by -mean(2 s z e + e^2) / (2 s^2).

        Over noise z of D elements, with q the rms of e, its rms is sqrt(q^2 / (s^2 D) + q^4 / (4 s^4)).
        """
        if self.plan.storage == torch.float32:
            return None
        batch = self.batch.select(torch.cat(list(self._first())))
        x_next = batch.items["x_next"].float()
        unit = torch.finfo(self.plan.storage).eps * torch.exp2(x_next.abs().clamp(min=1e-30).log2().floor())
        q_square = (unit.square() / 12).flatten(1).mean(1)
        s_square = self._gaussian(batch, self.plan.guidance).std.float().flatten().square()
        per_unit = 1 / (2 * s_square) if self.plan.log_prob == "gaussian" else torch.ones_like(s_square)
        dimension = x_next[0].numel()
        moved = (4 * s_square * q_square / dimension + q_square.square()) * per_unit.square()
        expected = float(moved.mean().sqrt())
        observed = float(self.algorithm.replay(self.policy, batch).square().mean().sqrt())
        if 0.5 < observed / expected < 2:
            return (
                f"states were rounded to {self.plan.storage} after their log-density was taken (log-ratios of rms "
                f"{observed:.2e}, rounding alone gives {expected:.2e}); round first, or use storage float32"
            )
        return None

    # ------------------------------------------------------------ replay without the algorithm

    def _gaussian(self, batch: Batch, scale: float) -> kernels.Gaussian:
        gaussian, _ = sampling.replay_transition(
            guidance.classifier_free(self.policy.current, scale),
            batch.items["x"],
            batch.items["sigma"],
            batch.items["sigma_next"],
            batch.cond.select(batch.sample),
            kernel=self.plan.kernel,
            level=self.plan.level,
            sigma_cap=float(self.plan.sigmas[1]),
        )
        return gaussian

    def _by_plan(self, batch: Batch, scale: float) -> Tensor:
        log_prob = kernels.log_prob(self._gaussian(batch, scale), batch.items["x_next"].float(), self.plan.log_prob)
        return log_prob - batch.items["log_prob"]

    def _rows_per_item(self) -> int:
        """How many rows of velocity the algorithm asks for per item: 2 with guidance."""
        part = self.micro_batches[0]
        rows: list[int] = []

        def spy(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            rows.append(x.shape[0])
            return self.policy.current(x, sigma, cond)

        self.algorithm.replay(replace(self.policy, current=spy), self.batch.select(part))
        return rows[0] // part.numel()
