"""The loss around a point, and where each method's step leads (the paper's Figure 1).

The plane is spanned by two random directions, normalised filter by filter so that they are as
large as the weights they perturb (Li et al. 2018, "Visualizing the Loss Landscape of Neural
Nets"); biases and norm parameters stay as they are. Every method takes one step from the same
point on the same batch, and is drawn as that step's shadow on the plane. Almost nothing of a step
lies in a random plane of a space of many dimensions, so ``plane="steps"`` spans the plane by the
first and the last step instead.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fop_bench.config import ConfigError
from fop_bench.files import read_record, write_json
from fop_bench.methods import get_method
from fop_bench.schema import Count, Name, NonNegative, OrInfinite
from fop_bench.stepper import Stepper
from fop_bench.style import look

if TYPE_CHECKING:
    from fop_bench.workloads import Splits, Workload

FILE = "landscape.json"
Plane = Literal["random", "steps"]
Direction = list[Tensor]  # one tensor a parameter


@dataclass(frozen=True)
class Step:
    """One method's step: its shadow on the plane and the loss at its true end.

    ``share`` is the part of the step's length that lies in the plane.
    """

    method: Name
    x: float
    y: float
    loss: OrInfinite
    share: NonNegative


@dataclass(frozen=True)
class Landscape:
    """Losses on a grid: ``losses[i][j]`` at ``(xs[j], ys[i])``; ``loss`` is that at the centre."""

    workload: Name
    batch_size: Count
    seed: int
    plane: Plane
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    losses: tuple[tuple[OrInfinite, ...], ...]
    loss: OrInfinite
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        for name, places in (("xs", self.xs), ("ys", self.ys)):
            if len(places) < 3 or list(places) != sorted(set(places)):
                raise ValueError(f"{name}: expected three rising numbers or more")
        if {len(self.xs)} != {len(row) for row in self.losses} or len(self.losses) != len(self.ys):
            raise ValueError(f"losses: expected {len(self.ys)} rows of {len(self.xs)}")
        if not self.steps:
            raise ValueError("steps: expected one at least, found none")

    @property
    def x_label(self) -> str:
        return self._labels()[0]

    @property
    def y_label(self) -> str:
        return self._labels()[1]

    def _labels(self) -> tuple[str, str]:
        if self.plane == "random":
            return "random direction 1", "random direction 2"
        first, last = (look(self.steps[i].method).label for i in (0, -1))
        return f"along the step of {first}", f"across, towards that of {last}"


def measure(
    workload: Workload,
    *,
    batch_size: int,
    methods: Sequence[str] = ("sgd", "kfac", "fop"),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    warmup: int = 20,
    resolution: int = 31,
    span: float = 1.0,
    plane: Plane = "random",
    seed: int = 0,
    data_dir: Path | None = None,
    device: torch.device | None = None,
    subset: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Landscape:
    """The surface around ``weights``, or around a model after ``warmup`` steps of the first method.

    ``options`` gives each method's optimizer options; what is not given takes the method's
    defaults. The grid reaches ``span`` to all sides, where 1 moves every filter by its own length
    (``plane="steps"``: where 1 is 1.6 times the longest step). ``progress(done, total)`` is
    called after each grid point.
    """
    if resolution < 3 or resolution % 2 == 0:
        raise ConfigError(f"resolution: expected an odd number >= 3, found {resolution}")
    if not methods:
        raise ConfigError("methods: expected at least one method, found none")
    device = device or torch.device("cpu")
    chosen = {name: dict((options or {}).get(name, {})) for name in methods}
    splits = workload.splits(data_dir, device=device, validation=False, subset=subset)
    model = workload.model(seed).to(device)
    model.train()
    if weights is not None:
        model.load_state_dict(dict(weights))
    else:
        optimizer = _optimizer(model, methods[0], chosen[methods[0]])
        stepper = Stepper(model, optimizer, loss=workload.loss)
        for batch in _batches(splits, batch_size, seed, warmup):
            stepper.step(*batch)
        model = copy.deepcopy(model)  # without the hooks of the optimizer that warmed it up
    # From another order of the data than the warm-up's, so that its last batch is no special one.
    inputs, targets = next(_batches(splits, batch_size, seed + 1, 1))
    taken = [_one_step(model, workload, name, chosen[name], inputs, targets) for name in methods]
    moves = [move for move, _ in taken]
    axes, reach = _axes(model, moves, plane, span, seed)
    loss_at = _loss_in_plane(model, workload, axes, inputs, targets)
    places = tuple(torch.linspace(-reach, reach, resolution).tolist())
    steps = [
        Step(name, *coordinates(move, axes), loss=end, share=_share(move, axes))
        for name, (move, end) in zip(methods, taken, strict=True)
    ]
    return Landscape(
        workload=workload.name,
        batch_size=len(inputs),
        seed=seed,
        plane=plane,
        xs=places,
        ys=places,
        losses=_grid(loss_at, places, progress),
        loss=loss_at(0.0, 0.0),
        steps=tuple(steps),
    )


def _axes(
    model: nn.Module, moves: Sequence[Direction], plane: Plane, span: float, seed: int
) -> tuple[tuple[Direction, Direction], float]:
    """The two axes of the plane, and how far the grid reaches along them."""
    if plane == "random":
        generator, weights = torch.Generator().manual_seed(seed), list(model.parameters())
        first = filter_normalised(weights, generator)
        return (first, filter_normalised(weights, generator)), span
    axes = _plane_of(moves[0], moves[-1])
    longest = max(max(map(abs, coordinates(move, axes))) for move in moves)
    return axes, span * 1.6 * longest or span


def _grid(
    loss_at: Callable[[float, float], float],
    places: Sequence[float],
    progress: Callable[[int, int], None] | None,
) -> tuple[tuple[float, ...], ...]:
    """The loss at each pair of places, a row for each y."""
    losses = []
    for y, x in itertools.product(places, places):
        losses.append(loss_at(x, y))
        if progress:
            progress(len(losses), len(places) ** 2)
    width = len(places)
    return tuple(tuple(losses[at : at + width]) for at in range(0, len(losses), width))


def filter_normalised(parameters: Sequence[Tensor], generator: torch.Generator) -> Direction:
    """A random direction with filters as long as the weights'; zero for vectors and scalars."""
    direction = []
    for weight in parameters:
        if weight.dim() < 2:
            direction.append(torch.zeros_like(weight))
            continue
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        rows = noise.flatten(1)
        lengths = weight.detach().flatten(1).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-12)
        direction.append((rows * lengths[:, None]).view_as(weight))
    return direction


