"""`p.grad` is torch's, always: an adapter that does not fit its module is found, and not used.

Gradients of a watched module are compared with those of an untouched copy, in float64. A layer is
either served, and then the adapter fits, or it is disabled and named; in both cases its gradients
are torch's.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fop
from tests.common import distance, same, snapshot

Change = Callable[[Any], None]

# How a module is built, and the shape of its input; of an embedding None, for indices.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "Linear": (lambda: nn.Linear(4, 6), (4,)),
    "tokens": (lambda: nn.Linear(4, 6, bias=False), (3, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=2), (4, 9)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=2), (4, 7, 8)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 2, padding=1), (4, 4, 3, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, padding=1), (4, 7)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, padding=1), (4, 5, 4)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 6, 2, padding=1), (4, 3, 4, 3)),
    "Embedding": (lambda: nn.Embedding(5, 4), None),
}
CONVOLUTIONS = [name for name in MODULES if name.startswith("Conv")]
PLAIN_CONVOLUTIONS = [name for name in CONVOLUTIONS if "Transpose" not in name]


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name][0]().double()


def inputs(name: str, n: int = 5, seed: int = 0) -> Tensor:
    generator, shape = torch.Generator().manual_seed(seed), MODULES[name][1]
    if shape is None:
        return torch.randint(5, (n, 3), generator=generator)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64)


def gradients(module: nn.Module, x: Tensor, *, twice: bool = False) -> list[Tensor]:
    """Of all parameters and the input; `twice`: of the norm of the input's gradient."""
    module.zero_grad()
    leaf = x.clone()
    if x.is_floating_point():
        leaf.requires_grad_()
    output = module(leaf)
    loss = output.pow(3).mean()
    if twice:
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        loss = slope.square().sum()
    if loss.requires_grad:
        loss.backward()
    tensors = [*module.parameters(), leaf]
    found = [t.grad.to_dense().clone() for t in tensors if t.grad is not None]
    assert found or not loss.requires_grad
    return found


