"""What a step costs on R ranks: operations and bytes from layers' shapes, seconds from constants.

A MODEL, to see how far a design scales on machines that are not at hand. Nothing that comes out of
here was measured, and whoever shows it says so. For N examples on R ranks, layers with factors
[i, i] and [o, o] (bias included) at s positions, curvature every T steps, P parameters:

    forward and backward   6 n sum s i o           n = ceil(N / R) examples on the busiest rank
    factor products        2 n sum s (i^2 + o^2) / T
    decompositions         sum (i^3 + o^3) / T     layers of the busiest owner: Cholesky and inverse
    preconditioning        k 2 i o (i + o)         the same; k = 3 two-sided products, KFAC 1
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

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from fop_bench.schema import Count, Name, NonNegative, OrInfinite

BYTES = 4  # of a number: gradients, factors and updates travel in float32
DIAGONAL_ABOVE = 8192  # fop's default max_factor_size: a larger factor is kept as its diagonal
BACKWARD = 2 / 3  # of forward and backward

# Two-sided products with the curvature a step needs; methods without curvature are not listed.
PRODUCTS = {"kfac": 1, "kfac-2x": 1, "sp-ngd": 1, "fop": 3, "fop-sum": 3}
WITH_DIFFERENCE = ("fop", "fop-sum")


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
    def full_factors(self) -> tuple[int, ...]:
        return tuple(n for n in (self.inputs, self.outputs) if n <= DIAGONAL_ABOVE)

    def decomposition(self) -> float:
        return self.groups * sum(float(n) ** 3 for n in self.full_factors)

    def precondition(self) -> float:
        """One two-sided product."""
        return 2.0 * self.matrix * sum(self.full_factors)

    def factor_products(self) -> float:
        """For one example."""
        return 2.0 * self.positions * self.groups * sum(float(n) ** 2 for n in self.full_factors)

    def triangles(self) -> int:
        """Numbers in the curvature sums."""
        return self.groups * sum(n * (n + 1) // 2 for n in self.full_factors)

    def curvature(self) -> int:
        """Numbers in the factors and their inverses, at most: of wide ones half may be kept."""
        return 2 * self.groups * sum(n * n for n in self.full_factors)


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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not value > 0 and name != "overlaps":
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
    if method in PRODUCTS:
        products = PRODUCTS[method]
        mine = busiest(shape.layers, ranks, interval, products)
        matrices = BYTES * sum(layer.matrix for layer in shape.layers)
        triangles = BYTES * sum(layer.triangles() for layer in shape.layers)
        factors = examples * sum(layer.factor_products() for layer in shape.layers)
        differences = hardware.ring(matrices, ranks) if method in WITH_DIFFERENCE else 0.0
        every_step = max(0.0, gradients + differences - behind_backward)
        sums = hardware.ring(triangles, ranks)
        with_sums = max(0.0, gradients + differences + sums - behind_backward)
        parts |= {
            "factor products": factors / hardware.product_rate / interval,
            "decompositions": sum(layer.decomposition() for layer in mine)
            / hardware.decompose_rate
            / interval,
            "preconditioning": products
            * sum(layer.precondition() for layer in mine)
            / hardware.product_rate,
            "curvature sums": (with_sums - every_step) / interval,
            "updates": hardware.ring(matrices, ranks),
        }
        if method in WITH_DIFFERENCE:
            parts["differences"] = every_step - parts["gradients"]
        parts["overhead"] += len(mine) * hardware.overhead
    return Prediction(method, batch_size, ranks, hardware.name, parts)


def busiest(
    layers: Sequence[LayerShape], ranks: int, interval: int, products: int
) -> list[LayerShape]:
    """The layers of the owner with most to do, when the costliest layer always goes to the owner
    with the least so far.
    """

    def cost(layer: LayerShape) -> float:
        return layer.decomposition() / interval + products * layer.precondition()

    owners: list[tuple[float, int, list[LayerShape]]] = [(0.0, r, []) for r in range(ranks)]
    for layer in sorted(layers, key=cost, reverse=True):
        load, rank, owned = heapq.heappop(owners)
        heapq.heappush(owners, (load + cost(layer), rank, [*owned, layer]))
    return max(owners, key=lambda owner: owner[0])[2]


def bytes_sent(method: str, shape: ModelShape, ranks: int, interval: int) -> dict[str, float]:
    """Bytes that a rank sends a step, by what they are for; a mean over ranks and the interval."""
    ring = BYTES * (ranks - 1) / ranks
    sent = {"gradients": 2 * ring * shape.parameters}
    if method in PRODUCTS:
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

    watched = [m for m in names if isinstance(m, (nn.Linear, *CONVOLUTIONS))]
    handles = [module.register_forward_hook(note) for module in watched]
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
