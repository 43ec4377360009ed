"""Where each data set lies, in which layouts, and how it is had.

Looked for in `--data-dir`, then $FOP_DATA, then the cache (~/.cache/fop, where downloads go), then
the folders in which a system package puts it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fop_bench.data.download import Download, fetch
from fop_bench.data.errors import DataError


@dataclass(frozen=True)
class Layout:
    """Files that make a data set, in a folder relative to a data folder; each may end in .gz."""

    folder: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """One data set: the layouts it is known in and the way to get it."""

    name: str
    layouts: tuple[Layout, ...]
    manual: str
    downloads: tuple[Download, ...] = ()
    system_folders: tuple[Path, ...] = ()

    @property
    def how_to_get(self) -> str:
        if not self.downloads:
            return self.manual
        hosts = ", ".join(dict.fromkeys(d.url.rsplit("/", 1)[0] for d in self.downloads))
        return f"Downloaded on first use from {hosts} into {cache_folder()}. {self.manual}"


@dataclass(frozen=True)
class Location:
    """Where a data set was found, and which of its files are not there."""

    folder: Path
    files: tuple[Path, ...]
    missing: tuple[Path, ...]


@dataclass(frozen=True)
class DataStatus:
    """Whether a data set is complete on this machine, where, and how to get it."""

    found: bool
    where: str
    how_to_get: str


def cache_folder() -> Path:
    """The folder downloads go to: $XDG_CACHE_HOME/fop or ~/.cache/fop."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fop"


def search_folders(source: Source, data_dir: Path | None) -> list[Path]:
    """Folders to look into, first one first."""
    configured = os.environ.get("FOP_DATA")
    folders = [data_dir, Path(configured) if configured else None, cache_folder()]
    return [f.expanduser() for f in folders if f is not None] + list(source.system_folders)


def locate(source: Source, data_dir: Path | None) -> Location | None:
    """The first complete copy, else the first incomplete one, else None."""
    candidates = [
        _look(folder / layout.folder, layout.files)
        for folder in search_folders(source, data_dir)
        for layout in source.layouts
    ]
    complete = (c for c in candidates if not c.missing)
    started = (c for c in candidates if len(c.missing) < len(c.files))
    return next(complete, None) or next(started, None)


def obtain(source: Source, data_dir: Path | None) -> tuple[Path, ...]:
    """The data set's files, downloaded if there is no copy; DataError names what is missing."""
    if data_dir is not None and not data_dir.expanduser().is_dir():
        raise DataError(data_dir, "is not a folder", "Pass an existing folder as --data-dir")
    location = locate(source, data_dir)
    if location is None and source.downloads:
        for download in source.downloads:
            if not (cache_folder() / download.path).exists():
                fetch(download, cache_folder())
        location = locate(source, None)
    if location is None:
        looked = ", ".join(str(folder) for folder in search_folders(source, data_dir))
        wanted = source.layouts[0]
        raise DataError(
            Path(wanted.folder) / wanted.files[0],
            f"{source.name} was not found in {looked}",
            source.how_to_get,
        )
    if location.missing:
        raise DataError(
            location.missing[0],
            f"missing; {len(location.files) - len(location.missing)} of the "
            f"{len(location.files)} parts of {source.name} are in {location.folder}",
            f"Add it, or remove the incomplete copy. {source.how_to_get}",
        )
    return location.files


def status(source: Source, data_dir: Path | None) -> DataStatus:
    """What `fop-bench list` shows: nothing is downloaded and nothing is read."""
    location = locate(source, data_dir)
    if location is None:
        return DataStatus(False, "", source.how_to_get)
    if location.missing:
        where = f"{location.folder} (incomplete: {location.missing[0].name} is missing)"
        return DataStatus(False, where, source.how_to_get)
    return DataStatus(True, str(location.folder), source.how_to_get)


def _look(folder: Path, names: tuple[str, ...]) -> Location:
    files, missing = [], []
    for name in names:
        compressed = folder / f"{name}.gz"
        path = compressed if compressed.exists() and not (folder / name).exists() else folder / name
        files.append(path)
        if not path.exists():
            missing.append(path)
    return Location(folder, tuple(files), tuple(missing))
