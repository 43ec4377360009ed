"""The step that sizes itself: a quadratic model on a few directions, in a trust region.

    V    directions: the update u of all layers (KFAC's or FOP's), the previous displacement, and
         that of the parameters without curvature
    A    [k, k] = V' J' H J V, the exact Gauss-Newton matrix on their span, on a part of the batch;
         J v = (z(w + h v) - z(w)) / h by forward passes, H the Hessian of the loss at the output
    b    [k] = V' gradient, of the full batch
    c    = -A^-1 b, shortened to c'Ac <= r
    rho  = actual / predicted reduction on that part; c is halved while rho is bad, and r follows it

The displacement is V c, and is the next step's previous one. The reduction needs no labels: see
`Reading.change`. All of it is free of the units of loss, tokens and parameters.

The gradient of a batch agrees with itself more than with that of the next batch, so b of u is too
large. The two half-batches tell by how much: signal = <g1, M^-1 g2> / <a, M^-1 a> is 1 without
noise, and b of u is multiplied by its square root. Below NOISY the previous displacement is mostly
noise too: then the one direction is an average of the last updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fop.capture import Forward
from fop.distributed import Ranks
from fop.likelihood import Gaussian
from fop.replay import Direction, Replay

# Of the first loss: how much the first step may change the output, in the Gauss-Newton norm.
FIRST_RADIUS = 0.05
RIDGE = 1e-6  # added to A, scaled to a unit diagonal
HALVINGS = 3
NOISY = 0.5  # share of signal
SMALLEST_SIGNAL = 0.01
SIGNAL_DECAY, AVERAGE_DECAY = 0.8, 0.8
# h |v| / |w|, by what the parameters' type resolves.
DIFFERENCE = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE_DIFFERENCE = 3e-2


@dataclass(frozen=True)
class Outcome:
    """What a step came to, for diagnostics."""

    rule: str  # "model", or "fixed"
    why: str = ""  # of a fixed one
    coefficients: tuple[float, ...] = ()
    radius: float = math.nan
    ratio: float = math.nan  # actual to predicted reduction
    signal: float = math.nan
    reduction: float = math.nan  # of the loss on the part of the batch


@dataclass
class Memory:
    """What the rule keeps from step to step, as numbers in a parameter group."""

    group: Any  # a MutableMapping

    @property
    def radius(self) -> float | None:
        found: float | None = self.group["trust_radius"]
        return found

    @radius.setter
    def radius(self, value: float) -> None:
        self.group["trust_radius"] = value

    def signal(self, energy: float, noise: float | None) -> float:
        """The share of signal, averaged over steps; 1 where the half-batches tell nothing."""
        if noise is not None and energy > 0:
            # As shares, so that a batch with a large gradient does not rule the average.
            now, before = 1 - noise / energy, self.group["signal"]
            self.group["signal"] = (
                now if before is None else SIGNAL_DECAY * before + (1 - SIGNAL_DECAY) * now
            )
        known = self.group["signal"]
        return 1.0 if known is None else min(1.0, max(known, SMALLEST_SIGNAL))


MEMORY: Mapping[str, None] = {"trust_radius": None, "signal": None}


class Model:
    """The loss near the present parameters, as far as forward passes on a part of the batch tell.

    `scale` undoes the loss scale of mixed precision. Sums go over ranks, whose mean is trained.
    """

    def __init__(
        self,
        model: nn.Module,
        forwards: Sequence[Forward],
        values: Sequence[Tensor],
        ranks: Ranks,
        *,
        seed: int,
        scale: float = 1.0,
    ) -> None:
        self._forwards, self._ranks, self._values = forwards, ranks, values
        self._scale = scale
        self._replay = Replay(model, forwards, values, seed)
        self.base = [forward.output for forward in forwards]
        self._slopes = [forward.gradient for forward in forwards]

    def repeats(self) -> tuple[bool, bool]:
        """Whether a pass can be repeated, and whether it repeats what the user's own gave."""
        one, two = self._replay.outputs(), self._replay.outputs()
        recorded = [forward.output for forward in self._forwards]
        self._use(one)
        return _equal(one, two), _equal(one, recorded)

    def run_base(self) -> None:
        """Batch norm, dropout and autocast make a part another thing than a piece of the batch."""
        self._use(self._replay.outputs())

    def _use(self, base: list[Tensor]) -> None:
        self.base, self._slopes = base, []
        for forward, z in zip(self._forwards, base, strict=True):
            reading = forward.reading
            target = reading.targets(forward.output, forward.gradient)
            self._slopes.append(reading.scale * (reading.likelihood.mean(z.to(target)) - target))

    def loss(self) -> float:
        """Up to what does not depend on the output: of classes, 0 is the least there can be."""
        total = []
        for forward, z, slope in zip(self._forwards, self.base, self._slopes, strict=True):
            reading = forward.reading
            z = z.double()
            t = reading.targets(z, slope.double())
            value = (reading.scale * reading.likelihood.psi(z)).sum() - (
                reading.scale * t * z
            ).sum()
            if isinstance(reading.likelihood, Gaussian):
                value = value + (reading.scale * t.square()).sum() / 2
            total.append(value * forward.weight)
        return self._over_ranks(torch.stack(total).sum().reshape(1))[0]

    def along(self, directions: Sequence[Direction], norms: Sequence[float]) -> list[list[Tensor]]:
        """J v of each, by differences."""
        size = math.sqrt(self._norm_squares([self._values])[0])
        relative = DIFFERENCE.get(self._values[0].dtype, COARSE_DIFFERENCE)
        found = []
        for direction, norm in zip(directions, norms, strict=True):
            if norm == 0:
                found.append([torch.zeros_like(z) for z in self.base])
                continue
            h = relative * (size or 1.0) / norm
            outputs = self._replay.outputs((h, direction))
            found.append([(z - z0) / h for z, z0 in zip(outputs, self.base, strict=True)])
        return found

    def matrices(self, tangents: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """A [k, k], and b [k] of the part alone."""
        k = len(tangents)
        curvature = torch.zeros(k, k, dtype=torch.float64)
        slopes = torch.zeros(k, dtype=torch.float64)
        for index, forward in enumerate(self._forwards):
            reading = forward.reading
            own = [tangent[index].double() for tangent in tangents]
            z, weight = self.base[index].double(), forward.weight
            for i, u in enumerate(own):
                product = reading.scale.double() * reading.likelihood.hessian_times(z, u)
                for j in range(i, k):
                    entry = float((own[j] * product).sum()) * weight
                    curvature[i, j] += entry
                    curvature[j, i] += entry * (i != j)
                slopes[i] += float((self._slopes[index].double() * u).sum()) * weight
        found = self._over_ranks(torch.cat([curvature.flatten(), slopes]))
        numbers = torch.tensor(found, dtype=torch.float64)
        return numbers[: k * k].reshape(k, k), numbers[k * k :]

    def change(self, directions: Sequence[Direction], c: Sequence[float]) -> float:
        """Of the loss, on the part, if the parameters moved so."""
        outputs = self._replay.outputs(*zip(c, directions, strict=True))
        total = []
        for forward, z, z0, slope in zip(
            self._forwards, outputs, self.base, self._slopes, strict=True
        ):
            reading = forward.reading
            total.append(reading.change(z0, z, slope) * forward.weight)
        return self._over_ranks(torch.stack(total).sum().reshape(1))[0]

    def slopes(self, directions: Sequence[Direction], gradients: Sequence[Tensor]) -> Tensor:
        """b = V' gradient of the full batch."""
        found = torch.stack([_inner(direction, gradients) for direction in directions])
        # Shards of the mean gradient add up; else every rank has a gradient of its own.
        ranks = self._ranks
        total = ranks.sum_of_ranks(found) / (1 if ranks.partial_rows else ranks.size)
        return total.double().cpu()

    def norms(self, directions: Sequence[Direction]) -> list[float]:
        return [math.sqrt(square) for square in self._norm_squares(directions)]

    def _norm_squares(self, directions: Sequence[Direction]) -> list[float]:
        found = torch.stack([_inner(direction, direction) for direction in directions])
        if self._ranks.partial_rows:
            found = self._ranks.sum_of_ranks(found)
        numbers: list[float] = found.tolist()
        return numbers

    def _over_ranks(self, sums: Tensor) -> list[float]:
        total = self._ranks.sum_of_ranks(sums.double()) * (self._scale / self._ranks.size)
        numbers: list[float] = total.tolist()
        return numbers


def _inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    parts = [(x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)]
    device = parts[0].device
    return torch.stack([part.to(device) for part in parts]).sum()


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    for one, other in zip(some, others, strict=True):
        if one.shape != other.shape:
            return False
        size = float(other.double().abs().max())
        tolerance = 1e-9 if other.dtype == torch.float64 else 1e-4
        if not float((one.double() - other.double()).abs().max()) <= tolerance * size:
            return False
    return True


def solve(A: Tensor, b: Tensor, radius: float) -> tuple[Tensor, bool]:
    """c = -A^-1 b within c'Ac <= radius, and whether that was needed."""
    scale = A.diagonal().clamp(min=torch.finfo(A.dtype).tiny).sqrt()
    identity = torch.eye(len(b), dtype=A.dtype)
    # A direction that changes nothing in the output has nothing to say.
    active = (A.diagonal() > 0).to(A.dtype)
    unit = A / scale[:, None] / scale[None, :] + RIDGE * identity + torch.diag(1 - active)
    c = -torch.linalg.solve(unit, active * b / scale) / scale
    square = float(c @ A @ c)
    if square > radius:
        return c * math.sqrt(radius / square), True
    return c, False


def size_step(
    model: Model,
    directions: Sequence[Direction],
    gradients: Sequence[Tensor],
    memory: Memory,
    signal: float,
) -> tuple[list[float], Outcome] | str:
    """The coefficients c of the directions, of which the first is u; or why there are none."""
    tangents = model.along(directions, model.norms(directions))
    A, b_part = model.matrices(tangents)
    b = model.slopes(directions, gradients)
    if not bool(A.isfinite().all() & b.isfinite().all() & b_part.isfinite().all()):
        return "the extra forward passes are not finite"
    b[0] *= math.sqrt(signal)
    radius = memory.radius
    if radius is None:
        radius = FIRST_RADIUS * model.loss()
        if not (math.isfinite(radius) and radius > 0):
            return "the loss is not known"
    c, bounded = solve(A, b, radius)
    ratio, actual, halved = -1.0, math.nan, False
    for attempt in range(HALVINGS + 1):
        predicted = float(b_part @ c + c @ A @ c / 2)
        actual = model.change(directions, c.tolist())
        # A part may see a step as uphill that is downhill for the batch.
        ratio = actual / predicted if predicted < 0 else (1.0 if actual < 0 else -1.0)
        if ratio > 0.1 or attempt == HALVINGS:
            break
        c, halved = c / 2, True
    if not math.isfinite(actual):
        return "the extra forward passes are not finite"
    square = float(c @ A @ c)
    if ratio <= 0.25 or halved:
        radius = square / 2
    elif ratio > 0.75 and bounded:
        radius *= 2
    memory.radius = radius
    found = tuple(c.tolist())
    return list(found), Outcome("model", "", found, radius, ratio, signal, -actual)
