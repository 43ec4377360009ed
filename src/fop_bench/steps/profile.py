"""Where the time of one step goes, by phase: fop's own functions, timed from outside.

    python -m fop_bench.steps.profile '{"workload": "resnet18-b64", "method": "kfac"}'

prints a line of JSON: seconds a phase, for a step that refreshes curvature and one that doesn't.
Time spent in a phase within another one counts for the inner one alone.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.functional import cross_entropy

from fop_bench.processes import answer, pin
from fop_bench.stepper import load_lazy_code
from fop_bench.steps.methods import METHODS
from fop_bench.steps.workloads import WORKLOADS

FORWARD, BACKWARD, REST = "forward", "backward, with half gradients", "parameter update and checks"
# Function of the library -> phase. A test holds these names to the library.
PHASES = {
    "fop.capture:Recorder.record_moments": "moments of inputs and output gradients",
    "fop.step:refresh": "moving averages",
    "fop.curvature.kronecker:FactoredKronecker.refresh": "decompositions",
    "fop.directions:Directions.compute": "preconditioning and projection",
    "fop.step:Engine.step": REST,
}
ORDER = (FORWARD, BACKWARD, *dict.fromkeys(PHASES.values()))


class PhaseClock:
    """CPU seconds by phase; phases nest, and each counts only its own."""

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Give the time since the last change to the innermost open phase."""
        now = self._now()
        if self._open:
            name = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def resolve(path: str) -> tuple[Any, str]:
    """The object that holds a function, and its name there."""
    module, _, dotted = path.partition(":")
    *owners, name = dotted.split(".")
    holder: Any = importlib.import_module(module)
    for owner in owners:
        holder = getattr(holder, owner)
    if not hasattr(holder, name):
        raise AttributeError(f"{path} is gone from the library: correct PHASES of {__name__}")
    return holder, name


def time_phases(clock: PhaseClock) -> None:
    """Time the library's functions from now on, in this process."""
    for path, phase in PHASES.items():
        holder, name = resolve(path)
        setattr(holder, name, _timed(clock, phase, getattr(holder, name)))


def _timed(clock: PhaseClock, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.phase(phase):
            return function(*args, **kwargs)

    return timed


def profile(workload_name: str, method_name: str) -> dict[str, dict[str, float]]:
    workload, method = WORKLOADS[workload_name], METHODS[method_name]
    clock = PhaseClock()
    time_phases(clock)
    load_lazy_code(lambda model: method.build(model, 10))
    inputs, labels = workload.data()
    stepper = method.build(workload.model(), 10)
    (optimizer,) = stepper.optimizers
    found = {}
    # fop refreshes on steps 1, 2 and 4: the first two warm up.
    for kind in ("", "", "plain", "refresh"):
        clock.seconds.clear()
        optimizer.zero_grad()
        with clock.phase(FORWARD):
            loss = cross_entropy(stepper.model(inputs), labels)
        with clock.phase(BACKWARD):
            loss.backward()
        with clock.phase(REST):
            optimizer.step()
        if kind:
            found[kind] = {phase: round(clock.seconds.get(phase, 0.0), 5) for phase in ORDER}
    return found


def main() -> None:
    request = json.loads(sys.argv[1])
    pin()
    warnings.simplefilter("ignore")
    answer(profile(request["workload"], request["method"]))


if __name__ == "__main__":
    main()
