"""How the ranks of a process group share a step: owners, messages, and who keeps what."""

from __future__ import annotations

from fop.distributed.agreement import describe
from fop.distributed.ranks import Batch, Contribution, Counts, Ranks, Updates
from fop.distributed.setup import GroupReference, join_group

__all__ = [
    "Batch",
    "Contribution",
    "Counts",
    "GroupReference",
    "Ranks",
    "Updates",
    "describe",
    "join_group",
]
