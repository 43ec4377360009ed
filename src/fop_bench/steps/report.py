"""A record as the generated part of docs/performance.md, with its plots."""

from __future__ import annotations

from pathlib import Path

from fop_bench.files import write_text
from fop_bench.plots import steps as plot
from fop_bench.render import to_markdown
from fop_bench.steps import tables

BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
COSTS, GROWTH = "images/performance-costs.png", "images/performance-growth.png"


def environment(record: tables.Record) -> str:
    machine, versions = record["machine"], record["versions"]
    measured = len(record["cells"]) + len(record["profiles"])
    parts = [
        record["date"],
        f"{machine['processor']}, {machine['system']}, 1 of {machine['cores']} cores, 1 thread",
        f"Python {versions['python']}, torch {versions['torch']}",
        *(f"{n} {v}" for n, v in versions.items() if n not in ("python", "torch", "numpy", "fop")),
        f"library source {record['source']}",
        f"`{record['mode']}` run, {measured} of {record['planned']} measurements",
    ]
    return "; ".join(parts) + "."


def markdown(record: tables.Record) -> str:
    """Everything measured, as sections."""
    body = "\n".join(
        f"### {heading}\n\n" + "\n".join(map(to_markdown, found))
        for heading, found in tables.sections(record).items()
    )
    return f"{environment(record)}\n\n{body.rstrip()}"


def between_markers(document: str, text: str) -> str:
    """The document with what stands between its markers replaced."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected a line {BEGIN} and after it a line {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def write_docs(record: tables.Record, docs: Path) -> None:
    plot.plot_costs(record, docs / COSTS)
    text = markdown(record)
    pictures = [f"![Cost of a step by method and workload]({COSTS})"]
    if tables.growth(record):
        plot.plot_growth(record, docs / GROWTH)
        pictures.append(f"![How the cost of a step grows]({GROWTH})")
    path = docs / "performance.md"
    document = path.read_text(encoding="utf-8")
    write_text(path, between_markers(document, "\n\n".join([text, *pictures])))
