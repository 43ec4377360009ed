"""A step of FOP and KFAC is the step of algorithm and paper, to float64 round-off.

Each case runs the library and the dense reference side by side for several steps, so that moving
averages, stale curvature, momentum and the KL clip are compared too, and then every parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fop
from tests.oracles import (
    Reference,
    ReferenceOptimizer,
    accumulate,
    binary_cross_entropy,
    cross_entropy,
    squared_error,
)

TOLERANCE = 1e-7
CLASSES = 3


class Sequence(nn.Module):
    """Linear layers over tokens, then a mean: shared positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.mix = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(torch.tanh(self.embed(x)))).mean(1))


class Recurrent(nn.Module):
    """One layer called three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.head(x)


class Scaled(nn.Module):
    """A layer with a parameter of its own, which follows the fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.full((4,), 0.7))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.layer(x)) * self.gain)


class Words(nn.Module):
    """Sentences to a class; or, tied, through the embedding's own table first."""

    def __init__(self, padding_idx: int | None = None, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, padding_idx=padding_idx)
        self.scores = nn.Linear(3, 5, bias=False)
        if tied:
            self.scores.weight = self.embed.weight
        self.head = nn.Linear(5, CLASSES)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scores(torch.tanh(self.embed(index)))).mean(1))


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Residual(nn.Module):
    """A branch behind a learnt scale, dropped for some examples (stochastic depth)."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        # The choice hangs on the example alone, so that the reference makes the same one.
        keep = (x.flatten(1).sum(1) > -1).to(x).reshape(-1, 1, 1)
        return x + keep / 0.8 * self.gamma * self.inner(self.norm(x))


class Attention(nn.Module):
    """Packed query, key and value in one Linear, as timm writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class VisionTransformer(nn.Module):
    """What timm's models are made of: patches by a convolution, class token, learnt positions,
    attention and MLP blocks with layer scale and stochastic depth."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(2, width, 2, stride=2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, width))
        mlp = nn.Sequential(nn.Linear(width, 6), nn.GELU(), nn.Linear(6, width))
        self.blocks = nn.Sequential(Residual(width, Attention(width)), Residual(width, mlp))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def flat(*layers: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        body = [copy.deepcopy(layer) for layer in layers]
        return nn.Sequential(*body, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES))

    return build


def convolutional(*convolutions: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        body: list[nn.Module] = []
        for convolution in convolutions:
            body += [copy.deepcopy(convolution), nn.Tanh()]
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(CLASSES))

    return build


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, CLASSES), (4,)),
    "linear without bias": (lambda: nn.Linear(4, CLASSES, bias=False), (4,)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, CLASSES)),
        (4,),
    ),
    "shared positions": (Sequence, (3, 3)),
    "called three times": (Recurrent, (4,)),
    "other parameters": (Scaled, (4,)),
    "conv": (convolutional(nn.Conv2d(2, 3, 3, padding=1)), (2, 5, 5)),
    "conv stride": (convolutional(nn.Conv2d(2, 3, 3, stride=2, bias=False)), (2, 6, 6)),
    "conv uneven": (
        convolutional(nn.Conv2d(1, 2, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1))),
        (1, 5, 6),
    ),
    "conv groups": (convolutional(nn.Conv2d(4, 4, 3, padding=1, groups=2)), (4, 4, 4)),
    "conv depthwise": (convolutional(nn.Conv2d(3, 6, 2, groups=3)), (3, 4, 4)),
    "conv same": (convolutional(nn.Conv2d(2, 2, 2, padding="same", dilation=2)), (2, 4, 4)),
    "conv valid": (convolutional(nn.Conv2d(2, 2, 2, padding="valid")), (2, 4, 4)),
    "conv circular": (
        convolutional(nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode="circular")),
        (2, 4, 4),
    ),
    "conv reflect": (
        convolutional(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect", groups=2)),
        (2, 4, 4),
    ),
    "conv replicate": (
        convolutional(nn.Conv2d(2, 2, 2, padding="same", padding_mode="replicate")),
        (2, 4, 4),
    ),
    "conv1d": (flat(nn.Conv1d(4, 4, 3, stride=2, padding=2, groups=2)), (4, 6)),
    "conv3d": (
        flat(nn.Conv3d(2, 3, (1, 2, 2), padding=(0, 1, 0), dilation=(1, 2, 1))),
        (2, 2, 3, 3),
    ),
    "transposed 1d": (flat(nn.ConvTranspose1d(4, 2, 3, stride=2, padding=1, groups=2)), (4, 4)),
    "transposed 2d": (
        flat(nn.ConvTranspose2d(2, 3, (2, 3), stride=2, output_padding=1, dilation=(1, 2))),
        (2, 2, 3),
    ),
    "transposed 3d": (
        flat(nn.ConvTranspose3d(2, 2, 2, stride=(2, 1, 1), bias=False)),
        (2, 2, 2, 1),
    ),
    "batch norm in evaluation": (
        flat(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3).eval(), nn.Dropout(0.5).eval()),
        (2, 4, 4),
    ),
    "tied": (Tied, (4,)),
    "vision transformer": (VisionTransformer, (2, 4, 4)),
    "conv stack": (
        convolutional(nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 3, stride=2, padding=1)),
        (1, 6, 6),
    ),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "exact damping": {"damping_mode": "exact", "damping": 0.03},
    "reduce": {"sharing": "reduce"},
    "reduce, exact damping": {"sharing": "reduce", "damping_mode": "exact", "damping": 0.03},
    "sum of halves": {"total": "sum"},
    "fixed beta": {"beta": -0.3},
    "fixed eta": {"eta": 0.7},
    "fixed both": {"beta": 0.2, "eta": 0.5},
    "no clip": {"kl_clip": None, "lr": 0.01},
    "tight clip": {"kl_clip": 1e-5, "lr": 0.5},
    "weight decay": {"weight_decay": 0.05},
    "decoupled nesterov": {"weight_decay": 0.05, "decoupled_weight_decay": True, "nesterov": True},
    "no momentum": {"momentum": 0.0},
    "fast factors": {"factor_decay": 0.5, "update_every": 1},
    "interval by step": {"update_every": lambda step: 2 if step < 4 else 3},
    "sum loss": {"loss_reduction": "sum", "lr": 0.01},
    "identity": {"curvature": "identity", "kl_clip": None},
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(seed)
    factory, shape = MODELS[name]
    model = factory().double()
    model(torch.zeros(1, *shape, dtype=torch.float64))  # gives lazy layers their shape
    return model, shape


def batches(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(n, *shape, dtype=torch.float64), torch.randint(CLASSES, (n,))) for n in sizes
    ]


def sentences(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randint(5, (n, *shape)), torch.randint(CLASSES, (n,))) for n in sizes]


def assert_same_training(
    model: nn.Module,
    shape: tuple[int, ...],
    settings: dict[str, Any],
    *,
    project: bool = True,
    sizes: tuple[int, ...] = (6,),
    loss: Any = cross_entropy,
    draw: Any = batches,
    steps: int = 5,
    weights: list[float] | None = None,
    loose_scalars: bool = False,
    own: dict[str, dict[str, Any]] | None = None,
    param_groups: list[dict[str, Any]] | None = None,
) -> None:
    """`loose_scalars`: compare parameters only, where s and beta may be quotients of round-off.

    `own` has the options of single parameters, by name, that they have from `param_groups`.
    """
    reference = ReferenceOptimizer(model, Reference(**settings, project=project), own)
    kind = fop.FOP if project else fop.KFAC
    optimizer = kind(model, **settings, param_groups=param_groups)
    for step in range(steps):
        data = draw(shape, sizes)
        optimizer.zero_grad()
        reduction = settings.get("loss_reduction", "mean")
        accumulate(model, data, loss, reduction, weights)
        optimizer.step()
        traces = reference.step(data, loss, weights=weights)
        report = {} if loose_scalars else fop.diagnostics(optimizer)
        for name, found in report.items():
            # Without two halves there is no p for a fixed beta to weigh.
            keys = ("s", "beta", "eta", "cos2") if traces[name].d.any() else ("s", "eta", "cos2")
            for key in keys:
                expected = float(getattr(traces[name], key))
                close = pytest.approx(expected, rel=1e-5, abs=1e-9)
                assert found[key] == close, (step, name, key)
        expected = dict(reference.model.named_parameters())
        for name, parameter in model.named_parameters():
            wanted = expected[name].detach()
            error = float((parameter.detach() - wanted).norm())
            assert error <= TOLERANCE * float(wanted.norm()), (step, name, error)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("project", [True, False], ids=["fop", "kfac"])
def test_every_layer_takes_the_reference_step(name: str, project: bool) -> None:
    assert_same_training(*build(name), {}, project=project)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["shared positions", "conv groups"])
def test_every_setting_takes_the_reference_step(name: str, setting: str) -> None:
    assert_same_training(*build(name), SETTINGS[setting])


# Of all weights, and of all biases and norms: two groups, as people write them.
GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decay": ({"weight_decay": 1e-2}, {"weight_decay": 0.0}),
    "biases stand still": ({}, {"lr": 0.0, "momentum": 0.0}),
    "all": (
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.03, "damping": 0.02},
        {"lr": 0.2, "momentum": 0.0, "weight_decay": 0.01, "damping": 0.5},
    ),
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    "name", ["mlp", "conv groups", "batch norm in evaluation", "vision transformer"]
)
def test_weights_and_biases_in_two_groups_take_the_reference_step(name: str, groups: str) -> None:
    """Each with its own options, but for the damping and the KL term, which are the weight's."""
    model, shape = build(name)
    decay = {n: p for n, p in model.named_parameters() if p.dim() > 1}
    no_decay = {n: p for n, p in model.named_parameters() if p.dim() <= 1}
    members = list(zip((decay, no_decay), GROUPS[groups], strict=True))
    assert_same_training(
        model,
        shape,
        {},
        own={n: options for group, options in members for n in group},
        param_groups=[{"params": list(group.values()), **options} for group, options in members],
    )


