"""Layers of one shape are computed together on accelerators: the same training, layer by layer.

The path of accelerators runs on a CPU here, in float64, against the path of CPUs, where every layer
is computed alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from fop.linalg import treat_as_accelerator
from tests.common import distance, snapshot

CLASSES, STEPS = 3, 7
Data = Callable[[int], Tensor]
Make = Callable[[], nn.Module]
BOTH = pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])


def perceptron() -> nn.Module:
    hidden = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(6, CLASSES))


def convolutions() -> nn.Module:
    hidden = [m for _ in range(3) for m in (nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Tanh())]
    return nn.Sequential(nn.Unflatten(1, (4, 3, 3)), *hidden, nn.Flatten(), nn.Linear(36, CLASSES))


class Norms(nn.Module):
    """Residual blocks with a norm each."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + torch.tanh(linear(norm(x)))
        return self.head(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Not with ReLU: eigenvectors of the singular factors of dead units would not be unique.
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, activation="gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, CLASSES)
        for parameter in self.body.parameters():  # the layers are copies of one
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 4) for _ in range(3))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = [torch.tanh(table(x[:, i])) for i, table in enumerate(self.tables)]
        return self.head(sum(found))  # type: ignore[no-any-return]


def normal(*shape: int) -> Data:
    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(24, *shape, generator=generator, dtype=torch.float64)

    return draw


def words(seed: int) -> Tensor:
    return torch.randint(5, (24, 3), generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, tuple[Make, Data]] = {
    "linear": (perceptron, normal(6)),
    "grouped convolutions": (convolutions, normal(36)),
    "norms": (Norms, normal(6)),
    "attention": (Attention, normal(3, 4)),
    "embeddings": (Embeddings, words),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "factored": {},
    "exact": {"damping_mode": "exact"},
    "ekfac": {"curvature": "ekfac"},
    "diagonal": {"curvature": "diagonal"},
    "identity": {"curvature": "identity"},
    "staggered": {"update_every": {"steps": 3, "stagger": True}},
}


