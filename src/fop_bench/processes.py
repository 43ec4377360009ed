"""Fresh processes that measure: how they are asked and answer, and what they do to themselves.

``ask("fop_bench.memory", request)`` runs ``python -m fop_bench.memory REQUEST`` and returns what
that process gave to `answer`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

MARKER = "fop-bench answer: "
SAID = 2000  # characters of what a failed process said last
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# glibc hands large freed blocks back to the kernel, and page faults would then make up a third of
# an SGD step. All methods keep their heap instead. Read by glibc when a process starts.
KEEP_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class ProcessError(RuntimeError):
    """A process ended without an answer."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"the process ended with code {code}: {said}")
        self.code = code
        self.said = said

    @property
    def out_of_memory(self) -> bool:
        """The kernel ends a process that asks for too much memory with signal 9, and no word."""
        return self.code == -9


def ask(
    module: str,
    request: Mapping[str, Any],
    *,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """What a fresh process of `module` answers; with several ranks, torchrun starts them."""
    launch = ["-m"]
    if ranks > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    done = subprocess.run(
        [sys.executable, *launch, module, json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARKER):
            return json.loads(line.removeprefix(MARKER))
    raise ProcessError(done.returncode, done.stderr.strip()[-SAID:] or "it said nothing")


def answer(value: Any) -> None:
    """In the process that was asked."""
    print(MARKER + json.dumps(value), flush=True)


def pin() -> None:
    """One thread on one core: the last one allowed, since systems like to use the first."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def start_counting_peak() -> int:
    """Resident bytes now. On Linux the peak is counted from here on; elsewhere the peak so far
    stays a lower bound.
    """
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def peak_resident() -> int:
    """Largest resident memory of this process, in bytes."""
    return _status("VmHWM")


def _status(field: str) -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