@pytest.mark.parametrize("settings", [SETTINGS["decoupled nesterov"], {"norms": "unitwise"}])
@pytest.mark.parametrize("name", ["mlp", "batch norm in evaluation"])
def test_groups_by_name_take_the_reference_step(name: str, settings: dict[str, Any]) -> None:
    model, shape = build(name)
    own = {"lr": 0.03, "weight_decay": 0.2}
    assert_same_training(
        model,
        shape,
        settings,
        own={n: own for n, _ in model.named_parameters() if n.endswith("bias")},
        param_groups=[{"names": "*bias", **own}],
    )


@pytest.mark.parametrize("tied", [False, True], ids=["embedding", "tied embedding"])
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize(
    "settings", [{}, {"damping_mode": "exact", "damping": 0.03}, {"sharing": "reduce"}], ids=str
)
def test_embeddings_take_the_reference_step(
    tied: bool, padding_idx: int | None, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = Words(padding_idx, tied).double()
    assert_same_training(model, (3,), settings, draw=sentences, sizes=(4, 3))


@pytest.mark.parametrize("name", ["linear", "shared positions", "conv groups", "transposed 1d"])
@pytest.mark.parametrize("mode", ["factored", "exact"])
def test_wide_layers_take_the_reference_step(name: str, mode: str) -> None:
    settings = {"max_factor_size": 4, "damping_mode": mode, "damping": 0.01}
    assert_same_training(*build(name), settings)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (flat(nn.Linear(3, 4), nn.LayerNorm([2, 4])), (2, 3)),
    "rms norm": (flat(nn.Linear(3, 4), nn.RMSNorm(4)), (2, 3)),
    "group norm": (flat(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4)), (2, 3, 3)),
    "batch norm 1d": (flat(nn.Linear(3, 4), nn.BatchNorm1d(4).eval()), (3,)),
    "batch norm 2d": (flat(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4).eval()), (2, 3, 3)),
    "batch norm 3d": (flat(nn.BatchNorm3d(2).eval()), (2, 2, 2, 2)),
    "vision transformer": (VisionTransformer, (2, 4, 4)),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("project", [True, False], ids=["fop", "kfac"])
