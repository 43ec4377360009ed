"""What a step costs on R ranks: operations and bytes from layers' shapes, seconds from constants.

A MODEL, to see how far a design scales on machines that are not here. Nothing that comes out of
it was measured, and whoever shows it says so. What curvature takes is counted by the library's
own model, `fop.costs`, in multiply-adds of two operations each. For N examples on R ranks, factors
[i, i] and [o, o] (bias included) at s positions, curvature every T steps, P parameters:

    forward and backward   6 n sum s i o           n = ceil(N / R) examples on the busiest rank
    factor products        second moments / T      of n s rows, the lower triangles alone
    decompositions         decompositions / T      layers of the busiest owner
    preconditioning        products                the same; FOP three with each factor, KFAC one
    gradients              all-reduce of P         as in DistributedDataParallel; overlaps backward
    curvature sums         reduce of triangles / T to their owners; overlaps backward
    differences            reduce of P             g1 - g2 to the owners, FOP alone; overlaps too
    updates                broadcast of P          from the owners
    overhead               a constant for each layer that a rank works on

Collectives are rings: a reduce or a broadcast moves (R - 1) / R of its bytes over each link, an
all-reduce twice that; each waits for the slowest link on its way. Not in the model: reading data,
waiting for slower ranks, the elementwise part of optimizers, the memory of a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from fop.costs import FOP_PASSES, KFAC_PASSES, Passes, Work, owner_cost
from fop.distributed.placement import assign_owners
from fop_bench.schema import Count, Name, NonNegative, OrInfinite

BYTES = 4  # of a number: gradients, factors and updates travel in float32
DIAGONAL_ABOVE = 8192  # fop's default max_factor_size: a larger factor is kept as its diagonal
BACKWARD = 2 / 3  # of forward and backward

OPERATIONS = 2  # in a multiply-add

# What a step does with each factor; methods without curvature are not listed.
PASSES = {
    "kfac": KFAC_PASSES,
    "kfac-2x": KFAC_PASSES,
    "sp-ngd": KFAC_PASSES,
    "fop": FOP_PASSES,
    "fop-sum": FOP_PASSES,
}
WITH_DIFFERENCE = tuple(name for name, passes in PASSES.items() if passes == FOP_PASSES)


@dataclass(frozen=True)
class LayerShape:
    """A linear layer or convolution; `inputs` and `outputs` are those of one group."""

    name: str
    inputs: int  # bias included
    outputs: int
    positions: int = 1
    groups: int = 1

    @property
    def matrix(self) -> int:
        return self.groups * self.inputs * self.outputs

    @property
    def work(self) -> Work:
        return Work(
            self.outputs,
            self.inputs,
            self.groups,
            diagonal_rows=self.outputs > DIAGONAL_ABOVE,
            diagonal_columns=self.inputs > DIAGONAL_ABOVE,
        )

    def triangles(self) -> int:
        """Numbers in the curvature sums."""
        widths = [n for n in (self.inputs, self.outputs) if n <= DIAGONAL_ABOVE]
        return self.groups * sum(n * (n + 1) // 2 for n in widths)


@dataclass(frozen=True)
class ModelShape:
    """All layers with curvature, and the parameters of the whole model."""

    layers: tuple[LayerShape, ...]
    parameters: int

    def training_operations(self) -> float:
        """Forward and backward of one example: three products of the size of the forward's."""
        return sum(6.0 * layer.positions * layer.matrix for layer in self.layers)


