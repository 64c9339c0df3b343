"""The replay check passes clean runs, and names each planted bug."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from flowalign.algorithms.flow_grpo import FlowGRPO, FlowGRPOSettings
from flowalign.core import guidance, kernels, sampling
from flowalign.data.prompts import KRepeatSampler, Prompt, PromptData
from flowalign.rewards.combine import WeightedReward
from flowalign.training import replay
from flowalign.training.collect import PromptCache, collect, score
from flowalign.training.learn import make_policy, split_updates
from flowalign.types import FlowAlignError, Policy
from tests.training.toy import PROMPTS, ColorReward, ToyModel

DATA = PromptData([Prompt(text) for text in PROMPTS], per_iteration=2, group_size=4)


class Case:
    """One iteration up to the check, whose parts a test may spoil."""

    def __init__(self, workers, model=None, rollout_batch_size=4, **changes) -> None:
        self.workers, self.model = workers, model or ToyModel()
        self.rollout_batch_size = rollout_batch_size
        values = {"num_steps": 6, "window": "random", "window_size": 3, "guidance": 1.0, **changes}
        self.algorithm = FlowGRPO(FlowGRPOSettings(name="flow_grpo", **values), shift=3.0)
        self.plan = self.algorithm.plan(0)
        self.model.transformer.eval()
        self.policy = make_policy(self.model, self.model.transformer, workers, {"reference": nullcontext})
        self.samples = KRepeatSampler(len(PROMPTS), 2, 4, 1, seed=0, updates=2).samples(0, 0)

    def draw(self, policy=None, plan=None):
        self.before = replay.fingerprint(self.model.transformer)
        self.rollout = collect(
            self.model,
            policy or self.policy,
            plan or self.plan,
            PromptCache(self.model, ""),
            DATA.prompts,
            self.samples,
            iteration=0,
            seed=0,
            shape=(3, 4, 4),
            batch_size=self.rollout_batch_size,
            device="cpu",
        )
        return self

    def prepare(self):
        rewards = [WeightedReward("color", ColorReward())]
        scores, _ = score(rewards, self.rollout, DATA, self.samples, self.workers, max_invalid=0)
        self.batch = self.algorithm.prepare(self.policy, self.rollout, scores)
        return self

    def check(self, micro=5, policy=None, tolerance=1e-4) -> float:
        index = split_updates(self.batch, 2, len(self.samples))[0]
        return replay.ReplayCheck(
            module=self.model.transformer,
            policy=policy or self.policy,
            algorithm=self.algorithm,
            plan=self.plan,
            rollout=self.rollout,
            batch=self.batch,
            micro_batches=torch.split(index, micro),
            before=self.before,
            tolerance=tolerance,
            rollout_batch_size=self.rollout_batch_size,
        ).run(self.workers)

    def failure(self, **kwargs) -> str:
        """The one sentence that the check refuses this case with."""
        with pytest.raises(FlowAlignError) as caught:
            self.check(**kwargs)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"guidance": 3.0},
        {"storage": "bfloat16"},
        {"window": "full"},
        {"kernel": "cps", "level": 0.8, "log_prob": "unscaled"},
        {"kernel": "dance", "level": 0.3, "share_noise": True},
        {"kernel": "sage", "level": 0.5, "schedule": "linear_shift"},
    ],
)
def test_clean_runs_pass(workers, changes: dict) -> None:
    case = Case(workers, **changes).draw().prepare()
    assert case.check() <= 2e-6
    case.rollout_batch_size = 4
    assert Case(workers, rollout_batch_size=8, **changes).draw().prepare().check(micro=8) <= 2e-6


def test_the_same_batches_give_exactly_one(workers) -> None:
    """Window of one step, so that an update's items are one rollout batch."""
    case = Case(workers, window_size=1).draw().prepare()
    assert case.check(micro=4) == 0.0


def test_dropout(workers) -> None:
    case = Case(workers, model=ToyModel(dropout=0.3)).draw().prepare()
    case.model.transformer.train()
    assert "dropout is active in train mode (dropout and 0 more)" in case.failure()


def test_other_randomness(workers) -> None:
    case = Case(workers).draw().prepare()
    noisy = replace(case.policy, current=lambda x, s, c: case.policy.current(x + 0.1 * torch.randn_like(x), s, c))
    assert "two replays of one micro-batch differ" in case.failure(policy=noisy)


def test_changed_weights(workers) -> None:
    case = Case(workers).draw().prepare()
    with torch.no_grad():
        case.model.transformer.out.weight.mul_(1.1)
    assert "weights changed between rollout and replay (out.weight and 0 more of 8)" in case.failure()


def test_states_that_storage_cannot_hold(workers) -> None:
    case = Case(workers, storage="bfloat16")
    case.draw(plan=replace(case.plan, storage=torch.float32)).prepare()
    case.batch = replace(case.batch, items={**case.batch.items, "log_prob": case.batch.items["log_prob"] + 0.01})
    assert "states 'x' are not representable in storage torch.bfloat16" in case.failure()


