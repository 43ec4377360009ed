"""Several ranks train as one process does on the same batches, agree on everything, and survive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fop_bench.cli import app
from fop_bench.costs import bytes_sent, shape_of
from fop_bench.data.splits import ImageSplits, Share
from fop_bench.loop import RunExistsError, Runtime, train
from fop_bench.parallel import depends_on_ranks
from fop_bench.records import load_runs, read_run, write_meta
from fop_bench.sections import warnings
from fop_bench.workloads import WORKLOADS
from tests.bench.parallel_runs import CASES, Plain
from tests.bench.test_loop import Interrupting, lines
from tests.bench.tiny import TinyWorkload, tiny_config

ROOT = Path(__file__).parents[2]
QUIET = Runtime(checkpoint_seconds=0.0, tensorboard=False)
PLAIN: Any = Plain()


def torchrun(*arguments: Any, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Two ranks on this host, one thread each."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        *map(str, arguments),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        # Else ranks that are started again may be given the addresses of those that are gone
        # (pytorch/pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    torchrun("--max-restarts=1", "-m", "tests.bench.parallel_runs", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_process_does(case: str, two_ranks: Path, tmp_path: Path) -> None:
    alone = train(CASES[case], PLAIN, tmp_path, QUIET)
    together = read_run(two_ranks / case)
    assert together.meta["ranks"] == 2
    assert len(together.metrics) == len(alone.metrics)
    for ours, theirs in zip(together.metrics, alone.metrics, strict=True):
        for name in ("epoch", "step", "lr", "train_loss", "test_loss", "test_accuracy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    one, two = (
        torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
        for folder in (tmp_path, two_ranks / case)
    )
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_rank_that_is_killed_leads_to_the_same_record(two_ranks: Path) -> None:
    """Also with dropout: the random numbers of each rank are in the checkpoint."""
    assert read_run(two_ranks / "killed").meta["status"] == "complete"
    assert lines(two_ranks / "killed") == lines(two_ranks / "whole")


@pytest.mark.slow
def test_ranks_whose_clocks_differ_agree_on_checkpoints(two_ranks: Path) -> None:
    assert read_run(two_ranks / "clocks").meta["status"] == "complete"
    assert (two_ranks / "clocks" / "checkpoint.pt").is_file()


@pytest.mark.slow
def test_all_ranks_stop_together(two_ranks: Path) -> None:
    first, second = (json.loads((two_ranks / f"seen-{rank}.json").read_text()) for rank in range(2))
    assert first["status"] == second["status"] == "diverged"
    assert first["reason"] == second["reason"] == "the training loss is nan at step 3"
    assert first["error"] == "OSError: the disk is gone"
    assert second["error"] == "StoppedError: rank 0 stopped with OSError: the disk is gone"


@pytest.mark.slow
def test_the_cost_model_counts_the_bytes_that_are_sent(two_ranks: Path) -> None:
    sent = json.loads((two_ranks / "seen-0.json").read_text())["sent"]
    shape = shape_of(Plain().model(0), torch.randn(1, 8))
    expected = bytes_sent("fop", shape, ranks=2, interval=5)
    del expected["gradients"]  # DistributedDataParallel's own
    assert {what: sent[what] for what in expected} == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_commands_run_under_torchrun(tmp_path: Path) -> None:
    quick = ["--epochs", 1, "--device", "cpu", "--batch-sizes", 256, "--seeds", "0"]
    done = torchrun(
        "-m", "fop_bench", "compare", "digits-mlp", "--methods", "sgd,adamw", *quick,
        "--out", tmp_path / "runs", cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.count("Report") == 1  # one rank speaks
    runs = load_runs(tmp_path / "runs")
    assert [(run.meta["method"], run.meta["ranks"]) for run in runs] == [("adamw", 2), ("sgd", 2)]
    assert (tmp_path / "runs" / "report.html").is_file()


def test_commands_for_one_process_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 1
    expected = "fop-bench list runs in one process, torchrun launched 2: start it alone"
    assert expected in " ".join(result.output.split())


def stopped_on(ranks: int, run_dir: Path, method: str, workload: Any) -> None:
    """A run on one rank that broke off, recorded as one of so many ranks."""
    config = tiny_config(method)
    with pytest.raises(KeyboardInterrupt):
        train(config, workload, run_dir, QUIET, reporter=Interrupting(after=17))
    write_meta(run_dir, {**read_run(run_dir).meta, "ranks": ranks})


def test_a_run_goes_on_on_other_ranks_where_that_changes_nothing(tmp_path: Path) -> None:
    stopped_on(2, tmp_path / "run", "sgd", PLAIN)
    run = train(tiny_config("sgd"), PLAIN, tmp_path / "run", QUIET, resume=True)
    train(tiny_config("sgd"), PLAIN, tmp_path / "whole", QUIET)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert (run.meta["ranks"], run.meta["earlier_ranks"]) == (1, [2])
    assert any("another number of ranks" in warning for warning in warnings([run]))


@pytest.mark.parametrize(
    ("method", "workload", "why"),
    [
        ("fop", PLAIN, "FOP takes its two gradients from even and odd ranks"),
        ("sgd", TinyWorkload(), r"each rank draws its own random numbers \(dropout '2'\)"),
    ],
)
def test_a_run_whose_numbers_depend_on_the_ranks_is_refused(
    method: str, workload: Any, why: str, tmp_path: Path
) -> None:
    stopped_on(2, tmp_path, method, workload)
    recorded = lines(tmp_path)
    message = f"was started on 2 ranks and can't go on on 1: {why}. Resume it with 2 ranks"
    with pytest.raises(RunExistsError, match=message):
        train(tiny_config(method), workload, tmp_path, QUIET, resume=True)
    assert lines(tmp_path) == recorded


def test_a_finished_run_on_other_ranks_is_not_taken_for_this_one(tmp_path: Path) -> None:
    run = train(tiny_config(epochs=1), PLAIN, tmp_path, QUIET)
    write_meta(tmp_path, {**run.meta, "ranks": 4})
    with pytest.raises(RunExistsError, match="holds this run on 4 ranks, asked for on 1"):
        train(tiny_config(epochs=1), PLAIN, tmp_path, QUIET, resume=True)


def test_batch_statistics_depend_on_the_ranks() -> None:
    assert "batch norm" in str(depends_on_ranks("kfac", WORKLOADS["cifar10-resnet8"].model(0)))
    assert depends_on_ranks("kfac", WORKLOADS["digits-mlp"].model(0)) is None


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_make_the_batch(count: int) -> None:
    for size in (1, 2, 7, 32):
        batch = torch.arange(size)
        shares = [Share(index, count).of(batch) for index in range(count)]
        assert torch.cat(shares).equal(batch)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_augmented_shares_are_those_of_the_whole_batch(cifar10_dir: Path) -> None:
    splits = WORKLOADS["cifar10-resnet8"].splits(cifar10_dir, subset=100)
    assert isinstance(splits, ImageSplits)
    assert splits.padding
    whole = list(splits.train(33, epoch=1, seed=2))
    parts = [splits.train(33, epoch=1, seed=2, share=Share(index, 2)) for index in range(2)]
    assert [len(labels) for _, labels in parts[1]] == [16, 16, 16, 0]
    for (inputs, labels), *shares in zip(whole, *parts, strict=True):
        assert torch.cat([share for share, _ in shares]).equal(inputs)
        assert torch.cat([share for _, share in shares]).equal(labels)