@dataclass(frozen=True)
class Hardware:
    """One rank's rates and its links. Rates are what is reached, not what is advertised."""

    name: str
    source: str  # where the constants are from
    train_rate: float  # operations a second of forward and backward
    product_rate: float  # of matrix products
    decompose_rate: float  # of Cholesky decompositions and inverses
    latency: float  # seconds of the smallest message
    bandwidth: OrInfinite  # bytes a second out of one rank, within a host
    host_bandwidth: OrInfinite  # the same between hosts
    host_ranks: int  # ranks on a host
    overhead: float  # seconds for each layer, however few examples
    overlaps: bool  # messages travel while the rank computes
    solves: bool = False  # with Cholesky factors of wide factors where that pays, as fop on a CPU

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) in (int, float) and not value > 0:
                raise ValueError(f"hardware {self.name!r}: {name} must be > 0, got {value!r}")

    def ring(self, size: float, ranks: int) -> float:
        """Seconds of a reduce, a broadcast or a gather of `size` bytes."""
        if ranks == 1:
            return 0.0
        slowest = self.bandwidth if ranks <= self.host_ranks else self.host_bandwidth
        return math.ceil(math.log2(ranks)) * self.latency + size * (ranks - 1) / ranks / slowest


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step by the model, and what they are spent on (a mean over the interval)."""

    method: Name
    batch_size: Count
    ranks: Count
    hardware: str
    parts: Mapping[str, NonNegative] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def predict(
    method: str, shape: ModelShape, batch_size: int, ranks: int, interval: int, hardware: Hardware
) -> Prediction:
    """The step of `batch_size` examples in all on `ranks` such ranks, by the model above."""
    examples = math.ceil(batch_size / ranks)
    training = examples * shape.training_operations() / hardware.train_rate
    numbers = BYTES * shape.parameters
    gradients = 2 * hardware.ring(numbers, ranks)
    behind_backward = BACKWARD * training if hardware.overlaps else 0.0
    parts = {
        "forward and backward": training,
        "overhead": len(shape.layers) * hardware.overhead,
        "gradients": max(0.0, gradients - behind_backward),
    }
    if method in PASSES:
        passes = PASSES[method]
        mine = busiest(shape.layers, ranks, interval, passes)
        works = [
            replace(layer.work, solves_over=interval if hardware.solves else None) for layer in mine
        ]
        matrices = BYTES * sum(layer.matrix for layer in shape.layers)
        triangles = BYTES * sum(layer.triangles() for layer in shape.layers)
        differences = hardware.ring(matrices, ranks) if method in WITH_DIFFERENCE else 0.0
        every_step = max(0.0, gradients + differences - behind_backward)
        sums = hardware.ring(triangles, ranks)
        with_sums = max(0.0, gradients + differences + sums - behind_backward)
        moments = sum(layer.work.second_moments(layer.positions) for layer in shape.layers)
        decompositions = sum(work.decompositions() for work in works)
        products = sum(work.products(passes) for work in works)
        parts |= {
            "factor products": OPERATIONS * examples * moments / hardware.product_rate / interval,
            "decompositions": OPERATIONS * decompositions / hardware.decompose_rate / interval,
            "preconditioning": OPERATIONS * products / hardware.product_rate,
            "curvature sums": (with_sums - every_step) / interval,
            "updates": hardware.ring(matrices, ranks),
        }
        if method in WITH_DIFFERENCE:
            parts["differences"] = every_step - parts["gradients"]
        parts["overhead"] += len(mine) * hardware.overhead
    return Prediction(method, batch_size, ranks, hardware.name, parts)


def busiest(
    layers: Sequence[LayerShape], ranks: int, interval: int, passes: Passes
) -> list[LayerShape]:
    """The layers of the owner with most to do, as the library assigns them."""
    costs = [owner_cost(layer.work, interval, passes) for layer in layers]
    owned: dict[int, list[LayerShape]] = {}
    loads: dict[int, float] = {}
    for layer, owner, cost in zip(layers, assign_owners(costs, ranks), costs, strict=True):
        owned.setdefault(owner, []).append(layer)
        loads[owner] = loads.get(owner, 0.0) + cost
    return owned[max(loads, key=lambda owner: loads[owner])] if loads else []


def bytes_sent(method: str, shape: ModelShape, ranks: int, interval: int) -> dict[str, float]:
    """Bytes that a rank sends a step, by what they are for; a mean over ranks and the interval."""
    ring = BYTES * (ranks - 1) / ranks
    sent = {"gradients": 2 * ring * shape.parameters}
    if method in PASSES:
        matrices = ring * sum(layer.matrix for layer in shape.layers)
        triangles = sum(layer.triangles() for layer in shape.layers)
        sent |= {"curvature sums": ring * triangles / interval, "updates": matrices}
        if method in WITH_DIFFERENCE:
            sent["differences"] = matrices
    return sent


def shape_of(model: nn.Module, inputs: Tensor) -> ModelShape:
    """The shapes that the linear layers and convolutions of a model have on `inputs` [1, ...]."""
    shapes: dict[str, LayerShape] = {}
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        name, bias = names[module], getattr(module, "bias", None) is not None
        if isinstance(module, nn.Linear):
            rows, columns = module.out_features, module.in_features
            positions, groups = output.numel() // rows, 1
        else:
            assert isinstance(module, CONVOLUTIONS)
            groups = module.groups
            rows = module.out_channels // groups
            columns = module.in_channels // groups * math.prod(module.kernel_size)
            positions = output[0, 0].numel()
        before = shapes[name].positions if name in shapes else 0  # called several times
        shapes[name] = LayerShape(name, columns + bias, rows, before + positions, groups)

    hooked = [m for m in names if isinstance(m, (nn.Linear, *CONVOLUTIONS))]
    handles = [module.register_forward_hook(note) for module in hooked]
    training = model.training
    model.eval()
    try:
        model(inputs)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return ModelShape(tuple(shapes.values()), parameters)


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def accelerator(
    name: str, utilisation: float = 0.3, decompose_share: float = 0.05, overhead: float = 3e-4
) -> Hardware:
    """A preset: peak rates and links as advertised, and assumptions on what of them is reached.

    Training and products reach `utilisation` of the matrix units' peak, decompositions
    `decompose_share` of the plain float32 peak, links 80 % of their bandwidth.
    """
    peak = PEAKS[name]
    return Hardware(
        name=peak.title,
        source=(
            f"{peak.source}; assumed: {utilisation:.0%} of the TF32 peak in training and products, "
            f"{decompose_share:.0%} of the float32 peak in decompositions, {LINKS:.0%} of the "
            f"links' bandwidth, {LATENCY * 1e6:.0f} us a hop, {overhead * 1e6:.0f} us a layer"
        ),
        train_rate=utilisation * peak.tf32,
        product_rate=utilisation * peak.tf32,
        decompose_rate=decompose_share * peak.float32,
        latency=LATENCY,
        bandwidth=LINKS * peak.link,
        host_bandwidth=LINKS * peak.network,
        host_ranks=8,
        overhead=overhead,
        overlaps=True,
    )


@dataclass(frozen=True)
class Peak:
    """As advertised: dense operations a second, bytes a second in one direction."""

    title: str
    source: str
    tf32: float
    float32: float
    link: float
    network: float


LINKS = 0.8
LATENCY = 1e-5
# The two machines of the paper's appendix E.1, eight devices a host, each with a 400 Gb/s adapter.
PEAKS = {
    "h100": Peak(
        "NVIDIA H100 SXM",
        "NVIDIA H100 data sheet (TF32 495 TFLOP/s dense, FP32 67, NVLink 900 GB/s both ways), "
        "NDR InfiniBand 400 Gb/s",
        494.7e12,
        66.9e12,
        450e9,
        50e9,
    ),
    "mi300x": Peak(
        "AMD MI300X",
        "AMD Instinct MI300X data sheet (TF32 654 TFLOP/s dense, FP32 163, Infinity Fabric 7 x "
        "128 GB/s both ways), 400 Gb/s network",
        653.7e12,
        163.4e12,
        448e9,
        50e9,
    ),
}
