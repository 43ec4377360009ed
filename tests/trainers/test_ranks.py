"""Trainers on two ranks save without a call by the user, and resume after one is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fop
from fop.trainers import gather_where_trainers_save
from tests.common import mlp
from tests.distributed.test_elastic import torchrun
from tests.trainers.ranks_worker import SAVE_EVERY

WORKER = Path(__file__).parent / "ranks_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [["accelerate", "trainer", "mixin", "lightning"]])
def test_killed_and_resumed_training_is_the_uninterrupted(
    tmp_path: Path, trainers: list[str]
) -> None:
    """Bit for bit, on both ranks; the last checkpoint before the kill is that of step 6."""
    done = torchrun(WORKER, tmp_path, *trainers)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr, "nobody was killed"
    for trainer in trainers:
        results = [json.loads((tmp_path / trainer / rank).read_text()) for rank in "01"]
        for found in results:
            assert found["resumed at"] == [2 * SAVE_EVERY, 0], trainer
            assert found["same"], trainer
        assert results[0]["sums"] == results[1]["sums"]


class Sharded:
    """Stands for an optimizer whose ranks keep parts of the state; notes what is asked of it."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def consolidate_state_dict(self, to: int | None) -> None:
        self.log.append(("gather", to))


@pytest.fixture
def trainer_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Trainer:
        def __init__(self, optimizer: object, *, save_on_each_node: bool) -> None:
            self.optimizer = optimizer
            self.args = SimpleNamespace(save_on_each_node=save_on_each_node)

        def _save_optimizer_and_scheduler(self, directory: str) -> str:
            log.append("save")
            return directory

    log: list[Any] = []
    Trainer.log = log  # type: ignore[attr-defined]
    module = ModuleType("transformers.trainer")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    return Trainer


@pytest.mark.parametrize("each_node", [False, True])
def test_states_are_gathered_once_and_before_they_are_saved(
    trainer_class: Any, each_node: bool
) -> None:
    """On the first rank, or, if each host saves, on all; through the wrappers of Accelerate."""
    gather_where_trainers_save(Sharded)
    gather_where_trainers_save(Sharded)
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=Sharded(trainer_class.log)))
    trainer = trainer_class(wrapped, save_on_each_node=each_node)
    assert trainer._save_optimizer_and_scheduler("here") == "here"
    assert trainer_class.log == [("gather", None if each_node else 0), "save"]


def test_other_optimizers_are_left_alone(trainer_class: Any) -> None:
    gather_where_trainers_save(fop.FOP)
    trainer = trainer_class(Sharded(trainer_class.log), save_on_each_node=False)
    trainer._save_optimizer_and_scheduler("here")
    assert trainer_class.log == ["save"]


def test_one_process_leaves_trainers_as_they_are(trainer_class: Any) -> None:
    before = trainer_class._save_optimizer_and_scheduler
    fop.FOP(mlp())
    assert trainer_class._save_optimizer_and_scheduler is before
