"""From prompts to scored samples, and from pairs to examples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowalign.core import guidance, rng, sampling
from flowalign.data.pairs import PairData, Pairs, keyed_batch
from flowalign.data.prompts import Prompt, PromptData, SampleId
from flowalign.models.base import Model
from flowalign.rewards import combine
from flowalign.rewards.background import Background
from flowalign.rewards.combine import WeightedReward
from flowalign.training.distributed import Workers
from flowalign.types import Combination, Conditioning, Examples, Policy, Rollout, RolloutPlan, Scores, Trajectory


class PromptCache:
    """Conditioning of each text, computed once and kept on the CPU.

    Texts are encoded one at a time: an embedding must not depend on which other texts came along, or results would
    depend on the number of processes.

    Args:
        negative: text that guidance steers away from; None = encode none.
        size: most texts kept; the least recently used go first.
    """

    def __init__(self, model: Model, negative: str | None = None, size: int = 8192) -> None:
        self._model, self._negative, self._size = model, negative, size
        self._kept: OrderedDict[str, Conditioning] = OrderedDict()

    def __call__(self, texts: Sequence[str], device: torch.device | str) -> Conditioning:
        """Conditioning of ``texts``, in order, on ``device``."""
        return Conditioning.cat([self._one(text) for text in texts]).to(device)

    def _one(self, text: str) -> Conditioning:
        if text not in self._kept:
            with torch.no_grad():
                self._kept[text] = self._model.encode([text], self._negative).to("cpu")
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
        self._kept.move_to_end(text)
        return self._kept[text]


class LatentCache:
    """Clean latents of each pair, encoded once and kept on the CPU in float32."""

    def __init__(self, model: Model, pairs: Pairs) -> None:
        self._model, self._pairs = model, pairs
        self._kept: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, indices: Sequence[int], device: torch.device | str) -> Tensor:
        """(len(indices), C, *S) on ``device``."""
        for i in indices:
            if i not in self._kept:  # one at a time, for the same reason as texts
                self._kept[i] = self._model.encode_media(self._pairs.images([i]).to(device))[0].float().cpu()
        return torch.stack([self._kept[i] for i in indices]).to(device)


def read_examples(
    data: PairData,
    latents: LatentCache,
    cache: PromptCache,
    workers: Workers,
    *,
    iteration: int,
    seed: int,
    worse: LatentCache | None = None,
) -> Examples:
    """This rank's pairs of an iteration: position j of all belongs to rank j mod W, as in sampling.

    ``worse``: latents of ``data.worse``, where there are any.
    """
    chosen = list(enumerate(keyed_batch(len(data.pairs), data.batch_size, iteration, seed)))
    own = chosen[workers.rank :: workers.world_size]
    indices = [i for _, i in own]
    texts = tuple(data.pairs.texts[i] for i in indices)
    return Examples(
        prompts=texts,
        keys=tuple(rng.key(seed, iteration, "pair", position) for position, _ in own),
        cond=cache(texts, workers.device),
        clean=latents(indices, workers.device),
        worse=None if worse is None else worse(indices, workers.device),
    )


@torch.no_grad()
def collect(
    model: Model,
    policy: Policy,
    plan: RolloutPlan,
    cache: PromptCache,
    prompts: Sequence[Prompt],
    samples: Sequence[SampleId],
    *,
    iteration: int,
    seed: int,
    shape: Sequence[int],
    batch_size: int,
    device: torch.device | str,
    drawn: Callable[[Sequence[SampleId], Tensor], None] | None = None,
) -> Rollout:
    """Draws ``samples``. Every random number is keyed by (seed, iteration, prompt, repeat), so that a sample does not
    depend on ``batch_size`` or on which rank draws it, beyond the rounding of batched arithmetic.

    Args:
        shape: (C, *S) of the latents.
        batch_size: samples per forward pass.
        drawn: called with the samples and the media of each forward pass.
    """
    parts = []
    for chosen in (samples[i : i + batch_size] for i in range(0, len(samples), batch_size)):
        parts.append(_chunk(model, policy, plan, cache, prompts, chosen, iteration, seed, shape, device))
        if drawn is not None:
            drawn(chosen, parts[-1][2])
    trajectories = [part[0] for part in parts]
    trajectory = Trajectory(
        final=torch.cat([t.final for t in trajectories]),
        states=torch.cat([t.states for t in trajectories]),
        steps=torch.cat([t.steps for t in trajectories]),
        sigmas=plan.sigmas,
        log_probs=torch.cat([t.log_probs for t in trajectories]),
    )
    return Rollout(
        prompts=tuple(prompts[s.prompt].text for s in samples),
        group=torch.tensor([s.prompt for s in samples]),
        keys=tuple(rng.key(seed, iteration, s.prompt, s.repeat) for s in samples),
        cond=Conditioning.cat([part[1] for part in parts]),
        trajectory=trajectory,
        media=torch.cat([part[2] for part in parts]),
    )


def _chunk(
    model: Model,
    policy: Policy,
    plan: RolloutPlan,
    cache: PromptCache,
    prompts: Sequence[Prompt],
    samples: Sequence[SampleId],
    iteration: int,
    seed: int,
    shape: Sequence[int],
    device: torch.device | str,
) -> tuple[Trajectory, Conditioning, Tensor]:
    cond = cache([prompts[s.prompt].text for s in samples], device)
    own = [rng.generator(seed, iteration, s.prompt, s.repeat) for s in samples]
    shared = [rng.generator(seed, iteration, s.prompt, "start") for s in samples]
    # Keyed by the group: samples whose stochastic steps differ are not comparable.
    window = plan.window
    windows = window and [window(rng.generator(seed, iteration, "window", s.prompt)) for s in samples]
    trajectory = sampling.integrate(
        guidance.classifier_free(policy.behaviour, plan.guidance),
        rng.normal(shared if plan.share_noise else own, shape, device),
        cond,
        plan.sigmas,
        kernel=plan.kernel,
        level=plan.level,
        windows=windows,
        noise=None if window is None else lambda: rng.normal(own, shape, device),
        storage=plan.storage,
        log_prob_form=plan.log_prob,
    )
    media = model.decode(trajectory.final).float().clamp(0, 1)
    return trajectory, cond, media


def score(
    rewards: Sequence[WeightedReward],
    rollout: Rollout,
    data: PromptData,
    samples: Sequence[SampleId],
    workers: Workers,
    *,
    max_invalid: float,
    combination: Combination = "sum",
    background: Background | None = None,
) -> tuple[Scores, float]:
    """Scores this rank's samples and gathers those of all ranks, in the order of positions.

    Args:
        combination: see `core.combination.total`.
        background: what the media of ``samples`` were given to, if they were.

    Returns:
        The scores, and the share of samples that some reward could not score.

    Raises:
        FlowAlignError: on every rank, when more than ``max_invalid`` of the samples have no score.
    """
    if background is not None:
        columns = background.result()
    else:
        metadata = [data.prompts[s.prompt].metadata for s in samples]
        columns = combine.score(rewards, rollout.media, rollout.prompts, metadata)
    local = torch.tensor([s.position for s in samples])
    order = workers.gather(local).argsort()
    values = {name: workers.gather(value)[order] for name, value in columns.values.items()}
    missing = torch.full((len(samples),), torch.nan)
    subscores = {
        name: workers.gather(columns.subscores.get(name, missing))[order] for name in workers.union(columns.subscores)
    }
    group = workers.gather(rollout.group.cpu())[order]
    texts = [data.prompts[i].text for i in group.tolist()]
    invalid = combine.check_invalid_share(values, texts, max_invalid, columns.reasons)
    gated = combine.gated(rewards, values)
    return Scores(values, combine.weights(rewards), group, local, subscores, combination, gated), invalid
