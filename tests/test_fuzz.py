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

from tests.test_exactness import CLASSES, assert_same_training

PADDING_MODES = ["zeros", "circular", "reflect", "replicate"]


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
    }


@pytest.mark.filterwarnings("ignore:layer .* saw .* examples in the two halves")
@settings(suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    model=st.one_of(mlps(), cnns()),
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
    network(torch.zeros(1, *shape, dtype=torch.float64))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.7 * torch.randn_like(parameter))
    if not project:
        chosen = {k: v for k, v in chosen.items() if k not in ("beta", "eta", "total", "halves")}
    assert_same_training(
        network, shape, chosen, project=project, sizes=tuple(sizes), steps=3, loose_scalars=True
    )
