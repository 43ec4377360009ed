"""The loops and models people have: odd batches, several heads, adapters, moved models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import distance, mlp, points, same, snapshot, train


@pytest.mark.parametrize("settings", [{}, {"sharing": "reduce"}, {"fisher": "exact"}], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["at once", "later"])
def test_an_empty_batch_changes_nothing(settings: dict[str, Any], first: bool) -> None:
    model = mlp()
    optimizer = fop.FOP(model, **settings)
    if not first:
        train(model, optimizer, [points(seed=seed) for seed in range(10)])  # the next step is due
    before = snapshot(model)
    x, y = points()
    optimizer.zero_grad()
    cross_entropy(model(x[:0]), y[:0]).backward()  # a mean over nothing: NaN
    optimizer.step()
    assert same(snapshot(model), before)
    train(model, optimizer, [points(seed=20)])
    assert distance(snapshot(model), before) > 1e-5


def test_an_empty_microbatch_beside_a_full_one_changes_nothing() -> None:
    one, two = mlp(), mlp()
    first, second = fop.FOP(one), fop.FOP(two)
    x, y = points()
    for model, optimizer in ((one, first), (two, second)):
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if model is one:
                model(x[:0]).sum().backward()
            optimizer.step()
    assert same(snapshot(one), snapshot(two))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return {"left": self.left(hidden), "right": self.right(hidden)}


def test_several_outputs_train_by_the_gradient_of_their_sum() -> None:
    """A dict of outputs; p.grad is the same if losses are added or backpropagated alone."""
    found = []
    for apart in (False, True):
        model = TwoHeads().double()
        optimizer = fop.FOP(model, curvature="identity", kl_clip=None, beta=0.4, eta=1.0)
        for seed in range(3):
            x, y = points(seed=seed)
            optimizer.zero_grad()
            output = model(x)
            losses = [cross_entropy(output[name], y) for name in ("left", "right")]
            if apart:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            else:
                (losses[0] + losses[1]).backward()
            optimizer.step()
        found.append(snapshot(model))
    assert distance(*found) < 1e-12


class LowRank(nn.Module):
    """A frozen layer with a small trained pair beside it, as in LoRA."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_low_rank_adapters_train_and_leave_the_frozen_weights_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LowRank(nn.Linear(5, 6)), nn.Tanh(), LowRank(nn.Linear(6, 3))).double()
    frozen = [model[i].base.weight.clone() for i in (0, 2)]
    optimizer = fop.FOP(model)
    x, y = points(24)
    start = cross_entropy(model(x), y).item()
    train(model, optimizer, [(x, y)] * 30)
    assert same([model[i].base.weight for i in (0, 2)], frozen)
    assert set(fop.diagnostics(optimizer)) == {"0.down", "0.up", "2.down", "2.up"}
    assert cross_entropy(model(x), y).item() < 0.7 * start


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, nn.EmbeddingBag])
def test_other_layers_are_trained_by_the_fallback_and_named(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    layer = kind(5, 4)
    with caplog.at_level("INFO", logger="fop"):
        optimizer = fop.FOP(nn.Sequential(layer))
    assert f"no curvature for {kind.__name__}" in caplog.text
    assert f"by sgd ({kind.__name__} 0)" in repr(optimizer)
    assert {group["rule"] for group in optimizer.param_groups} == {"sgd"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_follows_a_model_that_is_cast(dtype: torch.dtype) -> None:
    """Training goes on in the new precision as if the model had had it from the start."""
    model = mlp(dtype=torch.float32)
    optimizer = fop.FOP(model)
    train(model, optimizer, [points(seed=s, dtype=torch.float32) for s in range(5)])
    model.to(dtype)
    train(model, optimizer, [points(seed=s, dtype=dtype) for s in range(5, 8)])
    always = mlp(dtype=torch.float64)
    train(always, fop.FOP(always), [points(seed=s) for s in range(8)])
    assert optimizer.state[model[0].weight]["input_inverse"].dtype == dtype
    assert distance([p.double() for p in model.parameters()], snapshot(always)) < 1e-3


def test_a_replaced_parameter_is_named() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    train(model, optimizer, [points()])
    model[2].weight = nn.Parameter(torch.zeros_like(model[2].weight))
    with pytest.raises(RuntimeError, match="weight of layer '2' was replaced"):
        train(model, optimizer, [points()])


def test_function_transforms_work_and_leave_no_trace() -> None:
    one, two = mlp(), mlp()
    first, second = fop.FOP(one, update_every=1), fop.FOP(two, update_every=1)
    x, y = points()
    train(one, first, [(x, y)])
    parameters = {name: p.detach() for name, p in one.named_parameters()}

    def loss(values: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(one, values, (example.unsqueeze(0),))
        return cross_entropy(output, label.unsqueeze(0))

    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    assert per_example["0.weight"].shape == (len(x), 6, 5)
    assert torch.func.vmap(one)(x).shape == (len(x), 3)
    train(one, first, [points(seed=1)])
    train(two, second, [(x, y), points(seed=1)])
    assert same(snapshot(one), snapshot(two))


def test_clipping_by_value_keeps_average_and_difference_in_step() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    for seed in range(4):
        optimizer.zero_grad()
        x, y = points(seed=seed)
        cross_entropy(model(x), y).backward()
        free = optimizer._engine.blocks[0].capture.gradient_ratio()
        assert float(free) == pytest.approx(1.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        ratio = float(optimizer._engine.blocks[0].capture.gradient_ratio())
        assert 0 < ratio < 1
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())


def test_averaged_models_follow_without_being_trained() -> None:
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = fop.FOP(model)
    expected = snapshot(model)
    for seed in range(4):
        train(model, optimizer, [points(seed=seed)])
        average.update_parameters(model)
        if seed == 0:
            expected = snapshot(model)
        else:
            pairs = zip(expected, snapshot(model), strict=True)
            expected = [0.5 * a + 0.5 * b for a, b in pairs]
    assert distance(average.module.parameters(), expected) < 1e-12


def test_a_broken_checkpoint_leaves_the_optimizer_as_it_was() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    broken["param_groups"][0]["params"] = broken["param_groups"][0]["params"][:-1]
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(broken)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entries in before["state"].items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(after["state"][number][key]), torch.as_tensor(value))
