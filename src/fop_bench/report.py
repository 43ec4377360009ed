"""A report of all that is recorded below a directory: one self-contained HTML page, and Markdown.

It is a pure function of the records: the same records give the same bytes, nothing is run again,
and no date or path of the machine gets in. ``sections`` decides what is shown, this file how it
is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fop_bench.config import ConfigError
from fop_bench.errors import RecordError, reason
from fop_bench.files import atomic_open, write_text
from fop_bench.render import markdown_text, to_html, to_markdown
from fop_bench.sections import Picture, Section, collect

TEMPLATES = Path(__file__).with_name("templates")


# In the first lines of both files: what has no such line was not written by a report.
MARK = "<!-- written by fop-bench report -->"


@dataclass(frozen=True)
class Written:
    """The files of a report; `damaged` says which records are not in it, and why."""

    page: Path
    markdown: Path
    pictures: tuple[Path, ...]
    damaged: tuple[str, ...]

    def complain(self) -> None:
        """Raises where records were left out, once everything else is done."""
        if self.damaged:
            listed = "".join(f"\n  {line}" for line in self.damaged)
            raise RecordError(f"{len(self.damaged)} not in {self.page}, since damaged:{listed}")


def write_report(root: Path, out: Path, *, force: bool = False) -> Written:
    """Write the page to ``out``, Markdown beside it (``.md``, its pictures in ``<name>-plots``).

    A file that an earlier report wrote is replaced, any other one only by ``force``.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"out: expected a name ending in .html, found {out.name!r}")
    page, text = out, out.with_suffix(".md")
    for path in (page, text):
        if not force and path.exists() and not _is_report(path):
            raise ConfigError(
                f"{path} exists and was not written by fop-bench report: choose another name with "
                "--out, move it away, or replace it with --force"
            )
    sections = collect(root)
    title = f"fop-bench: {root.resolve().name}"
    write_text(page, html(title, sections))
    plots = out.with_name(f"{out.stem}-plots")
    pictures = {plots / f"{picture.name}.png": picture for picture in _pictures(sections)}
    for path, picture in pictures.items():
        with atomic_open(path, "wb") as stream:
            stream.write(picture.png)
    write_text(text, markdown(title, sections, plots.name))
    damaged = tuple(line for section in sections for line in section.damaged)
    return Written(page, text, tuple(pictures), damaged)


def _is_report(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return MARK.encode() in stream.read(200)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be replaced ({reason(error)}): choose another name"
        ) from error


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
    return template.render(
        mark=Markup(MARK), title=title, lead=_lead(sections), sections=sections, to_html=to_html
    )


def markdown(title: str, sections: list[Section], plots: str) -> str:
    """The same tables, with links to the pictures in the folder ``plots``."""
    parts = [f"{MARK}\n", f"# {markdown_text(title)}\n", f"{_lead(sections)}\n"]
    for section in sections:
        parts.append(f"## {markdown_text(section.heading)}\n")
        parts += [f"> {markdown_text(line)}\n" for line in (*section.warnings, *section.damaged)]
        parts += [to_markdown(table) for table in section.tables]
        parts += [
            f"![{markdown_text(p.caption)}](<{quote(plots)}/{p.name}.png>)\n"
            for p in section.pictures
        ]
        parts += [to_markdown(table) for table in section.details]
    return "\n".join(parts)


def _pictures(sections: list[Section]) -> list[Picture]:
    return [picture for section in sections for picture in section.pictures]


def _lead(sections: list[Section]) -> str:
    runs = sum(len(section.runs) for section in sections)
    return (
        f"From {runs} recorded runs. Times are those of training alone, without evaluation and "
        "set-up. Figures marked as published come from their authors and were not measured here."
    )
