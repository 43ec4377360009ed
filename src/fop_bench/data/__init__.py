"""Data sets in their official layouts: found, or downloaded, checked and turned into batches.

No file format with code in it (pickle) is ever read.
"""

from __future__ import annotations

from fop_bench.data.catalog import SOURCES, data_status
from fop_bench.data.errors import DataError
from fop_bench.data.sources import DataStatus
from fop_bench.data.splits import Batches, Splits

__all__ = ["SOURCES", "Batches", "DataError", "DataStatus", "Splits", "data_status"]
