"""The report is one page made from records alone, and a browser really draws it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fop_bench.landscape import Landscape, Step, write_landscape
from fop_bench.memory import Measurement, write_measurements
from fop_bench.records import RecordError, load_runs
from fop_bench.report import write_report
from fop_bench.sections import collect, warnings
from tests.bench.recorded import write_comparison, write_run, write_sweep

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: install Debian's package chromium"
)
# Runs in the page after its own script: what is drawn, and what a click on a column's head does.
PROBE = """
<script>
window.addEventListener("load", () => {
  const column = (table, index) =>
    Array.from(table.tBodies[0].rows, (row) => row.cells[index].textContent);
  const table = Array.from(document.querySelectorAll("table"))
    .find((t) => t.caption.textContent.includes("all results"));
  const head = table.tHead.rows[0].cells[3].querySelector("button");
  const before = column(table, 3);
  head.click();
  const ascending = column(table, 3);
  head.click();
  const found = {
    images: Array.from(document.images, (i) =>
      [i.alt, i.naturalWidth, i.getBoundingClientRect().width]),
    tables: Array.from(document.querySelectorAll("table"), (t) =>
      [t.caption.textContent, t.tBodies[0].rows.length, t.getBoundingClientRect().height]),
    before, ascending, descending: column(table, 3),
    sorted: table.tHead.rows[0].cells[3].getAttribute("aria-sort"),
    runs: document.querySelectorAll("details.run").length,
    injected: document.querySelectorAll("#injected").length,
  };
  document.body.setAttribute("data-found", JSON.stringify(found));
});
</script>
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison, a sweep, tuning trials, memory and a landscape below one directory."""
    root = tmp_path_factory.mktemp("records")
    write_comparison(root / "compare", batches=(256, 4096), seeds=(0, 1))
    write_sweep(root / "damping", "damping", (1e-4, 1e-3))
    for trial in (1, 2):
        write_run(
            root, method="fop", split="validation", accuracies=[0.5, 0.9],
            options={"damping": 0.1**trial},
            folder=root / "tune" / "digits-mlp" / "fop" / "b256" / f"trial{trial:02d}" / "s0",
        )  # fmt: skip
    write_measurements(
        [Measurement("digits-mlp", m, 256, "cpu", 1e7) for m in ("sgd", "fop")],
        root / "memory" / "memory.json",
    )
    places = (-1.0, 0.0, 1.0)
    bowl = tuple(tuple(x * x + y * y for x in places) for y in places)
    steps = (Step("sgd", 0.1, 0.0, 0.9, 0.1), Step("fop", 0.1, 0.3, 0.8, 0.2))
    surface = Landscape("digits-mlp", 64, 0, "random", places, places, bowl, 1.0, steps)
    write_landscape(surface, root / "landscape" / "landscape.json")
    return root


@pytest.fixture(scope="module")
def report(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(records, tmp_path_factory.mktemp("out") / "report.html").page


def test_sections_follow_the_records(records: Path) -> None:
    sections = collect(records)
    assert [section.heading for section in sections] == [
        "digits-mlp (compare)",
        "digits-mlp (damping)",
        "digits-mlp: tuning (tune)",
        "memory (memory)",
        "digits-mlp: loss landscape (landscape)",
    ]
    comparison, sweep, tuning = sections[:3]
    assert [p.name for p in comparison.pictures] == [
        f"digits-mlp-compare-{kind}"
        for kind in ("epochs", "time", "target-epochs", "target-seconds")
    ]
    assert [p.name for p in sweep.pictures] == ["digits-mlp-damping-damping"]
    assert len(comparison.runs) == 20
    assert tuning.tables[0].title == "digits-mlp: tuning on the validation split"


def test_page_holds_everything_it_shows(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    assert re.findall(r'src="(?!data:image/png;base64,)', page) == []
    assert not re.search(r"<link|@import|url\(|<iframe|<script src", page)
    assert page.count("<img ") == 8
    for text in ("base_batch", "torch", "2.13.0", "Linux x86_64"):
        assert text in page


def test_markdown_has_the_same_tables_and_finds_its_pictures(report: Path) -> None:
    text = report.with_suffix(".md").read_text(encoding="utf-8")
    assert r"**digits-mlp: epochs / time to target \[speed-up\]**" in text
    links = re.findall(r"!\[[^]]*]\(<([^>]+)>\)", text)
    assert len(links) == 8
    for link in links:
        assert (report.parent / link).read_bytes().startswith(b"\x89PNG")


def test_report_is_a_pure_function_of_the_records(
    records: Path, report: Path, tmp_path: Path
) -> None:
    before = sorted((p, p.stat().st_mtime_ns) for p in records.rglob("*"))
    again = write_report(records, tmp_path / "report.html").page
    assert again.read_bytes() == report.read_bytes()
    assert sorted((p, p.stat().st_mtime_ns) for p in records.rglob("*")) == before
    assert str(records) not in again.read_text(encoding="utf-8")


def test_report_may_lie_among_the_records(tmp_path: Path) -> None:
    write_run(tmp_path, accuracies=[0.5, 0.95])
    first = write_report(tmp_path, tmp_path / "report.html").page.read_bytes()
    assert write_report(tmp_path, tmp_path / "report.html").page.read_bytes() == first
    assert not [p for p in tmp_path.rglob("*") if p.suffix == ".tmp"]


def test_a_failed_report_leaves_the_old_one(tmp_path: Path) -> None:
    run = write_run(tmp_path, accuracies=[0.5, 0.95])
    old = write_report(tmp_path, tmp_path / "report.html").page.read_bytes()
    (run / "meta.json").write_text("{", encoding="utf-8")
    with pytest.raises(RecordError, match=r"meta\.json"):
        write_report(tmp_path, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == old


def test_errors_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="expected recorded runs"):
        write_report(tmp_path, tmp_path / "report.html")
    with pytest.raises(ValueError, match=r"ending in \.html"):
        write_report(tmp_path, tmp_path / "report.pdf")


def test_readers_are_warned(tmp_path: Path) -> None:
    write_run(tmp_path, method="fop", accuracies=[0.5], status="diverged")
    write_run(tmp_path, method="kfac", accuracies=[0.5], machine={"device": "cuda"})
    found = " ".join(warnings(load_runs(tmp_path)))
    assert "FOP without its control" in found
    assert "2 different machines" in found
    assert "1 of 2 runs diverged" in found
    write_run(tmp_path, method="kfac-2x", accuracies=[0.5])
    assert "without its control" not in " ".join(warnings(load_runs(tmp_path)))


def browse(page: Path, folder: Path, *more: str) -> str:
    """What Chromium prints of a page; a fresh profile each time."""
    assert CHROMIUM is not None
    profile = folder / "profile"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *more, page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shutil.rmtree(profile, ignore_errors=True)
    return done.stdout


def probe(report: Path, folder: Path) -> dict[str, Any]:
    """The page with the probe added, and what the probe found."""
    page = folder / "probed.html"
    text = report.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    dom = browse(page, folder, "--virtual-time-budget=10000", "--dump-dom")
    match = re.search(r'data-found="([^"]*)"', dom)
    assert match, "the page's own script or the probe failed"
    found: dict[str, Any] = json.loads(html.unescape(match.group(1)))
    return found


@needs_chromium
def test_browser_draws_plots_and_tables_and_sorts(report: Path, tmp_path: Path) -> None:
    found = probe(report, tmp_path)
    assert len(found["images"]) == 8
    for alt, natural, shown in found["images"]:
        assert natural > 800, alt
        assert shown > 300, alt
    assert all(rows > 0 and height > 40 for _, rows, height in found["tables"])
    assert len(found["tables"]) == 5
    assert found["runs"] == 20 + 24 + 2

    def epochs(texts: list[str]) -> list[float]:
        return [float("inf") if t == "--" else float(t.split(" ±")[0]) for t in texts]

    assert epochs(found["before"]) != sorted(epochs(found["before"]))
    assert epochs(found["ascending"]) == sorted(epochs(found["before"]))
    assert epochs(found["descending"]) == sorted(epochs(found["before"]), reverse=True)
    assert found["sorted"] == "descending"


@needs_chromium
def test_screenshot_shows_the_plots(report: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    browse(report, tmp_path, "--hide-scrollbars", "--window-size=1200,2400", f"--screenshot={shot}")
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape == (2400, 1200, 3)
    for colour in ((0xD5, 0x5E, 0x00), (0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)):
        near = np.abs(pixels - np.array(colour)).sum(axis=2) < 20
        assert near.sum() > 300  # the lines of FOP, KFAC and AdamW


@needs_chromium
def test_nothing_in_a_record_becomes_part_of_the_page(tmp_path: Path) -> None:
    nasty = '$"><img id=injected src=x onerror="document.title=1"><script id=injected></script>'
    root = tmp_path / "records"
    write_run(
        root, workload=nasty, method=nasty, accuracies=[0.5, 0.95], folder=root / "run",
        versions={nasty: nasty}, options={"note": "</pre><b id=injected>"},
    )  # fmt: skip
    report = write_report(root, tmp_path / "report.html").page
    assert "<script id=injected>" not in report.with_suffix(".md").read_text(encoding="utf-8")
    found = probe(report, tmp_path)
    assert found["injected"] == 0
    assert found["images"]
