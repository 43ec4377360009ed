"""Ranks that die or hang: the others say so, and torchrun goes on from the last checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import fop
from tests.distributed.elastic_worker import STEPS
from tests.distributed.launch import start_context
from tests.distributed.models import assert_same, batches, net

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "elastic_worker.py"
HOSTS = Path(__file__).parent / "two_hosts.sh"


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *sys.path])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        # A restart with gloo otherwise finds the addresses of the workers that are gone.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def torchrun(worker: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, "--max-restarts=1", str(worker), *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def reference(ranks: int) -> nn.Module:
    """The worker's training, undisturbed and in one process."""
    model = net()
    optimizer = fop.FOP(model, halves="microbatches")
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in batches([4] * ranks, seed=step):
            (cross_entropy(model(x), y) / ranks).backward()
        optimizer.step()
    return model


def result(directory: Path) -> nn.Module:
    model = net(seed=1)
    model.load_state_dict(torch.load(directory / "final.pt", weights_only=True))
    return model


def test_a_killed_worker_leads_to_a_restart_and_the_same_result(tmp_path: Path) -> None:
    done = torchrun(WORKER, tmp_path, 1, 4, int(signal.SIGKILL))
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr, "nobody was killed"
    assert_same(result(tmp_path), reference(ranks=2))


def test_two_hosts_equal_one_process(tmp_path: Path) -> None:
    """Two ranks each; curvature is shared out within a host."""
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"no right to make network namespaces: {probe.stderr.strip()}")
    done = subprocess.run(
        [str(HOSTS), sys.executable, "2", str(WORKER), str(tmp_path), "-1", "0", "0", "2"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert_same(result(tmp_path), reference(ranks=4))


def stop_or_wait(index: int, port: int, directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=index, world_size=2, timeout=timedelta(seconds=3)
    )
    model = net()
    optimizer = fop.FOP(model)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batches([4, 4], seed=step)[index]
        cross_entropy(model(x), y).backward()
        if index == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            optimizer.step()
        except RuntimeError as error:
            (directory / "error").write_text(str(error))
            os._exit(0)


def test_a_rank_that_hangs_makes_the_others_name_rank_message_and_layers(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = start_context()
    ranks = [
        context.Process(target=stop_or_wait, args=(index, store.port, tmp_path))
        for index in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        ranks[0].join(120)
        assert ranks[0].exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()
    message = (tmp_path / "error").read_text()
    assert message.startswith("rank 0 of 2: ")
    assert "failed. Messages under way: " in message
    assert "reduce of differences of 'last'" in message
    assert "hangs" in message
