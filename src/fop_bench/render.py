"""A table of text, and three ways to print it: in the terminal, as Markdown, as HTML.

Published figures are marked in all three: in a line of their own or below ours in a cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

PUBLISHED = "published"
MARKDOWN = re.compile(r"([\\`*_\[\]|~#$])")  # what means something in a line of Markdown


@dataclass(frozen=True)
class Cell:
    """What is printed, what to sort by if not the text, and a published figure below it."""

    text: str
    sort: float | None = None
    published: str = ""


@dataclass(frozen=True)
class Table:
    """Column heads, lines of cells, notes under them; ``marked`` lines are published figures."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    marked: frozenset[int] = field(default_factory=frozenset)


def to_rich(table: Table) -> RichTable:
    """For the terminal."""
    rich = RichTable(
        title=Text(table.title),
        caption=Text("\n".join(table.notes)),
        box=box.SIMPLE_HEAD,
        caption_justify="left",
    )
    for index, column in enumerate(table.columns):
        rich.add_column(Text(column), justify="left" if index == 0 else "right")
    for number, line in enumerate(table.lines):
        style = "dim italic" if number in table.marked else None
        rich.add_row(*(_rich_cell(cell) for cell in line), style=style)
    return rich


def _rich_cell(cell: Cell) -> Text:
    text = Text(cell.text)
    if cell.published:
        gap = "\n" if cell.text else ""
        text.append(f"{gap}{PUBLISHED} {cell.published}", style="dim italic")
    return text


def to_markdown(table: Table) -> str:
    """For READMEs and issues; published figures in italics."""
    head = [markdown_text(column) for column in table.columns]
    aligned = ["---", *["---:"] * (len(head) - 1)]
    lines = [
        [_markdown_cell(cell, number in table.marked) for cell in line]
        for number, line in enumerate(table.lines)
    ]
    body = markdown_rows([head, aligned, *lines])
    notes = "".join(f"\n\n{markdown_text(note)}" for note in table.notes)
    return f"**{markdown_text(table.title)}**\n\n{body}{notes}\n"


def markdown_rows(rows: Iterable[Sequence[str]]) -> str:
    """Lines of a Markdown table, of text that is Markdown already."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _markdown_cell(cell: Cell, marked: bool) -> str:
    text = markdown_text(cell.text)
    if marked:
        return f"*{text}*" if text else ""
    below = f"*{PUBLISHED} {markdown_text(cell.published)}*" if cell.published else ""
    return "<br>".join(part for part in (text, below) if part)


def markdown_text(text: str) -> str:
    """The one way for text into Markdown: it brings no HTML, link, emphasis or column of its own,
    and stays on its line.
    """
    lines = (" ".join(line.split()) for line in text.splitlines())
    escaped = (str(escape(MARKDOWN.sub(r"\\\1", line))) for line in lines if line)
    return "<br>".join(escaped).replace("&#39;", "'")  # which is harmless outside of attributes


def to_html(table: Table) -> Markup:
    """For the report; its column heads are buttons that the page's script makes sort the lines."""
    head = Markup().join(
        Markup('<th scope="col"><button type="button">{}</button></th>').format(column)
        for column in table.columns
    )
    body = Markup("\n").join(
        Markup("<tr{}>{}</tr>").format(
            Markup(' class="published"') if number in table.marked else "",
            Markup().join(_html_cell(cell) for cell in line),
        )
        for number, line in enumerate(table.lines)
    )
    notes = Markup().join(Markup('<p class="note">{}</p>').format(note) for note in table.notes)
    return Markup(
        '<div class="scroll"><table class="sortable"><caption>{}</caption>'
        "<thead><tr>{}</tr></thead><tbody>\n{}\n</tbody></table></div>{}"
    ).format(table.title, head, body, notes)


def _html_cell(cell: Cell) -> Markup:
    below: Markup | str = ""
    if cell.published:
        below = Markup('<span class="published">{} {}</span>').format(PUBLISHED, cell.published)
    if cell.sort is None:
        return Markup('<td class="text">{}{}</td>').format(cell.text, below)
    # JavaScript has no literal for infinity in text, but 1e999 reads as one.
    key = f"{math.copysign(1, cell.sort):.0f}e999" if math.isinf(cell.sort) else repr(cell.sort)
    return Markup('<td data-sort="{}">{}{}</td>').format(key, cell.text, below)
