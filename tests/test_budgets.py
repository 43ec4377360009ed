"""The structure of a step keeps within its budgets: launches, and what a reader has to follow.

The aim is at most 10 files and 30 changes of file in `step()` of one nn.Linear, and 14 and 70 from
the forward pass to its end. That is not reached. What is held here is what is: lower the numbers
whenever a change allows it, and never raise them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fop
from tests.budgets import CURVATURE_STEP, MODELS, PLAIN_STEP, kernels_per_layer, trace_linear

# Kernels per layer of a plain step on the path of accelerators.
KERNELS = {
    "24-layer transformer": {fop.FOP: 20, fop.KFAC: 10},
    "ResNet-18": {fop.FOP: 40, fop.KFAC: 20},
    "ResNet-50": {fop.FOP: 40, fop.KFAC: 20},
}
# Files, and changes of file.
READING = {
    CURVATURE_STEP: {"step": (26, 141), "together": (29, 182)},
    PLAIN_STEP: {"step": (22, 103), "together": (24, 132)},
}


@pytest.mark.parametrize("kind", [fop.FOP, fop.KFAC])
@pytest.mark.parametrize("model", list(MODELS))
def test_kernels_of_a_plain_step(kind: Any, model: str) -> None:
    torch.manual_seed(0)
    _, kernels = kernels_per_layer(kind, *MODELS[model]())
    assert kernels <= KERNELS[model][kind]


@pytest.mark.parametrize("step", list(READING), ids=["curvature step", "plain step"])
def test_what_a_reader_of_a_step_follows(step: int) -> None:
    traces = trace_linear(step)
    for part, (files, changes) in READING[step].items():
        assert len(traces[part].files) <= files, part
        assert traces[part].changes <= changes, part


def test_the_architecture_tells_the_step_as_it_runs() -> None:
    """The phases in ARCHITECTURE.md are functions of the library, called in that order."""
    page = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text()
    walk = page.partition("a straight line:\n")[2].partition("zero_grad()")[0]
    told = [line.split("  ")[0] for line in re.findall(r"^ {22}(\S.*)$", walk, re.MULTILINE)]
    functions = {
        "batch.reduce": "reduce",
        "Directions": "compute",  # which on one process is all that a broadcast does
        "step rule": "scale",
        "update": "apply_changes",
    }
    expected = [functions.get(phase, phase) for phase in told if phase != "broadcast"]
    called = trace_linear(CURVATURE_STEP)["step"].functions
    assert [name for name in called if name in expected] == expected
