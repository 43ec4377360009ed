"""What a measuring process does to itself, and reads from the system."""

from __future__ import annotations

import gc
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

# glibc hands large freed blocks back to the kernel, and page faults would then make up a third of
# an SGD step. All methods keep their heap instead. Read by glibc when a process starts.
KEEP_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def child_environment() -> dict[str, str]:
    return {**os.environ, **KEEP_HEAP, **ONE_THREAD}


def pin() -> None:
    """One thread on one core: the last one allowed, since systems like to use the first."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def start_counting_peak() -> int:
    """Resident bytes now; on Linux the peak is counted from here on."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def peak_resident() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
