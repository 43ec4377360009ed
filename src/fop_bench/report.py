"""A report of all that is recorded below a directory: one self-contained HTML page, and Markdown.

It is a pure function of the records: the same records give the same bytes, nothing is run again,
and no date or path of the machine gets in. ``sections`` decides what is shown, this file how it
is written.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import escape

from fop_bench.records import atomic_open, write_text
from fop_bench.render import to_html, to_markdown
from fop_bench.sections import Picture, Section, collect

TEMPLATES = Path(__file__).with_name("templates")


def write_report(root: Path, out: Path) -> Path:
    """Write the page to ``out``, Markdown beside it (``.md``, its pictures in ``<name>-plots``)."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"out: expected a name ending in .html, found {out.name!r}")
    sections = collect(root)
    title = f"fop-bench: {root.resolve().name}"
    write_text(out, html(title, sections))
    plots = out.with_name(f"{out.stem}-plots")
    for picture in _pictures(sections):
        with atomic_open(plots / f"{picture.name}.png", "wb") as stream:
            stream.write(picture.png)
    write_text(out.with_suffix(".md"), markdown(title, sections, plots.name))
    return out


def html(title: str, sections: list[Section]) -> str:
    """The page, with everything it shows inside it; whatever comes from a record is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.jinja")
    return template.render(title=title, lead=_lead(sections), sections=sections, to_html=to_html)


def markdown(title: str, sections: list[Section], plots: str) -> str:
    """The same tables, with links to the pictures in the folder ``plots``."""
    parts = [f"# {_plain(title)}\n", f"{_lead(sections)}\n"]
    for section in sections:
        parts.append(f"## {_plain(section.heading)}\n")
        parts += [f"> {_plain(warning)}\n" for warning in section.warnings]
        parts += [to_markdown(table) for table in section.tables]
        parts += [f"![{_plain(p.caption)}](<{plots}/{p.name}.png>)\n" for p in section.pictures]
        parts += [to_markdown(table) for table in section.details]
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Text from a record on one line and without HTML of its own."""
    return str(escape(" ".join(text.split())))


def _pictures(sections: list[Section]) -> list[Picture]:
    return [picture for section in sections for picture in section.pictures]


def _lead(sections: list[Section]) -> str:
    runs = sum(len(section.runs) for section in sections)
    return (
        f"From {runs} recorded runs. Times are those of training alone, without evaluation and "
        "set-up. Figures marked as published come from their authors and were not measured here."
    )
