"""The library trains as it did when the trajectories were recorded, to 1e-10 in float64."""

from __future__ import annotations

import json

import pytest

from tests.golden import runs

RECORDED: dict[str, runs.Trajectory] = json.loads(runs.RECORD.read_text())


@pytest.mark.parametrize("name", runs.RUNS)
def test_one_process_trains_as_recorded(name: str) -> None:
    assert runs.distance(runs.trajectory(runs.RUNS[name]), RECORDED[name]) < 1e-10


def test_two_ranks_train_as_recorded() -> None:
    found = runs.trajectories_on_ranks()
    assert found.keys() == RECORDED.keys() - runs.RUNS.keys()
    for name, trajectory in found.items():
        assert runs.distance(trajectory, RECORDED[name]) < 1e-10, name
