"""TensorBoard event files: the records of a run, and what the optimizer says about each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

import fop

NOT_PLOTTED = ("epoch", "step")


class EventLog:
    """Writes once an epoch, outside the training time; does nothing where it is not enabled."""

    def __init__(self, run_dir: Path, first_step: int, *, enabled: bool) -> None:
        self._writer: Any = None
        if enabled:
            from torch.utils.tensorboard import SummaryWriter

            # Events after the checkpoint that a run goes on from would otherwise be there twice.
            purge = first_step + 1 if first_step else None
            self._writer = SummaryWriter(str(run_dir), purge_step=purge)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, record: Mapping[str, Any], layers: Mapping[str, Mapping[str, float]]) -> None:
        """One evaluation, and what `layer_diagnostics` said then."""
        if self._writer is None:
            return
        step = record["step"]
        for name, value in record.items():
            if name not in NOT_PLOTTED:
                self._writer.add_scalar(f"run/{name}", value, step)
        for layer, quantities in layers.items():
            for name, value in quantities.items():
                if math.isfinite(value):
                    self._writer.add_scalar(f"layers/{layer}/{name}", value, step)
        self._writer.flush()


def layer_diagnostics(optimizer: Optimizer) -> Mapping[str, Mapping[str, float]]:
    """What `fop.diagnostics` says; nothing for other optimizers.

    Between a step and the next zero_grad, which is when the optimizer still knows its gradients.
    """
    if not isinstance(optimizer, (fop.FOP, fop.KFAC)):
        return {}
    return fop.diagnostics(optimizer)