def model_of(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def build(kind: Any, model: nn.Module, **options: Any) -> Any:
    return kind(model, **{"update_every": 3, "damping": 0.01, "norms": "unitwise", **options})


def run(model: nn.Module, optimizer: Any, data: Data, steps: Iterable[int]) -> None:
    for seed in steps:
        labels = torch.randint(CLASSES, (24,), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        cross_entropy(model(data(seed)), labels).backward()
        optimizer.step()


def both_ways(
    kind: Any, make: Make, data: Data, change: Callable[[nn.Module], Any] = lambda _: None, **o: Any
) -> tuple[Any, Any]:
    """Two optimizers that have trained: layers alone, and stacked. They must agree."""
    alone, stacked = model_of(make), model_of(make)
    for model in (alone, stacked):
        change(model)
    one, two = build(kind, alone, **o), build(kind, stacked, **o)
    run(alone, one, data, range(STEPS))
    with treat_as_accelerator():
        run(stacked, two, data, range(STEPS))
    assert distance(snapshot(stacked), snapshot(alone)) < 1e-10
    return one, two


def shapes(state: dict[str, Any]) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in state.items() if isinstance(value, Tensor)}


def is_stacked(optimizer: Any) -> bool:
    """Whether an entry of one layer is in the memory of that of another."""
    used = [
        value.untyped_storage().data_ptr()
        for own in optimizer.state.values()
        for key, value in own.items()
        if key.endswith(
            ("output_inverse", "output_eigenvalues", "corrected_eigenvalues", "squares")
        )
    ]
    return len(set(used)) < len(used)


@BOTH
@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("model", list(MODELS))
def test_stacked_layers_train_as_each_alone(kind: Any, model: str, options: str) -> None:
    make, data = MODELS[model]
    one, two = both_ways(kind, make, data, **OPTIONS[options])
    assert not is_stacked(one)
    assert is_stacked(two) or options in ("identity", "staggered")
    # What is kept is each layer's own, with the shapes of layers that are computed alone.
    for alone, stacked in zip(one.state.values(), two.state.values(), strict=True):
        shapes = [
            {k: v.shape for k, v in s.items() if isinstance(v, Tensor)} for s in (alone, stacked)
        ]
        assert shapes[0] == shapes[1]


@BOTH
@pytest.mark.parametrize("options", ["factored", "exact", "ekfac", "diagonal"])
def test_groups_may_differ_in_damping_and_lr(kind: Any, options: str) -> None:
    groups = [{"names": "0", "damping": 0.1}, {"names": "2", "damping": 1.0, "lr": 0.03}]
    for name in ("linear", "grouped convolutions"):
        make, data = MODELS[name]
        if name == "grouped convolutions":
            groups = [{"names": "1", "damping": 0.1}, {"names": "3", "damping": 1.0}]
        _, two = both_ways(kind, make, data, param_groups=groups, **OPTIONS[options])
        assert {own["damping"] for own in two.state.values() if "damping" in own} == {
            0.01,
            0.1,
            1.0,
        }
        assert is_stacked(two)


@BOTH
def test_a_frozen_bias_and_one_frozen_later(kind: Any) -> None:
    def freeze(model: Any) -> None:
        model[2].bias.requires_grad_(False)

    both_ways(kind, perceptron, normal(6), freeze)
    results = []
    for accelerated in (False, True):
        model: Any = model_of(perceptron)
        optimizer = build(kind, model)
        for some in (range(4), range(4, 10)):
            with treat_as_accelerator() if accelerated else torch.enable_grad():
                run(model, optimizer, normal(6), some)
            model[4].bias.requires_grad_(False)
            model[4].bias.grad = None
        results.append(snapshot(model))
    assert distance(*results) < 1e-10


@BOTH
@pytest.mark.parametrize("options", ["factored", "exact", "ekfac", "diagonal"])
def test_a_checkpoint_goes_from_stacked_to_alone_and_back(kind: Any, options: str) -> None:
    make, data = MODELS["linear"]
    reference, first = model_of(make), model_of(make)
    run(reference, build(kind, reference, **OPTIONS[options]), data, range(9))
    optimizer = build(kind, first, **OPTIONS[options])
    with treat_as_accelerator():
        run(first, optimizer, data, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for own in saved["state"].values():  # nothing of other layers is saved with a layer
        for value in own.values():
            if isinstance(value, Tensor):
                assert value.shape == torch.Size([]) or value.shape[0] in (1, 3, 6)
    second = model_of(make)
    second.load_state_dict(first.state_dict())
    optimizer = build(kind, second, **OPTIONS[options])
    optimizer.load_state_dict(saved)
    assert not is_stacked(optimizer)
    run(second, optimizer, data, range(3, 6))
    third = model_of(make)
    third.load_state_dict(second.state_dict())
    resumed = build(kind, third, **OPTIONS[options])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with treat_as_accelerator():
        run(third, resumed, data, range(6, 9))
    assert is_stacked(resumed)
    assert distance(snapshot(third), snapshot(reference)) < 1e-10


@BOTH
@pytest.mark.parametrize("replace", [True, False], ids=["replaced", "in place"])
def test_an_entry_that_the_user_changes_is_honoured(kind: Any, replace: bool) -> None:
    """By another tensor, or in place; its neighbours keep theirs."""
    results = []
    for accelerated in (False, True):
        model: Any = model_of(perceptron)
        optimizer = build(kind, model, update_every=100)
        with treat_as_accelerator() if accelerated else torch.enable_grad():
            run(model, optimizer, normal(6), range(4))
            own = optimizer.state[model[2].weight]
            if replace:
                own["input_inverse"] = own["input_inverse"] * 2
            else:
                own["input_inverse"] *= 2
            neighbour = optimizer.state[model[4].weight]["input_inverse"].clone()
            run(model, optimizer, normal(6), range(4, 6))
            assert torch.equal(optimizer.state[model[4].weight]["input_inverse"], neighbour)
        results.append(snapshot(model))
    unchanged = model_of(perceptron)
    run(unchanged, build(kind, unchanged, update_every=100), normal(6), range(6))
    assert distance(*results) < 1e-10
    assert distance(results[0], snapshot(unchanged)) > 1e-4
