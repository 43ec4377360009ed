"""FOP and KFAC keep every promise of torch.optim.Optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fop
from tests.common import cnn, distance, images, mlp, points, same, snapshot, train

Build = Callable[..., Any]
both = pytest.mark.parametrize("build", [fop.FOP, fop.KFAC])

RESUME_SETTINGS: list[dict[str, Any]] = [
    {},
    {"damping_mode": "exact"},
    {"fallback": "adamw", "weight_decay": 0.01},
    {"update_every": 3, "nesterov": True},
]


def through_a_file(state: dict[str, Any], path: Path) -> dict[str, Any]:
    torch.save(state, path)
    return torch.load(path, weights_only=True)


@both
@pytest.mark.parametrize("settings", RESUME_SETTINGS, ids=str)
@pytest.mark.parametrize("at", [0, 1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(
    build: Build, settings: dict[str, Any], at: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    data = [images(seed=seed, dtype=dtype) for seed in range(14)]
    whole = cnn(dtype=dtype)
    train(whole, build(whole, **settings), data)

    first = cnn(dtype=dtype)
    optimizer = build(first, **settings)
    train(first, optimizer, data[:at])
    saved = {"model": first.state_dict(), "optimizer": optimizer.state_dict()}
    loaded = through_a_file(saved, tmp_path / "checkpoint.pt")
    second = cnn(seed=9, dtype=dtype)
    resumed = build(second, **settings)
    second.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    train(second, resumed, data[at:])
    assert same(snapshot(second), snapshot(whole))


def test_loading_does_not_tie_the_optimizer_to_the_checkpoint() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    train(model, optimizer, [points()])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    train(model, optimizer, [points(seed=1)])
    factor = saved["state"][0]["input_factor"]
    assert not torch.equal(factor, optimizer.state[model[0].weight]["input_factor"])


def test_a_state_dict_round_trip_before_the_first_step_is_harmless() -> None:
    """As Accelerate does when it prepares an optimizer."""
    one, two = mlp(), mlp()
    first, second = fop.FOP(one), fop.FOP(two)
    second.load_state_dict(second.state_dict())
    data = [points(seed=seed) for seed in range(4)]
    train(one, first, data)
    train(two, second, data)
    assert same(snapshot(one), snapshot(two))


def test_the_state_is_plain_and_names_its_parameters() -> None:
    model = cnn()
    optimizer = fop.FOP(model, fallback="adamw")
    train(model, optimizer, [images()])
    state = optimizer.state_dict()
    for entries in state["state"].values():
        assert all(isinstance(value, (Tensor, float, int)) for value in entries.values())
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert set(state["state"][0]) >= {"input_factor", "output_factor", "momentum_buffer"}


def test_a_state_of_another_model_is_refused() -> None:
    optimizer = fop.FOP(mlp())
    other = fop.FOP(cnn())
    with pytest.raises(ValueError, match="param"):
        optimizer.load_state_dict(other.state_dict())


# ---- parameter groups


def test_groups_by_layer_name_have_their_own_options() -> None:
    model = mlp()
    groups = [{"names": "2", "lr": 0.3}, {"names": "*.bias", "weight_decay": 0.0}]
    with pytest.raises(ValueError, match=r"'2.bias' is in param_groups\[0\] and in param_groups"):
        fop.FOP(model, param_groups=groups)
    optimizer = fop.FOP(
        model,
        weight_decay=0.1,
        param_groups=[{"names": "2", "lr": 0.3, "damping": 0.02}, {"names": "0.bias", "lr": 0.7}],
    )
    found = {
        name: (group["lr"], group["weight_decay"], group["damping"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert found == {
        "0.weight": (0.1, 0.1, 1e-3),
        "0.bias": (0.7, 0.1, 1e-3),
        "2.weight": (0.3, 0.1, 0.02),
        "2.bias": (0.3, 0.1, 0.02),
    }


def test_one_group_takes_several_patterns() -> None:
    groups = [{"names": ["*.bias", "2.*"], "weight_decay": 0.0}]
    optimizer = fop.FOP(mlp(), weight_decay=0.1, param_groups=groups)
    found = [(g["weight_decay"], g["param_names"]) for g in optimizer.param_groups]
    assert found == [(0.0, ["0.bias", "2.weight", "2.bias"]), (0.1, ["0.weight"])]


@pytest.mark.parametrize("named", [False, True])
def test_groups_of_tensors_take_their_own_learning_rate(named: bool) -> None:
    """A layer at lr 0 stands still; the other moves as if alone, KL clip aside."""
    model = mlp()
    frozen = list(model[0].named_parameters()) if named else list(model[0].parameters())
    optimizer = fop.FOP(model, kl_clip=None, param_groups=[{"params": frozen, "lr": 0.0}])
    before = snapshot(model)
    train(model, optimizer, [points()])
    assert same(snapshot(model)[:2], before[:2])
    alone = mlp()
    train(alone, fop.FOP(alone, kl_clip=None), [points()])
    assert distance(snapshot(model)[2:], snapshot(alone)[2:]) < 1e-14


def test_weight_decay_by_group_is_that_of_sgd() -> None:
    one, two = mlp(), mlp()
    first = fop.KFAC(
        one, curvature="identity", kl_clip=None, weight_decay=0.1,
        param_groups=[{"names": "*.bias", "weight_decay": 0.0}],
    )  # fmt: skip
    biases = [p for name, p in two.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in two.named_parameters() if name.endswith("weight")]
    second = torch.optim.SGD(
        [{"params": biases, "weight_decay": 0.0}, {"params": weights}],
        lr=0.1, momentum=0.7, weight_decay=0.1,
    )  # fmt: skip
    data = [points(seed=seed) for seed in range(3)]
    train(one, first, data)
    train(two, second, data)
    assert distance(snapshot(one), snapshot(two)) < 1e-13


def test_the_fallback_has_groups_of_its_own() -> None:
    optimizer = fop.FOP(cnn(), fallback={"name": "adamw", "lr": 0.02})
    rules = {g["rule"]: g for g in optimizer.param_groups}
    assert rules["adamw"]["param_names"] == ["1.weight", "1.bias"]
    assert rules["adamw"]["fallback_lr"] == 0.02
    assert rules["adamw"]["lr"] == rules["curvature"]["lr"] == 0.1  # one schedule for both


def test_adding_parameters_later_is_refused() -> None:
    optimizer = fop.FOP(mlp())
    with pytest.raises(RuntimeError, match="can't take parameters after it was built"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1


# ---- the loop


@both
def test_a_closure_is_evaluated_once_with_gradients(build: Build) -> None:
    one, two = mlp(), mlp()
    first, second = build(one), build(two)
    x, y = points()
    calls = []

    def closure() -> Tensor:
        first.zero_grad()
        loss = cross_entropy(one(x), y)
        loss.backward()
        calls.append(loss)
        return loss

    for _ in range(3):
        assert first.step(closure) is calls[-1]
    train(two, second, [(x, y)] * 3)
    assert len(calls) == 3
    assert same(snapshot(one), snapshot(two))


def test_zeroing_between_forward_and_backward_changes_nothing() -> None:
    """As Lightning does in its closure; also with the extra pass of the sampled Fisher."""
    for fisher in ("empirical", "exact"):
        one, two = mlp(), mlp()
        first, second = fop.FOP(one, fisher=fisher), fop.FOP(two, fisher=fisher)
        for seed in range(3):
            x, y = points(seed=seed)
            loss = cross_entropy(one(x), y)
            first.zero_grad()
            loss.backward()
            first.step()
            train(two, second, [(x, y)])
        assert same(snapshot(one), snapshot(two))


def test_schedulers_and_step_hooks_work() -> None:
    model = mlp()
    optimizer = fop.FOP(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    for seed in range(3):
        train(model, optimizer, [points(seed=seed)])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert seen == ["pre", "post"] * 3


def test_a_scheduler_of_the_damping_takes_effect_at_the_next_refresh() -> None:
    model = mlp()
    optimizer = fop.FOP(model, update_every=1)
    optimizer.param_groups[0]["damping"] = 0.5
    train(model, optimizer, [points()])
    assert fop.diagnostics(optimizer)["0"]["damping"] == 0.5


def test_zero_grad_sets_to_none_or_to_zero() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    cross_entropy(model(points()[0]), points()[1]).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_step_without_gradients_does_nothing() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    before = snapshot(model)
    optimizer.step()
    assert same(snapshot(model), before)


def test_the_repr_tells_what_is_trained_how() -> None:
    text = repr(fop.FOP(cnn(), fallback="adamw"))
    assert "2 layers with kronecker curvature" in text
    assert "2 parameters use adamw (BatchNorm2d 1)" in text
    assert "lr: 0.1" in text


def test_the_repr_names_the_modules_without_curvature() -> None:
    norms = nn.ModuleList(nn.LayerNorm(2) for _ in range(4))
    parts = {"rnn": nn.LSTM(2, 2), "bag": nn.EmbeddingBag(3, 2), "norms": norms}
    model = nn.ModuleDict({**parts, "gru": nn.GRU(2, 2), "head": nn.Linear(2, 2)})
    model.scale = nn.Parameter(torch.ones(()))
    text = repr(fop.FOP(model))
    where = "ModuleDict; LSTM rnn; EmbeddingBag bag; LayerNorm norms.0, norms.1 and 2 more; GRU gru"
    assert f"18 parameters use adamw ({where})" in text


def test_the_repr_shows_options_and_no_bookkeeping() -> None:
    text = repr(fop.FOP(mlp(), 0.2, fisher="mc", weight_decay=0.1))
    for shown in ("FOP (", "2 layers with kronecker curvature", "kl_clip: 0.001", "fisher: mc"):
        assert shown in text
    assert "update_every: 10" in text
    assert "lr: 0.2, momentum: 0.7, nesterov: False, weight_decay: 0.1" in text
    for internal in ("refresh_overdue", "state_format", "steps", "rule", "reference_lr"):
        assert internal not in text


# ---- copies


@both
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_model_and_optimizer_copied_together_train_on_alike(build: Build, how: str) -> None:
    model = cnn()
    optimizer = build(model)
    train(model, optimizer, [images(seed=seed) for seed in range(5)])
    pair = (model, optimizer)
    twin, twin_optimizer = (
        pickle.loads(pickle.dumps(pair)) if how == "pickle" else copy.deepcopy(pair)
    )
    assert twin_optimizer.param_groups[0]["params"][0] is twin[0].weight
    data = [images(seed=seed) for seed in range(5, 12)]
    train(model, optimizer, data)
    train(twin, twin_optimizer, data)
    assert same(snapshot(twin), snapshot(model))


@both
def test_a_copy_of_the_model_trains_nothing_and_can_have_its_own_optimizer(build: Build) -> None:
    model = mlp()
    optimizer = build(model)
    average = copy.deepcopy(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    before = snapshot(average)
    for twin in (average, averaged):
        cross_entropy(twin(points()[0]), points()[1]).backward()
    assert all(block.recorder.sample().difference is None for block in optimizer._engine.layers)
    train(model, optimizer, [points()])
    averaged.update_parameters(model)
    assert same(snapshot(average), before)
    assert same(averaged.module.parameters(), model.parameters())
    train(average, build(average), [points(seed=1)])
    assert not same(snapshot(average), before)


def test_a_saved_model_loads_without_its_optimizer() -> None:
    model = mlp()
    optimizer = fop.FOP(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert same(snapshot(loaded), snapshot(model))
    train(loaded, torch.optim.SGD(loaded.parameters(), 0.1), [points()])
    del optimizer
