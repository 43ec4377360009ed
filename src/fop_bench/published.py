"""Figures that others have published, kept as data so that they can stand beside our own.

Every ``published/<workload>.toml`` holds one workload's numbers, and ``sources.toml`` beside
them says where they are from. A target that was not reached is ``inf``, as in our own records, and
times are in seconds. Nothing here is measured by us: whoever shows a figure marks it as published.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).with_name("published")
SECONDS = {"s": 1.0, "min": 60.0}


@dataclass(frozen=True)
class Source:
    """A publication."""

    key: str
    title: str
    authors: str
    year: int
    url: str

    @property
    def citation(self) -> str:
        return f"{self.authors} ({self.year}), {self.title}, {self.url}"

    @property
    def short(self) -> str:
        """Author and year, as in "Osawa et al. 2020"."""
        first, *others = self.authors.replace(" and ", ", ").split(", ")
        return f"{first} {'and ' + others[0] if len(others) == 1 else 'et al.'} {self.year}"


@dataclass(frozen=True)
class Result:
    """One cell of a published table: what a method reached at a batch size.

    ``epochs`` and ``seconds`` are ``inf`` where the target was not reached, None if not printed;
    ``best`` is a fraction (0.9 is 90 % accuracy); ``speedup`` is the factor as printed.
    """

    method: str
    batch_size: int
    source: Source
    where: str
    label: str
    gpus: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    speedup: float | None = None
    best: float | None = None

    @property
    def reached(self) -> bool:
        return self.epochs is not None and math.isfinite(self.epochs)


@dataclass(frozen=True)
class Memory:
    """Largest memory of one device in GB (1e9 bytes), as published."""

    method: str
    batch_size: int
    gigabytes: float
    gpus: int
    source: Source
    where: str


@dataclass(frozen=True)
class EpochTime:
    """Seconds of an epoch on so many devices, from a published time and number of epochs.

    ``efficiency`` is that of one device's time over the devices' time together, of one method.
    """

    method: str
    batch_size: int
    gpus: int
    seconds: float
    efficiency: float
    source: Source
    where: str


@dataclass(frozen=True)
class Reference:
    """The run against which the published speed-ups are counted."""

    method: str
    batch_size: int


@dataclass(frozen=True)
class Published:
    """All published figures of one workload."""

    workload: str
    metric: str
    target: float | None
    reference: Reference | None
    results: tuple[Result, ...]
    memory: tuple[Memory, ...]

    def find(self, method: str, batch_size: int) -> Result | None:
        """The figure for a method at a batch size, if one was published."""
        for result in self.results:
            if (result.method, result.batch_size) == (method, batch_size):
                return result
        return None


def workloads() -> tuple[str, ...]:
    """Names of the workloads for which figures were published."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.toml") if p.stem != "sources"))


def for_workload(name: str) -> Published | None:
    """Published figures of a workload; None where there are none, as for the laptop-scale ones."""
    return _load(FOLDER / f"{name}.toml") if name in workloads() else None


def epoch_times(workload: str) -> tuple[EpochTime, ...]:
    """How published training scaled with devices; nothing where a method has but one count."""
    figures = for_workload(workload)
    found: list[EpochTime] = []
    for result in figures.results if figures else ():
        if not (result.reached and result.gpus and result.epochs and result.seconds):
            continue
        seconds = result.seconds / result.epochs
        first = next((e for e in found if e.method == result.method), None)
        alone = seconds * result.gpus if first is None else first.seconds * first.gpus
        found.append(
            EpochTime(
                method=result.method,
                batch_size=result.batch_size,
                gpus=result.gpus,
                seconds=seconds,
                efficiency=alone / (seconds * result.gpus),
                source=result.source,
                where=result.where,
            )
        )
    several = {e.method for e in found if len({o.gpus for o in found if o.method == e.method}) > 1}
    return tuple(entry for entry in found if entry.method in several)


@cache
def sources() -> dict[str, Source]:
    """Every publication cited, by key."""
    entries = _read(FOLDER / "sources.toml")
    return {key: Source(key=key, **entry) for key, entry in entries.items()}


@cache
def _load(path: Path) -> Published:
    content = _read(path)
    reference = content.get("reference")
    return Published(
        workload=content["workload"],
        metric=content["metric"],
        target=content.get("target"),
        reference=Reference(**reference) if reference else None,
        results=tuple(_result(entry, content) for entry in content["results"]),
        memory=tuple(
            Memory(source=sources()[content["source"]], where=content["memory_where"], **entry)
            for entry in content.get("memory", ())
        ),
    )


def _result(entry: dict[str, Any], content: dict[str, Any]) -> Result:
    printed = dict(entry)
    time = printed.pop("time", None)
    error = printed.pop("error_percent", None)
    if error is not None:
        printed["best"] = 1.0 - error / 100.0
    return Result(
        source=sources()[printed.pop("source", content["source"])],
        where=printed.pop("where", content["where"]),
        label=printed.pop("label", printed["method"]),
        seconds=None if time is None else time * SECONDS[content["time_unit"]],
        **printed,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: expected TOML, found {error}; reinstall fop[bench]") from error
