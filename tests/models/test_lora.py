"""Adapters against their formula, and weight sets that never share memory with the model."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from flowalign.models import load_model
from flowalign.models.lora import WeightSets, add_lora, load_lora, lora_state, reference
from flowalign.training.export import export_lora
from flowalign.types import FlowAlignError
from tests.models import tiny_sd3


@pytest.fixture(scope="module")
def base(plain_folder):
    return load_model(plain_folder)


@pytest.fixture
def model(base):
    """A fresh transformer each time; all else is shared."""
    fresh = copy.copy(base)
    fresh._pipe = copy.copy(base._pipe)
    fresh._pipe.transformer = fresh.transformer = copy.deepcopy(base.transformer)
    return fresh


X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def velocity(model, transformer=None):
    sigma = torch.tensor([0.9, 0.3])
    return model.velocity(transformer or model.transformer, X, sigma, model.encode(["a red circle", "two cats"]))


@torch.no_grad()
def randomise(model, seed=0, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.transformer.named_parameters():
        if ".lora_B." in name:
            p.copy_(scale * torch.randn(p.shape, generator=generator))


@torch.no_grad()
def test_a_new_adapter_changes_nothing_and_switched_off_it_never_does(model):
    before = velocity(model)
    parameters = add_lora(model, rank=4, alpha=8)
    assert torch.equal(velocity(model), before)
    randomise(model)
    trained = velocity(model)
    assert (trained - before).abs().max() > 0.05
    with reference(model.transformer):
        assert torch.equal(velocity(model), before)
    assert torch.equal(velocity(model), trained)
    assert all(p.requires_grad for p in parameters)
    with pytest.raises(RuntimeError, match="inside"), reference(model.transformer):
        raise RuntimeError("inside")
    assert torch.equal(velocity(model), trained), "the adapter is on again after an error"


def test_reference_leaves_gradients_and_graphs_as_they_were(model):
    parameters = add_lora(model, rank=2, alpha=2)
    randomise(model)
    parameters[0].requires_grad_(False)
    loss = velocity(model).square().mean()
    with torch.no_grad(), reference(model.transformer):
        velocity(model)
    assert [p.requires_grad for p in parameters] == [False] + [True] * (len(parameters) - 1)
    found = torch.autograd.grad(loss, parameters[1:])
    expected = torch.autograd.grad(velocity(model).square().mean(), parameters[1:])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
@pytest.mark.parametrize(("rank", "alpha"), [(4, 8.0), (3, 1.5), (1, 7.0)])
def test_output_is_alpha_over_rank_b_a(model, rank, alpha):
    plain = copy.deepcopy(model.transformer)
    add_lora(model, rank=rank, alpha=alpha)
    randomise(model)
    weights = dict(model.transformer.named_parameters())
    for name, module in plain.named_modules():
        if f"{name}.lora_A.default.weight" in weights:
            a, b = (weights[f"{name}.lora_{part}.default.weight"] for part in "AB")
            module.weight += alpha / rank * b @ a
    assert (velocity(model) - velocity(model, plain)).abs().max() < 1e-5


def test_what_is_trained(model):
    parameters = add_lora(model, rank=4, alpha=8)
    trainable = {name: p for name, p in model.transformer.named_parameters() if p.requires_grad}
    layers = {name.split(".lora_")[0] for name in trainable}
    # The last block has no output of its context, and the second attention of the first block is not a target.
    joint = {"to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    first = {f"transformer_blocks.0.attn.{name}" for name in joint}
    second = {f"transformer_blocks.1.attn.{name}" for name in joint - {"to_add_out"}}
    assert layers == first | second
    assert len(parameters) == len(trainable) == 2 * len(layers)
    assert {p.dtype for p in parameters} == {torch.float32}
    assert lora_state(model.transformer).keys() == trainable.keys()


def test_initial_weights_depend_on_seed_and_layer_only(base):
    def drawn(targets=None, init="kaiming", seed=3, rank=64):
        model = copy.copy(base)
        model.transformer = copy.deepcopy(base.transformer)
        add_lora(model, rank=rank, alpha=8, targets=targets, seed=seed, init=init)
        return {name: p.detach() for name, p in model.transformer.named_parameters() if ".lora_A." in name}

    state = torch.random.get_rng_state()
    whole, again, other = drawn(), drawn(), drawn(seed=4)
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state must not move"
    part = drawn(targets=("attn.to_q",))
    assert len(part) == 2 and all(torch.equal(whole[name], value) for name, value in part.items())
    assert all(torch.equal(whole[name], again[name]) and not torch.equal(whole[name], other[name]) for name in whole)
    values = torch.stack(list(whole.values()))
    bound = 1 / math.sqrt(16)  # sqrt(6 / ((1 + 5) fan in)), as Kaiming's uniform with a = sqrt 5
    assert values.abs().max() <= bound and float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    values = torch.stack(list(drawn(init="gaussian").values()))
    assert float(values.std()) == pytest.approx(1 / 64, rel=0.05)


def test_targets_that_do_not_exist_or_cannot_be_adapted(model):
    with pytest.raises(FlowAlignError, match=r"no module .* is called 'to_w'.*did you mean 'to_[qkv]'"):
        add_lora(model, rank=4, alpha=4, targets=("to_w",))
    with pytest.raises(FlowAlignError, match=r"tuning\.targets: .*name linear or convolution layers"):
        add_lora(model, rank=4, alpha=4, targets=("norm_q",))


def test_a_second_adapter_is_refused(model):
    add_lora(model, rank=4, alpha=4)
    with pytest.raises(FlowAlignError, match="has an adapter already"):
        add_lora(model, rank=4, alpha=4)


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_model_with_float32_adapter(plain_folder, autocast):
    model = load_model(plain_folder, dtype=torch.bfloat16)
    with torch.no_grad():
        before = velocity(model)
    parameters = add_lora(model, rank=4, alpha=8, targets=("attn.to_q", "pos_embed.proj", "proj_out"))
    assert {p.dtype for p in parameters} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        found = velocity(model)
    assert found.dtype == torch.float32 and (found - before).abs().max() < 0.02 * before.abs().max()
    found.square().mean().backward()
    gradients = [p.grad for p in parameters]
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in gradients)
    assert sum(bool(g.any()) for g in gradients) == len(parameters) // 2, (
        "B is 0 at the start, so A has no gradient yet"
    )
    assert {p.dtype for p in model.transformer.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_activation_checkpointing_gives_the_same_gradients(model):
    parameters = add_lora(model, rank=2, alpha=2)
    randomise(model)
    expected = torch.autograd.grad(velocity(model).square().mean(), parameters)
    model.transformer.enable_gradient_checkpointing()
    found = torch.autograd.grad(velocity(model).square().mean(), parameters)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(found, expected, strict=True))


# ---------------------------------------------------------------- weight sets


def storages(tensors):
    return {t.untyped_storage().data_ptr() for t in tensors}


def test_sets_are_never_aliased(model):
    parameters = add_lora(model, rank=2, alpha=2)
    sets = WeightSets(model.transformer)
    sets.copy("a")
    sets.copy("b")
    sets.load("c", sets.state_dict("a"))
    names = [None, "a", "b", "c"]
    present = [sets.state_dict(name) for name in names]
    assert len(set().union(*(storages(s.values()) for s in present))) == 4 * len(parameters)
    old = {key: value.clone() for key, value in sets.state_dict("a").items()}
    with torch.no_grad():
        for p in parameters:
            p.add_(1)
    assert all(torch.equal(sets.state_dict(s)[key], old[key]) for s in "abc" for key in old)
    assert all(torch.equal(sets.state_dict()[key], old[key] + 1) for key in old)
    assert sets.names() == ["a", "b", "c"]
    sets.ema("b", 0.5)
    assert all(torch.equal(sets.state_dict(s)[key], old[key]) for s in "ac" for key in old)


@torch.no_grad()
def test_average_follows_its_formula():
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.copy_(torch.tensor([[1.0, -2.0]]))
    sets = WeightSets(layer)
    sets.copy("ema")
    history = [torch.tensor([[1.0, -2.0]])]
    for step in range(1, 6):
        layer.weight.copy_(torch.tensor([[1.0 + step, step**2]]))
        history.append(layer.weight.clone())
        sets.ema("ema", 0.9)
    # Closed form: decay^5 w_0 + sum of (1 - decay) decay^(5 - k) w_k.
    expected = 0.9**5 * history[0] + sum(0.1 * 0.9 ** (5 - k) * history[k] for k in range(1, 6))
    assert torch.allclose(sets.state_dict("ema")["weight"], expected, rtol=1e-6)
    assert torch.equal(layer.weight, history[-1])


def test_use_puts_a_set_in_and_takes_it_out(model):
    parameters = add_lora(model, rank=2, alpha=2)
    sets = WeightSets(model.transformer)
    sets.copy("start")
    with torch.no_grad():
        start = velocity(model)
    randomise(model)
    loss = velocity(model).square().mean()
    with torch.no_grad():
        now = velocity(model)
        with pytest.raises(RuntimeError, match="inside"), sets.use("start"):
            assert torch.equal(velocity(model), start)
            raise RuntimeError("inside")
        assert torch.equal(velocity(model), now) and not torch.equal(now, start)
    # A graph that was made before is not disturbed.
    found = torch.autograd.grad(loss, parameters)
    expected = torch.autograd.grad(velocity(model).square().mean(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def test_the_reference_of_full_tuning_is_a_copy(model):
    model.transformer.requires_grad_(True)
    sets = WeightSets(model.transformer)
    sets.copy("reference")
    before = velocity(model)
    for p in model.transformer.parameters():
        p.mul_(1.1)
    assert (velocity(model) - before).abs().max() > 0.05
    with sets.use("reference"):
        assert torch.equal(velocity(model), before)


def test_sets_refuse_what_does_not_fit(model):
    add_lora(model, rank=2, alpha=2)
    sets = WeightSets(model.transformer)
    tensors = {key: value.clone() for key, value in sets.state_dict().items()}
    name = next(iter(tensors))
    for wrong in ({name: tensors[name]}, {**tensors, "more": torch.zeros(1)}, {**tensors, name: torch.zeros(3, 3)}):
        for target in (None, "copy"):
            with pytest.raises(FlowAlignError, match=r"tensors do not fit.*of another model or recipe"):
                sets.load(target, wrong)
    with pytest.raises(ValueError, match="weight set 'ema': unknown; known are none"):
        sets.ema("ema", 0.9)
    sets.load(None, {key: value + 1 for key, value in tensors.items()})
    assert torch.equal(sets.state_dict()[name], tensors[name] + 1)


# ---------------------------------------------------------------- files


@torch.no_grad()
def test_load_lora_gives_the_trained_model(base, model, tmp_path):
    add_lora(model, rank=3, alpha=7)
    randomise(model)
    trained, file = velocity(model), export_lora(model, tmp_path)
    for where in (file, tmp_path):
        loaded = load_model_afresh(base)
        load_lora(loaded, where)
        assert (velocity(loaded) - trained).abs().max() < 1e-5
        assert not any(p.requires_grad for p in loaded.transformer.parameters())
        with pytest.raises(FlowAlignError, match="has an adapter already"):
            load_lora(loaded, where)


def load_model_afresh(base):
    fresh = copy.copy(base)
    fresh._pipe = copy.copy(base._pipe)
    fresh._pipe.transformer = fresh.transformer = copy.deepcopy(base.transformer)
    return fresh


def test_load_lora_refuses_what_would_change_nothing(model, base, tmp_path):
    with pytest.raises(FlowAlignError, match="no such file or folder"):
        load_lora(model, tmp_path / "missing.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(FlowAlignError, match="does not fit the model"):
        load_lora(model, tmp_path / "broken.safetensors")
    # A folder as peft writes it: its keys begin with base_model.model, of which diffusers says nothing.
    wrapped = get_peft_model(load_model_afresh(base).transformer, LoraConfig(r=2, target_modules=["attn.to_q"]))
    wrapped.save_pretrained(tmp_path / "peft")
    with pytest.raises(FlowAlignError, match=r"4 of its 4 tensors fit nothing.*base_model\.model"):
        load_lora(load_model_afresh(base), tmp_path / "peft" / "adapter_model.safetensors")


def test_load_lora_refuses_the_file_of_another_model(base, tmp_path):
    other = load_model_afresh(base)
    add_lora(other, rank=2, alpha=2)
    file = export_lora(other, tmp_path)
    smaller = load_model_afresh(base)
    smaller._pipe.transformer = smaller.transformer = tiny_sd3.transformer()
    del smaller.transformer.transformer_blocks[1]
    with pytest.raises(FlowAlignError, match="lora "):
        load_lora(smaller, file)
