"""A layer type that fop does not know is served through an adapter that its user registers.

The layer is transformers' Conv1D, y = x W + b with W [i, o], as GPT-2 is built of. The adapter is
the one of docs/extending.md, which runs here as it stands there.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fop
import fop.testing
from fop.layers import ADAPTERS
from fop.layers.linear import LinearAdapter
from tests.common import Batch, distance, points, train

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def test_the_page_runs_as_it_stands() -> None:
    known = dict(ADAPTERS)
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    try:
        exec(compile("\n".join(code), str(PAGE), "exec"), {"__name__": "extending"})
    finally:
        ADAPTERS.clear()
        ADAPTERS.update(known)


class Conv1D(nn.Module):
    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        sizes = (*x.shape[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(sizes)


class Conv1DAdapter(fop.LayerAdapter):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        return x @ weight if bias is None else x @ weight + bias

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().to_matrix(weight.t(), bias)

    def from_matrix(self, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        of_weight, *of_bias = super().from_matrix(matrix, weight.t(), bias)
        return [of_weight.t(), *of_bias]


class Scaled(nn.Linear):
    """A factor belongs to the output rows."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class ScaledAdapter(fop.LayerAdapter):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
        return 3 * nn.functional.linear(x, weight, bias)

    def output_rows(self, grad: Tensor) -> Tensor:
        return 3 * super().output_rows(grad)


@pytest.fixture
def registered() -> Iterator[None]:
    with fop.register_layer(Conv1D, Conv1DAdapter), fop.register_layer(Scaled, ScaledAdapter):
        yield


@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 4)])
@pytest.mark.parametrize("build", [lambda: Conv1D(3, 4), lambda: Scaled(4, 3)], ids=["t", "s"])
def test_a_minimal_adapter_passes_the_battery(
    build: Any, shape: tuple[int, ...], registered: None
) -> None:
    torch.manual_seed(0)
    fop.testing.check_layer(build(), torch.randn(shape), tolerance=1e-10)


def both() -> tuple[nn.Sequential, nn.Sequential]:
    """A model with the user's layers, and the same with nn.Linear."""
    torch.manual_seed(0)
    theirs = nn.Sequential(Conv1D(6, 5), nn.Tanh(), Conv1D(3, 6)).double()
    ours = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    load(ours, theirs)
    return theirs, ours


def load(ours: nn.Sequential, theirs: nn.Sequential) -> None:
    with torch.no_grad():
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.copy_(other.t() if other.dim() == 2 else other)


def batches(seed: int = 0) -> list[Batch]:
    return [points(seed=seed + i) for i in range(5)]


@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
@pytest.mark.parametrize(
    "options", [{}, {"curvature": "ekfac"}, {"fisher": "exact"}, {"max_factor_size": 3}], ids=str
)
def test_it_trains_like_linear_layers(kind: Any, options: dict[str, Any], registered: None) -> None:
    theirs, ours = both()
    for model in (theirs, ours):
        train(model, kind(model, update_every=2, **options), batches())
    trained = [p.t() if p.dim() == 2 else p for p in theirs.parameters()]
    assert distance(trained, ours.parameters()) < 1e-10


def test_it_resumes_bit_for_bit(registered: None) -> None:
    whole, _ = both()
    train(whole, fop.FOP(whole), batches() + batches(7))
    first, _ = both()
    one = fop.FOP(first)
    train(first, one, batches())
    second = copy.deepcopy(first)
    two = fop.FOP(second)
    two.load_state_dict(one.state_dict())
    train(second, two, batches(7))
    assert all(map(torch.equal, second.parameters(), whole.parameters()))


def test_a_removed_registration_serves_no_new_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    handle = fop.register_layer(Conv1D, Conv1DAdapter)
    theirs, _ = both()
    optimizer = fop.FOP(theirs)
    handle.remove()
    with fop.register_layer(Conv1D, ScaledAdapter):
        handle.remove()  # once more, and of another
        assert ADAPTERS[Conv1D] is ScaledAdapter
    train(theirs, optimizer, batches())
    assert list(fop.diagnostics(optimizer)) == ["0", "2"]
    with caplog.at_level(logging.INFO, "fop"):
        fop.FOP(both()[0])
    assert "no curvature for Conv1D): '0', '2'" in caplog.text


