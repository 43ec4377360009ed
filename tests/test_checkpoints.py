"""A state is loaded as a whole or not at all, and says what it does not fit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from fop.checkpoints import RULE_ENTRIES
from fop.curvature.ekfac import EigenCorrected
from fop.curvature.kronecker import FactoredKronecker
from fop.entries import Entry
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


def under_another_number(state: State) -> None:
    state["state"][17] = state["state"].pop(0)


def with_a_number_twice(state: State) -> None:
    state["param_groups"][0]["params"][3] = 0


def with_too_few_names(state: State) -> None:
    del state["param_groups"][0]["param_names"][2:]


def without_an_option(state: State) -> None:
    del state["param_groups"][0]["refresh_overdue"]


REFUSED: list[tuple[Callable[[State], None], str]] = [
    (of_a_later_version, "has format 3, but this version of fop reads format 2: load it with"),
    (of_an_unknown_version, "has format 'beta', but this version of fop reads format 2"),
    (without_groups, "no state_dict of an optimizer, because it has no 'param_groups'"),
    (without_state, "it has no 'state': it has 'param_groups'"),
    (with_a_group_cut_short, r"parameter groups of \[3\] parameters, but this .* \[4\]"),
    (with_a_group_too_many, r"parameter groups of \[4, 1\] parameters, but this .* \[4\]"),
    (in_another_order, "parameter 0 is '0.weight', but '2.bias' in the state: build"),
    (of_other_rules, "'0.weight' follows the rule 'curvature', but 'sgd' in the state"),
    (with_another_momentum, r"momentum_buffer of .* '2.weight' should be 3 x 6, but .* \(6, 4\)"),
    (with_another_factor, r"output_factor of layer '0' should be 1 x 6 x 6 or 1 x 6, but .* 3\)"),
    (under_another_number, "entries under 17, which stands for no parameter of its param_groups"),
    (with_a_number_twice, r"names a parameter twice: its params are \[0, 1, 2, 0\]"),
    (with_too_few_names, "param_names in the state should be 4 names"),
    (without_an_option, r"param_groups\[0\] of the state has no 'refresh_overdue'"),
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
    """Out of memory, say."""
    _, optimizer = trained()
    state, before = frozen_copy(trained(3)[1]), frozen_copy(optimizer)
    read, calls = Entry.read, []

    def fail(*args: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 5:
            raise MemoryError
        return read(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Entry, "read", fail)
        with pytest.raises(MemoryError):
            optimizer.load_state_dict(state)
    assert_equal_states(optimizer.state_dict(), before)


# ---- every entry, damaged in every way


class Wide(nn.Sequential):
    """One factor wide enough to be stored packed and solved with, one parameter in no layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 520), nn.LayerNorm(520), nn.Tanh(), nn.Linear(520, 3))
        self.double()


SETTINGS: list[dict[str, Any]] = [
    {"damping_mode": "factored", "norms": "unitwise"},
    {"damping_mode": "exact", "fallback": "adamw", "max_factor_size": 500},
    {"curvature": "ekfac", "fallback": "sgd", "update_every": 1},
]


def with_one(number: float) -> Callable[[Tensor], Tensor]:
    def damaged(value: Tensor) -> Tensor:
        value = value.clone(memory_format=torch.contiguous_format)
        value.view(-1)[-1] = number
        return value

    return damaged


TENSOR_DAMAGES: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda value: None,
    "text": lambda value: "x",
    "a number": lambda value: 1.0,
    "a list": lambda value: value.tolist(),
    "whole numbers": lambda value: value.round().long(),
    "flags": lambda value: value > 0,
    "complex": lambda value: value.to(torch.complex64),
    "sparse": lambda value: value.to_sparse(),
    "quantized": lambda value: torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8),
    "without numbers": lambda value: value.to("meta"),
    "a dimension more": lambda value: value.unsqueeze(0),
    "empty": lambda value: value.new_zeros(0),
    "twice as long": lambda value: (
        torch.stack([value, value]).flatten(0, 1) if value.dim() else value.expand(2)
    ),
    "not a number": with_one(math.nan),
    "infinite": with_one(-math.inf),
}
NUMBER_DAMAGES: dict[str, Any] = {
    "nothing": None,
    "text": "x",
    "a flag": True,
    "a tensor": torch.tensor(1.0),
    "not a number": math.nan,
    "infinite": math.inf,
    "negative": -1e-3,
    "zero": 0.0,
}
# Where a negative number means nothing.
NEVER_NEGATIVE = {"exp_avg_sq", "step", "corrected_eigenvalues"} | {
    f"{side}_eigenvalues" for side in ("input", "output")
}


