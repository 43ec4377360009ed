"""A state is loaded as a whole or not at all, and says what it does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fop
from tests.common import cnn, distance, images, mlp, points, same, snapshot, train

State = dict[str, Any]


def trained(steps: int = 5, **settings: Any) -> tuple[nn.Sequential, fop.FOP]:
    model = mlp()
    optimizer = fop.FOP(model, **settings)
    train(model, optimizer, [points(seed=seed) for seed in range(steps)])
    return model, optimizer


def frozen_copy(optimizer: fop.FOP) -> State:
    return copy.deepcopy(optimizer.state_dict())


def assert_equal_states(one: State, two: State) -> None:
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    for number, entries in one["state"].items():
        assert entries.keys() == two["state"][number].keys()
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(two["state"][number][key]))


# ---- what is refused


def of_a_later_version(state: State) -> None:
    for group in state["param_groups"]:
        group["state_format"] = 3


def of_an_unknown_version(state: State) -> None:
    state["param_groups"][0]["state_format"] = "beta"


def without_groups(state: State) -> None:
    del state["param_groups"]


def without_state(state: State) -> None:
    del state["state"]


def with_a_group_cut_short(state: State) -> None:
    group = state["param_groups"][0]
    group["params"], group["param_names"] = group["params"][:-1], group["param_names"][:-1]


def with_a_group_too_many(state: State) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": [9], "param_names": ["x"]})


def in_another_order(state: State) -> None:
    state["param_groups"][0]["param_names"].reverse()


def of_other_rules(state: State) -> None:
    state["param_groups"][0]["rule"] = "sgd"


def with_another_momentum(state: State) -> None:
    state["state"][2]["momentum_buffer"] = torch.zeros(6, 4)


def with_another_factor(state: State) -> None:
    state["state"][0]["output_factor"] = torch.eye(3).unsqueeze(0)


def of_another_number_of_groups(state: State) -> None:
    state["state"][0]["input_factor"] = torch.eye(6).expand(2, 6, 6)


REFUSED: list[tuple[Callable[[State], None], str]] = [
    (of_a_later_version, "has format 3, but this version of fop reads format 2: load it with"),
    (of_an_unknown_version, "has format 'beta', but this version of fop reads format 2"),
    (without_groups, "no state_dict of an optimizer, because it has no 'param_groups'"),
    (without_state, "it has no 'state': it has 'param_groups'"),
    (with_a_group_cut_short, r"parameter groups of \[3\] parameters, but this .* \[4\]"),
    (with_a_group_too_many, r"parameter groups of \[4, 1\] parameters, but this .* \[4\]"),
    (in_another_order, "parameter 0 is '0.weight', but '2.bias' in the state: build"),
    (of_other_rules, "'0.weight' follows the rule 'curvature', but 'sgd' in the state"),
    (with_another_momentum, r"'2.weight' has shape \(3, 6\), but its momentum_buffer .* \(6, 4\)"),
    (with_another_factor, r"output_factor of layer '0' should be 1 x 6 x 6, but .* \(1, 3, 3\)"),
    (of_another_number_of_groups, r"input_factor of layer '0' .* has shape \(2, 6, 6\)"),
]


@pytest.mark.parametrize(("damage", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_a_state_that_does_not_fit_is_named_and_changes_nothing(
    damage: Callable[[State], None], message: str
) -> None:
    disturbed, optimizer = trained()
    state = frozen_copy(trained(3)[1])
    damage(state)
    before = frozen_copy(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_equal_states(optimizer.state_dict(), before)
    undisturbed, other = trained()
    data = [points(seed=seed) for seed in range(5, 12)]
    train(disturbed, optimizer, data)
    train(undisturbed, other, data)
    assert same(snapshot(disturbed), snapshot(undisturbed))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_state_of_another_optimizer_is_refused(kind: Any) -> None:
    model = mlp()
    other = kind(model.parameters(), lr=0.1)
    train(model, other, [points()])
    with pytest.raises(ValueError, match=r"optimizer that is not fop's: .* new optimizer"):
        fop.FOP(model).load_state_dict(other.state_dict())


def test_a_file_cut_short_is_refused_by_torch_and_changes_nothing(tmp_path: Path) -> None:
    _, optimizer = trained()
    path = tmp_path / "state.pt"
    torch.save(optimizer.state_dict(), path)
    whole, before = path.read_bytes(), frozen_copy(optimizer)
    for length in (0, 100, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:length])
        with pytest.raises((RuntimeError, OSError, EOFError, UnpicklingError)):
            optimizer.load_state_dict(torch.load(path, weights_only=True))
    assert_equal_states(optimizer.state_dict(), before)


def test_loading_that_fails_half_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, say, after torch has taken the state over."""
    _, optimizer = trained()
    state, before = frozen_copy(trained(3)[1]), frozen_copy(optimizer)
    groups = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_restore_precision", fail)
        with pytest.raises(MemoryError):
            optimizer.load_state_dict(state)
    assert_equal_states(optimizer.state_dict(), before)
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == groups


