"""A program for torchrun: runs of the tiny workload on all ranks, for test_parallel.py to look at.

``parallel_runs.py FOLDER`` does everything in one launch, since starting processes is what takes
time. In its first life one rank is killed in the midst of a run; torchrun starts all ranks again
and the run goes on from its checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import fop
from fop_bench.data.splits import WHOLE, Share
from fop_bench.loop import Runtime, train
from fop_bench.parallel import Ranks, StoppedError, process_group
from fop_bench.progress import Reporter
from tests.bench.tiny import TinyBatches, TinySplits, TinyWorkload, tiny_config

KILLED_AT = 17  # steps; in the third epoch, after two checkpoints


@dataclass(frozen=True)
class Plain(TinyWorkload):
    """Without dropout, so that the number of ranks decides nothing but round-off."""

    def model(self, seed: int) -> nn.Module:
        model = super().model(seed)
        model[2] = nn.Identity()  # type: ignore[index]
        return model


@dataclass(frozen=True)
class PoisonedSplits(TinySplits):
    """One example of the last rank's share of the third batch is not a number."""

    def train(self, batch_size: int, epoch: int, seed: int, share: Share = WHOLE) -> TinyBatches:
        batches = super().train(batch_size, epoch, seed, share)
        batches.inputs[3 * batch_size - 1] = torch.nan
        return batches


@dataclass(frozen=True)
class Poisoned(Plain):
    def splits(self, *arguments: Any, **settings: Any) -> TinySplits:
        return PoisonedSplits(**vars(super().splits(*arguments, **settings)))


class BrokenEvaluation(Plain):
    def evaluate(self, model: nn.Module, batches: TinyBatches) -> dict[str, float]:
        raise OSError("the disk is gone")


CASES: dict[str, Any] = {
    "even": tiny_config("sgd", epochs=2),  # the last of seven batches has 8 examples
    "uneven": tiny_config("adamw", epochs=2, batch_size=33, accumulate=3),
    "kfac": tiny_config("kfac", epochs=2, batch_size=33, accumulate=2),
    # Even shares: the first rank has the first half of every batch, as one process would.
    "fop": tiny_config("fop", epochs=2),
    # The last of four batches has one example, so that the second rank has none.
    "short": tiny_config("sgd", epochs=2, batch_size=66, subset=199, evaluate_every=1),
}


class Killing(Reporter):
    """Ends the process as a machine's failure would, once."""

    def __init__(self, ranks: Ranks) -> None:
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        self.left = KILLED_AT if first_life and ranks.first else -1

    def stepped(self, steps: int, images: int, loss: float | None) -> None:
        self.left -= steps
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def bytes_of_a_step(device: torch.device, ranks: Ranks) -> dict[str, float]:
    """What the library counts that it sends, a mean over one curvature interval."""
    model = ranks.wrap(Plain().model(0).to(device))
    optimizer = fop.FOP(model, lr=1e-3, update_every=5)
    before: dict[str, int] = {}
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == 4:
            before = dict(optimizer._ranks.comm.sent)  # type: ignore[attr-defined]
    after = optimizer._ranks.comm.sent  # type: ignore[attr-defined]
    return {what: (after[what] - before.get(what, 0)) / 5 for what in after}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")) as (ranks, device):
        runtime = Runtime(device, checkpoint_seconds=0.0, tensorboard=False, ranks=ranks)
        workload: Any = TinyWorkload()
        config = tiny_config("fop")  # each rank keeps the curvature of some layers
        killing = Killing(ranks)
        train(config, workload, folder / "killed", runtime, resume=True, reporter=killing)
        train(config, workload, folder / "whole", runtime)
        for name, case in CASES.items():
            plain: Any = Plain()
            train(case, plain, folder / name, runtime)
        stopped_clock = patch("fop_bench.loop.time", SimpleNamespace(monotonic=lambda: 0.0))
        with nullcontext() if ranks.first else stopped_clock:
            seldom = replace(runtime, checkpoint_seconds=1e-9)
            train(tiny_config("sgd", epochs=3), workload, folder / "clocks", seldom)
        sent = bytes_of_a_step(device, ranks)
        poisoned: Any = Poisoned()
        run = train(tiny_config("sgd"), poisoned, folder / "poisoned", runtime)
        seen: dict[str, Any] = {
            "status": run.meta["status"], "reason": run.meta["reason"], "sent": sent,
        }  # fmt: skip
        broken: Any = BrokenEvaluation()
        try:
            train(tiny_config("sgd"), broken, folder / "broken", runtime)
        except (OSError, StoppedError) as error:
            seen["error"] = f"{type(error).__name__}: {error}"
        (folder / f"seen-{ranks.index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
