"""How the ranks of a process group share a step: placement, messages, and who keeps what."""

from __future__ import annotations

from fop.distributed.agreement import describe
from fop.distributed.base import (
    Counts,
    Exchange,
    Gathered,
    Reading,
    Report,
    Request,
    Totals,
    Verdict,
)
from fop.distributed.local import Local
from fop.distributed.setup import GroupReference, join_group

__all__ = [
    "Counts",
    "Exchange",
    "Gathered",
    "GroupReference",
    "Local",
    "Reading",
    "Report",
    "Request",
    "Totals",
    "Verdict",
    "describe",
    "join_group",
]