# ---- what is loaded


def test_a_state_without_a_format_is_of_the_first() -> None:
    """Whose momentum was kept in units of updates: read as displacements it would be wrong."""
    _, first = trained()
    state = frozen_copy(first)
    for group in state["param_groups"]:
        del group["state_format"]
    with pytest.raises(ValueError, match="has format 1, but this version of fop reads format 2"):
        first.load_state_dict(state)


def test_renamed_layers_load_by_position() -> None:
    """As torch.optim does: the same model behind a wrapper, say."""
    one, first = trained()
    inner = mlp()
    second = fop.FOP(nn.Sequential(inner))
    second.load_state_dict(frozen_copy(first))
    inner.load_state_dict(one.state_dict())
    data = [points(seed=seed) for seed in range(5, 12)]
    train(one, first, data)
    train(inner, second, data)
    assert same(snapshot(one), snapshot(inner))


def derived(mode: str) -> set[str]:
    if mode == "factored":
        return {"input_inverse", "output_inverse"}
    return {f"{side}_{part}" for side in ("input", "output") for part in ("eigenvalues", "basis")}


@pytest.mark.parametrize(("old", "new"), [("factored", "exact"), ("exact", "factored")])
def test_another_way_of_damping_goes_on_from_the_moving_averages(old: Any, new: Any) -> None:
    """The next step, though none of the interval's, renews what the new way needs."""
    model, first = trained(damping_mode=old)
    state = frozen_copy(first)
    second_model = mlp()
    second_model.load_state_dict(model.state_dict())
    second = fop.FOP(second_model, damping_mode=new)
    second.load_state_dict(state)
    entries = second.state[second_model[0].weight]
    assert not derived(old) & entries.keys()
    batch = points(seed=20)
    train(second_model, second, [batch])
    assert derived(new) <= entries.keys()

    alone = mlp()
    alone.load_state_dict(model.state_dict())
    fresh = fop.FOP(alone, damping_mode=new)
    train(alone, fresh, [batch])
    for key in ("input_factor", "output_factor"):
        expected = 0.95 * state["state"][0][key] + 0.05 * fresh.state[alone[0].weight][key]
        assert distance([entries[key]], [expected]) < 1e-12
    factor = entries["input_factor"][0]
    if new == "factored":
        mean = {
            side: entries[f"{side}_factor"][0].diagonal().mean() for side in ("input", "output")
        }
        shift = (1e-3 * mean["input"] / mean["output"]).sqrt()
        expected = torch.linalg.inv(factor + shift * torch.eye(len(factor)).double())
        assert distance([entries["input_inverse"][0]], [expected]) < 1e-9
    else:
        basis, values = entries["input_basis"][0], entries["input_eigenvalues"][0]
        assert distance([basis @ values.diag() @ basis.T], [factor]) < 1e-12


