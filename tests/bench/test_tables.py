"""Tables say what the records say: misses are infinite, settings are not mixed, text is escaped."""

from __future__ import annotations

import io
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from fop_bench.records import load_runs
from fop_bench.render import Cell, Table, to_html, to_markdown, to_rich
from fop_bench.summary import Row, Spread, by_variant, reference, summarise
from fop_bench.tables import (
    detail_table,
    group_error_table,
    metrics_text,
    paper_table,
    times_text,
    tuning_table,
)
from tests.bench.recorded import write_run

REACHES_AT_3 = [0.5, 0.8, 0.91, 0.95]
REACHES_AT_1 = [0.92, 0.93, 0.94, 0.95]
NEVER = [0.5, 0.6, 0.7, 0.8]


def rows_of(root: Path) -> dict[tuple[str, int], Row]:
    return {(row.method, row.batch_size): row for row in summarise(load_runs(root))}


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in line] for line in table.lines]


def test_mean_and_sample_deviation_over_seeds(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, accuracies=REACHES_AT_3, times=[1, 2, 3, 4])
    write_run(tmp_path, seed=1, accuracies=REACHES_AT_1, times=[2, 4, 6, 8])
    row = rows_of(tmp_path)["sgd", 256]
    assert list(row.epochs.values) == [3, 1]
    assert list(row.seconds.values) == [3, 2]
    assert (row.epochs.mean, row.epochs.std) == pytest.approx((2, math.sqrt(2)))
    assert texts(paper_table([row], "digits-mlp"))[0][1].startswith("2 ± 1.4 / 2.5 ± 0.7 s")


def test_one_miss_makes_the_mean_infinite_and_is_counted(tmp_path: Path) -> None:
    for seed, curve in enumerate((REACHES_AT_3, NEVER, REACHES_AT_1)):
        write_run(tmp_path, seed=seed, accuracies=curve)
    row = rows_of(tmp_path)["sgd", 256]
    assert (row.epochs.mean, row.epochs.median) == (math.inf, 3)
    assert (row.epochs.reached, row.epochs.n) == (2, 3)
    assert math.isnan(row.epochs.std)
    assert texts(paper_table([row], "digits-mlp"))[0][1] == "-- / -- (2/3)"
    detail = texts(detail_table([row], "digits-mlp"))[0]
    assert detail[2:6] == ["2/3", "--", "3", "--"]


def test_all_misses_print_as_in_the_paper(tmp_path: Path) -> None:
    write_run(tmp_path, accuracies=NEVER)
    table = paper_table(summarise(load_runs(tmp_path)), "digits-mlp")
    assert texts(table)[0][1] == "-- / --"
    assert any("did not reach the target" in note for note in table.notes)


def test_diverged_and_unfinished_runs_are_misses_that_are_told(tmp_path: Path) -> None:
    write_run(tmp_path, seed=0, accuracies=REACHES_AT_3)
    write_run(tmp_path, seed=1, accuracies=[0.5, None], status="diverged")
    write_run(tmp_path, seed=2, accuracies=[], status="running")
    row = rows_of(tmp_path)["sgd", 256]
    assert (row.epochs.reached, row.epochs.n) == (1, 3)
    table = detail_table([row], "digits-mlp")
    assert texts(table)[0][2] == "1/3 (1 diverged, 1 unfinished)"
    assert texts(table)[0][7] == "--"
    assert any("Unfinished runs count as misses" in note for note in table.notes)


def test_lower_is_better_metrics(tmp_path: Path) -> None:
    write_run(tmp_path, accuracies=[9.0, 5.0, 3.0], target=5.0, higher_is_better=False)
    row = rows_of(tmp_path)["sgd", 256]
    assert (row.epochs.mean, row.best.mean) == (2, 3.0)


def test_speedup_is_against_sgd_at_the_base_batch(tmp_path: Path) -> None:
    for batch, times in ((64, [9, 9, 9, 9]), (256, [1, 2, 12, 13]), (1024, [1, 2, 4, 5])):
        for method, factor in (("sgd", 1.0), ("fop", 0.5)):
            write_run(
                tmp_path,
                method=method,
                batch_size=batch,
                accuracies=REACHES_AT_3,
                times=[factor * t for t in times],
            )
    rows = rows_of(tmp_path)
    assert rows["sgd", 256].speedup == pytest.approx(1)
    assert rows["fop", 1024].speedup == pytest.approx(12 / 2)
    assert "[×6.00]" in texts(paper_table(list(rows.values()), "digits-mlp"))[2][2]


def test_speedup_follows_the_paper_where_it_names_a_reference(tmp_path: Path) -> None:
    for method, batch in (("sgd", 2048), ("sgd", 4096), ("adamw", 512), ("fop", 4096)):
        write_run(
            tmp_path, workload="cifar10-resnet18", method=method, batch_size=batch,
            accuracies=REACHES_AT_3,
        )  # fmt: skip
    for method in ("sgd", "adamw"):
        write_run(
            tmp_path, workload="imagenet100-t2tvit", method=method, batch_size=512,
            accuracies=REACHES_AT_3,
        )  # fmt: skip
    rows = summarise(load_runs(tmp_path))
    cifar, vit = reference(rows, "cifar10-resnet18"), reference(rows, "imagenet100-t2tvit")
    assert cifar is not None
    assert vit is not None
    assert (cifar.method, cifar.batch_size) == ("sgd", 4096)
    assert vit.method == "adamw"


def test_no_reference_no_speedup(tmp_path: Path) -> None:
    write_run(tmp_path, method="fop", accuracies=REACHES_AT_3)
    rows = summarise(load_runs(tmp_path))
    assert math.isnan(rows[0].speedup)
    assert any("no SGD or AdamW run" in note for note in paper_table(rows, "digits-mlp").notes)


