"""Verifying a module's adapter disturbs nothing, and goes along with everything else torch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import fop
from fop.capture import verify
from tests.common import cnn, distance, images, mlp, points, same, snapshot, train


def doubled(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def of_parameters(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def verified(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that are compared with their adapters from now on, call by call."""
    calls: list[nn.Module] = []
    original = verify.verify

    def counting(layer: Any, module: nn.Module, *args: Any, **kwargs: Any) -> bool:
        calls.append(module)
        return original(layer, module, *args, **kwargs)

    monkeypatch.setattr(verify, "verify", counting)
    return calls


def test_a_module_is_compared_at_its_first_call_and_when_it_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, model = verified(monkeypatch), cnn(dtype=torch.float64)
    optimizer = fop.FOP(model, norms="unitwise", update_every=2)
    train(model, optimizer, [images(seed=s, dtype=torch.float64) for s in range(4)])
    assert calls == [model[0], model[1], model[4]]
    model[0].padding_mode, model[1].eps = "circular", 1e-3  # type: ignore[assignment]
    train(model, optimizer, [images(seed=s, dtype=torch.float64) for s in range(4)])
    assert calls[3:] == [model[0], model[1]]


def test_an_unchanged_module_costs_no_operation() -> None:
    for module, shape in ((nn.Linear(4, 4), (4,)), (nn.Conv2d(4, 4, 3), (4, 5, 5))):
        optimizer = fop.FOP(module, lr=1e-3)
        module(torch.randn(2, *shape)).sum().backward()
        capture = optimizer._engine.layers[0].recorder
        hooks: list[Any] = list(module._forward_hooks.values())
        [adapter] = [hook._adapter for hook in hooks if hasattr(hook, "_adapter")]
        assert adapter.at_call(module, None, None, capture) is not None  # no tensor is looked at


def test_hooks_retained_gradients_and_random_numbers_are_left_alone() -> None:
    """As of an unwatched copy: how often hooks are called, and with what."""
    found = []
    for watch in (False, True):
        model, (x, y) = mlp(), points()
        optimizer = fop.FOP(model) if watch else None
        seen: list[Tensor] = []
        model[2].weight.register_hook(seen.append)
        model[2].register_full_backward_hook(lambda m, i, o, seen=seen: seen.extend([*i, *o]))
        hidden = model[0](x)
        hidden.retain_grad()
        hidden.register_hook(seen.append)
        torch.manual_seed(5)
        cross_entropy(model[2](hidden), y).backward()
        found.append([*seen, hidden.grad, torch.rand(1), *of_parameters(model)])
        del optimizer
    assert distance(*found) < 1e-12


