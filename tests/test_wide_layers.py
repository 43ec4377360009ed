"""Factors that would be too wide are kept as their diagonal, and embeddings never have another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import fop
from tests.common import distance, mlp, points, same, snapshot, train

V, D, CLASSES = 7, 4, 3
MODES = [{}, {"damping_mode": "exact", "damping": 0.02}]


class Words(nn.Module):
    """A mean of embeddings, looked up or by a linear layer on one-hot rows."""

    def __init__(self, lookup: bool, padding_idx: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, D, padding_idx=padding_idx)
        self.head = nn.Linear(D, CLASSES)
        self.padding_idx = padding_idx
        if not lookup:
            weight = self.table.weight.detach().t().clone()
            self.table = nn.Linear(V, D, bias=False)
            self.table.weight.data.copy_(weight)
        self.lookup = lookup

    def forward(self, index: Tensor) -> Tensor:
        if self.lookup:
            rows = self.table(index)
        else:
            hot = one_hot(index, V).double()
            if self.padding_idx is not None:
                hot[index == self.padding_idx] = 0
            rows = self.table(hot)
        return self.head(torch.tanh(rows.reshape(len(index), -1, D)).mean(1))


def sentences(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(V, shape, generator=generator)
    return index, torch.randint(CLASSES, shape[:1], generator=generator)


@pytest.mark.parametrize("settings", MODES, ids=str)
@pytest.mark.parametrize("shape", [(9,), (6, 2, 3)], ids=str)
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
def test_an_embedding_trains_like_a_linear_layer_on_one_hot_rows(
    settings: dict[str, Any], shape: tuple[int, ...], padding_idx: int | None, kind: Any
) -> None:
    looked_up, linear = Words(True, padding_idx).double(), Words(False, padding_idx).double()
    data = [sentences(shape, seed) for seed in range(5)]
    train(looked_up, kind(looked_up, **settings), data)
    train(linear, kind(linear, **settings), data)
    expected = snapshot(linear)
    assert distance(snapshot(looked_up), [expected[0].t(), *expected[1:]]) < 1e-11


def test_wide_layers_keep_no_square_of_the_width() -> None:
    torch.manual_seed(0)
    vocabulary = 20_000
    model = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))
    optimizer = fop.FOP(model)
    index, target = torch.randint(vocabulary, (6,)), torch.randint(vocabulary, (6,))
    train(model, optimizer, [(index, target)] * 2)
    for state in optimizer.state.values():
        largest = max(v.numel() for v in state.values() if isinstance(v, Tensor))
        assert largest <= 9 * vocabulary
    report = fop.diagnostics(optimizer)
    assert set(report) == {"0", "1"}
    assert report["1"]["condition"] > 1


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_diagonal_factors_resume_bit_for_bit(settings: dict[str, Any]) -> None:
    data = [points(seed=seed) for seed in range(8)]
    whole = mlp()
    train(whole, fop.FOP(whole, max_factor_size=4, **settings), data)
    first, second = mlp(), mlp(seed=3)
    one = fop.FOP(first, max_factor_size=4, **settings)
    two = fop.FOP(second, max_factor_size=4, **settings)
    train(first, one, data[:3])
    second.load_state_dict(first.state_dict())
    two.load_state_dict(one.state_dict())
    train(second, two, data[3:])
    assert same(snapshot(second), snapshot(whole))


class Positions(nn.Module):
    """Adds a position embedding that is looked up once for all examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(V, D), nn.Embedding(5, D)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, index: Tensor) -> Tensor:
        places = self.places(torch.arange(index.shape[1]).unsqueeze(0))
        return self.head(torch.tanh(self.words(index) + places).mean(1))


def test_an_embedding_that_sees_no_examples_uses_the_fallback_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Positions().double()
    optimizer = fop.FOP(model, 0.1, fallback="sgd")
    index, target = sentences((6, 5), 0)
    cross_entropy(model(index), target).backward()
    expected = model.places.weight.detach() - 0.1 * model.places.weight.grad
    with caplog.at_level("INFO", logger="fop"):
        optimizer.step()
        assert distance([model.places.weight], [expected]) < 1e-14
        train(model, optimizer, [sentences((6, 5), seed) for seed in range(4)])  # says so once
    [message] = caplog.messages
    assert "(looked up once for the whole batch" in message
    assert message.endswith("'places' 1 and 6")
    assert set(fop.diagnostics(optimizer)) == {"words", "head"}


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=["max_norm", "by frequency"]
)
def test_embeddings_with_other_gradients_fall_back(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Embedding(V, D, **options), nn.Linear(D, CLASSES))
    with caplog.at_level("INFO", logger="fop"):
        optimizer = fop.FOP(model)
    assert f"it has {next(iter(options))}=" in caplog.text
    train(model, optimizer, [sentences((6,), 0)])
    assert set(fop.diagnostics(optimizer)) == {"1"}
