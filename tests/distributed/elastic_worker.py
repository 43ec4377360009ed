"""Training under torchrun that goes on from its last checkpoint; one worker can be made to fail.

usage: elastic_worker.py DIRECTORY RANK STEP SIGNAL [K]
    RANK -1: nobody fails; K: one owner of a layer among every K ranks
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fop
from tests.distributed.models import batches, net

STEPS = 8


def main() -> None:
    directory, failing, bad_step, number = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = net()
    module = DistributedDataParallel(model)
    strategy = int(sys.argv[5]) if len(sys.argv) > 5 else "owner"
    optimizer = fop.FOP(module, strategy=strategy)
    path = directory / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(optimizer.steps, STEPS):
        optimizer.zero_grad()
        x, y = batches([4] * ranks, seed=step)[rank]
        cross_entropy(module(x), y).backward()
        if rank == failing and step == bad_step and first_attempt:
            # In mid-step: the others have this rank's gradients and wait for its updates.
            optimizer._ranks.broadcast = lambda *_: os.kill(os.getpid(), number)
        optimizer.step()
        if step % 3 == 2:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, directory / "new.pt")
                (directory / "new.pt").replace(path)
    if rank == 0:
        torch.save(model.state_dict(), directory / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
