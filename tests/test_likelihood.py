"""A loss is read from its gradient at the output, or a reason is given; it is never misread."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fop.loss_graph
from fop.likelihood import (
    Bernoulli,
    Categorical,
    Gaussian,
    Reading,
    all_gradients,
    sampled_gradient,
)
from fop.loss_graph import squared_scale
from fop.loss_reading import read

Loss = Callable[[Tensor], Tensor]
PairLoss = Callable[[Tensor, Tensor], Tensor]
PRECISE = {torch.float64: 1e-10, torch.float32: 2e-5}
both = pytest.mark.parametrize("dtype", list(PRECISE), ids=["float64", "float32"])


def gradient(z: Tensor, loss: Loss) -> Tensor:
    z = z.detach().requires_grad_()
    (g,) = torch.autograd.grad(loss(z), z)
    return g


def read_loss(z: Tensor, loss: Loss) -> Reading:
    reading = read(z, gradient(z, loss))
    assert isinstance(reading, Reading), reading
    return reading


def check_change(z: Tensor, loss: Loss, reading: Reading, tolerance: float | None = None) -> None:
    """L(z2) - L(z) by the reading equals that of the loss, for short and long steps."""
    tolerance = tolerance or PRECISE[z.dtype]
    g = gradient(z, loss)
    for length in (1e-2, 1.0):
        z2 = z + length * torch.randn(z.shape, dtype=z.dtype)
        change = reading.change(z, z2, g)
        assert change.dtype == torch.float64
        size = (g.double() * (z2 - z).double()).abs().sum() + (change - (g * (z2 - z)).sum()).abs()
        assert abs(change - (loss(z2.double()) - loss(z.double()))) <= tolerance * size


def reason(z: Tensor, loss: Loss) -> str:
    found = read(z, gradient(z, loss))
    assert isinstance(found, str), found
    assert 0 < len(found) < 100
    return found


def labels_like(z: Tensor, dim: int) -> Tensor:
    return torch.randint(z.shape[dim], z.movedim(dim, -1).shape[:-1])


def mixed(z: Tensor, y: Tensor, y2: Tensor, smoothing: float = 0.0) -> Tensor:
    share = 0.3
    return share * F.cross_entropy(z, y, label_smoothing=smoothing) + (1 - share) * F.cross_entropy(
        z, y2, label_smoothing=smoothing
    )


SHAPES = [(12, 5), (6, 7, 4), (4, 5, 3, 2), (5, 1000), (20, 2)]


@both
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy(
    shape: tuple[int, ...], factor: float, reduction: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    z = 2 * torch.randn(shape, dtype=dtype)
    y = labels_like(z, 1)
    reading = read_loss(z, lambda z: factor * F.cross_entropy(z, y, reduction=reduction))
    assert reading.likelihood == Categorical(1)
    assert reading.certain
    expected = factor / (y.numel() if reduction == "mean" else 1)
    torch.testing.assert_close(
        reading.scale, torch.full_like(reading.scale, expected), rtol=PRECISE[dtype], atol=0
    )
    loss: Loss = lambda z: factor * F.cross_entropy(z, y, reduction=reduction)  # noqa: E731
    check_change(z, loss, reading)
    targets = F.one_hot(y, shape[1]).movedim(-1, 1).to(dtype)
    torch.testing.assert_close(
        reading.targets(z, gradient(z, loss)), targets, rtol=0, atol=5 * PRECISE[dtype]
    )


def _cross_entropies() -> dict[str, Callable[[Tensor], tuple[Tensor, Loss]]]:
    def tokens(z: Tensor) -> tuple[Tensor, Loss]:
        y = labels_like(z, -1)
        y[0, :2] = -100
        return z, lambda z: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    def smoothing(z: Tensor) -> tuple[Tensor, Loss]:
        y = labels_like(z.flatten(0, 1), 1)
        return z, lambda z: F.cross_entropy(z.flatten(0, 1), y, label_smoothing=0.1)

    def mixup(z: Tensor, eps: float = 0.0) -> tuple[Tensor, Loss]:
        z = z.flatten(0, 1)
        y, y2 = labels_like(z, 1), labels_like(z, 1)
        return z, lambda z: mixed(z, y, y2, eps)

    def ignored(z: Tensor) -> tuple[Tensor, Loss]:
        z = z.flatten(0, 1)
        y = labels_like(z, 1)
        y[::3] = -100
        return z, lambda z: F.cross_entropy(z, y)

    def weights(z: Tensor) -> tuple[Tensor, Loss]:
        z = z.flatten(0, 1)
        y, w = labels_like(z, 1), torch.rand(z.shape[-1]) + 0.1
        return z, lambda z: F.cross_entropy(z, y, w.to(z.dtype))

    return {
        "tokens": tokens,
        "smoothing": smoothing,
        "mixup": mixup,
        "mixup and smoothing": lambda z: mixup(z, 0.1),
        "ignore_index": ignored,
        "class weights": weights,
    }


@both
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(_cross_entropies()))
def test_other_cross_entropies(name: str, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    z, loss = _cross_entropies()[name](1.5 * torch.randn(5, 7, 6 + 5 * seed, dtype=dtype))
    reading = read_loss(z, loss)
    assert reading.likelihood == Categorical(z.dim() - 1)
    check_change(z, loss, reading, 10 * PRECISE[dtype])
    ignored = gradient(z, loss).abs().sum(-1, keepdim=True) == 0
    assert torch.equal(reading.scale == 0, ignored)


@both
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("margin", [0.0, 2.0, 6.0, 12.0])
def test_early_and_late_in_training(
    margin: float, label_smoothing: float, dtype: torch.dtype
) -> None:
    """The label's logit leads by the margin; at 12 with smoothing the model is over-confident."""
    torch.manual_seed(1)
    z = torch.randn(64, 10, dtype=dtype)
    y = labels_like(z, 1)
    z += margin * F.one_hot(y, 10)
    loss: Loss = lambda z: F.cross_entropy(z, y, label_smoothing=label_smoothing)  # noqa: E731
    check_change(z, loss, read_loss(z, loss), 10 * PRECISE[dtype])


