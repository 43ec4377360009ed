"""How a method looks everywhere: its name, its colour, line and marker, and its place in the order.

Colours are Okabe and Ito's and Tol's colour-blind-safe ones. A control or variant has its parent's
colour, a dashed line and another marker, so that it reads as what it is also in grey print.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Look:
    """Appearance of one method."""

    label: str
    colour: str
    marker: str
    dashed: bool = False

    @property
    def line(self) -> Literal["-", "--"]:
        return "--" if self.dashed else "-"


LOOKS = {
    "sgd": Look("SGD", "#5c5c5c", "o"),
    "adamw": Look("AdamW", "#e69f00", "s"),
    "lamb": Look("LAMB", "#cc79a7", "v"),
    "shampoo": Look("Shampoo", "#56b4e9", "P"),
    "scalable-shampoo": Look("Shampoo (scalable)", "#56b4e9", "1", dashed=True),
    "kron": Look("Kron", "#44aa99", "8"),
    "singd": Look("singd", "#aa4499", "H"),
    "curvlinops": Look("KFAC (curvlinops)", "#117733", "2"),
    "soap": Look("SOAP", "#009e73", "X"),
    "sp-ngd": Look("SP-NGD", "#882255", "p"),
    "seng": Look("SENG", "#999933", "h"),
    "kfac": Look("KFAC", "#0072b2", "^"),
    "kfac-staggered": Look("KFAC, staggered", "#003f63", ">"),
    "kfac-2x": Look("KFAC, 2× lr", "#0072b2", "<", dashed=True),
    "fop": Look("FOP", "#d55e00", "D"),
    "fop-sum": Look("FOP (sum)", "#d55e00", "d", dashed=True),
}
SPARE_COLOURS = ("#332288", "#88ccee", "#ddcc77", "#661100", "#6699cc")


def look(method: str) -> Look:
    """Appearance of a method; an unknown one gets a spare colour that depends on its name alone."""
    if method in LOOKS:
        return LOOKS[method]
    return Look(method, SPARE_COLOURS[zlib.crc32(method.encode()) % len(SPARE_COLOURS)], "*")


def order(method: str) -> tuple[int, str]:
    """Sort key: first-order methods first, FOP last, unknown ones after it by name."""
    names = list(LOOKS)
    return (names.index(method) if method in LOOKS else len(names), method)


def value_text(value: Any) -> str:
    """A setting in print: short numbers, everything else as it is."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
