"""The benchmark's arithmetic, with made-up times: nothing here depends on a clock."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fop.settings import Settings
from fop_bench.errors import RecordError
from fop_bench.models import mlp
from fop_bench.plots import steps as plot
from fop_bench.render import to_markdown
from fop_bench.steps import guard, profile, report, run, store, tables
from fop_bench.steps.measure import Cell
from fop_bench.steps.methods import METHODS, OURS, tensor_bytes
from fop_bench.steps.operations import count_multiply_adds
from fop_bench.steps.stats import counted, figures, whole_interval
from fop_bench.steps.workloads import LARGE_BATCH, TABLE, WORKLOADS, TimedWorkload

TINY = TimedWorkload(
    name="tiny", title="tiny", build=lambda: mlp(6, 4, 10), input_shape=(6,), batch=8
)
ROOT = Path(__file__).parents[2]
MLP = "mlp-w1024-b512"


def cell(
    steps: list[tuple[int, bool, float]], *, peak: int = 100, state: int = 10, **more: Any
) -> dict[str, Any]:
    """A measurement whose reference takes two seconds, in the median."""
    return {
        "steps": steps,
        "reference": [1.0, 2.0, 9.0],
        "peak_bytes": peak,
        "state_bytes": state,
        **more,
    }


def interval_of(refresh: float, plain: float) -> list[tuple[int, bool, float]]:
    """Steps 5 to 14, of which the eleventh refreshes."""
    return [(n, n == 11, refresh if n == 11 else plain) for n in range(5, 15)]


def made_up(**cells: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A record of methods on the MLP."""
    found = {
        store.cell_key(MLP, method, interval): measured
        for method, by_interval in cells.items()
        for interval, measured in by_interval.items()
    }
    head = {
        "schema": store.SCHEMA,
        "mode": "full",
        "date": "2026-01-31",
        "machine": {"processor": "a processor", "system": "Linux x86_64", "cores": 2},
        "versions": {"python": "3.11", "torch": "2.13.0", "singd": "0.0.5"},
        "source": "abc",
        "planned": 7,
    }
    return {**head, "cells": found, "profiles": {}}


SGD = {1: cell([(4, False, 2.0), (5, False, 2.0)], peak=50, multiply_adds={"plain": 50})}
KFAC = {
    1: cell([(4, True, 8.0), (5, True, 10.0), (6, True, 99.0)], peak=150),
    10: cell(interval_of(10.0, 4.0), multiply_adds={"refresh": 200, "plain": 100}),
}
FOP = {
    1: cell([(4, True, 12.0)], peak=160),
    10: cell(interval_of(12.0, 6.0), multiply_adds={"refresh": 260, "plain": 150}),
}


class TestFigures:
    def test_are_ratios_of_medians_to_the_reference(self) -> None:
        found = figures(KFAC)
        assert found.every_step == 5.0  # 10 / 2
        assert found.plain == 2.0
        assert found.interval == pytest.approx((10 + 9 * 4) / 10 / 2)
        assert found.worst == pytest.approx(10 / 4.6)
        assert (found.peak_bytes, found.state_bytes) == (150, 10)

    def test_of_a_part_of_an_interval_are_composed_of_the_two_kinds_of_step(self) -> None:
        part = {10: cell([(4, True, 10.0), (5, False, 4.0), (6, False, 4.0)])}
        assert figures(part).interval == figures({10: KFAC[10]}).interval
        assert figures(part).worst == pytest.approx(10 / 4.6)
        assert figures(part).every_step == 5.0

    def test_take_the_refresh_from_the_other_process_if_the_interval_showed_none(self) -> None:
        found = figures({1: KFAC[1], 10: cell([(5, False, 4.0)])})
        assert found.interval == pytest.approx((5 + 9 * 2) / 10)

    def test_of_a_staggered_method_need_a_whole_interval(self) -> None:
        steps = [(n, False, 4.0 + (n == 7)) for n in range(5, 15)]
        found = figures({10: cell(steps, staggered=True)})
        assert found.interval == pytest.approx(41 / 10 / 2)
        assert found.worst == pytest.approx(5 / 4.1)
        assert found.plain is None
        assert found.every_step is None
        part = figures({10: cell(steps[:9], staggered=True)})
        assert (part.interval, part.worst) == (None, None)

    def test_of_a_peer_that_failed_hold_its_words(self) -> None:
        found = figures({1: {"error": "ValueError: no"}, 10: KFAC[10]})
        assert found.error == "ValueError: no"
        assert found.interval is None

    def test_of_nothing_are_nothing(self) -> None:
        assert figures({}).every_step is None


