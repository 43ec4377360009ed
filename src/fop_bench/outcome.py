"""What a command leaves for its user once the runs are recorded: tables, pictures, a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement

from fop_bench.records import Run
from fop_bench.report import write_report
from fop_bench.summary import by_workload
from fop_bench.tables import detail_table, paper_table, summarise, to_rich


def show_tables(runs: Sequence[Run], console: Console) -> None:
    """The paper's table of each workload, or where that is too wide one with a line a method."""
    rows = summarise(runs)
    for workload in by_workload(runs):
        table = to_rich(paper_table(rows, workload))
        if Measurement.get(console, console.options, table).maximum > console.width:
            table = to_rich(detail_table(rows, workload))
        console.print(table)


def finish(root: Path, console: Console) -> None:
    """Writes the report and its plots beside the records, and says where everything is."""
    report = write_report(root, root / "report.html")
    for title, paths in (
        ("Plots", report.pictures),
        ("Report", (report.page, report.markdown)),
        ("Records", (root,)),
    ):
        console.print(title, style="bold")
        for path in paths:
            console.print(f"  {path}", soft_wrap=True, highlight=False)
    report.complain()