def test_different_settings_are_never_averaged(tmp_path: Path) -> None:
    for damping, curve in ((1e-3, REACHES_AT_3), (1e-4, NEVER)):
        for seed in (0, 1):
            write_run(
                tmp_path / str(damping), method="fop", seed=seed, accuracies=curve,
                options={"damping": damping},
            )  # fmt: skip
    rows = summarise(load_runs(tmp_path))
    assert [row.label for row in rows] == ["FOP (damping 0.0001)", "FOP (damping 0.001)"]
    assert [row.epochs.reached for row in rows] == [0, 2]


def test_a_setting_that_only_some_runs_name_still_tells_them_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", method="fop", accuracies=NEVER)
    write_run(tmp_path / "b", method="fop", accuracies=NEVER, options={"betas": [0.9, 0.99]})
    (variants,) = by_variant(load_runs(tmp_path)).values()
    assert set(variants) == {(("betas", "default"),), (("betas", (0.9, 0.99)),)}


def test_published_figures_stand_beside_ours_and_are_marked(tmp_path: Path) -> None:
    write_run(
        tmp_path, workload="cifar10-resnet18", method="fop", batch_size=4096,
        accuracies=REACHES_AT_3,
    )  # fmt: skip
    rows = summarise(load_runs(tmp_path))
    table = paper_table(rows, "cifar10-resnet18")
    line = next(line for line in table.lines if line[0].text == "4,096")
    cell = line[table.columns.index("FOP")]
    assert cell.text.startswith("3 / 6.0 s")
    assert cell.published == "22 / 181.9 s [×2.52]"
    detail = detail_table(rows, "cifar10-resnet18")
    assert detail.marked == frozenset(range(1, 25))
    assert detail.lines[1][-1].text.startswith("published: Lu and Armour 2025, table 1")
    assert r"*published 22 / 181.9 s \[×2.52\]*" in to_markdown(table)


def test_tuning_table_names_the_best_setting(tmp_path: Path) -> None:
    for trial, curve in enumerate((NEVER, REACHES_AT_1, REACHES_AT_3)):
        write_run(
            tmp_path, method="kfac", split="validation", accuracies=curve,
            options={"damping": 10.0**-trial}, folder=tmp_path / f"trial{trial}",
        )  # fmt: skip
    line = texts(tuning_table(load_runs(tmp_path), "digits-mlp"))[0]
    assert line == ["KFAC", "256", "3 × 1", "1/1", "95.00 %", "damping 0.1"]


def test_errors_by_class_group_come_from_the_last_epoch(tmp_path: Path) -> None:
    path = write_run(tmp_path, workload="cifar10-lt-100", batch_size=128, accuracies=[0.5])
    runs = load_runs(tmp_path)
    assert group_error_table(runs, "cifar10-lt-100") is None
    groups = '"test_error": 0.3, "test_error_head": 0.1, "test_error_middle": 0.25'
    line = f'{{"epoch": 2, "step": 99, "train_time": 4.0, {groups}, "test_error_tail": 0.6}}\n'
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(line)
    table = group_error_table(load_runs(tmp_path), "cifar10-lt-100")
    assert table is not None
    assert texts(table)[0] == ["SGD", "128", "30.00 %", "10.00 %", "25.00 %", "60.00 %"]


def test_spread_texts_use_one_unit() -> None:
    assert times_text(Spread((90 * 60.0, 100 * 60.0))) == "95.0 ± 7.1 min"
    assert times_text(Spread((0.010, 0.020))) == "15.0 ± 7.1 ms"
    assert metrics_text(Spread((0.90, 0.92)), "accuracy") == "91.00 ± 1.41 %"
    assert metrics_text(Spread((12.0, 14.0)), "perplexity") == "13 ± 1.414"
    assert metrics_text(Spread((0.9, -math.inf)), "accuracy") == "--"


NASTY = Table(
    title="<b>t</b>",
    columns=("a|b", "<i>"),
    lines=((Cell("<script>x</script>"), Cell("1 | 2\n3", math.inf, "p<q")),),
    notes=("n & m",),
)


def test_html_escapes_and_carries_sort_keys() -> None:
    class Tags(HTMLParser):
        seen: set[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.seen.add(tag)

    page = str(to_html(NASTY))
    parser = Tags()
    parser.seen = set()
    parser.feed(page)
    assert not parser.seen & {"script", "b", "i"}
    assert "&lt;script&gt;x&lt;/script&gt;" in page
    assert 'data-sort="1e999"' in page


def test_markdown_keeps_its_columns_whatever_a_cell_holds() -> None:
    lines = [line for line in to_markdown(NASTY).splitlines() if line.startswith("|")]
    assert len(lines) == 3
    assert {line.replace("\\|", "").count("|") for line in lines} == {3}
    assert "<script>" not in to_markdown(NASTY)


def test_rich_prints_text_and_not_markup() -> None:
    table = Table("t", ("[red]a", "b"), ((Cell("[bold]x"), Cell("1", 1.0, "2")),))
    stream = io.StringIO()
    Console(width=80, file=stream).print(to_rich(table))
    shown = stream.getvalue()
    assert "[red]a" in shown
    assert "[bold]x" in shown
    assert "published 2" in shown


def test_more_methods_than_batch_sizes_turn_the_table(tmp_path: Path) -> None:
    for method in ("fop", "sgd"):
        write_run(tmp_path, method=method, accuracies=REACHES_AT_3)
    table = paper_table(summarise(load_runs(tmp_path)), "digits-mlp")
    assert table.columns == ("method", "batch 256")
    assert [line[0] for line in texts(table)] == ["SGD", "FOP"]
