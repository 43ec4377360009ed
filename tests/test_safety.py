"""Nothing that goes wrong in one step is left behind, and no step waits for the host."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import fop
from fop import linalg
from fop.linalg import Dense, treat_as_accelerator
from tests.common import cnn, distance, images, mlp, points, same, snapshot, train


class HostReads(TorchDispatchMode):
    """Counts scalars that are read from the device."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["host", "accelerator"])
def any_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Changes are masked where the host would have to wait for the device."""
    with treat_as_accelerator() if request.param == "accelerator" else nullcontext():
        yield


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"damping_mode": "exact"},
        {"sharing": "reduce", "weight_decay": 0.1, "nesterov": True},
        {"fallback": "adamw"},
        {"beta": 0.1, "eta": 0.5, "decoupled_weight_decay": True, "weight_decay": 0.1},
        {"fisher": "mc"},
    ],
    ids=str,
)
@pytest.mark.parametrize("clip", [None, 0.1])
@treat_as_accelerator()
def test_a_steady_step_reads_nothing_from_the_device(
    settings: dict[str, Any], clip: float | None
) -> None:
    model = cnn()
    optimizer = fop.FOP(model, update_every=5, **settings)
    refreshes = []
    for step in range(1, 12):
        optimizer.zero_grad()
        x, y = images(seed=step)
        loss = cross_entropy(model(x), y)
        with HostReads() as backward:
            loss.backward()
        assert backward.count == 0
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        with HostReads() as reads:
            optimizer.step()
        if reads.count:
            refreshes.append(step)
    assert refreshes == [1, 2, 4, 6, 11]


def poison_input(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone()
    x[3, 1] = math.nan
    cross_entropy(model(x), y).backward()


def poison_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
    (cross_entropy(model(x), y) * math.inf).backward()


def poison_one_gradient(model: nn.Module, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y).backward()
    model[2].bias.grad[1] = math.nan


def poison_capture(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The two halves overflow, though their sum does not."""
    cross_entropy(model(x), y).backward()
    hook = next(iter(model[0]._forward_hooks.values()))
    hook._owner().sample().difference[0].fill_(math.inf)


OTHERS: dict[str, Any] = {"fallback": "adamw", "skip": "0", "nesterov": True}


@pytest.mark.parametrize(
    ("poison", "settings"),
    [
        *((poison, {}) for poison in (poison_input, poison_loss, poison_one_gradient)),
        *((poison, OTHERS) for poison in (poison_input, poison_loss, poison_one_gradient)),
        (poison_capture, {}),
    ],
)
@pytest.mark.parametrize("at", [1, 3, 4, 11])
@pytest.mark.usefixtures("any_device")
def test_a_step_that_is_not_finite_changes_nothing(
    poison: Callable[..., None], at: int, settings: dict[str, Any]
) -> None:
    model = mlp()
    optimizer = fop.FOP(model, weight_decay=0.01, **settings)
    train(model, optimizer, [points(seed=seed) for seed in range(at - 1)])
    before, state = snapshot(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    poison(model, *points(seed=99))
    optimizer.step()
    assert same(snapshot(model), before)
    after = optimizer.state_dict()["state"]
    for number, entries in after.items():
        for key, value in entries.items():
            # Before the first sound step there is no state: what was made since must be blank.
            old = state.get(number, {}).get(key)
            if old is None:
                assert not torch.as_tensor(value).any(), (number, key)
            else:
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(old)), (number, key)
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert distance(snapshot(model), before) > 1e-4


def test_curvature_lost_to_an_overflow_is_refreshed_in_the_next_step() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    train(model, optimizer, [points(seed=seed) for seed in range(10)])
    factor = optimizer.state[model[0].weight]["input_factor"].clone()
    optimizer.zero_grad()
    poison_input(model, *points())  # step 11 would have refreshed
    optimizer.step()
    assert torch.equal(optimizer.state[model[0].weight]["input_factor"], factor)
    train(model, optimizer, [points(seed=12)])
    assert not torch.equal(optimizer.state[model[0].weight]["input_factor"], factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_single_precision_curvature(dtype: torch.dtype) -> None:
    model = mlp(dtype=torch.float32)
    half = copy.deepcopy(model).to(dtype)
    optimizer, reference = fop.FOP(half), fop.FOP(model)
    train(half, optimizer, [points(seed=s, dtype=dtype) for s in range(6)])
    train(model, reference, [points(seed=s, dtype=torch.float32) for s in range(6)])
    state = optimizer.state[half[0].weight]
    assert {state[key].dtype for key in ("input_factor", "output_inverse")} == {torch.float32}
    assert half[0].weight.dtype == dtype
    assert distance([p.float() for p in half.parameters()], snapshot(model)) < 0.3


# ---- decompositions are tried again


def psd(*eigenvalues: float) -> Tensor:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64)).Q
    matrix = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T
    return ((matrix + matrix.T) / 2).unsqueeze(0)


