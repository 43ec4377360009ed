"""Every layer type is brought to the canonical form, and equals another layer where it can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fop
from fop.layers import ADAPTERS, NormLayer, adapter_for
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
    norms = {kind for kind, adapter in ADAPTERS.items() if issubclass(adapter, NormLayer)}
    assert {case[0] for case in CASES} == set(ADAPTERS) - norms  # these: tests/test_norms.py


def train(module: nn.Module, squeeze: int | None, shape: tuple[int, ...]) -> list[Tensor]:
    """A few steps; `squeeze` is a dimension to add to the inputs."""
    optimizer = fop.FOP(module, damping=0.01)
    torch.manual_seed(3)
    for _ in range(3):
        x = torch.randn(4, *shape, dtype=torch.float64)
        if squeeze is not None:
            x = x.unsqueeze(squeeze)
        optimizer.zero_grad()
        module(x).pow(2).mean().backward()
        optimizer.step()
    return snapshot(module)


@pytest.mark.parametrize("transposed", [False, True])
def test_conv1d_trains_like_conv2d_of_height_one(transposed: bool) -> None:
    one, two = (nn.ConvTranspose1d, nn.ConvTranspose2d) if transposed else (nn.Conv1d, nn.Conv2d)
    options = {"stride": 2, "padding": 1, "groups": 2}
    wide = {"stride": (1, 2), "padding": (0, 1), "groups": 2}
    flat = build(one, (4, 4, 3), options)
    tall = two(4, 4, (1, 3), **wide).double()  # type: ignore[arg-type]
    with torch.no_grad():
        tall.weight.copy_(flat.weight.unsqueeze(2))
        tall.bias.copy_(flat.bias)
    trained = train(tall, 2, (4, 8))
    assert distance(train(flat, None, (4, 8)), [trained[0].squeeze(2), trained[1]]) < 1e-12


@pytest.mark.parametrize("transposed", [False, True])
def test_conv3d_of_depth_one_trains_like_conv2d(transposed: bool) -> None:
    kinds = (nn.ConvTranspose2d, nn.ConvTranspose3d) if transposed else (nn.Conv2d, nn.Conv3d)
    flat = build(kinds[0], (2, 4, (2, 3)), {"stride": (1, 2)})
    deep = kinds[1](2, 4, (2, 1, 3), stride=(1, 1, 2)).double()
    with torch.no_grad():
        deep.weight.copy_(flat.weight.unsqueeze(3))
        deep.bias.copy_(flat.bias)
    trained = train(deep, 3, (2, 4, 7))
    assert distance(train(flat, None, (2, 4, 7)), [trained[0].squeeze(3), trained[1]]) < 1e-12


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_trains_like_the_mirrored_convolution(groups: int) -> None:
    """With stride 1, and padding k - 1 - p on the other side."""
    mirror = build(nn.ConvTranspose2d, (4, 6, 3), {"padding": 1, "groups": groups})
    plain = nn.Conv2d(4, 6, 3, padding=1, groups=groups).double()

    def as_plain(weight: Tensor) -> Tensor:
        parts = weight.chunk(groups)
        return torch.cat([part.transpose(0, 1).flip(2, 3) for part in parts])

    with torch.no_grad():
        plain.weight.copy_(as_plain(mirror.weight))
        plain.bias.copy_(mirror.bias)
    trained = train(mirror, None, (4, 5, 5))
    assert distance([as_plain(trained[0]), trained[1]], train(plain, None, (4, 5, 5))) < 1e-12


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
    assert distance(train(asked, None, (2, 4, 5)), train(built, None, (2, 4, 5))) < 1e-14


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