@pytest.mark.parametrize("by_name", [False, True], ids=["position", "keyword"])
def test_hooks_that_change_a_layers_input_or_output_are_part_of_the_graph(by_name: bool) -> None:
    """Pre-hooks run before the call that is seen, other hooks after it: the layer is served."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return tuple(3 * a for a in args), {key: 3 * value for key, value in kwargs.items()}

    found = []
    for watch in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(5, 3).double()
        module.register_forward_hook(lambda _, args, output: output.tanh())
        optimizer = fop.FOP(module) if watch else None
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(lambda _, args, output: output * 2)
        x = points()[0].requires_grad_()
        output = module(input=x) if by_name else module(x)
        output.pow(3).mean().backward()
        found.append([x.grad, *of_parameters(module)])
        if optimizer is not None:
            optimizer.step()
            assert list(fop.diagnostics(optimizer)) == [""]
    assert distance(*found) < 1e-12


def test_a_weight_that_its_input_depends_on_is_compared_in_its_last_call_alone() -> None:
    """A module called on its own output: the comparison must not go back beyond its input."""
    found = []
    for watch in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(4, 4).double()
        optimizer = fop.FOP(module) if watch else None
        x = points()[0][:, :4]
        module(module(x).tanh()).square().mean().backward()
        found.append(of_parameters(module))
        if optimizer is not None:
            optimizer.step()
            assert list(fop.diagnostics(optimizer)) == [""]
    assert distance(*found) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "half precision"])
@pytest.mark.parametrize("wrong", [False, True])
def test_layers_in_low_precision_are_served_and_wrong_ones_found(
    dtype: torch.dtype, pure: bool, wrong: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 64),
        nn.LayerNorm(64), nn.Linear(64, 3, bias=False),
    )  # fmt: skip
    if pure:
        model.to(dtype)
    plain = copy.deepcopy(model)
    optimizer = fop.FOP(model, lr=1e-4, norms="unitwise")
    for one in (model, plain) if wrong else ():
        doubled(one[3])
    x = torch.randn(64, 8, 4, 4, dtype=dtype if pure else torch.float32)
    for one in (model, plain):
        with torch.autocast("cpu", dtype, enabled=not pure):
            one(x).square().mean().backward()
    assert distance(of_parameters(model), of_parameters(plain)) < 0.05
    if wrong:
        with pytest.warns(RuntimeWarning, match=r"compute something else .*'3': "):
            optimizer.step()
    else:
        optimizer.step()
        assert len(fop.diagnostics(optimizer)) == 4


def test_a_batch_that_is_empty_or_not_finite_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = verified(monkeypatch)
    model, (x, y) = mlp(), points()
    optimizer = fop.FOP(model)
    before = snapshot(model)
    for bad in (x[:0], x * float("nan")):
        optimizer.zero_grad()
        cross_entropy(model(bad), y[: len(bad)]).backward()
        optimizer.step()
    assert same(snapshot(model), before)
    doubled(model[2])
    with pytest.warns(RuntimeWarning, match=r"compute something else .*'2': "):
        train(model, optimizer, [(x, y)])
    assert calls == [model[0], model[2]] * 2
    assert set(fop.diagnostics(optimizer)) == {"0"}


def test_a_pass_without_numbers_decides_nothing() -> None:
    """On the meta device, to find out shapes."""
    module = nn.Linear(5, 3, device="meta")
    optimizer = fop.FOP(module)
    assert module(torch.empty(4, 5, device="meta")).shape == (4, 3)
    assert not optimizer._engine.layers[0].recorder.disabled


def test_a_disabled_layer_asks_for_no_extra_backward() -> None:
    model = mlp()
    optimizer = fop.KFAC(model, fisher="mc")
    doubled(model[2])
    with pytest.warns(RuntimeWarning, match=r"compute something else .*'2': "):
        train(model, optimizer, [points()])
    train(model, optimizer, [points(seed=1)])  # curvature is due again on step 11
    assert type(model(points()[0]).grad_fn).__name__ != "_OutputProbeBackward"
    assert optimizer._extra_pass is not None
    assert not optimizer._extra_pass.wanting()


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.head(self.body(x))
        x = x.clone().requires_grad_()
        return self.head(checkpoint(self.body, x, use_reentrant=self.how == "reentrant"))


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("change", ["none", "same", "doubled"])
def test_gradients_under_activation_checkpointing_are_torchs(how: str, change: str) -> None:
    found = []
    for place in ("plain", how):
        model, (x, y) = Checkpointed(place).double(), points()
        optimizer = fop.FOP(model) if place == how else None
        layer: Any = model.body[0]
        if change == "doubled":
            doubled(layer)
        elif change == "same":
            layer.forward = partial(nn.Linear.forward, layer)
        torch.manual_seed(7)
        cross_entropy(model(x), y).backward()
        found.append([*of_parameters(model), torch.rand(1)])
        if optimizer is None:
            continue
        # Without a graph to look at, code of others is not trusted.
        if change == "doubled" or (change == "same" and how == "not reentrant"):
            with pytest.warns(RuntimeWarning, match=r"compute something else .*'body.0': "):
                optimizer.step()
        else:
            optimizer.step()
        assert {"body.3", "head"} <= set(fop.diagnostics(optimizer))
    assert distance(*found) < 1e-12


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_of_a_compiled_module_of_others_are_torchs() -> None:
    model, (x, y) = mlp(), points()
    optimizer = fop.FOP(model)
    doubled(model[0])
    plain = mlp()
    doubled(plain[0])
    cross_entropy(torch.compile(model, backend="aot_eager")(x), y).backward()
    cross_entropy(plain(x), y).backward()
    assert distance(of_parameters(model), of_parameters(plain)) < 1e-10
    with pytest.warns(RuntimeWarning, match=r"compute something else .*'0': "):
        optimizer.step()


def test_one_module_that_does_not_fit_disables_the_weight_that_others_share() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight = model[0].weight
    plain, (x, y) = copy.deepcopy(model), points()
    optimizer = fop.FOP(model)
    for one in (model, plain):
        doubled(one[2])
        cross_entropy(one(x), y).backward()
    assert distance(of_parameters(model), of_parameters(plain)) < 1e-10
    with pytest.warns(RuntimeWarning, match=r"compute something else .*'0': "):
        optimizer.step()
    assert not fop.diagnostics(optimizer)


def test_a_forward_with_other_arguments_or_results_is_left_to_torch() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3)
            one, two = self.one.forward, self.two.forward
            self.one.forward = lambda row: one(row)  # type: ignore[assignment, method-assign]
            self.two.forward = lambda x: (two(x), x)  # type: ignore[assignment, method-assign]

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(row=x))[0]

    model, plain = Odd().double(), Odd().double()
    optimizer, (x, y) = fop.FOP(model), points()
    for one in (model, plain):
        cross_entropy(one(x), y).backward()
    assert distance(of_parameters(model), of_parameters(plain)) < 1e-10
    with pytest.warns(RuntimeWarning, match="does not take one tensor and return one"):
        optimizer.step()


# ---- norms

NORMS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(6), {"eps": 0.5}),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-5), {"eps": 0.5}),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), {"eps": 0.5, "num_groups": 3}),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), {"eps": 0.5}),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NORMS)
def test_the_geometry_of_a_norm_is_read_at_the_call(name: str, training: bool) -> None:
    """Its step is that of a norm that always had it."""
    build, values = NORMS[name]
    norms, optimizers = [], []
    x, early = torch.randn(2, 8, 6, dtype=torch.float64).unbind()
    for late in (True, False):
        norm = build().double().train(training)
        norms.append(norm)
        for at in (0, 1):
            if at == late:
                for key, value in values.items():
                    setattr(norm, key, value)
            if at == 0:
                optimizers.append(fop.FOP(norm, norms="unitwise", lr=0.1))
                norm(early).pow(3).mean().backward()
                optimizers[-1].zero_grad()
    for _ in range(3):
        for norm, optimizer in zip(norms, optimizers, strict=True):
            optimizer.zero_grad()
            norm(x).pow(3).mean().backward()
            optimizer.step()
            assert list(fop.diagnostics(optimizer)) == [""]
    for one, two in zip(norms[0].parameters(), norms[1].parameters(), strict=True):
        assert distance([one], [two]) < 1e-12


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_computes_something_else_is_disabled(name: str) -> None:
    norm, plain = (NORMS[name][0]().double() for _ in range(2))
    optimizer = fop.FOP(norm, norms="unitwise")
    x = torch.randn(8, 6, dtype=torch.float64)
    for one in (norm, plain):
        doubled(one)
        one(x).pow(3).mean().backward()
    assert distance(of_parameters(norm), of_parameters(plain)) < 1e-10
    with pytest.warns(RuntimeWarning, match=f"its output is not that of a {name}"):
        optimizer.step()


# ---- attention


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["instance", "class"])
def test_attention_with_a_forward_of_its_own_has_torchs_gradients(when: str, where: str) -> None:
    class Scaled(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*(2 * arg for arg in args), **kwargs)

    def change(module: Any) -> None:
        forward = module.forward
        if where == "class":
            module.__class__ = Scaled
        else:
            module.forward = lambda *args: forward(*(2 * arg for arg in args))

    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2).double()
    plain = copy.deepcopy(module)
    change(plain)
    if when == "before":
        change(module)
    optimizer = fop.FOP(module)
    if when == "after":
        change(module)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    for one in (module, plain):
        output, _ = one(x, x, x)
        assert type(output) is Tensor
        output.pow(3).mean().backward()
    assert distance(of_parameters(module), of_parameters(plain)) < 1e-10
    if when == "after":
        with pytest.warns(RuntimeWarning, match="attention has a forward of its own") as said:
            optimizer.step()
        assert len(said) == 1
    else:
        optimizer.step()
    assert not fop.diagnostics(optimizer)