def coordinates(move: Direction, axes: Sequence[Direction]) -> tuple[float, float]:
    """The point of the plane nearest to the end of ``move``, in units of the two axes."""
    one, two = axes
    a, b, c = _dot(one, one), _dot(one, two), _dot(two, two)
    p, q = _dot(move, one), _dot(move, two)
    determinant = a * c - b * b
    if determinant <= 1e-12 * a * c:  # the two axes are one line, or one of them is nothing
        return (p / a if a else 0.0), 0.0
    return (p * c - q * b) / determinant, (q * a - p * b) / determinant


def _dot(one: Direction, two: Direction) -> float:
    return math.fsum(float((a.double() * b.double()).sum()) for a, b in zip(one, two, strict=True))


def _share(move: Direction, axes: Sequence[Direction]) -> float:
    x, y = coordinates(move, axes)
    shadow = [x * a + y * b for a, b in zip(axes[0], axes[1], strict=True)]
    length = math.sqrt(_dot(move, move))
    return min(1.0, math.sqrt(_dot(shadow, shadow)) / length) if length else 0.0


def _plane_of(first: Direction, last: Direction) -> tuple[Direction, Direction]:
    """Two orthogonal axes of length one whose plane holds both steps."""
    length = math.sqrt(_dot(first, first)) or 1.0
    x_axis = [part / length for part in first]
    along = _dot(last, x_axis)
    rest = [part - along * axis for part, axis in zip(last, x_axis, strict=True)]
    height = math.sqrt(_dot(rest, rest)) or 1.0
    return x_axis, [part / height for part in rest]


def _batches(
    splits: Splits, batch_size: int, seed: int, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The first ``count`` batches of training, over as many epochs as that takes."""
    epochs = (splits.train(batch_size, epoch, seed) for epoch in itertools.count())
    return itertools.islice(itertools.chain.from_iterable(epochs), count)


def _one_step(
    model: nn.Module,
    workload: Workload,
    method: str,
    options: Mapping[str, Any],
    inputs: Tensor,
    targets: Tensor,
) -> tuple[Direction, float]:
    """The step that a fresh optimizer of the method takes, and the loss after it."""
    moved = copy.deepcopy(model)
    optimizer = _optimizer(moved, method, options)
    Stepper(moved, optimizer, loss=workload.loss).step(inputs, targets)
    pairs = zip(moved.parameters(), model.parameters(), strict=True)
    move = [(after - before).detach().clone() for after, before in pairs]
    with torch.no_grad():
        return move, float(workload.loss(moved(inputs), targets))


def _optimizer(model: nn.Module, method: str, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    chosen = get_method(method)
    return chosen.build(model, **{"lr": chosen.defaults["lr"], **options})


def _loss_in_plane(
    model: nn.Module, workload: Workload, axes: Sequence[Direction], inputs: Tensor, targets: Tensor
) -> Callable[[float, float], float]:
    """The batch's loss at a place of the plane; batch norm uses the batch, as in training."""
    probe = copy.deepcopy(model)
    centre = [parameter.detach().clone() for parameter in probe.parameters()]

    @torch.no_grad()
    def loss_at(x: float, y: float) -> float:
        for parameter, at, one, two in zip(probe.parameters(), centre, *axes, strict=True):
            parameter.copy_(at + x * one + y * two)
        return float(workload.loss(probe(inputs), targets))

    return loss_at


def write_landscape(landscape: Landscape, path: Path) -> Path:
    """Record the surface, so that it can be drawn and reported; a loss of infinity becomes null."""
    return write_json(path, asdict(landscape))


def read_landscape(path: Path) -> Landscape:
    """A surface that ``write_landscape`` recorded."""
    return read_record(path, Landscape, "landscape")
