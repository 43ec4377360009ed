"""How curvature is refreshed: when it is due, and how a batch becomes averages and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fop.capture import Statistics
from fop.curvature import Curvature
from fop.curvature.base import LAST_SIZE, CurvatureState, RefreshJob
from fop.distributed import Batch, Counts, Ranks
from fop.layer import Layer, State
from fop.linalg import all_finite, on_host
from fop.messages import Messages
from fop.projection import Coefficients
from fop.rules import Feedback
from fop.scaling import LossScale, to_means
from fop.settings import Settings

Fresh = list[tuple[Layer, Statistics]]


@dataclass(frozen=True)
class Refresher:
    """What a refresh goes by, besides the batch."""

    settings: Settings
    ranks: Ranks
    messages: Messages
    loss_scale: LossScale | None
    step: int
    options: Mapping[Any, Mapping[str, Any]]  # by parameter
    coefficients: Mapping[Layer, tuple[Coefficients, int]]  # of the last step

    def refresh(
        self, layers: Sequence[Layer], counts: Mapping[Layer, Counts], batch: Batch, state: State
    ) -> tuple[list[Layer], bool]:
        """Refresh these layers' curvature, each on its owner.

        Returns those where that failed; and whether moments are non-finite: then on no layer.
        """
        if self.settings.needs_halves:
            self.messages.empty_halves({layer: counts[layer] for layer in layers})
        owned = [layer for layer in layers if self.ranks.owns(layer)]
        fresh = [(layer, batch.moments(layer, counts[layer])) for layer in owned]
        for layer, sums in fresh:
            self._to_means(layer, sums)
        for layer in layers:
            layer.recorder.drop_moments()
        # Sums that are finite on each rank may not be so together, or once they are scaled.
        bounds = [bound for _, sums in fresh for bound in sums.bounds()]
        overflow = bool(bounds) and not bool(all_finite(bounds))
        if self.ranks.any_rank([overflow])[0]:
            return [], True
        shares = {x: share for x in layers if (share := x.recorder.take_unaccounted()) is not None}
        self.messages.unaccounted(shares)
        failed = self._update_and_refresh(fresh, state)
        self.messages.not_inverted(failed)
        return failed, False

    def _to_means(self, layer: Layer, sums: Statistics) -> None:
        # Extra passes differentiate each example's own loss, unscaled; training passes
        # differentiate the user's.
        empirical, scale = layer.recorder.plan.empirical, None
        if empirical and self.loss_scale is not None:
            if self.loss_scale.measured and layer.recorder.gradient_touched():
                self.messages.unknown_scale()
            scale = self.loss_scale.of_captured(layer.recorder.gradient_ratio())
        to_means(
            sums,
            sharing=self.settings.sharing,
            reduction=self.settings.loss_reduction if empirical else "sum",
            ranks=self.ranks.size,
            loss_scale=scale,
        )

    def _update_and_refresh(self, fresh: Fresh, state: State) -> list[Layer]:
        """Batches into moving averages, and those into metrics; the layers where that failed.

        The list is emptied.
        """
        failed: list[Layer] = []
        uses = self.settings.interval(self.step)  # steps that a metric will serve on
        for some in _rounds(fresh):
            jobs: dict[Curvature, list[tuple[Layer, RefreshJob]]] = {}
            for layer, moments in some:
                state[layer.weight]  # exists from now on: state is a defaultdict, as torch's
                own = layer.state_in(state)
                layer.curvature.update(own, moments, self.settings.factor_decay)
                job = RefreshJob(own, layer.shape, self._damping(layer, own), uses)
                jobs.setdefault(layer.curvature, []).append((layer, job))
            unsuccessful = []
            for curvature, pairs in jobs.items():
                done = curvature.refresh([job for _, job in pairs])
                unsuccessful += [x for (x, _), fine in zip(pairs, done, strict=True) if not fine]
            _restart(unsuccessful, dict(some), state)
            failed += unsuccessful
        return failed

    def _damping(self, layer: Layer, own: CurvatureState) -> float:
        last, index = self.coefficients.get(layer, (None, 0))
        feedback = Feedback(
            layer.name,
            self.step,
            self.options[layer.weight]["damping"],
            own.get("damping"),
            layer.curvature.mean_eigenvalue(own, layer.shape),
            None if last is None else last.of_layer(index),
        )
        return float(self.settings.damping_rule(feedback))


def _rounds(fresh: Fresh) -> Iterator[Fresh]:
    """What to refresh together: all, for one host read, unless that costs nothing.

    One at a time, sums go and a decomposition replaces its predecessor before the next needs
    memory.
    """
    one_by_one = all(on_host(layer.weight) for layer, _ in fresh)
    while fresh:
        count = 1 if one_by_one else len(fresh)
        some, fresh[:count] = fresh[:count], []
        yield some


def _restart(failed: list[Layer], fresh: Mapping[Layer, Statistics], state: State) -> None:
    """Start moving averages again that hold something non-finite, which would never fade."""
    for layer in failed:
        own, entries = layer.state_in(state), layer.curvature.entries
        averages = [key for key in entries if key + LAST_SIZE in entries and key in own]
        if not bool(all_finite([own[key] for key in averages])):
            for key in averages:
                del own[key]
            layer.curvature.update(own, fresh[layer], 0.0)


def phases(costs: Sequence[float], interval: int) -> tuple[int, ...]:
    """For each layer, by how many steps its refreshes come after the start of an interval.

    Work is spread evenly: costliest first, each to the step with the least work so far; of equal
    ones, the first. A pure function of costs and interval: a resumed run finds the same.
    """
    return _phases(tuple(costs), interval)


@lru_cache(maxsize=32)
def _phases(costs: tuple[float, ...], interval: int) -> tuple[int, ...]:
    work: dict[int, float] = dict.fromkeys(range(min(interval, len(costs))), 0.0)
    chosen = [0] * len(costs)
    for layer in sorted(range(len(costs)), key=lambda layer: (-costs[layer], layer)):
        chosen[layer] = min(work, key=lambda phase: (work[phase], phase))
        work[chosen[layer]] += costs[layer]
    return tuple(phase * interval // max(len(work), 1) for phase in chosen)
