"""One cell, measured in this process: a method on a workload at an interval of refreshes.

    python -m fop_bench.steps.measure \\
        '{"workload": "mlp-w1024-b512", "method": "kfac", "interval": 10, "budget": 4}'

prints a line of JSON. Times are CPU times of whole steps (zero_grad, forward, backward, step).
SGD on the same network is timed in turn with the method, in the same process.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from fop_bench.processes import answer, peak_resident, pin, start_counting_peak
from fop_bench.stepper import Stepper, load_lazy_code
from fop_bench.steps.methods import METHODS, OURS, OWN, TimedMethod, tensor_bytes
from fop_bench.steps.operations import count_multiply_adds
from fop_bench.steps.stats import FIRST_OF_WHOLE_INTERVALS
from fop_bench.steps.workloads import WORKLOADS, TimedWorkload

COUNTED = ("sgd", *OURS)  # methods whose multiply-adds are counted
FEWEST_STEPS = 3  # of each kind, unless a single one is longer than the budget
MOST_STEPS = 25
REFERENCE_EVERY = 3  # steps of the method for one of SGD, where steps are of two kinds


def cpu_time(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class Cell:
    """One measurement in progress."""

    def __init__(
        self, workload: TimedWorkload, method: TimedMethod, interval: int, budget: float
    ) -> None:
        self.workload, self.method, self.interval, self.budget = workload, method, interval, budget
        self.inputs, self.labels = workload.data()
        self.steps: list[tuple[int, bool, float]] = []  # number, refreshes curvature, seconds
        self.reference: list[float] = []
        self.multiply_adds: dict[str, int] = {}
        self.taken = 0
        self.spent = 0.0

    def run(self) -> dict[str, Any]:
        load_lazy_code(lambda model: self.method.build(model, self.interval))
        before = start_counting_peak()
        self.stepper = self.method.build(self.workload.model(), self.interval)
        # Two steps show the whole memory: the second has state beside everything it computes. They
        # warm up, too; one is enough if a step takes long.
        first = self._step(count=True)
        slow = first > self.budget
        self._step(timed=slow)
        peak = peak_resident() - before
        sgd = METHODS["sgd"].build(self.workload.model(), 1)
        for _ in range(2):
            sgd.step(self.inputs, self.labels)
        self._alternate(sgd, slow)
        return {
            "staggered": self.method.staggered,
            "steps": [(number, refreshes, round(s, 6)) for number, refreshes, s in self.steps],
            "reference": [round(seconds, 6) for seconds in self.reference],
            "peak_bytes": peak,
            "state_bytes": self._state_bytes(),
            "multiply_adds": self.multiply_adds,
        }

    def _alternate(self, sgd: Stepper, slow: bool) -> None:
        """Steps of the method and of SGD in turn, until there are enough or time is up."""
        every = 1 if self.interval == 1 else REFERENCE_EVERY
        since = every
        while not self._enough(slow):
            if since >= every:
                self._time_reference(sgd)
                since = 0
            count = self.taken + 1 == 3
            self._step(count=count, timed=slow or not count)
            since += 1
        self._time_reference(sgd)

    def _time_reference(self, sgd: Stepper) -> None:
        self.reference.append(cpu_time(lambda: sgd.step(self.inputs, self.labels)))
        self.spent += self.reference[-1]

    def _step(self, *, timed: bool = False, count: bool = False) -> float:
        self.taken += 1
        refreshes = self._refreshes(self.taken)

        def work() -> None:
            self.stepper.step(self.inputs, self.labels)

        if count and self.method.name in COUNTED:
            # Counting adds some microseconds an operation: nothing to a step slow enough to be
            # timed as well.
            found: list[int] = []
            seconds = cpu_time(lambda: found.append(count_multiply_adds(work)))
            self.multiply_adds["refresh" if refreshes else "plain"] = found[0]
        else:
            seconds = cpu_time(work)
        if timed:
            self.steps.append((self.taken, refreshes, seconds))
            self.spent += seconds
        return seconds

    def _refreshes(self, step: int) -> bool:
        return self.method.refreshes is not None and self.method.refreshes(step, self.interval)

    def _enough(self, slow: bool) -> bool:
        fewest = 1 if slow else FEWEST_STEPS
        whole = sum(number >= FIRST_OF_WHOLE_INTERVALS for number, _, _ in self.steps)
        if self.method.staggered and whole < self.interval:
            return False
        plain = sum(not refreshes for _, refreshes, _ in self.steps)
        measured = plain if self.interval > 1 else len(self.steps)
        if measured < fewest or not self.reference:
            return False
        if len(self.steps) >= MOST_STEPS:
            return True
        if self.interval == 1:
            return self.spent >= self.budget
        # A whole interval more, or none: half of one would weigh positions unevenly.
        missing = -whole % self.interval or self.interval
        costs = [seconds for _, _, seconds in self.steps]
        return self.spent + missing * sum(costs) / len(costs) > self.budget

    def _state_bytes(self) -> int:
        model = self.stepper.model
        return tensor_bytes(self.stepper.state(), [*model.parameters(), *model.buffers()])


def main() -> None:
    request = json.loads(sys.argv[1])
    pin()
    warnings.simplefilter("ignore")  # peers' deprecations are not what this is about
    workload, method = WORKLOADS[request["workload"]], METHODS[request["method"]]
    try:
        result = Cell(workload, method, request["interval"], request["budget"]).run()
    except Exception as error:
        if method.name in OWN:
            raise
        result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    answer(result)


if __name__ == "__main__":
    main()
