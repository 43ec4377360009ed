"""The record of a run: one JSON file, written anew, as a whole, after every measurement."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fop
from fop_bench.errors import BenchError
from fop_bench.records import machine, now, versions, write_text
from fop_bench.schema import read_json

SCHEMA = 1
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
    found = versions()
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    facts = {**machine(torch.device("cpu")), "threads": 1}
    return {
        "schema": SCHEMA,
        "mode": mode,
        "date": now()[:10],
        "machine": facts,
        "versions": found,
        "source": source_hash(),
    }


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
        write_text(self.path, _compact(self.content))


def read(path: Path) -> dict[str, Any]:
    content = read_json(path, "measure again")
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise StoreError(f"{path}: expected a record of schema {SCHEMA}: measure again")
    return content


def _compact(content: Mapping[str, Any]) -> str:
    """Readable JSON with one line a measurement."""
    parts = []
    for key, value in content.items():
        if key in ("cells", "profiles"):
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f"{json.dumps(key)}: {{\n{lines}\n}}" if lines else f'"{key}": {{}}')
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def cell_key(workload: str, method: str, interval: int) -> str:
    return f"{workload}/{method}/T{interval}"


def by_interval(
    content: Mapping[str, Any], workload: str, method: str
) -> dict[int, dict[str, Any]]:
    """The cells of one method on one workload."""
    found = {}
    for interval in (1, 10):
        cell = content["cells"].get(cell_key(workload, method, interval))
        if cell is not None:
            found[interval] = cell
    return found