def test_rows_that_are_right_to_rounding() -> None:
    torch.manual_seed(2)
    z = torch.randn(32, 10)
    y = labels_like(z, 1)
    z[:16] += 40 * F.one_hot(y[:16], 10)
    loss: Loss = lambda z: F.cross_entropy(z, y)  # noqa: E731
    reading = read_loss(z, loss)
    torch.testing.assert_close(reading.scale, torch.full((32, 1), 1 / 32), rtol=1e-4, atol=0)


@both
@pytest.mark.parametrize("classes", [2, 10])
def test_a_head_of_zeros_is_read_but_not_certain(classes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    z = torch.zeros(32, classes, dtype=dtype)
    y = labels_like(z, 1)
    reading = read_loss(z, lambda z: F.cross_entropy(z, y))
    assert reading.likelihood == Categorical(1)
    assert not reading.certain
    check_change(z, lambda z: F.cross_entropy(z, y), reading)
    smoothed = read_loss(z, lambda z: F.cross_entropy(z, y, label_smoothing=0.1))
    assert not smoothed.certain  # its scale can't be told from another
    y2 = labels_like(z, 1)
    assert isinstance(read(z, gradient(z, lambda z: mixed(z, y, y2))), str)
    target = torch.randint(2, (32, 1)).to(dtype)
    bernoulli = read_loss(z[:, :1], lambda z: F.binary_cross_entropy_with_logits(z, target))
    assert bernoulli.likelihood == Bernoulli()
    assert not bernoulli.certain


# --- Bernoulli ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("how", ["mean", "sum", "pixels"])
@pytest.mark.parametrize("kind", ["hard", "gray", "masked"])
@pytest.mark.parametrize("shape", [(64, 1), (64,), (16, 5), (9, 2), (8, 1, 6, 6)], ids=str)
def test_binary_cross_entropy(
    shape: tuple[int, ...], kind: str, how: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    z = 2 * torch.randn(shape, dtype=dtype)
    t = torch.randint(2, shape).to(dtype)
    if kind == "gray":
        t = torch.where(torch.rand(shape) < 0.4, torch.randint(255, shape).to(dtype) / 255, t)
    mask = torch.rand(shape) < 0.7 if kind == "masked" else torch.ones(shape, dtype=torch.bool)

    def loss(z: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(z, t.to(z.dtype), mask, reduction="none")
        return each.sum() / len(z) if how == "pixels" else getattr(each, how)()

    reading = read_loss(z, loss)
    assert reading.likelihood == Bernoulli()
    check_change(z, loss, reading, 10 * PRECISE[dtype])


@both
def test_confident_binary_predictions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    t = torch.randint(2, (200, 1)).to(dtype)
    z = torch.randn(200, 1, dtype=dtype) + 6 * (2 * t - 1)
    loss: Loss = lambda z: F.binary_cross_entropy_with_logits(z, t.to(z.dtype))  # noqa: E731
    reading = read_loss(z, loss)
    expected = torch.full((200, 1), 1 / 200, dtype=dtype)
    torch.testing.assert_close(reading.scale, expected, rtol=1e-3, atol=0)


# --- losses that are none of these ----------------------------------------------------------------


def _unreadable() -> dict[str, Loss]:
    torch.manual_seed(0)
    y, teacher = torch.randint(8, (48,)), torch.randn(48, 8).softmax(-1)
    real, hard = torch.randn(48, 8), torch.randint(2, (48, 8)).float()

    def focal(z: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return ((1 - (-each).exp()).square() * each).mean()

    def binary_focal(z: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(z, hard.to(z.dtype), reduction="none")
        return ((1 - (-each).exp()).square() * each).mean()

    def contrastive(z: Tensor) -> Tensor:
        logits, own = z[:8], torch.arange(8)
        return F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)

    def binary(z: Tensor, **options: Tensor) -> Tensor:
        options = {name: value.to(z.dtype) for name, value in options.items()}
        return F.binary_cross_entropy_with_logits(z, hard.to(z.dtype), **options)

    return {
        "temperature": lambda z: F.cross_entropy(z / 2, y),
        "temperature, smoothing": lambda z: F.cross_entropy(z / 0.5, y, label_smoothing=0.1),
        "focal": focal,
        "binary focal": binary_focal,
        "contrastive": contrastive,
        "distillation": lambda z: F.cross_entropy(z, teacher.to(z.dtype)),
        "reversed": lambda z: -F.cross_entropy(z, y),
        "row weights": lambda z: (
            F.cross_entropy(z, y, reduction="none") * torch.linspace(1, 2, len(z))
        ).mean(),
        "pos_weight": lambda z: binary(z, pos_weight=torch.tensor(3.0)),
        "small pos_weight": lambda z: binary(z, pos_weight=torch.tensor(0.4)),
        "pos_weights": lambda z: binary(z, pos_weight=torch.linspace(1, 3, 8)),
        "column weights": lambda z: binary(z, weight=torch.linspace(1, 3, 8)),
        "huber": lambda z: F.huber_loss(z, real.to(z.dtype), delta=0.3),
        "l1": lambda z: F.l1_loss(z, real.to(z.dtype)),
        "mse": lambda z: F.mse_loss(z, real.to(z.dtype)),
        "mse of labels": lambda z: F.mse_loss(z, hard.to(z.dtype)),
        "mse of probabilities": lambda z: F.mse_loss(z.softmax(-1), teacher.to(z.dtype)),
        "hinge": lambda z: F.multi_margin_loss(z, y),
        "entropy": lambda z: F.cross_entropy(z, y) + 0.1 * (z.softmax(-1) * z).sum(-1).mean(),
        "z-loss": lambda z: F.cross_entropy(z, y) + 0.1 * z.logsumexp(-1).square().mean(),
    }


@both
@pytest.mark.parametrize("size", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("name", list(_unreadable()))
def test_other_losses_give_a_reason(name: str, size: float, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    reason(size * torch.randn(48, 8, dtype=dtype), _unreadable()[name])


@pytest.mark.parametrize("name", list(_unreadable()))
def test_other_losses_under_autocast_give_a_reason(name: str) -> None:
    torch.manual_seed(3)
    z = (2 * torch.randn(48, 8)).bfloat16()
    loss = _unreadable()[name]
    reason(z, lambda z: loss(z.float()))


@pytest.mark.parametrize("size", [(1, 2), (1, 1), (2, 1)])
def test_too_little_to_tell(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(size), torch.zeros(size[0], dtype=torch.long)
    if size[1] > 1:
        reason(z, lambda z: F.cross_entropy(z, y))
    reason(z, lambda z: F.binary_cross_entropy_with_logits(z, torch.ones_like(z)))


def test_degenerate_inputs_give_a_reason() -> None:
    z = torch.randn(4, 3)
    assert read(z, torch.zeros(4, 3)) == "the gradient is zero"
    assert read(z, torch.full((4, 3), float("nan"))) == "not finite"
    assert isinstance(read(z, torch.zeros(4)), str)
    assert isinstance(read(z[:0], z[:0]), str)
    assert isinstance(read(torch.randn(()), torch.randn(())), str)


# --- low precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["hard", "smoothing", "bernoulli", "bernoulli column"])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_of_autocast(seed: int, kind: str, low: torch.dtype) -> None:
    torch.manual_seed(seed)
    model, x = nn.Linear(16, 1 if "column" in kind else 10), torch.randn(256, 16)
    nn.init.normal_(model.weight, std=0.4)
    y = torch.randint(10, (256,))
    with torch.autocast("cpu", low):
        z = model(x)
        z.retain_grad()
        if kind.startswith("bernoulli"):
            t = torch.randint(2, z.shape).float()
            loss = F.binary_cross_entropy_with_logits(z.float(), t)
        else:
            eps = 0.1 if kind == "smoothing" else 0.0
            loss = F.cross_entropy(z, y, label_smoothing=eps)
    (loss * 1024).backward()
    assert z.dtype == z.grad.dtype == low
    reading = read(z.detach(), z.grad)
    assert isinstance(reading, Reading), reading
    rows = z.numel() if kind.startswith("bernoulli") else 256
    assert isinstance(reading.likelihood, Bernoulli if kind.startswith("b") else Categorical)
    expected = torch.full_like(reading.scale, 1024 / rows)
    torch.testing.assert_close(reading.scale, expected, rtol=2e-2, atol=0)


def test_a_gradient_that_was_rounded_and_cast_back() -> None:
    torch.manual_seed(0)
    z, y = torch.randn(64, 10), torch.randint(10, (64,))
    g = gradient(z, lambda z: F.cross_entropy(z, y)).bfloat16().float()
    reading = read(z, g)
    assert isinstance(reading, Reading)
    torch.testing.assert_close(reading.scale, torch.full((64, 1), 1 / 64), rtol=1e-2, atol=0)


# --- squared errors -------------------------------------------------------------------------------


def squared_in_pass(
    loss: Callable[[Tensor, Tensor], Tensor], z: Tensor, t: Tensor
) -> Reading | str:
    """What a hook on the output reads, during the backward pass."""
    found: list[Tensor | str] = []
    z.register_hook(lambda g: found.append(squared_scale(z, g)))
    loss(z, t).backward()
    (scale,) = found
    return scale if isinstance(scale, str) else Reading(Gaussian(), scale)


def squared_difference(z: Tensor, t: Tensor) -> Tensor:
    difference = z - t
    return (difference * difference).mean()


SQUARED: dict[str, PairLoss] = {
    "mse_loss": F.mse_loss,
    "swapped": lambda z, t: F.mse_loss(t, z),
    "module": lambda z, t: nn.MSELoss()(z, t),
    "sum": lambda z, t: F.mse_loss(z, t, reduction="sum"),
    "power": lambda z, t: ((z - t) ** 2).mean(),
    "half": lambda z, t: 0.5 * (t - z).square().mean(),
    "sum over n": lambda z, t: (z - t).pow(2).sum() / len(z),
    "sum of features": lambda z, t: (z - t).pow(2).sum(-1).mean(),
    "product": squared_difference,
    "factors": lambda z, t: 3e2 * F.mse_loss(z, t) / torch.tensor(7.0),
    "one column": lambda z, t: F.mse_loss(z[:, 0], t[:, 0]),
    "some rows": lambda z, t: ((z - t) ** 2).mean(-1)[t[:, 0] > 0].mean(),
    "flat": lambda z, t: F.mse_loss(z.reshape(-1), t.reshape(-1)),
    "reshaped": lambda z, t: F.mse_loss(z.T.unsqueeze(0), t.T.unsqueeze(0)),
    "no target": lambda z, t: z.square().mean(),
    "float": lambda z, t: F.mse_loss(z.float(), t.float()),
}


@both
@pytest.mark.parametrize("features", [1, 4])
@pytest.mark.parametrize("name", list(SQUARED))
def test_squared_errors(name: str, features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    z = nn.Linear(3, features, dtype=dtype)(torch.randn(12, 3, dtype=dtype))
    t = torch.randn(12, features, dtype=dtype)
    reading = squared_in_pass(SQUARED[name], z, t)
    assert isinstance(reading, Reading), reading
    tolerance = PRECISE[torch.float32 if name == "float" else dtype]
    check_change(z.detach(), lambda z: SQUARED[name](z, t.to(z.dtype)), reading, 10 * tolerance)


NOT_SQUARED: dict[str, PairLoss] = {
    "huber": F.huber_loss,
    "smooth": F.smooth_l1_loss,
    "l1": F.l1_loss,
    "weighted": lambda z, t: ((z - t) ** 2 * torch.linspace(1, 2, 12)[:, None]).mean(),
    "weighted rows": lambda z, t: (((z - t) ** 2).mean(-1) * torch.linspace(1, 2, 12)).mean(),
    "factor and penalty": lambda z, t: 0.3 * F.mse_loss(z, t) + (t.sum() * z.detach()).mean(),
    "of a sigmoid": lambda z, t: F.mse_loss(z.sigmoid(), t),
    "of a norm": lambda z, t: (F.normalize(z) - F.normalize(t)).square().sum(),
    "cubed": lambda z, t: ((z - t) ** 3).mean(),
    "fourth": lambda z, t: ((z - t) ** 2).pow(2).mean(),
    "square of a mean": lambda z, t: (z - t).mean().square(),
    "root": lambda z, t: F.mse_loss(z, t).sqrt(),
    "subtracted": lambda z, t: t.sum() - F.mse_loss(z, t),
    "twice": lambda z, t: F.mse_loss(z, t) + F.mse_loss(z, -t),
    "broadcast": lambda z, t: ((z[:, :1] - t[:, 0]) ** 2).mean(),
    "repeated": lambda z, t: ((z[[0, 0, *range(2, 12)]] - t) ** 2).mean(),
    "negative": lambda z, t: -2 * F.mse_loss(z, t),
    "bernoulli": lambda z, t: F.binary_cross_entropy_with_logits(z, (t > 0).float()),
}


@pytest.mark.parametrize("name", list(NOT_SQUARED))
def test_graphs_of_other_losses_give_a_reason(name: str) -> None:
    torch.manual_seed(0)
    z = nn.Linear(3, 4)(torch.randn(12, 3))
    found = squared_in_pass(NOT_SQUARED[name], z, torch.randn(12, 4))
    assert isinstance(found, str), found


def test_a_penalty_beside_a_squared_error() -> None:
    layer = nn.Linear(3, 4)
    z = layer(torch.randn(12, 3))
    penalized = squared_in_pass(
        lambda z, t: F.mse_loss(z, t) + 0.1 * layer.weight.square().sum(), z, torch.randn(12, 4)
    )
    assert isinstance(penalized, Reading)
    assert torch.equal(penalized.scale, torch.full((12, 4), 2 / 48, dtype=torch.float64))


def test_passes_in_passes_and_given_gradients() -> None:
    """Also where a pass runs inside of another, by torch.autograd.grad, or scaled."""
    layer, t = nn.Linear(3, 4), torch.randn(12, 4)
    z = layer(torch.randn(12, 3))
    found: list[Tensor | str] = []

    @torch.enable_grad()
    def hook(g: Tensor) -> None:
        other = layer(torch.randn(5, 3))
        other.register_hook(lambda g: found.append(squared_scale(other, g)))
        F.mse_loss(other, torch.zeros(5, 4)).backward()
        found.append(squared_scale(z, g))

    z.register_hook(hook)
    torch.autograd.grad(F.mse_loss(z, t), layer.weight, torch.tensor(3.0))
    inner, outer = found
    assert isinstance(inner, Tensor)
    assert isinstance(outer, Tensor)
    assert inner.unique().tolist() == pytest.approx([2 / 20])
    assert outer.unique().tolist() == pytest.approx([6 / 48])


def test_the_hook_may_run_in_a_thread_of_its_own() -> None:
    """As it does on an accelerator, where the pass was started by another one."""
    z, t, found = nn.Linear(3, 4)(torch.randn(12, 3)), torch.randn(12, 4), []

    def hook(g: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(squared_scale, z, g).result())

    z.register_hook(hook)
    F.mse_loss(z, t).backward()
    assert found[0].unique().tolist() == pytest.approx([2 / 48])


def test_nothing_is_kept_alive() -> None:
    """Not even until the garbage collector runs."""
    gc.collect()
    gc.disable()
    try:
        model, held, found = nn.Linear(3, 4), [], []

        def step() -> None:
            z, t = model(torch.randn(12, 3)), torch.randn(12, 4)
            waiting = [z]
            z.register_hook(lambda g: found.append(squared_scale(waiting.pop(), g)))
            loss = F.mse_loss(z, t)
            held.extend(weakref.ref(tensor) for tensor in (z, t, loss))
            loss.backward()

        step()
        assert [reference() for reference in held] == [None] * 3
        assert isinstance(found[0], Tensor)
    finally:
        gc.enable()


@pytest.mark.parametrize("missing", ["_engine_run_backward", "get_gradient_edge"])
def test_another_torch_gives_a_reason(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = fop.loss_graph if missing == "get_gradient_edge" else torch.autograd.graph
    real = getattr(where, missing)

    def other(*args: Any, **kwargs: Any) -> Any:
        if missing == "get_gradient_edge":
            raise AttributeError(missing)
        return real(*args, **kwargs)

    monkeypatch.setattr(where, missing, other)
    z = nn.Linear(3, 4)(torch.randn(12, 3))
    assert isinstance(squared_in_pass(F.mse_loss, z, torch.randn(12, 4)), str)


def test_outside_of_a_pass_there_is_a_reason() -> None:
    z = nn.Linear(3, 4)(torch.randn(2, 3))
    assert isinstance(squared_scale(z, torch.ones(2, 4)), str)
    assert isinstance(squared_scale(torch.ones(2, 4), torch.ones(2, 4)), str)


@both
def test_candidates_for_a_squared_error(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    z, t = torch.randn(12, 1, dtype=dtype), torch.randn(12, 1, dtype=dtype)
    loss: Loss = lambda z: F.mse_loss(z, t.to(z.dtype))  # noqa: E731
    g = gradient(z, loss)
    wrong = [torch.randn(12, 1), torch.randn(3), torch.ones(12, dtype=torch.long)]
    for right in (t, z - t, (t - z).neg().squeeze(), t.flatten()):
        reading = read(z, g, candidates=[*wrong, right])
        assert isinstance(reading, Reading)
        assert reading.likelihood == Gaussian()
        check_change(z, loss, reading, 10 * PRECISE[dtype])
    assert isinstance(read(z, g, candidates=wrong), str)
    mask = torch.arange(12)[:, None] % 3 > 0
    masked = read(z, g * mask, candidates=[t])
    assert isinstance(masked, Reading)
    assert torch.equal(masked.scale > 0, mask)


# --- Hessian and Fisher ---------------------------------------------------------------------------


def readings() -> list[tuple[Tensor, Reading]]:
    torch.manual_seed(0)
    scale = torch.rand(3, 4, dtype=torch.float64)
    z = torch.randn(3, 4, 2, dtype=torch.float64)
    return [
        (z[..., 0], Reading(Categorical(1), scale[:, :1])),
        (z, Reading(Categorical(2), scale[..., None])),
        (z, Reading(Categorical(1), scale[:, :1, None].expand(3, 1, 2))),
        (z[..., 0], Reading(Bernoulli(), scale)),
        (z[..., 0], Reading(Gaussian(), scale)),
        (z[..., 0], Reading(Gaussian(), scale.new_tensor(0.3))),
    ]


def hessian(z: Tensor, reading: Reading) -> Tensor:
    """[numel, numel], by autograd."""
    psi = lambda z: (reading.scale * reading.likelihood.psi(z)).sum()  # noqa: E731
    return torch.autograd.functional.hessian(psi, z).reshape(z.numel(), z.numel())


@pytest.mark.parametrize("index", range(6))
def test_hessian_and_all_gradients(index: int) -> None:
    z, reading = readings()[index]
    expected, u, v = hessian(z, reading), torch.randn_like(z), torch.randn_like(z)
    inner = reading.hessian_inner(z, u, v)
    torch.testing.assert_close(inner, u.flatten() @ expected @ v.flatten(), rtol=1e-10, atol=1e-12)
    for rows in (1, 3):
        examples = z.shape[0] // rows
        sums = [g.reshape(examples, -1) for g in all_gradients(z, reading, rows)]
        outer = sum(torch.einsum("na,nb->nab", g, g) for g in sums)
        blocks = expected.reshape(examples, z.numel() // examples, examples, -1)
        own = torch.stack([blocks[n, :, n] for n in range(examples)])
        torch.testing.assert_close(outer, own, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("index", range(6))
def test_sampled_gradients_have_the_hessian_as_second_moment(index: int) -> None:
    z, reading = readings()[index]
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([sampled_gradient(z, reading, generator).flatten() for _ in range(8000)])
    moment = draws.T @ draws / len(draws)
    assert (moment - hessian(z, reading)).abs().max() < 0.06
    assert draws.mean(0).abs().max() < 0.06
    assert sampled_gradient(z.bfloat16(), reading).dtype == torch.bfloat16


# --- any sizes ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("seed", range(40))
def test_any_sizes(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    n, classes = int(torch.randint(8, 100, ())), int(torch.randint(4, 60, ()))
    size = 10 ** float(torch.empty(()).uniform_(-1, 0.8))
    z = size * torch.randn(n, classes, dtype=dtype)
    y, y2 = labels_like(z, 1), labels_like(z, 1)
    if seed % 2:  # after some training
        z += 3 * F.one_hot(y, classes)
    eps, factor = float(torch.rand(()) * 0.3), 10 ** float(3 - 6 * torch.rand(()))
    w = torch.rand(classes) + 0.1
    t = torch.randint(2, z.shape).to(dtype)
    losses: list[Loss] = [
        lambda z: factor * F.cross_entropy(z, y),
        lambda z: factor * F.cross_entropy(z, y, label_smoothing=eps),
        lambda z: factor * mixed(z, y, y2),
        lambda z: factor * mixed(z, y, y2, eps),
        lambda z: factor * F.binary_cross_entropy_with_logits(z, t.to(z.dtype)),
    ]
    if n - len(y.unique()) > 1:
        losses.append(lambda z: factor * F.cross_entropy(z, y, w.to(z.dtype)))
    for number, loss in enumerate(losses):
        reading = read(z, gradient(z, loss))
        assert isinstance(reading, Reading), (number, reading)
        check_change(z, loss, reading, 50 * PRECISE[dtype])