def test_inverses_and_eigenbases_are_right_where_all_is_well() -> None:
    factor, shift = psd(3.0, 1.0, 0.2), torch.tensor([0.1], dtype=torch.float64)
    (inverse,) = linalg.decomposed([Dense(factor)], ["inverse"], [shift])[0] or (None,)
    assert inverse is not None
    assert torch.allclose(inverse @ (factor + 0.1 * torch.eye(3)), torch.eye(3).double())
    pair = linalg.decomposed([Dense(factor)], ["eigenbasis"], [shift])[0]
    assert pair is not None
    values, vectors = pair
    assert torch.allclose(vectors @ torch.diag_embed(values) @ vectors.mT, factor)


def test_a_matrix_too_ill_conditioned_for_float32_is_inverted_in_float64() -> None:
    wide = psd(1e6, 1.0, 0.0, 0.0)
    shift = torch.tensor([1e-5])
    (inverse,) = linalg.decomposed([Dense(wide.float())], ["inverse"], [shift])[0] or (None,)
    assert inverse is not None
    assert inverse.dtype == torch.float32
    assert inverse.isfinite().all()


def test_an_indefinite_matrix_is_inverted_with_more_damping() -> None:
    factor, shift = Dense(psd(1.0, 0.5, -0.05)), torch.tensor([0.01], dtype=torch.float64)
    (inverse,) = linalg.decomposed([factor], ["inverse"], [shift])[0] or (None,)
    assert inverse is not None
    assert torch.linalg.eigvalsh(inverse).min() > 0


def test_a_hopeless_matrix_is_none() -> None:
    factor = torch.full((1, 3, 3), math.nan)
    for how in ("inverse", "eigenbasis"):
        assert linalg.decomposed([Dense(factor)], [how], [torch.tensor([0.1])]) == [None]


DECOMPOSITIONS = {"factored": "cholesky_ex", "exact": "eigh"}


def fail(*args: Any, **kwargs: Any) -> Any:
    raise torch.linalg.LinAlgError("injected")


@pytest.mark.parametrize("mode", list(DECOMPOSITIONS))
def test_a_failed_decomposition_keeps_the_previous_inverse_and_says_so(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer = fop.FOP(model, damping_mode=mode)
    train(model, optimizer, [points(seed=seed) for seed in range(10)])
    key = "input_inverse" if mode == "factored" else "input_basis"
    old, before = optimizer.state[model[0].weight][key].clone(), snapshot(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, DECOMPOSITIONS[mode], fail)
        with pytest.warns(RuntimeWarning, match=r"curvature of '0', '2' could not be inverted"):
            train(model, optimizer, [points(seed=10)])
    assert torch.equal(optimizer.state[model[0].weight][key], old)
    assert distance(snapshot(model), before) > 1e-5  # the step was taken with the old inverse
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [points(seed=11)])  # and refreshed as soon as it works again
    assert not torch.equal(optimizer.state[model[0].weight][key], old)


@pytest.mark.parametrize("mode", list(DECOMPOSITIONS))
def test_without_a_previous_inverse_the_step_is_the_plain_gradient(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = mlp(), mlp()
    optimizer = fop.FOP(model, damping_mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, DECOMPOSITIONS[mode], fail)
        with pytest.warns(RuntimeWarning, match="could not be inverted"):
            train(model, optimizer, [points()])
    train(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9), [points()])
    assert distance(snapshot(model), snapshot(plain)) < 1e-13
    train(model, optimizer, [points(seed=1)])
    assert len(fop.diagnostics(optimizer)) == 2


