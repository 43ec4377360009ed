"""Watching a model changes neither its results nor its gradients, and adds no arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fop
from tests.common import cnn, distance, images, mlp, points, same, snapshot, train


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    conv = nn.Conv2d
    return {
        "mlp": (mlp(), (5,)),
        "tokens": (nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), (7, 5)),
        "batch norm": (cnn(), (2, 4, 4)),
        "strided": (nn.Sequential(conv(2, 4, 3, stride=2, padding=1), nn.Flatten()), (2, 5, 5)),
        "grouped": (nn.Sequential(conv(4, 8, 3, groups=4, dilation=2), nn.Flatten()), (4, 7, 7)),
        "circular": (
            nn.Sequential(conv(2, 3, 3, padding=2, padding_mode="circular"), nn.Flatten()),
            (2, 4, 4),
        ),
        "same": (nn.Sequential(conv(2, 3, 4, padding="same"), nn.Flatten()), (2, 5, 5)),
    }


@pytest.mark.parametrize("name", list(models()))
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_outputs_and_gradients_stay_the_ordinary_ones(name: str, n: int) -> None:
    plain, shape = models()[name]
    plain = plain.double()
    if name == "batch norm" and n == 1:
        plain.eval()
    watched = copy.deepcopy(plain)
    optimizer = fop.FOP(watched)
    x = torch.randn(n, *shape, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [plain(inputs[0]), watched(inputs[1])]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().mean().backward()
    found, wanted = gradients(watched), gradients(plain)
    for one, two in zip([*found, inputs[1].grad], [*wanted, inputs[0].grad], strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-14)
    del optimizer


@pytest.mark.parametrize(
    ("module", "shape"), [(nn.Linear(4, 3), (4,)), (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 5))]
)
def test_an_unbatched_input_is_one_example(module: nn.Module, shape: tuple[int, ...]) -> None:
    one, two = copy.deepcopy(module).double(), copy.deepcopy(module).double()
    x = torch.randn(*shape, dtype=torch.float64)
    first, second = fop.KFAC(one), fop.KFAC(two)
    one(x).square().sum().backward()
    two(x.unsqueeze(0)).square().sum().backward()
    first.step()
    second.step()
    assert distance(snapshot(one), snapshot(two)) < 1e-14


def backward_flops(model: nn.Module, x: Tensor, y: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(x), y).backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("n", [2, 7])
def test_half_gradients_cost_no_extra_multiply_adds(n: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(),
        nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    x, y = images(n)
    ordinary = backward_flops(model, x, y)
    model.zero_grad()
    optimizer = fop.FOP(model)
    train(model, optimizer, [images(n, seed) for seed in range(4)])
    optimizer.zero_grad()
    assert optimizer.steps == 4  # the next step refreshes no curvature
    assert backward_flops(model, x, y) == ordinary
    assert all(block.recorder.sample().difference is not None for block in optimizer._engine.layers)


def test_kfac_watches_nothing_between_curvature_steps() -> None:
    model = mlp()
    optimizer = fop.KFAC(model)
    train(model, optimizer, [points(seed=seed) for seed in range(4)])
    output = model(points()[0])
    assert type(output.grad_fn).__name__ == "AddmmBackward0"
    train(model, optimizer, [points(seed=seed) for seed in range(6)])  # the next is step 11
    assert type(model(points()[0]).grad_fn).__name__ == "RecordedCallBackward"


def test_evaluation_and_frozen_layers_cost_nothing() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    with torch.no_grad():
        assert model(points()[0]).grad_fn is None
    model[0].requires_grad_(False)
    hidden = model[0](points()[0])
    assert hidden.grad_fn is None
    before = snapshot(model)
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    assert same(snapshot(model)[:2], before[:2])
    assert model[0].weight not in optimizer.state
    assert distance(snapshot(model)[2:], before[2:]) > 1e-3


def test_frozen_parts_train_as_if_they_were_constants() -> None:
    """A frozen first layer equals feeding its outputs to the rest."""
    whole = mlp()
    whole[0].requires_grad_(False)
    rest = nn.Sequential(copy.deepcopy(whole[2]))
    data = [points(seed=seed) for seed in range(4)]
    features = [(whole[1](whole[0](x)).detach(), y) for x, y in data]
    train(whole, fop.FOP(whole), data)
    train(rest, fop.FOP(rest), features)
    assert distance(snapshot(whole)[2:], snapshot(rest)) < 1e-13


def test_a_bias_frozen_during_training_leaves_the_curvature_to_the_weight() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    train(model, optimizer, [points(seed=seed) for seed in range(5)])
    model[0].bias.requires_grad_(False)
    before = snapshot(model)
    train(model, optimizer, [points(seed=5)])
    assert torch.equal(model[0].bias, before[1])
    assert optimizer.state[model[0].weight]["input_factor"].shape == (1, 5, 5)
    model[0].bias.requires_grad_(True)
    train(model, optimizer, [points(seed=6)])
    assert optimizer.state[model[0].weight]["input_factor"].shape == (1, 6, 6)


def test_a_frozen_weight_leaves_its_bias_to_plain_sgd() -> None:
    one, two = mlp(), mlp()
    for model in (one, two):
        model[0].weight.requires_grad_(False)
    train(one, fop.FOP(one, 0.1), [points()])
    cross_entropy(two(points()[0]), points()[1]).backward()
    expected = two[0].bias - 0.1 * two[0].bias.grad
    assert distance([one[0].bias], [expected]) < 1e-13


class Branches(nn.Module):
    """Uses one of two layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)
        self.use = "both"

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x) if self.use != "right" else 0
        right = self.right(x) if self.use != "left" else 0
        return self.head(torch.tanh(left + right))