def test_a_whole_interval_takes_the_median_of_each_place() -> None:
    steps = [(n, False, float(n % 10)) for n in range(5, 15)]
    repeated = [(n + 10, False, 100.0) for n, _, _ in steps] + [(n + 20, r, s) for n, r, s in steps]
    assert sorted(whole_interval(steps + repeated) or []) == [float(n) for n in range(10)]
    early = [(n, True, 1.0) for n in range(1, 11)]
    assert whole_interval(early) is None  # the first four are steps of their own kind


def test_counted_operations_are_weighted_over_the_interval() -> None:
    found = counted(KFAC[10])
    assert found == {"every_step": 200, "interval": 110.0, "plain": 100}
    assert counted({}) is None


class TestTables:
    def test_show_three_ratios_and_what_could_not_run(self) -> None:
        record = made_up(sgd=SGD, kfac=KFAC, singd={1: {"error": "TypeError: no such layer"}})
        assert to_markdown(tables.times(record)).splitlines()[2:] == [
            "|  | MLP 784-1024-1024-10, batch 512 |",
            "| --- | ---: |",
            "| SGD | 1.00 |",
            r"| singd | – \[1\] |",
            "| KFAC | 5.00 / 2.30 / 2.00 |",
            "| SGD, CPU seconds | 2.000 |",
            "",
            r"\[1\] could not run: singd on MLP 784-1024-1024-10, batch 512: "
            "TypeError: no such layer",
        ]

    def test_show_memory_against_sgd(self) -> None:
        text = to_markdown(tables.memory(made_up(sgd=SGD, kfac=KFAC)))
        assert "| KFAC | 3.00 / 0 MB |" in text

    def test_show_fop_against_kfac_as_measured_and_by_count(self) -> None:
        record = made_up(sgd=SGD, kfac=KFAC, fop=FOP)
        measured, by_count = tables.fop_against_kfac(record, MLP, "interval")
        assert measured == pytest.approx((12 + 54) / (10 + 36))
        assert by_count == pytest.approx((26 + 9 * 15) / (20 + 9 * 10))
        assert "1.20, 1.30" in to_markdown(tables.fop_ratios(record))
        assert tables.fop_against_kfac(made_up(kfac=KFAC), MLP, "plain") == (None, None)

    def test_show_what_counts_say_against_sgd(self) -> None:
        table = tables.ratios_to_sgd(made_up(sgd=SGD, kfac=KFAC, fop={}))
        [line] = table.lines
        assert [cell.text for cell in line] == [
            f"KFAC, {TABLE[MLP].label}", "5.00, 4.00", "2.30, 2.20", "2.00, 2.00"
        ]  # fmt: skip
        assert "Against operation counts" not in tables.sections(made_up(kfac=KFAC))

    @pytest.mark.parametrize(
        ("value", "expected"),
        [(1.604, "1.60 (reached 1.60)"), (1.606, "1.61 (target 1.60)"), (None, "–")],
    )
    def test_say_whether_a_target_is_reached(self, value: float | None, expected: str) -> None:
        assert tables.against_target(value, 1.6) == expected

    def test_of_a_whole_report_need_no_peer(self) -> None:
        record = made_up(sgd=SGD, kfac=KFAC, fop=FOP)
        seconds = dict.fromkeys(profile.ORDER, 1.0)
        record["profiles"] = {f"{MLP}/kfac": {"refresh": seconds, "plain": seconds}}
        text = report.markdown(record)
        assert text.startswith("2026-01-31; a processor, Linux x86_64, 1 of 2 cores")
        assert "`full` run, 6 of 7 measurements." in text
        assert f"| forward | 1.000 s, {100 / len(profile.ORDER):.0f} % |" in text

    def test_are_drawn(self, tmp_path: Path) -> None:
        record = made_up(sgd=SGD, kfac=KFAC, fop=FOP)
        for draw in (plot.plot_costs, plot.plot_growth):
            path = draw(record, tmp_path / "plot.png")
            assert path.read_bytes().startswith(b"\x89PNG")


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    document = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.between_markers(document, "new")
    assert once == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    assert report.between_markers(once, "new") == once
    with pytest.raises(ValueError, match="benchmark: end"):
        report.between_markers(report.BEGIN, "new")


def test_the_docs_have_their_markers() -> None:
    document = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert report.between_markers(document, "text").count("text") >= 1


