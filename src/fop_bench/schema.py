"""The content of a file against the types that the code declares for it: annotations are schemas.

`fit(value, kind)` gives the value in the form of `kind` (tables as dataclasses, lists as tuples
where the type says so), or raises `MisfitError`, which names the place in the file, what was
expected there and what was found.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

LARGEST = 1e100  # far above anything measured, far below what overflows in a sum or a plot
LARGEST_WHOLE = 2**63 - 1


class MisfitError(ValueError):
    """A value is not what was expected in its place."""


@dataclass(frozen=True)
class Limit:
    """What a type's values must be besides, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class NullMeans:
    """JSON has no infinity, so a record holds null in its place."""

    value: float


Count = Annotated[int, Limit("a whole number >= 1", lambda value: value >= 1)]
Whole = Annotated[int, Limit("a whole number >= 0", lambda value: value >= 0)]
Positive = Annotated[float, Limit("a number > 0", lambda value: value > 0)]
NonNegative = Annotated[float, Limit("a number >= 0", lambda value: value >= 0)]
Name = Annotated[str, Limit("text that is not empty", bool)]
OrInfinite = Annotated[float, NullMeans(math.inf)]
Scalar = str | bool | int | float | None
Setting = Scalar | list[Scalar]  # an option of an optimizer or a schedule
Settings = dict[str, Setting]

SIMPLE: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: type(value) is int and abs(value) <= LARGEST_WHOLE),
    float: ("a number", lambda value: type(value) in (int, float) and abs(value) <= LARGEST),
    type(None): ("null", lambda value: value is None),
}


def fit(value: Any, kind: Any, place: str = "") -> Any:
    """The value as `kind`; `place` is where in the file it stands."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind in SIMPLE:
        if SIMPLE[kind][1](value):
            return value
    elif origin is Annotated:
        return _limited(value, parts[0], parts[1:], place)
    elif origin in (Union, types.UnionType):
        return _any_of(value, kind, place)
    elif origin is Literal:
        if any(value == part and type(value) is type(part) for part in parts):
            return value
    elif origin in (list, tuple):
        if isinstance(value, (list, tuple)):
            return origin(fit(v, parts[0], f"{place}[{i}]") for i, v in enumerate(value))
    elif isinstance(value, Mapping):
        return _table(value, kind, place)
    raise _misfit(value, words(kind), place)


def check_fields(instance: Any, dotted: str = "") -> None:
    """The fields of a dataclass against their types, which Python itself does not look at."""
    for name, kind in get_type_hints(type(instance), include_extras=True).items():
        if not is_dataclass(kind):  # which has checked itself
            fit(getattr(instance, name), kind, dotted + name)


def words(kind: Any) -> str:
    """A type as a reader of the message knows it."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in SIMPLE:
        return SIMPLE[kind][0]
    if origin is Annotated:
        limits = [extra.words for extra in parts[1:] if isinstance(extra, Limit)]
        return limits[0] if limits else f"{words(parts[0])} or null"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(words(part) for part in parts))
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}" if len(parts) > 1 else repr(parts[0])
    if origin in (list, tuple):
        return f"a list ({words(parts[0])} each)"
    return "a table"


def _limited(value: Any, kind: Any, extras: tuple[Any, ...], place: str) -> Any:
    limits = [extra for extra in extras if isinstance(extra, Limit)]
    for extra in extras:
        if isinstance(extra, NullMeans) and value is None:
            return extra.value
    try:
        fitted = fit(value, kind, place)
    except MisfitError:
        if not limits or isinstance(value, (list, tuple, Mapping)):  # which know better
            raise
        raise _misfit(value, limits[0].words, place) from None
    for limit in limits:
        if not limit.holds(fitted):
            raise _misfit(value, limit.words, place)
    return fitted


def _any_of(value: Any, kind: Any, place: str) -> Any:
    for part in get_args(kind):
        try:
            return fit(value, part, place)
        except MisfitError as error:
            inside = error
    # A table can only have been meant for the last, and that one knows what is wrong in it.
    raise inside if isinstance(value, Mapping) else _misfit(value, words(kind), place)


def _table(value: Mapping[Any, Any], kind: Any, place: str) -> Any:
    odd = [key for key in value if not isinstance(key, str)]
    if odd:
        raise MisfitError(f"{place or 'the file'}: expected names as text, found {odd[0]!r}")
    dotted = f"{place}." if place else ""
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        table = dict(value)
        for key, inner in hints.items():
            if key in value:
                table[key] = fit(value[key], inner, dotted + key)
            elif key in kind.__required_keys__:
                raise MisfitError(f"{dotted}{key} is missing: expected {words(inner)}")
        return table
    if is_dataclass(kind):
        return _dataclass(value, kind, dotted)
    inner = get_args(kind)[1]
    return {key: fit(item, inner, dotted + key) for key, item in value.items()}


def _dataclass(value: Mapping[str, Any], kind: Any, dotted: str) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    for key in value:
        if key not in hints:
            raise MisfitError(f"{dotted}{key}: nothing of this name is known here")
    for field in fields(kind):
        optional = field.default is not MISSING or field.default_factory is not MISSING
        if field.name not in value and not optional:
            raise MisfitError(
                f"{dotted}{field.name} is missing: expected {words(hints[field.name])}"
            )
    return kind(**{key: fit(item, hints[key], dotted + key) for key, item in value.items()})


def _misfit(value: Any, expected: str, place: str) -> MisfitError:
    found = repr(value)
    found = found if len(found) <= 60 else f"{found[:57]}..."
    return MisfitError(f"{place or 'the file'}: expected {expected}, found {found}")
