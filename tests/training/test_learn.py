"""Optimiser steps against plain torch."""

from __future__ import annotations

import pytest
import torch

from flowalign.models.lora import WeightSets
from flowalign.training import learn
from flowalign.types import Batch, Conditioning, FlowAlignError, Policy, Terms
from tests.training.toy import ToyModel, optimizer, training


class Squares:
    """Loss (v - target)^2 and a second term; a metric per item."""

    updates = 2

    def losses(self, policy, batch):
        v = policy.current(batch.items["x"], batch.items["sigma"], batch.cond.select(batch.sample))
        error = (v - batch.items["target"]).square().flatten(1).mean(1)
        return Terms({"error": error, "size": 0.1 * v.square().flatten(1).mean(1)}, {"item": batch.items["sigma"]})


def batch(samples=6, steps=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    n = samples * steps
    items = {
        "x": torch.randn(n, 3, 4, 4, generator=g),
        "target": torch.randn(n, 3, 4, 4, generator=g),
        "sigma": torch.rand(n, generator=g),
    }
    weight = torch.rand(n, generator=g) + 0.5
    weight[torch.tensor([1, 4, 5, 13])] = 0
    sample = torch.arange(samples).repeat_interleave(steps)
    return Batch(items, sample, Conditioning({"text": torch.randn(samples, 4, generator=g)}), weight)


def learner(workers, model, tmp_path, opt=None, algorithm=None, **changes):
    weights = WeightSets(model.transformer)
    weights.copy("ema")
    weights.copy("reference")
    module = workers.prepare(model.transformer)
    policy = learn.make_policy(model, module, workers, {"reference": lambda: weights.use("reference")})
    parameters = learn.trainable(model.transformer)
    made = learn.Learner(
        algorithm or Squares(),
        policy,
        module,
        parameters,
        opt or optimizer(),
        workers,
        training(tmp_path, **changes),
        weights,
    )
    return made, weights


def by_hand(model, data, index, lr, steps=1, max_norm=1.0):
    """The same step in one go, without micro-batches; returns loss, terms, norm."""
    opt = torch.optim.AdamW(model.transformer.parameters(), lr=lr, weight_decay=1e-4)
    policy = Policy(lambda x, s, c: model.velocity(model.transformer, x, s, c), None)
    chosen = data.select(index)
    terms = Squares().losses(policy, chosen)
    means = {k: float((v.detach() * chosen.weight).sum() / chosen.weight.sum()) for k, v in terms.losses.items()}
    loss = sum((v * chosen.weight).sum() / chosen.weight.sum() for v in terms.losses.values())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.transformer.parameters(), max_norm)
    opt.step()
    return means, float(norm)