def test_unitwise_norms_take_the_reference_step(name: str, project: bool) -> None:
    torch.manual_seed(0)
    factory, shape = NORMS[name]
    model = factory().double()
    model(torch.zeros(1, *shape, dtype=torch.float64))
    settings = {"norms": "unitwise", "damping": 0.01}
    # It drops branches at random. With one example left in a layer, a and d are parallel, and s,
    # beta and cos2 are those of round-off; the step is not.
    dropping = name == "vision transformer"
    assert_same_training(
        model, shape, settings, project=project, sizes=(4, 3), loose_scalars=dropping
    )


@pytest.mark.parametrize("sizes", [(7,), (1,), (2, 2, 2), (3, 3, 3), (4, 1, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("halves", ["samples", "microbatches"])
@pytest.mark.filterwarnings("ignore:layers? .* saw .* examples in the two halves")
def test_odd_batches_and_microbatches_take_the_reference_step(
    sizes: tuple[int, ...], halves: str
) -> None:
    for name in ("conv stack", "shared positions"):
        assert_same_training(*build(name), {"halves": halves, "beta": 0.3}, sizes=sizes)
        assert_same_training(*build(name), {"halves": halves}, sizes=sizes)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ragged_microbatches_carry_their_weight_in_the_loss(sharing: str, reduction: str) -> None:
    settings = {"sharing": sharing, "loss_reduction": reduction, "lr": 0.01}
    for name in ("mlp", "shared positions"):
        weights = [0.2, 0.5, 0.3]
        assert_same_training(*build(name), settings, sizes=(4, 1, 3), weights=weights)


def gaussian_batches(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    draw = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    return [(draw(n, *shape), draw(n, CLASSES)) for n in sizes]


def bernoulli_batches(
    shape: tuple[int, ...], sizes: tuple[int, ...]
) -> list[tuple[Tensor, Tensor]]:
    return [(x, (y > 0).double()) for x, y in gaussian_batches(shape, sizes)]


@pytest.mark.parametrize("name", ["shared positions", "called three times"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("likelihood", "loss", "draw"),
    [
        ("categorical", cross_entropy, batches),
        ("gaussian", squared_error, gaussian_batches),
        ("bernoulli", binary_cross_entropy, bernoulli_batches),
    ],
)
def test_the_exact_fisher_takes_the_reference_step(
    name: str, sharing: str, reduction: str, likelihood: str, loss: Any, draw: Any
) -> None:
    settings = {
        "fisher": {"name": "exact", "likelihood": likelihood},
        "loss_reduction": reduction,
        "sharing": sharing,
        "lr": 0.02,
    }
    assert_same_training(*build(name), settings, loss=loss, draw=draw, sizes=(3, 2), steps=3)
