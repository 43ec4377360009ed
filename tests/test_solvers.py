"""A damped factor is inverted, or its Cholesky factor solved with: the step is the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fop
from fop import linalg
from fop.linalg import Blocked, Dense, Diagonal, Factor
from tests.common import cnn, distance, images, mlp, points, same, snapshot, train

BOTH = pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])


@pytest.fixture
def packed() -> Iterator[None]:
    """Every factor, as if it were wide; inverted, though, because it is not."""
    with linalg.STORAGE.changed(packed_from=1, block=4):
        yield


@pytest.fixture
def cholesky(packed: None) -> Iterator[None]:
    """Every factor packed, and solved with."""
    with linalg.STORAGE.changed(solve_overhead=0):
        yield


def grouped() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(*layers).double()


def forms(optimizer: Any) -> set[str]:
    keys = {key for state in optimizer.state.values() for key in state}
    return {key for key in keys if key.endswith(("_inverse", "_cholesky"))}


def trained(kind: Any, model: nn.Module, data: Any, **settings: Any) -> Any:
    optimizer = kind(model, update_every=3, damping=0.01, **settings)
    train(model, optimizer, data)
    return optimizer


def convolutional() -> nn.Sequential:
    return cnn(dtype=torch.float64)


@BOTH
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (convolutional, {"norms": "unitwise", "fisher": "mc"}),
        (grouped, {"max_factor_size": 6}),
        (grouped, {"damping_mode": "exact"}),
        # The eigenvectors of singular factors, as of the other models, are not unique.
        (mlp, {"curvature": "ekfac"}),
    ],
)
@pytest.mark.parametrize("form", ["packed", "cholesky"])
def test_steps_by_packed_factors_are_steps_by_dense_ones(
    kind: Any, make: Any, settings: dict[str, Any], form: str, request: pytest.FixtureRequest
) -> None:
    batch = points if make is mlp else images
    data = [batch(seed=seed, dtype=torch.float64) for seed in range(7)]
    model = make()
    optimizer = trained(kind, model, data, **settings)
    exact = "damping_mode" in settings or "curvature" in settings
    assert exact or forms(optimizer) == {"input_inverse", "output_inverse"}
    dense, report = snapshot(model), fop.diagnostics(optimizer)
    request.getfixturevalue(form)
    model = make()
    optimizer = trained(kind, model, data, **settings)
    assert exact or ("output_cholesky" in forms(optimizer)) == (form == "cholesky")
    factors = [s["output_factor"] for s in optimizer.state.values() if "output_factor" in s]
    assert all(factor.dim() == 2 or factor.shape[1] == 1 for factor in factors)
    assert distance(snapshot(model), dense) < 1e-9
    for name, entry in fop.diagnostics(optimizer).items():
        for key, value in entry.items():
            if not report[name][key] > 1e10:  # the condition of a singular factor is round-off
                assert value == pytest.approx(report[name][key], rel=1e-6, abs=1e-12, nan_ok=True)


@pytest.mark.usefixtures("cholesky")
@BOTH
def test_cholesky_factors_resume_bit_for_bit(kind: Any) -> None:
    data = [points(seed=seed, dtype=torch.float32) for seed in range(8)]
    model = mlp(dtype=torch.float32)
    optimizer = trained(kind, model, data[:5])
    copied, saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, data[5:])
    resumed = kind(copied, update_every=3, damping=0.01)
    resumed.load_state_dict(saved)
    train(copied, resumed, data[5:])
    assert same(snapshot(model), snapshot(copied))


@pytest.mark.usefixtures("cholesky")
def test_a_layer_may_change_from_one_form_to_the_other() -> None:
    model, (x, y) = mlp(), points()
    optimizer = fop.FOP(model, update_every=1)
    for overhead, expected in ((500, "inverse"), (0, "cholesky"), (500, "inverse")):
        with linalg.STORAGE.changed(solve_overhead=overhead):
            train(model, optimizer, [(x, y)])
        assert forms(optimizer) == {f"input_{expected}", f"output_{expected}"}


def test_wide_factors_are_solved_with_unless_used_often() -> None:
    """A 3 x 3 convolution of 512 channels: not worth inverting for ten steps, but for a hundred."""
    assert linalg.solve_pays(4608, 10 * 512)
    assert not linalg.solve_pays(4608, 100 * 512)
    assert not linalg.solve_pays(512, 4608)


@BOTH
@pytest.mark.parametrize("interval", [900, 1100])
def test_packed_factors_and_their_dense_inverses_resume_bit_for_bit(
    kind: Any, interval: int
) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(1000, 2), nn.Linear(1000, 2)
    data = [(torch.randn(4, 1000), torch.tensor([0, 1, 1, 0])) for _ in range(6)]
    optimizer, resumed = (kind(m, update_every=interval) for m in (model, other))
    train(model, optimizer, data[:3])
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, data[3:])
    train(other, resumed, data[3:])
    assert forms(resumed) == forms(optimizer)
    assert same(snapshot(model), snapshot(other))


def test_the_interval_decides_the_form() -> None:
    def form(kind: Any, **settings: Any) -> set[str]:
        torch.manual_seed(0)
        model = nn.Linear(1000, 2)
        optimizer = kind(model, **settings)
        train(model, optimizer, [(torch.randn(4, 1000), torch.tensor([0, 1, 1, 0]))])
        return forms(optimizer)

    for kind in (fop.FOP, fop.KFAC):
        assert "input_cholesky" in form(kind, update_every=900)
        assert "input_inverse" in form(kind, update_every=1100)
        assert "input_cholesky" in form(kind, update_every=lambda step: 900)


@pytest.mark.usefixtures("cholesky")
def test_a_cholesky_factorisation_that_fails_is_tried_again() -> None:
    indefinite = Blocked.from_dense(
        torch.diag_embed(torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.5, -0.05]]))
    )
    (found,) = linalg.decomposed([indefinite], ["cholesky"], [torch.tensor([0.01])])[0] or (None,)
    assert found is not None
    assert (linalg.Cholesky(found, 6).diagonal() > 0).all()
    hopeless = indefinite.like(torch.full_like(indefinite.values, float("nan")))
    assert linalg.decomposed([hopeless], ["cholesky"], [torch.tensor([0.01])]) == [None]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_one_bad_entry_is_found(value: float, dtype: torch.dtype) -> None:
    good = [torch.ones(3, 4, dtype=torch.float64) * 1e300, torch.empty(0), torch.ones(2)]
    assert linalg.all_finite(good)
    bad = torch.ones(5, dtype=dtype)
    bad[3] = value
    assert not linalg.all_finite([*good, bad])


@pytest.mark.parametrize(("kind", "products"), [(fop.KFAC, 1), (fop.FOP, 3)])
def test_a_steady_step_needs_no_more_than_the_method_does(kind: Any, products: int) -> None:
    """Two-sided products: F a, M^-1 a and M^-1 d for FOP, the second for KFAC."""
    torch.manual_seed(0)
    model = nn.Linear(200, 130)
    optimizer = kind(model, update_every=1000)
    x, y = torch.randn(8, 200), torch.randint(130, (8,))
    train(model, optimizer, [(x, y)] * 4)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == products * 2 * 130 * 201 * (130 + 201)


@pytest.mark.parametrize("bad", [None, 1, 4], ids=["all good", "one indefinite", "one hopeless"])
def test_decompositions_of_equal_shapes_may_be_made_together(
    bad: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on accelerators: the same results, each for itself, and no failure spreads."""
    generator = torch.Generator().manual_seed(0)

    def positive(groups: int, width: int) -> Tensor:
        x = torch.randn(groups, width, width + 2, generator=generator, dtype=torch.float64)
        return x @ x.mT / width

    matrices = [positive(1, 5), positive(2, 5), positive(1, 3), positive(1, 5), positive(1, 5)]
    if bad == 1:
        matrices[1][1] -= 5 * torch.eye(5)
    elif bad == 4:
        matrices[4][0, 0, 0] = math.nan
    factors: list[Factor] = [Dense(matrix) for matrix in matrices]
    factors.append(Diagonal(matrices[0].diagonal(dim1=-2, dim2=-1).clone()))
    shifts = [torch.full((len(f.values),), 0.1 * i + 0.1).double() for i, f in enumerate(factors)]

    hows: tuple[linalg.How, linalg.How] = ("inverse", "eigenbasis")
    alone = [
        [linalg.decomposed([f], [how], [s])[0] for f, s in zip(factors, shifts, strict=True)]
        for how in hows
    ]
    calls = []
    original = torch.linalg.cholesky_ex
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda *a, **k: (calls.append(len(a[0])), original(*a, **k))[1]
    )
    together = [linalg.decomposed(factors, [how] * len(factors), shifts) for how in hows]
    assert calls[:2] == [5, 1]  # one call for the inverses of width 5
    for found, wanted in zip(together, alone, strict=True):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
            assert all(p.untyped_storage().nbytes() == p.numel() * 8 for p in one or ())
