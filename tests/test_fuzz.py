"""Random architectures, shapes and settings: every step is the reference's.

`make test` draws a few cases, always the same; `make fuzz` draws thousands of new ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.test_exactness import CLASSES, assert_same_training, batches, sentences

PADDING_MODES = ["zeros", "circular", "reflect", "replicate"]
WORDS = 5


@st.composite
def mlps(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    widths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    positions = draw(st.lists(st.integers(1, 3), max_size=2))
    layers: list[nn.Module] = []
    for i, o in zip(widths, [*widths[1:], CLASSES], strict=True):
        layers += [nn.Linear(i, o, bias=draw(st.booleans())), nn.Tanh()]
    body = nn.Sequential(*layers[:-1])
    if positions:
        body = nn.Sequential(body, nn.Flatten(1, -2), Mean())
    return body, (*positions, widths[0])


class Mean(nn.Module):
    """Over positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


@st.composite
def cnns(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    groups = draw(st.integers(1, 2))
    channels = groups * draw(st.integers(1, 2))
    outputs = groups * draw(st.integers(1, 2))
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    convolution = nn.Conv2d(
        channels,
        outputs,
        kernel,
        stride=draw(st.integers(1, 2)),
        padding=draw(st.tuples(st.integers(0, 1), st.integers(0, 2))),
        dilation=draw(st.integers(1, 2)),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(PADDING_MODES)),
    )
    shape = (channels, draw(st.integers(5, 6)), draw(st.integers(5, 6)))
    pool = nn.AdaptiveAvgPool2d(draw(st.integers(1, 2)))
    head = nn.LazyLinear(CLASSES, bias=draw(st.booleans()))
    return nn.Sequential(convolution, nn.Tanh(), pool, nn.Flatten(), head), shape


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """In one to three dimensions, plain and transposed."""
    dimensions = draw(st.sampled_from([1, 1, 2, 3]))

    def sizes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    groups = draw(st.integers(1, 2))
    channels, outputs = (groups * draw(st.integers(1, 2)) for _ in range(2))
    kernel, stride, dilation = sizes(1, 2), sizes(1, 2), sizes(1, 2)
    common: dict[str, Any] = {
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    transposed = draw(st.booleans())
    if transposed:
        pairs = zip(stride, dilation, strict=True)
        common["output_padding"] = tuple(draw(st.integers(0, max(*pair) - 1)) for pair in pairs)
        kinds: Any = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
    else:
        common["padding_mode"] = draw(st.sampled_from(PADDING_MODES))
        kinds = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
    common["padding"] = sizes(0, 1)
    layer = kinds[dimensions - 1](channels, outputs, kernel, **common)
    shape = (channels, *(draw(st.integers(3, 4 if dimensions < 3 else 3)) for _ in kernel))
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)), shape


class Words(nn.Module):
    """A sentence to a class, by an embedding that may be tied to a layer."""

    def __init__(self, width: int, padding_idx: int | None, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=padding_idx)
        self.scores = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.scores.weight = self.embed.weight
        self.head = nn.Linear(WORDS, CLASSES)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.scores(torch.tanh(self.embed(index))))
        return self.head(hidden.flatten(1, -2).mean(1))


@st.composite
def readers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    model = Words(
        draw(st.integers(1, 3)), draw(st.sampled_from([None, 0, WORDS - 1])), draw(st.booleans())
    )
    return model, tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))


class Tied(nn.Module):
    """One weight in several modules, called in turn."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(times))
        for layer in self.layers:
            layer.weight = self.layers[0].weight
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@st.composite
def tied_layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    width = draw(st.integers(1, 4))
    return Tied(width, draw(st.integers(2, 3))), (width,)


@st.composite
def normed(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Every normalisation; with batch statistics an example has no gradient of its own."""
    units, positions = 2 * draw(st.integers(1, 2)), draw(st.integers(1, 3))
    affine = draw(st.booleans())
    makers: list[tuple[Any, tuple[int, ...]]] = [
        (lambda: nn.LayerNorm(units, bias=affine), (positions, units)),
        (lambda: nn.LayerNorm([positions, units], bias=affine), (positions, units)),
        (lambda: nn.RMSNorm(units), (positions, units)),
        (lambda: nn.GroupNorm(2, units), (units, positions + 1)),
        (lambda: nn.BatchNorm1d(units).eval(), (units,)),
        (lambda: nn.BatchNorm2d(units).eval(), (units, positions, 2)),
        (lambda: nn.BatchNorm3d(units).eval(), (units, positions, 1, 2)),
    ]
    make, shape = draw(st.sampled_from(makers))
    return nn.Sequential(make(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)), shape


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    mode = draw(st.sampled_from(["factored", "exact"]))
    momentum = draw(st.sampled_from([0.0, 0.7, 0.9]))
    return {
        "lr": draw(st.sampled_from([0.01, 0.1, 0.5])),
        "momentum": momentum,
        "nesterov": momentum > 0 and draw(st.booleans()),
        "weight_decay": draw(st.sampled_from([0.0, 0.01])),
        "decoupled_weight_decay": draw(st.booleans()),
        "damping_mode": mode,
        "damping": draw(st.sampled_from([1e-2, 1e-1])),
        "factor_decay": draw(st.sampled_from([0.5, 0.95])),
        "update_every": draw(st.integers(1, 3)),
        "sharing": draw(st.sampled_from(["expand", "reduce"])),
        "beta": draw(st.sampled_from(["adaptive", "adaptive", -0.3, 0.2])),
        "eta": draw(st.sampled_from(["adaptive", "adaptive", 0.6])),
        "total": draw(st.sampled_from(["mean", "sum"])),
        "kl_clip": draw(st.sampled_from([1e-4, 1e-3])),
        "halves": draw(st.sampled_from(["samples", "microbatches"])),
        "norms": draw(st.sampled_from(["fallback", "unitwise"])),
        "max_factor_size": draw(st.sampled_from([2, 4, 8192])),
    }


@pytest.mark.filterwarnings("ignore:layers? .* saw .* examples in the two halves")
@settings(suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    model=st.one_of(
        mlps(), cnns(), convolutions(), convolutions(), readers(), tied_layers(), normed()
    ),
    chosen=options(),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    project=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_random_model_takes_the_reference_steps(
    model: tuple[nn.Module, tuple[int, ...]],
    chosen: dict[str, Any],
    sizes: list[int],
    project: bool,
    seed: int,
) -> None:
    network, shape = model
    torch.manual_seed(seed)
    network = network.double()
    reads = isinstance(network, Words)
    network(torch.zeros(1, *shape, dtype=torch.int64 if reads else torch.float64))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.7 * torch.randn_like(parameter))
    if not project:
        chosen = {k: v for k, v in chosen.items() if k not in ("beta", "eta", "total", "halves")}
    assert_same_training(
        network,
        shape,
        chosen,
        project=project,
        sizes=tuple(sizes),
        draw=sentences if reads else batches,
        steps=3,
        loose_scalars=True,
    )
