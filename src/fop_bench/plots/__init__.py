"""Pictures of recorded runs: functions from records to figures, and ``save``, which writes one."""

from fop_bench.plots.bars import memory_bars
from fop_bench.plots.batches import target_by_batch
from fop_bench.plots.canvas import png, save
from fop_bench.plots.curves import curves
from fop_bench.plots.scaling import scaling_curves
from fop_bench.plots.surface import landscape_3d, landscape_contour
from fop_bench.plots.sweeps import ablation, sweep

__all__ = [
    "ablation",
    "curves",
    "landscape_3d",
    "landscape_contour",
    "memory_bars",
    "png",
    "save",
    "scaling_curves",
    "sweep",
    "target_by_batch",
]
