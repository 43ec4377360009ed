"""Real gloo processes for tests: many checks in one start, each with its own result.

A check is a function of a `Rank`, run by all ranks together. What it raises on any rank fails the
test that asks for it.
"""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass(frozen=True)
class Rank:
    index: int
    ranks: int
    alone: dist.ProcessGroup  # of this rank only: an optimizer in it trains on its own
    directory: Path  # common to all ranks

    def share(self, items: Sequence[object]) -> list[object]:
        """This rank's part of a list."""
        return list(items)[self.index :: self.ranks]


Check = Callable[[Rank], None]
# Imported once, by the process that the ranks are forked from: that is most of a rank's start.
PRELOADED = ["fop", "pytest", "torch.distributed.fsdp", "torch.distributed.checkpoint"]


def start_context() -> Any:
    """Starts processes from one that has imported what they need."""
    mp.set_forkserver_preload(PRELOADED)
    return mp.get_context("forkserver")


def run(
    ranks: int, checks: Sequence[Check], timeout: float = 120.0, directory: Path | None = None
) -> dict[str, str]:
    """What went wrong, by check; nothing if all is well."""
    if directory is None:
        with tempfile.TemporaryDirectory() as temporary:
            return run(ranks, checks, timeout, Path(temporary))
    # Port 0: the system chooses a free one, and the store tells which.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start_context()
    mp.start_processes(
        _work,
        (ranks, list(checks), directory, timeout, store.port),
        ranks,
        start_method="forkserver",
    )
    found: dict[str, str] = {}
    for path in sorted(directory.glob("*.failed")):
        name = path.name.split(".")[0]
        found[name] = found.get(name, "") + path.read_text()
    return found


def _work(
    index: int, ranks: int, checks: list[Check], directory: Path, timeout: float, port: int
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=index, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    groups = [dist.new_group([member]) for member in range(ranks)]
    rank = Rank(index, ranks, groups[index], directory)
    for check in checks:
        try:
            check(rank)
            failure = 0
        except Exception:
            failure = 1
            path = directory / f"{check.__name__}.{index}.failed"
            path.write_text(f"rank {index}:\n{traceback.format_exc()}\n")
        # After a failure ranks may be at different messages: what follows would only mislead.
        total = torch.tensor(failure)
        dist.all_reduce(total)
        if int(total):
            for later in checks[checks.index(check) + 1 :]:
                text = f"not run, because {check.__name__} failed\n"
                (directory / f"{later.__name__}.{index}.failed").write_text(text)
            break
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of groups that a failed check left behind must not keep the process