def doubled(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args: 2 * forward(*args)


def twice_the_class(module: Any) -> None:
    class Doubled(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Tensor:
            return 2 * super().forward(*args)

    module.__class__ = Doubled


def half_the_gradient(module: Any) -> None:
    """The same values, as of a straight-through estimator."""
    forward = module.forward

    def half(*args: Any) -> Tensor:
        output = forward(*args)
        return output.detach() + 0.5 * (output - output.detach())

    module.forward = half


def detached_weight(module: Any) -> None:
    forward, weight = module.forward, module.weight

    def without(*args: Any) -> Tensor:
        try:
            module._parameters["weight"] = weight.detach()
            return forward(*args)
        finally:
            module._parameters["weight"] = weight

    module.forward = without


def one_more_parameter(module: Any) -> None:
    """A low-rank adapter, say, that starts from zero and so changes nothing at first."""
    forward = module.forward
    module.extra = nn.Parameter(torch.zeros((), dtype=torch.float64))
    module.forward = lambda *args: forward(*args) * (1 + module.extra)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


def a_function(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args: Through.apply(forward(*args))


def another_shape(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args: forward(*args).unsqueeze(1)


def a_random_layer(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args: F.dropout(forward(*args), 0.5)


def a_prepended_hook(module: Any) -> None:
    """Placed before the optimizer's, which then sees its output."""
    module.register_forward_hook(lambda _, args, output: output * 2, prepend=True)


CHANGES: list[Change] = [
    doubled,
    twice_the_class,
    half_the_gradient,
    detached_weight,
    one_more_parameter,
    a_function,
    another_shape,
]


CASES = [
    (name, change, when)
    for name in MODULES
    for change in CHANGES
    for when in ("before", "after", "later")
    # A subclass with a forward of its own is not taken at all, and some have no gradient then.
    if (change, when) not in ((twice_the_class, "before"), (one_more_parameter, "before"))
    if change is not detached_weight or name not in ("Embedding", "tokens")
]


@pytest.mark.parametrize(
    ("name", "change", "when"), CASES, ids=[f"{n}-{c.__name__}-{w}" for n, c, w in CASES]
)
def test_gradients_are_torchs_whatever_a_module_computes(
    name: str, change: Change, when: str
) -> None:
    """And the layer is named, once."""
    module, x = built(name), inputs(name)
    if when == "before":
        change(module)
    plain = copy.deepcopy(built(name))
    optimizer = fop.FOP(module, lr=1e-3, momentum=0.0)
    if when == "later":  # after steps with curvature
        for seed in range(2):
            gradients(module, inputs(name, seed=seed))
            optimizer.step()
        plain.load_state_dict(module.state_dict())
    if when != "before":
        change(module)
    change(plain)
    assert distance(gradients(module, x), gradients(plain, x)) < 1e-10
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(12):  # one of these is due to refresh curvature
            optimizer.step()
            plain.load_state_dict(module.state_dict())
            x = inputs(name, seed=seed)
            assert distance(gradients(module, x), gradients(plain, x)) < 1e-10
    [message] = [str(w.message) for w in said if "compute something else" in str(w.message)]
    assert "'': " in message


@pytest.mark.parametrize("name", list(MODULES)[:-1])  # indices have no derivatives
@pytest.mark.parametrize("change", CHANGES[:5], ids=lambda change: change.__name__)
def test_second_derivatives_of_a_disabled_layer_are_torchs(name: str, change: Change) -> None:
    module, x = built(name), inputs(name)
    plain = copy.deepcopy(module)
    optimizer = fop.FOP(module)
    for one in (module, plain):
        change(one)
    assert distance(gradients(module, x, twice=True), gradients(plain, x, twice=True)) < 1e-10
    del optimizer


@pytest.mark.parametrize("change", [a_random_layer, a_prepended_hook], ids=lambda c: c.__name__)
def test_what_comes_before_the_hook_of_the_optimizer_counts(change: Change) -> None:
    module, plain, x = built("Linear"), built("Linear"), inputs("Linear")
    optimizer = fop.FOP(module)
    for one in (module, plain):
        change(one)
    found = []
    for one in (module, plain):
        torch.manual_seed(1)
        found.append(gradients(one, x))
    assert distance(*found) < 1e-10
    with pytest.warns(RuntimeWarning, match="its output is not that of a Linear"):
        optimizer.step()


def served(module: nn.Module, optimizer: Any, x: Tensor) -> None:
    """One step, in which the only layer is preconditioned, and nothing is said."""
    gradients(module, x)
    optimizer.step()
    assert list(fop.diagnostics(optimizer)) == [""]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", MODULES)
def test_code_of_others_that_computes_the_same_is_served(name: str, when: str) -> None:
    """As accelerate's hooks, which replace `forward` on each module."""

    def wrapped(module: Any) -> None:
        forward = module.forward
        module.forward = lambda *args, **kwargs: forward(*args, **kwargs)

    module, plain, x = built(name), built(name), inputs(name)
    if when == "before":
        wrapped(module)
    optimizer, other = fop.FOP(module), fop.FOP(plain)
    if when == "after":
        wrapped(module)
    assert distance(gradients(module, x), gradients(plain, x)) < 1e-10
    for seed in range(3):
        for one, owner in ((module, optimizer), (plain, other)):
            served(one, owner, inputs(name, seed=seed))
    assert same(snapshot(module), snapshot(plain))


def test_code_of_others_is_compared_again_whenever_curvature_is_due() -> None:
    """It may compute the same at first, and something else later."""
    module, plain = built("Linear"), built("Linear")
    scale = [1.0]
    forward = module.forward
    module.forward = lambda x: scale[0] * forward(x)  # type: ignore[method-assign]
    optimizer = fop.FOP(module, update_every=1)
    served(module, optimizer, inputs("Linear"))
    plain.load_state_dict(module.state_dict())
    doubled(plain)
    scale[0], x = 2.0, inputs("Linear", seed=1)
    assert distance(gradients(module, x), gradients(plain, x)) < 1e-10
    with pytest.warns(RuntimeWarning, match="compute something else"):
        optimizer.step()


# ---- geometry


def setting(**values: Any) -> Change:
    def change(module: Any) -> None:
        for name, value in values.items():
            setattr(module, name, value)

    change.__name__ = ", ".join(f"{name}={value}" for name, value in values.items())
    return change


def per_dimension(**values: Any) -> Change:
    """As torch keeps them: a tuple with one number for each dimension."""

    def change(module: Any) -> None:
        for name, value in values.items():
            setattr(module, name, (value,) * (module.weight.dim() - 2))

    change.__name__ = ", ".join(f"{name}={value}" for name, value in values.items())
    return change


def in_groups(module: Any) -> None:
    """The weight stays; inputs come to have twice as many channels."""
    module.groups = 2


GEOMETRY: list[tuple[str, Change]] = [
    *[
        (name, change)
        for name in PLAIN_CONVOLUTIONS
        for change in (
            per_dimension(stride=2),
            per_dimension(dilation=2, padding=3),
            per_dimension(padding=0),
            setting(padding=1, stride=2),
            setting(padding="same"),
            setting(padding="valid"),
            setting(padding="same", dilation=(2,) * int(name[4])),
            setting(padding_mode="circular"),
            setting(padding_mode="replicate"),
            in_groups,
        )
    ],
    *[
        (name, change)
        for name in CONVOLUTIONS
        if name not in PLAIN_CONVOLUTIONS
        for change in (
            per_dimension(stride=2),
            per_dimension(dilation=2),
            per_dimension(padding=0),
            per_dimension(stride=3, output_padding=1),
        )
    ],
    ("Embedding", setting(padding_idx=2)),
]


@pytest.mark.parametrize(
    ("name", "change"), GEOMETRY, ids=[f"{name}-{change.__name__}" for name, change in GEOMETRY]
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_geometry_is_read_at_the_call(name: str, change: Change) -> None:
    """Gradients, also second ones, and the step are those of a module that always had it."""
    module, plain = built(name), built(name)
    optimizer = fop.FOP(module, kl_clip=None, lr=1e-3)
    x, changed = inputs(name), inputs(name, seed=1)
    if change is in_groups:
        changed = torch.cat([changed, changed.flip(0)], dim=1)
    gradients(module, x)  # a call before the change, of which nothing is left
    optimizer.zero_grad()
    change(module)
    change(plain)
    other = fop.FOP(plain, kl_clip=None, lr=1e-3)
    untouched = copy.deepcopy(plain)
    assert distance(gradients(module, changed), gradients(untouched, changed)) < 1e-10
    if x.is_floating_point():
        second = [gradients(one, changed, twice=True) for one in (module, untouched)]
        assert distance(*second) < 1e-10
    optimizer.zero_grad()
    for _ in range(2):
        served(module, optimizer, changed)
        served(plain, other, changed)
        optimizer.zero_grad()
        other.zero_grad()
    assert distance(snapshot(module), snapshot(plain)) < 1e-12


@pytest.mark.parametrize(
    "option", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=lambda o: next(iter(o))
)
def test_an_embedding_that_gets_an_unsupported_option_is_disabled(option: dict[str, Any]) -> None:
    module, plain, x = built("Embedding"), built("Embedding"), inputs("Embedding")
    optimizer = fop.FOP(module)
    for one in (module, plain):
        setting(**option)(one)
    assert distance(gradients(module, x), gradients(plain, x)) < 1e-10
    with pytest.warns(RuntimeWarning, match=f": it has {next(iter(option))}"):
        optimizer.step()


def test_an_embedding_that_becomes_sparse_has_torchs_gradient_and_is_named() -> None:
    module, plain, x = built("Embedding"), built("Embedding"), inputs("Embedding")
    optimizer = fop.FOP(module)
    for one in (module, plain):
        setting(sparse=True)(one)
    assert distance(gradients(module, x), gradients(plain, x)) < 1e-10
    with pytest.raises(RuntimeError, match="parameter 'weight' has a sparse gradient"):
        optimizer.step()


@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("name", PLAIN_CONVOLUTIONS)
def test_a_convolution_of_its_own_is_found(name: str, where: str) -> None:
    """Weight standardisation, as it is often written."""

    def change(module: Any) -> None:
        kind = type(module)
        base = kind._conv_forward

        def own(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return base(self, x, weight - weight.mean(1, keepdim=True), bias)

        if where == "class":
            module.__class__ = type("Standardised", (kind,), {"_conv_forward": own})
        else:
            module._conv_forward = own.__get__(module)

    module, plain, x = built(name), built(name), inputs(name)
    for one in (module, plain):
        change(one)
    optimizer = fop.FOP(module)
    assert distance(gradients(module, x), gradients(plain, x)) < 1e-10
    with pytest.warns(RuntimeWarning, match=f"its output is not that of a {name}"):
        optimizer.step()
