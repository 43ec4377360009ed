"""The loops and models people have: odd batches, several heads, adapters, moved models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune

import fop
from fop.capture import gradient_ratios
from tests.common import distance, mlp, points, same, snapshot, train
from tests.oracles import Reference, ReferenceOptimizer, project
from tests.oracles import cross_entropy as mean_cross_entropy


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
    """By a message that is seen without any set-up of logging, unless they are skipped."""
    layer = kind(5, 4)
    with caplog.at_level("WARNING", logger="fop"):
        fop.FOP(nn.Sequential(layer, nn.LayerNorm(4)), skip=kind)
        assert not caplog.records
        optimizer = fop.FOP(nn.Sequential(layer, nn.LayerNorm(4)))
    [record] = caplog.records
    assert record.getMessage() == (
        f"uses the fallback optimizer (no curvature for {kind.__name__}): '0'"
    )
    assert f"use adamw ({kind.__name__} 0; LayerNorm 1)" in repr(optimizer)
    assert {group["rule"] for group in optimizer.param_groups} == {"adamw"}


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
        free = gradient_ratios([optimizer._engine.layers[0].recorder.gradients])
        assert float(free) == pytest.approx(1.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        ratio = float(gradient_ratios([optimizer._engine.layers[0].recorder.gradients]))
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


def test_clipping_by_value_is_the_step_of_the_clipped_gradient() -> None:
    """a is what p.grad holds; d is brought to its size. Without curvature F = M = I."""
    model = mlp()
    optimizer = fop.FOP(model, lr=1.0, curvature="identity", kl_clip=None, momentum=0.0)
    (x, y), before = points(), snapshot(model)
    halves = []
    for part in (slice(0, 6), slice(6, 12)):
        twin = mlp()
        cross_entropy(twin(x[part]), y[part]).backward()
        halves.append([p.grad.clone() for p in twin.parameters()])
    cross_entropy(model(x), y).backward()
    free = [p.grad.clone() for p in model.parameters()]
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    clipped = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for i in (0, 2):  # weight and bias of a layer are one vector
        a = torch.cat([clipped[i].flatten(), clipped[i + 1]])
        ratio = clipped[i].norm() / free[i].norm()
        assert ratio < 0.9
        d = ratio * torch.cat([(halves[0][j] - halves[1][j]).flatten() for j in (i, i + 1)])
        identity = torch.eye(len(a)).double()
        wanted = project(
            a.unsqueeze(0), d.unsqueeze(0), identity, identity, Reference(kl_clip=None), []
        )
        moved = torch.cat([(before[j] - snapshot(model)[j]).flatten() for j in (i, i + 1)])
        assert distance([moved], [wanted.u[0]]) < 1e-10


def test_losses_backpropagated_one_by_one_count_as_microbatches() -> None:
    """Through parts of a model: the body sees two passes, each head its own."""

    class OneOutput(nn.Module):
        """Both heads side by side, for the reference; a negative label asks for the right one."""

        def __init__(self, heads: TwoHeads) -> None:
            super().__init__()
            self.heads = heads

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(list(self.heads(x).values()), dim=1)

    def loss_of(output: Tensor, label: Tensor, reduction: str) -> Tensor:
        left, right = output.chunk(2, dim=1)
        chosen = torch.where((label < 0).unsqueeze(1), right, left)
        return cross_entropy(chosen, label.where(label >= 0, -label - 1), reduction=reduction)

    settings: dict[str, Any] = {"kl_clip": None, "lr": 0.01, "update_every": 1}
    model = TwoHeads().double()
    reference = ReferenceOptimizer(OneOutput(model), Reference(**settings))
    optimizer = fop.FOP(model, **settings)
    (x, y), weights = points(), [0.3, 0.7]
    output = model(x)
    (weights[0] * cross_entropy(output["left"], y)).backward(retain_graph=True)
    assert model.right.weight.grad is None
    (weights[1] * cross_entropy(output["right"], y)).backward()
    optimizer.step()
    reference.step([(x, y), (x, -y - 1)], loss_of, weights=weights)
    expected = reference.model.get_submodule("heads.body").parameters()
    assert distance(model.body.parameters(), expected) < 1e-9


def test_several_inputs_are_watched_each_at_its_layer() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.head = nn.Linear(2, 4), nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
            return self.head(torch.tanh(self.one(a) * scale + self.two(b)))

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(x[:, :2], x[:, 2:], scale=2.0)

    joined, pair = Joined().double(), Pair().double()
    reference = ReferenceOptimizer(joined, Reference())
    optimizer = fop.FOP(pair)
    for seed in range(4):
        x, y = points(seed=seed)
        optimizer.zero_grad()
        cross_entropy(pair(x[:, :2], b=x[:, 2:], scale=2.0), y).backward()
        optimizer.step()
        reference.step([(x, y)], mean_cross_entropy)
    assert distance(snapshot(pair), reference.model.parameters()) < 1e-9


def test_a_layer_frozen_at_first_starts_with_curvature_of_its_own() -> None:
    """Its first step after thawing is that of an optimizer built then."""
    settings: dict[str, Any] = {"kl_clip": None, "lr": 0.01}
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = fop.FOP(model, **settings)
    train(model, optimizer, [points(seed=seed) for seed in range(6)])
    fresh = mlp()
    fresh.load_state_dict(model.state_dict())
    model[0].requires_grad_(True)
    train(model, optimizer, [points(seed=6)])  # no refresh is due
    train(fresh, fop.FOP(fresh, **settings), [points(seed=6)])
    assert same(snapshot(model)[:2], snapshot(fresh)[:2])
    train(model, optimizer, [points(seed=7)])
    model[0].requires_grad_(False)
    before = snapshot(model)
    train(model, optimizer, [points(seed=8)])
    assert same(snapshot(model)[:2], before[:2])
    assert distance(snapshot(model)[2:], before[2:]) > 1e-5


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(layer: nn.Module) -> nn.Module:
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


COMPUTED_WEIGHTS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "parametrize": parametrized,
    "hook spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}


@pytest.mark.parametrize("name", COMPUTED_WEIGHTS)
def test_layers_with_computed_weights_are_left_to_the_fallback(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What torch.optim.SGD does to them."""
    models = []
    for _ in range(2):
        model = mlp()
        for index in (0, 2):
            torch.manual_seed(index)  # power iterations start at random
            COMPUTED_WEIGHTS[name](model[index])
        models.append(model)
    data = [points(seed=seed) for seed in range(3)]
    with caplog.at_level("INFO", logger="fop"):
        optimizer = fop.FOP(models[0], fallback="sgd")
    assert "(its weight is computed by a parametrization): '0', '2'" in caplog.text
    train(models[0], optimizer, data)
    train(models[1], torch.optim.SGD(models[1].parameters(), 0.1, momentum=0.7), data)
    assert distance(snapshot(models[0]), snapshot(models[1])) < 1e-12


@pytest.mark.parametrize("build", [fop.FOP, fop.KFAC])
@pytest.mark.filterwarnings("ignore:layer '0' saw 0 and 0 examples")
def test_a_weight_that_becomes_computed_during_training_is_named(build: Any) -> None:
    model = mlp()
    optimizer = build(model)
    train(model, optimizer, [points(seed=seed) for seed in range(10)])
    parametrized(model[0])
    with pytest.warns(
        RuntimeWarning, match=r"'0' has a gradient that came without .* skip=\['0'\]"
    ):
        train(model, optimizer, [points(seed=10)])
    train(model, optimizer, [points(seed=seed) for seed in range(11, 14)])  # and says so once
    assert all(parameter.isfinite().all() for parameter in model.parameters())
