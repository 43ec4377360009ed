"""What is known by name: methods and workloads, trained and timed."""

from __future__ import annotations

from typing import Protocol, TypeVar


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_Named)


def by_name(*items: Named) -> dict[str, Named]:
    return {item.name: item for item in items}