def damages(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return NUMBER_DAMAGES
    found = {name: damage(value) for name, damage in TENSOR_DAMAGES.items()}
    if key.rpartition(".")[2] in NEVER_NEGATIVE:
        found["negative"] = with_one(-1e-3)(value)
    return found


def owners(optimizer: fop.FOP) -> dict[tuple[int, str], str]:
    """The name that an error must give, of each entry of a state."""
    numbered = dict(enumerate(p for g in optimizer.param_groups for p in g["params"]))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    found = {}
    for number, parameter in numbered.items():
        for key in optimizer.state[parameter]:
            found[number, key] = names[number]
        for block in optimizer._engine.layers:
            if block.weight is parameter:
                found.update({(number, key): block.name for key in block.keys})
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_every_damaged_entry_is_named_and_changes_nothing(settings: dict[str, Any]) -> None:
    """Not even the step under way, whose backward has run: it is the one of an unloaded twin."""
    models = [Wide(), Wide()]
    optimizers = [fop.FOP(model, momentum=0.9, **settings) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, [points(seed=seed) for seed in range(3)])
        optimizer.zero_grad()
        x, y = points(seed=3)
        cross_entropy(model(x), y).backward()
    model, optimizer = models[0], optimizers[0]
    before, good, names = snapshot(model), frozen_copy(optimizer), owners(optimizer)
    tried = 0
    for number, entries in good["state"].items():
        for key, value in entries.items():
            for damage, damaged in damages(key, value).items():
                state = {**good, "state": {**good["state"], number: {**entries, key: damaged}}}
                where = f"{key} of {names[number, key]}: {damage}"
                with pytest.raises((ValueError, TypeError)) as error:
                    optimizer.load_state_dict(state)
                assert key.rpartition(".")[2] in str(error.value), where
                assert repr(names[number, key]) in str(error.value), where
                tried += 1
    assert tried > 200
    assert_equal_states(optimizer.state_dict(), good)
    assert same(snapshot(model), before)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.step()
        train(model, optimizer, [points(seed=seed) for seed in range(4, 8)])
    assert same(snapshot(models[0]), snapshot(models[1]))
    assert_equal_states(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_every_kind_of_entry_is_damaged_above() -> None:
    """Roots and diagonals too, so that none is left out."""
    found = set()
    for settings in SETTINGS:
        model = Wide()
        optimizer = fop.FOP(model, momentum=0.9, **settings)
        train(model, optimizer, [points(seed=seed) for seed in range(3)])
        found |= {key for own in optimizer.state.values() for key in own}
    declared = {*FactoredKronecker.entries, *EigenCorrected.entries, *RULE_ENTRIES}
    assert found == declared - {"update_average"}  # of steps that size themselves


OPTIONS: list[tuple[str, Any]] = [
    *((name, value) for name in ("lr", "momentum", "weight_decay", "eps") for value in
      (-1.0, math.nan, math.inf, "x", None, True)),
    *(("damping", value) for value in (0, -1.0, math.nan, "x", None)),
    *(("betas", value) for value in (None, 0.9, (0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan))),
    *((name, value) for name in ("nesterov", "refresh_overdue") for value in (1, None, "yes")),
    *(("steps", value) for value in ("x", -1, 2.5, None, True, math.nan, torch.tensor(3))),
    ("rule", "adam"),
    ("rule", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_every_wrong_option_is_named_and_changes_nothing(name: str, value: Any) -> None:
    """By the checks of the constructor; so is one that is missing."""
    models = [mlp(), mlp()]
    optimizers = [fop.FOP(model, fallback="adamw", skip="2") for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, [points(seed=seed) for seed in range(3)])
    good = frozen_copy(optimizers[0])
    index = next(i for i, group in enumerate(good["param_groups"]) if group["rule"] == "adamw")
    state, without = copy.deepcopy(good), copy.deepcopy(good)
    state["param_groups"][index][name] = value
    del without["param_groups"][index][name]
    for damaged in (state, without):
        with pytest.raises((ValueError, TypeError), match=name):
            optimizers[0].load_state_dict(damaged)
    assert_equal_states(optimizers[0].state_dict(), good)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, [points(seed=seed) for seed in range(3, 6)])
    assert same(snapshot(models[0]), snapshot(models[1]))


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq", "step"])
def test_adamw_without_one_of_its_entries_is_refused(missing: str) -> None:
    model = mlp()
    optimizer = fop.FOP(model, fallback="adamw", skip="2")
    train(model, optimizer, [points()])
    state = frozen_copy(optimizer)
    del next(own for own in state["state"].values() if missing in own)[missing]
    with pytest.raises(ValueError, match=f"'2.weight' has no {missing} in the state"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("settings", [{}, {"damping_mode": "exact"}, {"curvature": "ekfac"}])
def test_curvature_without_one_of_its_entries_is_refreshed_at_the_next_step(
    settings: dict[str, Any],
) -> None:
    """From the moving averages that are there, as with another damping_mode."""
    model, optimizer = trained(5, **settings)
    good = frozen_copy(optimizer)
    for key in optimizer._engine.layers[0].curvature.entries:
        state = copy.deepcopy(good)
        optional = key == "corrected_eigenvalues" or key.endswith("_last_size")
        if state["state"][0].pop(key, None) is None or optional:
            continue
        optimizer.load_state_dict(state)
        train(model, optimizer, [points(seed=5)])  # no refresh is due
        assert key in optimizer.state[model[0].weight]
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_numbers_too_large_for_the_parameter_are_refused() -> None:
    model = mlp()
    optimizer = fop.FOP(model, momentum=0.9)
    train(model, optimizer, [points()])
    state = frozen_copy(optimizer)
    state["state"][0]["momentum_buffer"][0, 0] = 1e300
    single = fop.FOP(mlp(dtype=torch.float32), momentum=0.9)
    with pytest.raises(ValueError, match=r"'0.weight' .* not finite in the state once .* float32"):
        single.load_state_dict(state)


def test_a_function_for_update_every_that_fails_refuses_the_state() -> None:
    model = mlp()
    optimizer = fop.FOP(model, update_every=lambda step: 2 if step < 5 else 0)
    train(model, optimizer, [points(seed=seed) for seed in range(2)])
    good = frozen_copy(optimizer)
    with pytest.raises(ValueError, match=r"update_every\(6\) must be >= 1"):
        optimizer.load_state_dict(trained(5)[1].state_dict())
    assert_equal_states(optimizer.state_dict(), good)


def test_hooks_of_the_user_change_the_state_before_it_is_checked() -> None:
    one, first = trained(3)
    two, second = trained(0)
    two.load_state_dict(one.state_dict())
    broken = {**frozen_copy(first), "state": {}}

    def mend(optimizer: Any, state: State) -> None:
        state["state"] = frozen_copy(first)["state"]

    seen: list[int] = []
    second.register_load_state_dict_pre_hook(mend)
    second.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.steps))
    second.load_state_dict(broken)
    assert seen == [3]
    assert broken["state"] == {}
    train(one, first, [points(seed=4)])
    train(two, second, [points(seed=4)])
    assert same(snapshot(one), snapshot(two))


# ---- what is loaded


def test_a_state_without_a_format_is_of_the_first() -> None:
    """Whose momentum was kept in units of updates: read as displacements it would be wrong."""
    _, first = trained()
    state = frozen_copy(first)
    for group in state["param_groups"]:
        del group["state_format"]
    with pytest.raises(ValueError, match="has format 1, but this version of fop reads format 2"):
        first.load_state_dict(state)


def test_numbers_that_became_text_stand_for_the_same_parameters() -> None:
    """As torch.distributed.checkpoint and JSON make them."""
    one, first = trained()
    two, second = trained(0)
    state = frozen_copy(first)
    state["state"] = {str(number): entries for number, entries in state["state"].items()}
    two.load_state_dict(one.state_dict())
    second.load_state_dict(state)
    train(one, first, [points(seed=5)])
    train(two, second, [points(seed=5)])
    assert same(snapshot(one), snapshot(two))


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
    """The next step, though none of the interval's, refreshes what the new way needs."""
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


def test_narrower_factors_take_over_at_the_next_refresh() -> None:
    model, first = trained()
    other = mlp()
    other.load_state_dict(model.state_dict())
    second = fop.FOP(other, max_factor_size=4)
    second.load_state_dict(frozen_copy(first))
    train(other, second, [points(seed=5)])  # no refresh is due: the step of the old factors
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


def test_a_state_brings_the_options_of_its_groups_and_leaves_those_of_the_constructor() -> None:
    """Training goes on as with these put together."""
    of_groups = [
        {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.01, "nesterov": True, "damping": 0.02},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False, "damping": 0.001},
    ]
    fallbacks = [{"fallback": {"name": "adamw", "lr": lr}} for lr in (0.02, 0.005)]
    settings: list[dict[str, Any]] = [
        {"kl_clip": 0.1, "update_every": 2, "factor_decay": 0.5, "beta": 0.3},
        {"kl_clip": 0.01, "update_every": 3, "factor_decay": 0.9, "beta": 0.6},
    ]

    def build(groups: int, constructor: int) -> tuple[nn.Sequential, fop.FOP]:
        model = cnn(dtype=torch.float64)
        options = {**of_groups[groups], **fallbacks[groups], **settings[constructor]}
        return model, fop.FOP(model, **options)

    saved, first = build(0, 0)
    train(saved, first, [images(seed=seed, dtype=torch.float64) for seed in range(3)])
    found = []
    for groups in (1, 0):
        model, optimizer = build(groups, 1)
        model.load_state_dict(saved.state_dict())
        optimizer.load_state_dict(first.state_dict())
        by_rule = {group["rule"]: group for group in optimizer.param_groups}
        assert {**by_rule["curvature"], **of_groups[0]} == by_rule["curvature"]
        assert by_rule["adamw"]["fallback_lr"] == 0.02
        train(model, optimizer, [images(seed=s, dtype=torch.float64) for s in range(3, 9)])
        found.append(snapshot(model))
    assert same(*found)
    train(saved, first, [images(seed=s, dtype=torch.float64) for s in range(3, 9)])
    assert not same(found[0], snapshot(saved))  # whose constructor had other settings


@pytest.mark.parametrize("fallbacks", [("sgd", "adamw"), ("adamw", "sgd")])
@pytest.mark.parametrize("build", [cnn, mlp])
def test_a_state_of_another_fallback_leaves_its_learning_rate_behind(
    build: Any, fallbacks: tuple[Any, Any]
) -> None:
    """AdamW at SGD's learning rate would wreck a model."""
    first, second = (fop.FOP(build(), fallback=fallback) for fallback in fallbacks)
    before = [(g["rule"], g["fallback_lr"]) for g in second.param_groups]
    second.load_state_dict(first.state_dict())
    assert [(g["rule"], g["fallback_lr"]) for g in second.param_groups] == before


# ---- resume, where a loop leaves more behind than the state


@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("halves", ["samples", "microbatches"])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_odd_batches_and_the_models_zero_grad_resume_bit_for_bit(
    kind: Any, set_to_none: bool, halves: str, at: int
) -> None:
    """The odd example goes where fewer are in this gradient, not in one that is gone."""
    settings: dict[str, Any] = {"halves": halves} if kind is fop.FOP else {}

    def run(model: nn.Module, optimizer: Any, seeds: range) -> None:
        for seed in seeds:
            model.zero_grad(set_to_none)
            for part in range(3):
                x, y = points(5 + 2 * part, 10 * seed + part)
                (cross_entropy(model(x), y) / 3).backward()
            optimizer.step()

    whole = mlp()
    first = kind(whole, **settings)
    run(whole, first, range(at))
    resumed = mlp(seed=5)
    second = kind(resumed, **settings)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    second.load_state_dict(frozen_copy(first))
    run(whole, first, range(at, 9))
    run(resumed, second, range(at, 9))
    assert same(snapshot(whole), snapshot(resumed))


@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
@pytest.mark.parametrize(
    "settings", [{}, {"damping_mode": "exact"}, {"curvature": "ekfac"}, {"norms": "unitwise"}]
)
@pytest.mark.parametrize("when", ["before loading", "after loading"])
@pytest.mark.parametrize(("at", "zero"), [(1, "optimizer"), (3, "model"), (5, "optimizer")])
def test_a_bias_frozen_when_training_is_resumed_resumes_bit_for_bit(
    kind: Any, settings: dict[str, Any], when: str, zero: str, at: int
) -> None:
    def build(seed: int) -> tuple[nn.Sequential, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
        return model, kind(model, **settings)

    def freeze(model: nn.Sequential) -> None:
        for index in (0, 1):
            model[index].bias.requires_grad_(False)

    def run(model: nn.Module, optimizer: Any, seeds: range) -> None:
        for seed in seeds:
            (model if zero == "model" else optimizer).zero_grad()
            x, y = points(7, seed)
            cross_entropy(model(x), y).backward()
            optimizer.step()

    whole, first = build(0)
    run(whole, first, range(at))
    resumed, second = build(1)
    if when == "before loading":
        freeze(resumed)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    second.load_state_dict(frozen_copy(first))
    for model, optimizer in ((whole, first), (resumed, second)):
        freeze(model)
        run(model, optimizer, range(at, at + 7))
    assert same(snapshot(whole), snapshot(resumed))
