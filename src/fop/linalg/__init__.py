"""Factors, in any form of storage, and their decompositions."""

from __future__ import annotations

from fop.linalg.blocked import STORAGE, Cholesky
from fop.linalg.decompose import How, decomposed, solve_pays
from fop.linalg.device import all_finite, on_host, treat_as_accelerator
from fop.linalg.factor import (
    Blocked,
    Dense,
    Diagonal,
    Factor,
    Form,
    fits,
    from_state,
    state_shapes,
    unpacked,
)
from fop.linalg.gram import Gram

__all__ = [
    "STORAGE",
    "Blocked",
    "Cholesky",
    "Dense",
    "Diagonal",
    "Factor",
    "Form",
    "Gram",
    "How",
    "all_finite",
    "decomposed",
    "fits",
    "from_state",
    "on_host",
    "solve_pays",
    "state_shapes",
    "treat_as_accelerator",
    "unpacked",
]
