"""The cost model is the arithmetic that its opening says, on shapes that are the models' own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fop.costs import FOP_PASSES, owner_cost
from fop_bench.costs import (
    PEAKS,
    Hardware,
    LayerShape,
    ModelShape,
    accelerator,
    busiest,
    bytes_sent,
    predict,
    shape_of,
)
from fop_bench.methods import METHODS
from fop_bench.workloads import WORKLOADS

# Rates and links of one unit each, so that seconds are operations and bytes.
UNIT = Hardware("unit", "test", 1.0, 1.0, 1.0, 1e-12, 1.0, 0.5, 8, 1e-12, False)
SMALL = LayerShape("small", inputs=3, outputs=2)
WIDE = LayerShape("wide", inputs=10, outputs=4, positions=5, groups=2)
MODEL = ModelShape((SMALL, WIDE), parameters=100)


def test_shapes_are_those_of_the_layers() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 6, (3, 2), stride=2, groups=2), nn.BatchNorm2d(6), nn.Flatten(2),
        nn.Linear(12, 5, bias=False),
    ).eval()  # fmt: skip
    shape = shape_of(model, torch.randn(1, 4, 7, 8))
    assert shape.layers == (
        LayerShape("0", inputs=2 * 6 + 1, outputs=3, positions=3 * 4, groups=2),
        LayerShape("3", inputs=12, outputs=5, positions=6),
    )
    assert shape.parameters == 6 * 12 + 6 + 2 * 6 + 60
    assert not model[0]._forward_hooks


def test_a_layer_called_twice_has_the_positions_of_both_calls() -> None:
    layer = nn.Linear(3, 3)
    shape = shape_of(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(1, 3))
    assert [layer.positions for layer in shape.layers] == [2]


def test_resnet50_has_its_published_size() -> None:
    """25.56 million parameters and 4.09 billion multiplications an image of 224 x 224."""
    workload = WORKLOADS["imagenet1k-resnet50"]
    shape = shape_of(workload.model(0), workload.made_up(1))
    assert shape.parameters == 25_557_032
    assert shape.training_operations() / 6 == pytest.approx(4.09e9, rel=2e-3)
    assert len(shape.layers) == 54


@pytest.mark.parametrize("name", WORKLOADS)
def test_made_up_inputs_fit_every_workload(name: str) -> None:
    workload = WORKLOADS[name]
    with torch.no_grad():
        assert workload.model(0).eval()(workload.made_up(1)).shape[0] == 1


def test_one_rank_sends_nothing() -> None:
    found = predict("fop", MODEL, 6, 1, 4, UNIT)
    work = 6 * 6 * (SMALL.matrix + 5 * WIDE.matrix)
    assert found.parts["forward and backward"] == work
    for part in ("gradients", "curvature sums", "updates", "differences"):
        assert found.parts[part] == 0
    assert sum(bytes_sent("fop", MODEL, 1, 4).values()) == 0


def test_parts_are_counted_as_said() -> None:
    """SMALL [2, 3], WIDE two groups of [4, 10] at 5 positions; 6 examples on 2 ranks."""
    fop = predict("fop", MODEL, 6, 2, 4, UNIT).parts
    kfac = predict("kfac", MODEL, 6, 2, 4, UNIT).parts
    sgd = predict("sgd", MODEL, 6, 2, 4, UNIT).parts
    assert set(sgd) == {"forward and backward", "overhead", "gradients"}
    assert sgd["forward and backward"] == 3 * 6 * (6 + 5 * 80)
    assert sgd["gradients"] == pytest.approx(2 * 100 * 4 / 2)
    # Narrow factors are one block, so that all of them is computed.
    assert fop["factor products"] == 3 * 2 * ((9 + 4) + 5 * 2 * (100 + 16)) / 4
    assert fop["decompositions"] == 2 * (1000 + 64) / 4  # WIDE has an owner to itself
    assert fop["preconditioning"] == 3 * kfac["preconditioning"] == 3 * 2 * 80 * 14
    triangles = (6 + 3) + 2 * (55 + 10)
    assert fop["curvature sums"] == pytest.approx(4 * triangles / 2 / 4)
    assert fop["updates"] == pytest.approx(4 * 86 / 2)
    assert fop["differences"] == pytest.approx(4 * 86 / 2)
    assert "differences" not in kfac


def test_bytes_are_those_of_the_collectives() -> None:
    """Plain data parallelism sends 2 P; owners add the updates, and FOP the differences."""
    whole = 4 * 3 / 4  # a number of 4 bytes, all but a quarter of it to others
    assert bytes_sent("sgd", MODEL, 4, 4) == {"gradients": 2 * whole * 100}
    sent = bytes_sent("fop", MODEL, 4, 4)
    assert sent["updates"] == sent["differences"] == whole * 86
    assert sent["curvature sums"] == whole * 139 / 4
    assert set(bytes_sent("kfac", MODEL, 4, 4)) == set(sent) - {"differences"}


def test_messages_hide_behind_backward_where_hardware_overlaps() -> None:
    busy = Hardware(**{**vars(UNIT), "overlaps": True})
    assert predict("sgd", MODEL, 6, 2, 4, busy).parts["gradients"] == 0
    slow = Hardware(**{**vars(busy), "train_rate": 1e9})
    assert predict("sgd", MODEL, 6, 2, 4, slow).parts["gradients"] == pytest.approx(400, rel=1e-3)
    exposed = predict("kfac", MODEL, 6, 2, 4, slow).parts["curvature sums"]
    assert exposed == pytest.approx(4 * 139 / 2 / 4, rel=1e-3)


def test_the_slowest_link_of_a_ring_counts() -> None:
    assert UNIT.ring(1.0, 1) == 0
    assert UNIT.ring(16.0, 8) == pytest.approx(16 * 7 / 8)
    assert UNIT.ring(16.0, 16) == pytest.approx(16 * 15 / 16 / 0.5)
    slow = Hardware(**{**vars(UNIT), "latency": 1.0})
    assert slow.ring(0.0, 9) == 4


def test_work_is_shared_out_evenly_until_one_layer_is_all_there_is() -> None:
    layers = tuple(LayerShape(str(n), 10 + n, 10) for n in range(40))
    assert busiest(layers, 1, 4, FOP_PASSES) == list(layers)

    def cost(layer: LayerShape) -> float:
        return owner_cost(layer.work, 4)

    for ranks in (2, 3, 8):
        mean = sum(map(cost, layers)) / ranks
        assert mean <= sum(map(cost, busiest(layers, ranks, 4, FOP_PASSES))) <= 1.1 * mean
    assert busiest(layers, 1000, 4, FOP_PASSES) == [layers[-1]]


def test_a_factor_kept_as_its_diagonal_costs_next_to_nothing() -> None:
    wide = LayerShape("embedding", inputs=50_000, outputs=10)
    assert wide.work.decompositions() == 1000 / 2
    assert wide.triangles() == 55


def test_a_cpu_solves_with_wide_cholesky_factors() -> None:
    model = ModelShape((LayerShape("wide", inputs=1000, outputs=8),), parameters=8000)
    solving = Hardware(**{**vars(UNIT), "solves": True})
    inverse, solved = (predict("fop", model, 6, 1, 1, h).parts for h in (UNIT, solving))
    assert solved["decompositions"] < 0.6 * inverse["decompositions"]
    assert solved["preconditioning"] < inverse["preconditioning"]


def test_every_second_order_method_has_its_products() -> None:
    assert set(METHODS) >= {"kfac", "fop"}
    for name, method in METHODS.items():
        parts = predict(name, MODEL, 6, 2, 4, UNIT).parts
        assert ("preconditioning" in parts) == method.has_curvature_interval, name


@pytest.mark.parametrize("name", PEAKS)
def test_presets_name_their_sources_and_assumptions(name: str) -> None:
    hardware = accelerator(name, utilisation=0.5)
    assert "data sheet" in hardware.source
    assert "assumed: 50% of the TF32 peak" in hardware.source
    assert hardware.train_rate == 0.5 * PEAKS[name].tf32
    assert hardware.host_bandwidth < hardware.bandwidth


def test_constants_must_be_positive() -> None:
    with pytest.raises(ValueError, match="hardware 'unit': latency must be > 0, got 0"):
        Hardware(**{**vars(UNIT), "latency": 0.0})
    assert math.isfinite(predict("fop", MODEL, 6, 1024, 4, UNIT).seconds)