@pytest.mark.parametrize("curvature", ["kronecker", "identity"])
def test_a_state_of_the_other_curvature_loads(curvature: Any) -> None:
    other = "identity" if curvature == "kronecker" else "kronecker"
    model, first = trained(curvature=other)
    second_model = mlp()
    second_model.load_state_dict(model.state_dict())
    second = fop.FOP(second_model, curvature=curvature)
    second.load_state_dict(frozen_copy(first))
    train(second_model, second, [points(seed=seed) for seed in range(3)])
    has_factor = "input_factor" in second.state[second_model[0].weight]
    assert has_factor == (curvature == "kronecker")
    assert len(fop.diagnostics(second)) == 2


def test_narrower_factors_take_over_at_the_next_renewal() -> None:
    model, first = trained()
    other = mlp()
    other.load_state_dict(model.state_dict())
    second = fop.FOP(other, max_factor_size=4)
    second.load_state_dict(frozen_copy(first))
    train(other, second, [points(seed=5)])  # no renewal is due: the step of the old factors
    train(model, first, [points(seed=5)])
    assert same(snapshot(other), snapshot(model))
    train(other, second, [points(seed=seed) for seed in range(6, 12)])
    assert second.state[other[0].weight]["input_factor"].shape == (1, 6)
    assert all(parameter.isfinite().all() for parameter in other.parameters())


@pytest.mark.parametrize("saved", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"damping_mode": "exact", "fallback": "adamw"}], ids=str)
def test_a_state_of_another_dtype_goes_on_as_if_the_model_had_been_cast(
    saved: torch.dtype, loaded: torch.dtype, settings: dict[str, Any]
) -> None:
    one = cnn(dtype=saved)
    first = fop.FOP(one, **settings)
    train(one, first, [images(seed=seed, dtype=saved) for seed in range(5)])
    two = cnn(dtype=loaded)
    second = fop.FOP(two, **settings)
    two.load_state_dict(one.state_dict())
    second.load_state_dict(frozen_copy(first))
    one.to(loaded)
    data = [images(seed=seed, dtype=loaded) for seed in range(5, 12)]
    train(one, first, data)
    train(two, second, data)
    assert same(snapshot(one), snapshot(two))
    wanted = torch.promote_types(loaded, torch.float32)
    for key, value in second.state[two[0].weight].items():
        if isinstance(value, Tensor):
            assert value.dtype == (loaded if key == "momentum_buffer" else wanted), key


@pytest.mark.parametrize("old", ["kronecker", "ekfac"])
def test_kronecker_curvature_and_ekfac_load_each_others_states(old: Any) -> None:
    """Both go on from the same moving averages; corrected eigenvalues are measured or forgotten."""
    new: Any = "ekfac" if old == "kronecker" else "kronecker"
    model, first = trained(curvature=old, damping_mode="exact")
    state = frozen_copy(first)
    other = mlp()
    other.load_state_dict(model.state_dict())
    second = fop.FOP(other, curvature=new, damping_mode="exact", update_every=1)
    second.load_state_dict(state)
    entries = second.state[other[0].weight]
    assert "corrected_eigenvalues" not in entries
    assert torch.equal(entries["input_basis"], state["state"][0]["input_basis"])
    train(other, second, [points(seed=20)])
    assert ("corrected_eigenvalues" in entries) == (new == "ekfac")


def test_factors_of_a_packed_projection_are_checked_too() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2)
    optimizer = fop.FOP(attention)
    x = torch.randn(5, 6, 4)
    attention(x, x, x)[0].square().mean().backward()
    optimizer.step()
    state = frozen_copy(optimizer)
    entries = next(e for e in state["state"].values() if "key.input_factor" in e)
    entries["key.input_factor"] = torch.eye(9).unsqueeze(0)
    with pytest.raises(ValueError, match=r"input_factor of layer 'key' should be 1 x 5 x 5"):
        optimizer.load_state_dict(state)