@pytest.mark.parametrize("micro", [1, 2, 4, 100])
def test_a_step_equals_one_by_hand_whatever_the_micro_batch(workers, tmp_path, micro: int) -> None:
    model, twin, data = ToyModel(), ToyModel(), batch()
    made, _ = learner(workers, model, tmp_path, optimizer(lr=1e-2), micro_batch_size=micro)
    index = learn.split_updates(data, 2, 6)[0]
    metrics = made.update(data, index, 0)
    means, norm = by_hand(twin, data, index, 1e-2)
    assert metrics["loss/error"] == pytest.approx(means["error"], rel=1e-5)
    assert metrics["loss/size"] == pytest.approx(means["size"], rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["item_max"] == pytest.approx(float(data.items["sigma"][index].max()))
    for p, q in zip(model.transformer.parameters(), twin.transformer.parameters(), strict=True):
        assert torch.allclose(p, q, atol=2e-6)


def test_updates_split_samples_and_drop_items_without_weight() -> None:
    data = batch()
    first, second = learn.split_updates(data, 2, 6)
    assert first.tolist() == [i for i in range(9) if i not in (1, 4, 5)]
    assert second.tolist() == [i for i in range(9, 18) if i != 13]


def test_padding_has_no_weight_and_does_not_move_the_weights(workers, tmp_path) -> None:
    data = batch()
    index = learn.split_updates(data, 2, 6)[0]
    parts = list(learn.micro_batches(data, index, 4, 5))
    assert [len(p) for p in parts] == [4, 2, 1, 1, 1]
    assert [float(p.weight.sum()) > 0 for p in parts] == [True, True, False, False, False]
    empty = list(learn.micro_batches(data, index[:0], 4, 2))
    assert [float(p.weight.sum()) for p in empty] == [0, 0]


def test_an_update_without_weight_takes_no_step(workers, tmp_path) -> None:
    model = ToyModel()
    made, _ = learner(workers, model, tmp_path)
    before = [p.clone() for p in model.transformer.parameters()]
    assert made.update(batch(), torch.zeros(0, dtype=torch.int64), 0) is None
    assert made.steps == 0
    assert all(torch.equal(p, q) for p, q in zip(before, model.transformer.parameters(), strict=True))


def test_warmup_clipping_and_averaged_weights(workers, tmp_path) -> None:
    model, data = ToyModel(), batch()
    made, weights = learner(
        workers, model, tmp_path, optimizer(lr=4e-2, warmup=4, max_grad_norm=1e-3), ema_decay=0.5, ema_every=2
    )
    index = learn.split_updates(data, 1, 6)[0]
    expected = {k: v.clone() for k, v in weights.state_dict("ema").items()}
    for step in range(1, 7):
        made.update(data, index, 0)
        assert made.optimizer.param_groups[0]["lr"] == pytest.approx(4e-2 * min(1, step / 4))
        if step % 2 == 0:
            now = dict(model.transformer.named_parameters())
            expected = {k: 0.5 * v + 0.5 * now[k].detach() for k, v in expected.items()}
    for k, v in weights.state_dict("ema").items():
        assert torch.allclose(v, expected[k], atol=1e-6)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run_before_the_step(workers, tmp_path, where: str) -> None:
    class Broken(Squares):
        def losses(self, policy, batch):
            terms = super().losses(policy, batch)
            if where == "loss":
                return Terms({**terms.losses, "bad": terms.losses["error"] * torch.nan})
            size = terms.losses["size"]
            return Terms({"error": terms.losses["error"], "root": (size - size.detach()).abs().sqrt()})

    model = ToyModel()
    made, _ = learner(workers, model, tmp_path, algorithm=Broken())
    before = [p.clone() for p in model.transformer.parameters()]
    words = "iteration 7: loss term 'loss/bad' is nan" if where == "loss" else "iteration 7: gradient 'norm' is nan"
    with pytest.raises(FlowAlignError, match=words):
        made.update(batch(), torch.arange(6), 7)
    assert all(torch.equal(p, q) for p, q in zip(before, model.transformer.parameters(), strict=True))
    assert made.steps == 0


def test_reference_gives_no_gradient_and_leaves_the_current_graph_intact(workers, tmp_path) -> None:
    class Pull(Squares):
        def losses(self, policy, batch):
            cond = batch.cond.select(batch.sample)
            current = policy.current(batch.items["x"], batch.items["sigma"], cond)
            reference = policy.reference(batch.items["x"], batch.items["sigma"], cond)
            assert current.requires_grad and not reference.requires_grad
            return Terms({"pull": (current - reference).square().flatten(1).mean(1)})

    model, data = ToyModel(), batch()
    made, weights = learner(workers, model, tmp_path, algorithm=Pull())
    index = torch.arange(6)
    assert made.update(data, index, 0)["loss/pull"] == 0
    with torch.no_grad():
        model.transformer.out.bias.add_(1.0)
    assert made.update(data, index, 0)["loss/pull"] == pytest.approx(1.0, rel=0.1)
    assert torch.equal(weights.state_dict("reference")["out.bias"], ToyModel().transformer.out.bias)


def test_trainable_parameters_must_be_there_and_float32() -> None:
    model = ToyModel()
    with pytest.raises(FlowAlignError, match=r"inside\.weight is torch\.bfloat16"):
        learn.trainable(model.transformer.to(torch.bfloat16))
    with pytest.raises(FlowAlignError, match="no parameter is trainable"):
        learn.trainable(ToyModel().transformer.requires_grad_(False))
