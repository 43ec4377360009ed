"""The record of a run: one JSON file, written again, as a whole, after every measurement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fop
from fop_bench.errors import BenchError
from fop_bench.files import MEASURE_AGAIN, read_json, write_json
from fop_bench.records import SCHEMA, now, provenance

PEERS = ("curvlinops-for-pytorch", "singd")
# What must be the same for measurements to stand in one table.
SAME = ("schema", "mode", "machine", "versions", "source")


class StoreError(BenchError, RuntimeError):
    """A record that can't be read, or must not be written over."""


def source_hash() -> str:
    """Of the library's own files: figures of other code are other figures."""
    root = Path(fop.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def header(mode: str) -> dict[str, Any]:
    head = provenance(packages=PEERS)
    head["machine"]["threads"] = 1  # of the processes that measure
    return {**head, "mode": mode, "date": now()[:10], "source": source_hash()}


class Store:
    """Measurements by key; `put` makes them last."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    @classmethod
    def open(cls, path: Path, head: Mapping[str, Any], *, resume: bool) -> Store:
        """A new record, or with `resume` the one that is there."""
        if not path.exists():
            return cls(path, {**head, "cells": {}, "profiles": {}})
        if not resume:
            raise StoreError(
                f"{path} exists and is not written over: pass --resume to go on with it, or "
                "--output for another name"
            )
        content = read(path)
        for key in SAME:
            if content.get(key) != head[key]:
                raise StoreError(
                    f"{path} can't be resumed: its {key} is {content.get(key)!r}, now it is "
                    f"{head[key]!r}. Pass --output for a new record"
                )
        return cls(path, content)

    def has(self, section: str, key: str) -> bool:
        return key in self.content[section]

    def put(self, section: str, key: str, value: Any) -> None:
        self.content[section][key] = value
        write_json(self.path, self.content)


def read(path: Path) -> dict[str, Any]:
    content = read_json(path, MEASURE_AGAIN)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise StoreError(f"{path}: expected a record of schema {SCHEMA}: {MEASURE_AGAIN}")
    return content


def cell_key(workload: str, method: str, interval: int) -> str:
    return f"{workload}/{method}/T{interval}"


def by_interval(
    content: Mapping[str, Any], workload: str, method: str
) -> dict[int, dict[str, Any]]:
    """The cells of one method on one workload."""
    keys = {interval: cell_key(workload, method, interval) for interval in (1, 10)}
    return {i: content["cells"][key] for i, key in keys.items() if key in content["cells"]}
