"""Files that appear complete or not at all, and the JSON in them: one way to write, one to read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from fop_bench.errors import RecordError, WriteError, reason
from fop_bench.schema import LARGEST, fit

Content = TypeVar("Content")
MEASURE_AGAIN = "measure again"


@contextmanager
def atomic_open(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that appears under its name complete, or not at all; `WriteError` says why not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # A name on disk that is not UTF-8 can be shown, but not encoded.
    how: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open(mode, **({} if "b" in mode else how)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WriteError(path, error) from error
        raise


def remove_leftovers(folder: Path) -> None:
    """Deletes half-written files of a process that was killed while it wrote them."""
    for path in filter(is_leftover, folder.iterdir()):
        path.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    return path.match(".*.tmp")


def write_text(path: Path, text: str) -> None:
    with atomic_open(path) as stream:
        stream.write(text)


def strict_json(value: Any) -> Any:
    """`value` with every non-finite number as None: JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """The one way to write a record: strict JSON, two levels deep a line for each entry."""
    write_text(path, _lines(strict_json(content), levels=2) + "\n")
    return path


def _lines(value: Any, levels: int, indent: str = "") -> str:
    if not levels or not value or not isinstance(value, (dict, list)):
        return json.dumps(value, allow_nan=False)
    inner = indent + "  "
    if isinstance(value, dict):
        entries = [f"{json.dumps(k)}: {_lines(v, levels - 1, inner)}" for k, v in value.items()]
    else:
        entries = [_lines(item, levels - 1, inner) for item in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    body = ",\n".join(inner + entry for entry in entries)
    return f"{first}\n{body}\n{indent}{last}"


def read_record(path: Path, kind: type[Content], what: str) -> Content:
    """The one way to read a record that is no run: a file of JSON that fits the type `kind`."""
    content = read_json(path, MEASURE_AGAIN)
    try:
        fitted: Content = fit(content, kind)
        return fitted
    except ValueError as error:
        raise RecordError(f"{path} holds no {what} ({error}): {MEASURE_AGAIN}") from error


def read_json(path: Path, cure: str) -> Any:
    """The content of a JSON file, in which every number is finite and all text can be printed."""
    return parse_json(read_text(path, cure), str(path), cure)


def read_text(path: Path, cure: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({reason(error)}): {cure}") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{path} is not text ({error}): {cure}") from error


def parse_json(text: str, where: str, cure: str) -> Any:
    try:
        value = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number)
        # A lone half of a surrogate pair can be read, but not written again.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not JSON ({error}): {cure}") from error


def _number(text: str) -> int | float:
    value: int | float = int(text) if text.lstrip("-").isdigit() else float(text)
    if not abs(value) <= LARGEST:
        raise ValueError(f"the number {text[:40]} is out of range")
    return value