def test_an_adapter_that_does_not_fit_is_disabled_in_training() -> None:
    """Torch's own gradient is used, and the layer is named."""

    class Forgetful(ScaledAdapter):
        def output_rows(self, grad: Tensor) -> Tensor:
            return fop.LayerAdapter.output_rows(self, grad)

    module, (x, _) = Scaled(5, 3).double(), points()
    plain = copy.deepcopy(module)
    with fop.register_layer(Scaled, Forgetful):
        optimizer = fop.FOP(module)
    for one in (module, plain):
        one(x).pow(3).mean().backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours.grad, torchs.grad) for ours, torchs in pairs)
    with pytest.warns(RuntimeWarning, match="the gradient of its weight is not the adapter's"):
        optimizer.step()


def test_override_replaces_an_adapter_until_it_is_removed() -> None:
    class Own(LinearAdapter):
        pass

    with pytest.raises(ValueError, match=r"Linear has the adapter LinearAdapter already.*override"):
        fop.register_layer(nn.Linear, Own)
    with fop.register_layer(nn.Linear, Own, override=True):
        assert ADAPTERS[nn.Linear] is Own
    assert ADAPTERS[nn.Linear] is LinearAdapter


class Nothing(fop.LayerAdapter):
    pass


class Observing(Conv1DAdapter):
    autograd_backward = True


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Conv1D(2, 2), Conv1DAdapter), TypeError, r"a class of torch.nn.Module, got Conv1D\(\)"),
        ((Conv1D, Conv1D), TypeError, "a class of fop.LayerAdapter, got .*Conv1D'"),
        ((Conv1D, Nothing), TypeError, "Nothing lacks what every adapter needs: forward"),
        ((Conv1D, Observing), TypeError, "autograd_backward=True.*subclass fop.layers.NormAdapter"),
        ((nn.MultiheadAttention, Conv1DAdapter), ValueError, "is four layers"),
    ],
)
def test_what_can_not_be_registered_is_refused(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fop.register_layer(*arguments)
    assert Conv1D not in ADAPTERS


# What an author may get wrong, by the method, and what the battery says.
MISTAKES: dict[str, tuple[str, Any, str]] = {
    "other output": ("forward", lambda s, x, w, b, y: x @ w, "the output of forward"),
    "twice": ("input_gradient", lambda s, g, x, w: 2 * g @ w.mT, "input_gradient"),
    "not transposed": ("to_matrix", fop.LayerAdapter.to_matrix, "matrix_shape|from_matrix"),
    "half the weight": ("weight_gradient", lambda s, g, x, w: x.mT @ g / 2, "weight_gradient"),
    "first position": ("bias_gradient", lambda s, g: g[:, 0].sum(0), "bias_gradient"),
    "mean": ("weight_gradient", lambda s, g, x, w: (x.mT @ g).mean(0), "weight_gradient"),
    "scaled rows": ("input_rows", lambda s, x, g: 2 * x.unsqueeze(1), "weight_gradient"),
    "too few totals": ("input_totals", lambda s, x, g: x[:, None, 0], "input_totals"),
    "no moment": ("input_moment", lambda s, x, g, out: None, "input_moment"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_battery_names_a_mistake(name: str) -> None:
    method, wrong, message = MISTAKES[name]
    adapter = type("Mistaken", (Conv1DAdapter,), {method: wrong})
    torch.manual_seed(0)
    module, x = Conv1D(3, 3), torch.randn(4, 2, 3)
    with (
        fop.register_layer(Conv1D, adapter),
        pytest.raises(AssertionError, match=f"Mistaken: .*({message})"),
    ):
        fop.testing.check_layer(module, x)


def test_rows_that_belong_to_another_gradient_are_named() -> None:
    """Gradients are right, so training would go on, with the wrong curvature."""

    class Mistaken(ScaledAdapter):
        def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            return 3 * torch.einsum("nso,nsi->oi", grad, x)

        def output_rows(self, grad: Tensor) -> Tensor:
            return fop.LayerAdapter.output_rows(self, grad)

        def bias_gradient(self, grad: Tensor) -> Tensor:
            return 3 * grad.sum((0, 1))

    with (
        fop.register_layer(Scaled, Mistaken),
        pytest.raises(AssertionError, match=r"the sum of g x\^T over each example's rows"),
    ):
        fop.testing.check_layer(Scaled(4, 3), torch.randn(5, 2, 4))


def test_the_battery_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"Conv1D has no adapter: call fop\.register_layer first"):
        fop.testing.check_layer(Conv1D(3, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"no batch of 2 examples or more: \(1, 4\)"):
        fop.testing.check_layer(nn.Linear(4, 3), torch.randn(1, 4))
    with pytest.raises(ValueError, match="nothing to check in this Embedding: it has max_norm=1"):
        fop.testing.check_layer(nn.Embedding(4, 3, max_norm=1), torch.zeros(2, 4).long())
