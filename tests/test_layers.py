"""Every layer type is brought to the canonical form that the curvature is built on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fop
from fop.layers import ADAPTERS, NormAdapter, adapter_for
from fop.testing import check_layer
from tests.common import distance, snapshot

# module type, arguments, keyword arguments, shape of one input
CASES: list[tuple[type[nn.Module], tuple[int, ...], dict[str, Any], tuple[int, ...]]] = [
    (nn.Linear, (4, 3), {}, (4,)),
    (nn.Linear, (4, 3), {"bias": False}, (2, 5, 4)),
    (nn.Conv1d, (4, 6, 3), {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}, (4, 9)),
    (nn.Conv1d, (2, 3, 4), {"padding": "same", "padding_mode": "replicate"}, (2, 7)),
    (nn.Conv2d, (4, 4, 3), {"stride": 2, "padding": 1}, (4, 5, 6)),
    (nn.Conv2d, (6, 3, (2, 3)), {"dilation": (1, 2), "groups": 3, "bias": False}, (6, 5, 7)),
    (nn.Conv2d, (2, 3, 3), {"padding": (2, 1), "padding_mode": "circular"}, (2, 4, 5)),
    (nn.Conv2d, (2, 3, 3), {"padding": (2, 1), "padding_mode": "reflect"}, (2, 4, 5)),
    (nn.Conv3d, (2, 4, (1, 2, 3)), {"stride": (1, 2, 1), "padding": (0, 1, 2)}, (2, 3, 4, 5)),
    (nn.Conv3d, (4, 2, 2), {"groups": 2, "dilation": (1, 2, 1), "padding": "same"}, (4, 3, 4, 3)),
    (nn.ConvTranspose1d, (3, 2, 3), {"stride": 2}, (3, 4)),
    (nn.ConvTranspose1d, (4, 6, 4), {"stride": 3, "padding": 2, "output_padding": 1}, (4, 5)),
    (nn.ConvTranspose1d, (4, 6, 2), {"stride": 3, "groups": 2}, (4, 5)),
    (nn.ConvTranspose2d, (2, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}, (2, 3, 4)),
    (nn.ConvTranspose2d, (4, 4, (2, 3)), {"dilation": (1, 2), "bias": False}, (4, 3, 4)),
    (nn.ConvTranspose2d, (4, 2, 3), {"dilation": 2, "groups": 2, "padding": 3}, (4, 3, 4)),
    (nn.ConvTranspose2d, (2, 2, 2), {"padding": 1, "dilation": 1, "stride": 1}, (2, 4, 4)),
    (nn.ConvTranspose3d, (2, 2, 2), {"stride": (2, 1, 2), "padding": (1, 0, 0)}, (2, 2, 3, 2)),
    (nn.Embedding, (6, 3), {}, (2,)),
]  # fmt: skip


def build(kind: Any, arguments: tuple[int, ...], options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return kind(*arguments, **options).double()


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "shape"),
    CASES,
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_adapters_pass_the_battery(
    kind: Any, arguments: tuple[int, ...], options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """Output, gradients, rows, moments and steps are those of autograd and dense matrices."""
    module = build(kind, arguments, options)
    x = torch.randn(3, *shape)
    check_layer(module, x if kind is not nn.Embedding else torch.randint(6, (3, *shape)))


def test_every_registered_type_has_a_case() -> None:
    norms = {kind for kind, adapter in ADAPTERS.items() if issubclass(adapter, NormAdapter)}
    assert {case[0] for case in CASES} == set(ADAPTERS) - norms  # these: tests/test_norms.py


def train(module: nn.Module, shape: tuple[int, ...]) -> list[Tensor]:
    """A few steps."""
    optimizer = fop.FOP(module, damping=0.01)
    torch.manual_seed(3)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.randn(4, *shape, dtype=torch.float64)).pow(2).mean().backward()
        optimizer.step()
    return snapshot(module)


def test_a_transposed_convolution_takes_an_output_size() -> None:
    class Upsample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, output_size=[2 * x.shape[2], 2 * x.shape[3]])

    torch.manual_seed(0)
    asked = Upsample().double()
    torch.manual_seed(0)
    built = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1).double()
    assert distance(train(asked, (2, 4, 5)), train(built, (2, 4, 5))) < 1e-14


def test_channels_last_trains_like_contiguous() -> None:
    def run(memory_format: torch.memory_format) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)).double()
        model = model.to(memory_format=memory_format)
        optimizer = fop.FOP(model)
        for _ in range(3):
            x = torch.randn(6, 4, 6, 6, dtype=torch.float64).to(memory_format=memory_format)
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        return [p.contiguous() for p in snapshot(model)]

    assert distance(run(torch.channels_last), run(torch.contiguous_format)) < 1e-12


def test_a_subclass_counts_only_with_the_same_forward() -> None:
    class Renamed(nn.Linear):
        pass

    class Changed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert adapter_for(Renamed(2, 2)) is not None
    assert adapter_for(Changed(2, 2)) is None
    assert adapter_for(nn.Bilinear(2, 2, 2)) is None
