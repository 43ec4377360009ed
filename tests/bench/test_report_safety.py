"""Nothing in a record decides where a report writes, or what a reader's browser does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fop_bench.records import load_runs
from fop_bench.render import markdown_text
from fop_bench.report import write_report
from fop_bench.sections import file_name
from tests.bench.commands import run
from tests.bench.recorded import write_run

NASTY = (
    "x/../../../escaped",
    "<img src=x onerror=alert(1)>",
    "[click](javascript:alert(1))",
    "![a](javascript:b)",
    "<javascript:alert(1)>",
    "a | b\n# heading\n[r]: javascript:c",
    "`code` *bold* __strong__ ~~gone~~ $x$ \\",
)
# What Markdown would make something of, if no backslash stands before it.
BARE = re.compile(r"(?<!\\)(?:\\\\)*[`\[\]~$|]")


@pytest.mark.parametrize("key", NASTY)
def test_an_option_key_stays_inside_folder_and_page(tmp_path: Path, key: str) -> None:
    root, out = tmp_path / "a" / "b" / "runs", tmp_path / "a" / "b" / "out" / "report.html"
    for value in (1, 2):
        write_run(
            root, method="fop", seed=0, accuracies=[0.5, 0.9], options={key: value},
            folder=root / f"point={value}" / "digits-mlp" / "fop" / "b256" / "s0",
        )  # fmt: skip
    written = write_report(root, out)
    outside = {path for path in tmp_path.rglob("*") if path.is_file()} - set(root.rglob("*"))
    assert outside == {out, out.with_suffix(".md"), *written.pictures}
    assert {path.parent for path in written.pictures} == {out.parent / "report-plots"}
    text = written.markdown.read_text(encoding="utf-8")
    body = text.partition("-->")[2].replace("<br>", "")
    pictures = re.findall(r"!\[((?:[^\]\\]|\\.)*)\]\(<([^>]*)>\)", body)
    assert [link for _, link in pictures] == [
        path.relative_to(out.parent).as_posix() for path in written.pictures
    ]
    rest = re.sub(r"!\[(?:[^\]\\]|\\.)*\]\(<[^>]*>\)", "", body)
    assert "<" not in rest
    assert not re.search(r"(?<!\\)\]\(", rest)
    assert not re.search(r"^\[", rest, re.MULTILINE)
    page = out.read_text(encoding="utf-8")
    assert "<img src=x" not in page
    assert not re.search(r"""(?:href|src)\s*=\s*["']?\s*javascript""", page)


@pytest.mark.parametrize("text", NASTY)
def test_text_in_markdown_is_only_text(text: str) -> None:
    shown = markdown_text(text)
    assert not BARE.search(shown)
    assert "<" not in shown.replace("<br>", "")
    assert "\n" not in shown
    unescaped = re.sub(r"\\(.)", r"\1", shown.replace("<br>", " ").replace("&lt;", "<"))
    assert unescaped.replace("&gt;", ">").split() == text.split()


def test_names_of_files_are_safe_and_distinct() -> None:
    taken: set[str] = set()
    texts = ["a/b", "a-b", "A-b", "../../etc", "", "...", "x" * 300, "x" * 301, "con/\0\n"]
    names = [file_name(text, taken) for text in texts]
    assert len({name.lower() for name in names}) == len(names)
    assert names[:3] == ["a-b", "a-b-2", "A-b-3"]
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,110}", name)


def test_pictures_of_like_names_do_not_replace_each_other(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for workload in ("a/b", "a-b"):
        folder = root / workload.replace("/", "_")
        write_run(root, workload=workload, accuracies=[0.5, 0.9], folder=folder)
    written = write_report(root, tmp_path / "report.html")
    assert len(written.pictures) == len({path.name for path in written.pictures}) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written.pictures)


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_a_file_of_the_users_own_is_not_replaced(tmp_path: Path, name: str) -> None:
    root, out = tmp_path / "runs", tmp_path / "report.html"
    write_run(root, accuracies=[0.5, 0.9])
    (tmp_path / name).write_text("# fop-bench: my notes\n")
    refused = run("report", root, "--out", out)
    assert refused.exit_code == 1
    assert f"{name} exists and was not written by fop-bench report" in refused.output.replace(
        "\n", " "
    )
    assert [path.name for path in tmp_path.iterdir() if path != root] == [name]
    assert (tmp_path / name).read_text() == "# fop-bench: my notes\n"
    assert run("report", root, "--out", out, "--force").exit_code == 0
    assert "my notes" not in (tmp_path / name).read_text()
    assert run("report", root, "--out", out).exit_code == 0  # one of its own


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path) -> None:
    root = tmp_path / "[red]runs[/bold]"
    write_run(root, accuracies=[0.5, 0.9])
    result = run("report", root)
    assert result.exit_code == 0, result.output
    assert "[red]runs[/bold]" in result.output.replace("\n", "")
    assert len(load_runs(root)) == 1