def test_a_layer_that_is_not_used_rests_and_joins_later() -> None:
    torch.manual_seed(0)
    model = Branches().double()
    optimizer = fop.FOP(model)
    model.use = "left"
    before = model.right.weight.clone()
    train(model, optimizer, [points(seed=seed) for seed in range(5)])
    assert torch.equal(model.right.weight, before)
    assert "right" not in fop.diagnostics(optimizer)
    model.use = "both"
    train(model, optimizer, [points(seed=5)])  # step 6: no curvature is due, but `right` has none
    assert "right" in fop.diagnostics(optimizer)
    assert not torch.equal(model.right.weight, before)


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 4))
        self.head = nn.Linear(4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.head(self.body(x))
        x = x.clone().requires_grad_()  # the reentrant variant needs it
        return self.head(checkpoint(self.body, x, use_reentrant=self.how == "reentrant"))


@pytest.mark.parametrize(
    ("how", "fisher"),
    [
        ("reentrant", "empirical"),  # torch refuses torch.autograd.grad through these
        ("not reentrant", "empirical"),
        ("not reentrant", "exact"),
    ],
)
def test_activation_checkpointing_changes_nothing(how: str, fisher: Any) -> None:
    plain, saving = Checkpointed("plain").double(), Checkpointed(how).double()
    data = [points(seed=seed) for seed in range(4)]
    train(plain, fop.FOP(plain, fisher=fisher), data)
    train(saving, fop.FOP(saving, fisher=fisher), data)
    assert distance(snapshot(saving), snapshot(plain)) < 1e-13


def test_gradient_penalties_are_differentiated_through_the_layers() -> None:
    """create_graph=True gives the same second-order gradient as an unwatched model."""
    found = []
    for watch in (False, True):
        model = mlp()
        optimizer = fop.FOP(model) if watch else None
        x = points()[0].requires_grad_()
        slope = torch.autograd.grad(model(x).logsumexp(1).sum(), x, create_graph=True)[0]
        slope.square().sum().backward()
        found.append(gradients(model))
        del optimizer
    assert distance(found[1], found[0]) < 1e-13


def scale_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * 2,)


def scale_output(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return output * 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_user_keep_their_effect(when: str) -> None:
    def hook(model: nn.Module) -> None:
        model[0].register_forward_pre_hook(scale_input)
        model[2].register_forward_hook(scale_output)

    class Explicit(nn.Module):
        def __init__(self, inner: nn.Sequential) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 3 * self.inner(2 * x)

    hooked, explicit = mlp(), Explicit(mlp())
    if when == "before":
        hook(hooked)
    optimizers = fop.FOP(hooked), fop.FOP(explicit)
    if when == "after":
        hook(hooked)
    data = [points(seed=seed) for seed in range(3)]
    train(hooked, optimizers[0], data)
    train(explicit, optimizers[1], data)
    assert distance(snapshot(hooked), snapshot(explicit)) < 1e-13


def test_keyword_inputs_are_seen() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    one, two = Keyword(), nn.Sequential(mlp()[0])
    train(one, fop.FOP(one), [points()])
    train(two, fop.FOP(two), [points()])
    assert same(snapshot(one), snapshot(two))


@pytest.mark.parametrize("build", [fop.FOP, fop.KFAC])
def test_autocast_trains_close_to_full_precision(build: Callable[..., Any]) -> None:
    full, mixed = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    one, two = build(full), build(mixed)
    for seed in range(3):
        x, y = points(32, seed, torch.float32)
        one.zero_grad()
        cross_entropy(full(x), y).backward()
        one.step()
        two.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(mixed(x), y)
        loss.backward()
        assert mixed[0].weight.grad.dtype == torch.float32
        two.step()
        assert two.state[mixed[0].weight]["input_factor"].dtype == torch.float32
    assert 0 < distance(snapshot(mixed), snapshot(full)) < 0.1