@pytest.mark.parametrize("mode", list(DECOMPOSITIONS))
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e12])
def test_vanishing_and_huge_factors_give_finite_steps(mode: Any, scale: float) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = fop.FOP(model, damping_mode=mode)
    x, y = points(dtype=torch.float32)
    train(model, optimizer, [(x * scale, y) for _ in range(3)])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# ---- loss scaling


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ and step"])
def test_a_grad_scaler_changes_nothing(unscale: bool) -> None:
    plain, scaled = mlp(), mlp()
    one, two = fop.FOP(plain, beta=0.4), fop.FOP(scaled, beta=0.4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for seed in range(6):
        x, y = points(seed=seed)
        train(plain, one, [(x, y)])
        two.zero_grad()
        scaler.scale(cross_entropy(scaled(x), y)).backward()
        if unscale:
            scaler.unscale_(two)
        scaler.step(two)
        scaler.update()
    assert scaler.get_scale() > 1024  # it did change in between
    assert distance(snapshot(scaled), snapshot(plain)) < 1e-10


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_under_a_grad_scaler_skips_the_step_and_lowers_the_scale(unscale: bool) -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    before = snapshot(model)
    optimizer.zero_grad()
    x, y = points()
    (scaler.scale(cross_entropy(model(x), y)) * math.inf).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    assert same(snapshot(model), before)


def test_one_example_a_step_is_a_kfac_step_and_said_once() -> None:
    single, kfac = mlp(), mlp()
    optimizer = fop.FOP(single)
    data = [points(1, seed) for seed in range(4)]
    with pytest.warns(RuntimeWarning, match=r"'0', '2' saw 1 and 0 examples") as caught:
        train(single, optimizer, data)
    assert len(caught) == 1
    train(kfac, fop.KFAC(kfac), data)
    assert distance(snapshot(single), snapshot(kfac)) < 1e-13


def clipped_run(scaler: torch.amp.GradScaler | None, *, name_it: bool, **settings: Any) -> Any:
    model = mlp()
    optimizer = fop.FOP(model, update_every=1, beta=0.4, **settings)
    if name_it:
        optimizer.grad_scaler = scaler
    for seed in range(5):
        x, y = points(seed=seed)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (1 + seed))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return model, optimizer


@pytest.mark.parametrize("settings", [{}, {"damping_mode": "exact"}, {"fisher": "exact"}], ids=str)
def test_unscaling_and_clipping_are_told_apart_with_the_scaler(settings: dict[str, Any]) -> None:
    """The scale changes on the way, and every gradient is clipped."""
    plain, _ = clipped_run(None, name_it=False, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
    scaled, _ = clipped_run(scaler, name_it=True, **settings)
    assert scaler.get_scale() > 1000
    assert distance(snapshot(scaled), snapshot(plain)) < 1e-6  # unscale_ divides in float32


def test_without_the_scaler_a_clip_shrinks_the_curvature_of_its_step_and_is_named() -> None:
    """By its square, in the output factor alone; the gradient and its halves stay right."""

    def one_step(scaler: torch.amp.GradScaler | None) -> tuple[nn.Module, fop.FOP, float]:
        model = mlp()
        optimizer = fop.FOP(model, curvature="kronecker")
        x, y = points()
        loss = cross_entropy(model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        if scaler is None:
            optimizer.step()
        else:
            with pytest.warns(RuntimeWarning, match="Set optimizer.grad_scaler = scaler") as said:
                scaler.step(optimizer)
            assert len(said) == 1
        return model, optimizer, 0.1 / norm

    model, optimizer, _ = one_step(None)
    other, scaled, clip = one_step(torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert clip < 0.5
    for layer in (0, 2):
        right, found = optimizer.state[model[layer].weight], scaled.state[other[layer].weight]
        assert distance([found["input_factor"]], [right["input_factor"]]) < 1e-12
        wanted = right["output_factor"] * clip**2
        assert distance([found["output_factor"]], [wanted]) < 1e-4  # clips add 1e-6 to the norm


def test_the_scaler_is_no_part_of_state_or_copies() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    optimizer.grad_scaler = torch.amp.GradScaler("cpu")
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert twin_optimizer.grad_scaler is None
    train(twin, twin_optimizer, [points()])


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("fallback", ["adamw", "sgd"])
def test_a_non_finite_step_leaves_a_bias_whose_weight_is_frozen(fallback: Any) -> None:
    """It has no layer to go with, and momentum takes its plain gradient."""
    model = mlp()
    optimizer = fop.FOP(model, fallback=fallback, weight_decay=0.1)
    model[0].weight.requires_grad_(False)
    train(model, optimizer, [points(seed=seed) for seed in range(3)])
    before = snapshot(model)
    optimizer.zero_grad()
    x, y = points()
    (cross_entropy(model(x), y) * math.inf).backward()
    optimizer.step()
    assert same(snapshot(model), before)
    train(model, optimizer, [points(seed=5)])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