def test_states_rounded_after_their_log_prob(workers) -> None:
    """As many published trainers do: score in float32, then store in bfloat16."""
    case = Case(workers, storage="bfloat16", kernel="dance", level=0.1)
    case.draw()
    states, steps, sigmas = case.rollout.trajectory.states.float(), case.rollout.trajectory.steps, case.plan.sigmas
    g, log_probs = torch.Generator().manual_seed(0), []
    states = states.clone()
    for b in range(8):
        for k in range(3):
            i = int(steps[b, k])
            gaussian, _ = sampling.replay_transition(
                case.policy.current, states[b, k, :1], sigmas[i : i + 1], sigmas[i + 1 : i + 2],
                case.rollout.cond.select(torch.tensor([b])), kernel="dance", level=0.1, sigma_cap=float(sigmas[1]),
            )  # fmt: skip
            exact = gaussian.mean + gaussian.std * torch.randn(gaussian.mean.shape, generator=g)
            log_probs.append(kernels.log_prob(gaussian, exact))
            states[b, k, 1] = exact[0].bfloat16().float()
    trajectory = replace(
        case.rollout.trajectory, states=states.bfloat16(), log_probs=torch.cat(log_probs).view(8, 3).detach()
    )
    case.rollout = replace(case.rollout, trajectory=trajectory)
    case.prepare()
    assert "rounded to torch.bfloat16 after their log-density was taken" in case.failure(tolerance=1e-6)


def test_states_stored_more_coarsely_than_planned(workers) -> None:
    case = Case(workers).draw().prepare()
    rounded = {k: case.batch.items[k].bfloat16() for k in ("x", "x_next")}
    case.batch = replace(case.batch, items={**case.batch.items, **rounded})
    assert "states are stored in" in case.failure()


def test_wrong_step_index(workers) -> None:
    case = Case(workers).draw().prepare()
    items = case.batch.items
    shifted = {k: items[k].roll(1) for k in ("sigma", "sigma_next")}
    case.batch = replace(case.batch, items={**items, **shifted})
    assert "wrong step index: item " in case.failure()


def test_states_of_another_sample(workers) -> None:
    case = Case(workers).draw().prepare()
    case.batch = replace(case.batch, sample=case.batch.sample.flip(0))
    assert "is not a recorded state of its sample" in case.failure()


def test_autocast(workers) -> None:
    case = Case(workers).draw().prepare()
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast precision differs: samples were drawn without autocast and replayed under" in case.failure()
    with torch.autocast("cpu", torch.bfloat16):
        case.draw().prepare()
    assert "drawn under autocast torch.bfloat16 and replayed without" in case.failure(tolerance=1e-5)


def test_batch_size(workers) -> None:
    """A velocity that depends on how many rows come with it, as some attention kernels' does."""
    case = Case(workers, window_size=1)
    plain = case.policy.current
    case.policy = Policy(lambda x, s, c: plain(x, s, c) * (1 + 0.01 * x.shape[0]), case.policy.reference)
    case.draw().prepare()
    assert case.check(micro=4) == 0.0
    assert "results depend on the batch size" in case.failure(micro=3)


def test_replay_without_the_guidance_of_the_rollout(workers) -> None:
    case = Case(workers, guidance=3.0).draw().prepare()
    case.algorithm.settings = replace(case.algorithm.settings, guidance=1.0)
    assert "samples were drawn with guidance 3 and replayed without" in case.failure()


def test_replay_with_guidance_that_the_rollout_had_not(workers) -> None:
    case = Case(workers).draw().prepare()
    case.algorithm.settings = replace(case.algorithm.settings, guidance=3.0)
    assert "samples were drawn without guidance and replayed with it" in case.failure()


def test_rollout_without_the_guidance_of_the_plan(workers) -> None:
    case = Case(workers, guidance=3.0)
    case.draw(plan=replace(case.plan, guidance=1.0)).prepare()
    assert "samples were drawn without guidance, the plan and the replay have 3" in case.failure()


def test_another_kernel_than_the_plan_says(workers) -> None:
    case = Case(workers).draw().prepare()
    case.algorithm.settings = replace(case.algorithm.settings, level=0.5)
    assert "the algorithm replays other than its plan says" in case.failure()


def test_mixed_windows(workers) -> None:
    case = Case(workers, window_size=1).draw().prepare()
    steps = case.rollout.trajectory.steps.clone()
    rows = (case.rollout.group == case.rollout.group[0]).nonzero().flatten()
    steps[rows[1]] += 1
    case.rollout = replace(case.rollout, trajectory=replace(case.rollout.trajectory, steps=steps))
    assert "windows are mixed within the group of" in case.failure()


def test_not_finite(workers) -> None:
    case = Case(workers).draw().prepare()
    log_prob = case.batch.items["log_prob"].clone()
    log_prob[2] = torch.nan
    case.batch = replace(case.batch, items={**case.batch.items, "log_prob": log_prob})
    assert "the recorded 'log_prob' is not finite" in case.failure()


def test_an_unknown_cause_is_called_unknown(workers) -> None:
    case = Case(workers).draw().prepare()
    case.batch = replace(case.batch, items={**case.batch.items, "log_prob": case.batch.items["log_prob"] + 0.5})
    assert "the cause was not found" in case.failure()


def test_guided_velocity_is_what_the_check_thinks_it_is() -> None:
    """The planted guidance bugs rest on this."""
    calls = []

    def velocity(x, sigma, cond):
        calls.append(x.shape[0])
        return x

    cond = PromptCache(ToyModel(), "")(["square red"] * 2, "cpu")
    guidance.classifier_free(velocity, 3.0)(torch.zeros(2, 3, 4, 4), torch.ones(2), cond)
    guidance.classifier_free(velocity, 1.0)(torch.zeros(2, 3, 4, 4), torch.ones(2), cond)
    assert calls == [4, 2]