class TestStore:
    HEAD: dict[str, Any] = {  # noqa: RUF012
        "schema": 1, "mode": "full", "machine": {}, "versions": {}, "source": "abc", "date": "today"
    }  # fmt: skip

    def test_keeps_every_measurement_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        record = store.Store.open(path, self.HEAD, resume=False)
        record.put("cells", "a", {"steps": [[1, True, 0.5]]})
        assert json.loads(path.read_text())["cells"] == {"a": {"steps": [[1, True, 0.5]]}}
        assert [item.name for item in tmp_path.iterdir()] == ["record.json"]

    def test_is_resumed_only_when_asked(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        store.Store.open(path, self.HEAD, resume=False).put("cells", "a", 1)
        with pytest.raises(store.StoreError, match="--resume"):
            store.Store.open(path, self.HEAD, resume=False)
        resumed = store.Store.open(path, {**self.HEAD, "date": "tomorrow"}, resume=True)
        assert resumed.has("cells", "a")
        assert not resumed.has("cells", "b")

    @pytest.mark.parametrize("key", store.SAME)
    def test_is_not_resumed_under_other_conditions(self, tmp_path: Path, key: str) -> None:
        path = tmp_path / "record.json"
        store.Store.open(path, self.HEAD, resume=False).put("cells", "a", 1)
        with pytest.raises(store.StoreError, match=key):
            store.Store.open(path, {**self.HEAD, key: "other"}, resume=True)

    def test_says_what_it_can_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        path.write_text("{")
        with pytest.raises(RecordError, match=r"record\.json is not JSON"):
            store.read(path)

    @pytest.mark.parametrize("name", ["2026-11-18-full.json", "guard.json"])
    def test_reads_what_was_recorded(self, name: str) -> None:
        record = store.read(ROOT / "benchmarks" / "results" / name)
        assert "| FOP |" in report.markdown(record)


class TestGuard:
    BEFORE: dict[str, float] = {"a": 2.0, f"b, {guard.MEMORY}": 2.0}  # noqa: RUF012

    def test_accepts_what_is_within_the_margins(self) -> None:
        now = {"a": 2.0 * guard.TIME_MARGIN, f"b, {guard.MEMORY}": 1.0, "new": 99.0}
        assert guard.regressions(now, self.BEFORE) == []

    def test_names_what_became_slower_larger_or_was_lost(self) -> None:
        now = {"a": 3.1, f"b, {guard.MEMORY}": 2.6}
        assert guard.regressions(now, self.BEFORE) == [
            "a: 3.10 times SGD's, recorded 2.00, more than 1.5 times that",
            "b, peak memory: 2.60 times SGD's, recorded 2.00, more than 1.25 times that",
        ]
        assert "not measured now" in guard.regressions({"a": 1.0}, self.BEFORE)[0]

    def test_ends_with_an_error_on_a_regression_alone(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        recorded = store.read(ROOT / "benchmarks" / "results" / "guard.json")
        console = Console()
        guard.check(recorded, recorded, console)
        assert "no regression" in capsys.readouterr().out
        slower = json.loads(json.dumps(recorded))
        for found in slower["cells"].values():
            found["reference"] = [seconds / 2 for seconds in found["reference"]]
        with pytest.raises(guard.RegressionError, match=r"FOP, no curvature work"):
            guard.check(slower, recorded, console)

    def test_compares_times_and_memory_of_both_optimizers(self) -> None:
        found = guard.guarded(made_up(sgd=SGD, kfac=KFAC, fop=FOP))
        assert len(found) == 8
        assert found[f"{MLP}, KFAC, curvature every step"] == 5.0
        assert found[f"{MLP}, KFAC, peak memory"] == 3.0


class TestPlan:
    @pytest.mark.parametrize("mode", ["quick", "full", "everything"])
    def test_measures_each_cell_once_beside_sgd(self, mode: str) -> None:
        keys = [(task.section, task.key) for task in run.plan(mode, 1.0)]
        assert len(set(keys)) == len(keys)
        workloads = {key.split("/")[0] for section, key in keys if section == "cells"} & set(TABLE)
        assert all(("cells", store.cell_key(name, "sgd", 1)) in keys for name in workloads)

    def test_asks_for_known_workloads_and_methods(self) -> None:
        for task in run.plan("everything", 1.0):
            assert task.request["workload"] in WORKLOADS
            assert task.request["method"] in METHODS

    def test_leaves_peers_out_at_large_batches_unless_everything_is_asked_for(self) -> None:
        def peers(mode: str) -> int:
            return sum(
                task.request["workload"] in LARGE_BATCH and task.request["method"] == "singd"
                for task in run.plan(mode, 1.0)
            )

        assert peers("full") == 0
        assert peers("everything") == 2 * len(LARGE_BATCH)


class TestOperations:
    def test_of_products_and_decompositions_follow_their_formulas(self) -> None:
        a, b = torch.randn(3, 5, 5), torch.randn(3, 5, 7)
        assert count_multiply_adds(lambda: a @ b) == 3 * 5 * 5 * 7
        onto = torch.zeros(3, 5, 7)
        assert count_multiply_adds(lambda: onto.baddbmm_(a, b)) == 3 * 5 * 5 * 7
        assert count_multiply_adds(lambda: onto[0].addmm_(a[0], b[0])) == 5 * 5 * 7
        spd = torch.eye(30)
        triangle = torch.linalg.cholesky_ex(spd)[0]
        right = torch.randn(30, 4)
        expected = {
            "cholesky": (lambda: torch.linalg.cholesky_ex(spd), 30**3 / 3 / 2),
            "inverse": (lambda: torch.cholesky_inverse(triangle), 2 * 30**3 / 3 / 2),
            "eigenvectors": (lambda: torch.linalg.eigh(spd), 9 * 30**3 / 2),
            "solve": (lambda: torch.cholesky_solve(right, triangle), 30 * 30 * 4),
            "triangle": (
                lambda: torch.linalg.solve_triangular(triangle, right, upper=False),
                30 * 30 * 4 / 2,
            ),
        }
        for name, (work, count) in expected.items():
            assert count_multiply_adds(work) == int(count), name

    def test_of_a_fop_step_hold_two_more_two_sided_products_than_kfac(self) -> None:
        found = {}
        for name in OURS:
            stepper = METHODS[name].build(TINY.model(), 10)
            for _ in range(3):
                count = count_multiply_adds(lambda: stepper.step(*TINY.data()))  # noqa: B023
            found[name] = count
        products = sum(o * o * i + o * i * i for o, i in ((4, 7), (10, 5)))
        assert found["fop"] - found["kfac"] == 2 * products


class TestProfile:
    def test_charges_nested_phases_to_the_inner_one(self) -> None:
        ticks = iter([0.0, 1.0, 3.0, 10.0])
        clock = profile.PhaseClock(lambda: next(ticks))
        with clock.phase("outer"), clock.phase("inner"):
            pass
        assert clock.seconds == {"outer": 1.0 + 7.0, "inner": 2.0}

    @pytest.mark.parametrize("path", profile.PHASES)
    def test_knows_the_functions_of_the_library(self, path: str) -> None:
        holder, name = profile.resolve(path)
        assert callable(getattr(holder, name))

    def test_says_when_a_function_is_gone(self) -> None:
        with pytest.raises(AttributeError, match="PHASES"):
            profile.resolve("fop.step:Engine.gone")


class TestCell:
    @pytest.mark.parametrize("name", OURS)
    def test_has_steps_of_both_kinds_and_its_own_reference(self, name: str) -> None:
        found = Cell(TINY, METHODS[name], 10, budget=math.inf).run()
        numbers = [number for number, _, _ in found["steps"]]
        assert numbers == list(range(4, 4 + len(numbers)))  # the first three warm up
        assert [number for number, refreshes, _ in found["steps"] if refreshes] == [4, 11, 21]
        assert len(found["reference"]) >= len(numbers) // 3
        assert found["multiply_adds"].keys() == {"refresh", "plain"}
        # Momentum, and the factors with their inverses and the size of the latest batch's.
        factors = sum(o * o + i * i for o, i in ((4, 7), (10, 5)))
        assert found["state_bytes"] == 4 * (4 * 7 + 10 * 5 + 2 * factors + 4)

    def test_of_an_interval_knows_when_fop_refreshes(self) -> None:
        refreshes = METHODS["kfac"].refreshes
        assert refreshes is not None
        for interval in (1, 10):
            settings = Settings(update_every=interval)
            for step in range(1, 40):
                assert refreshes(step, interval) == settings.refresh_due(step)


def test_bytes_of_state_count_each_storage_once() -> None:
    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    shared, weight = torch.zeros(10), torch.zeros(5)
    roots = [{"a": shared, "b": [shared[:5], Holder(torch.zeros(3))]}, (weight,)]
    assert tensor_bytes(roots, without=[weight]) == 4 * 13
