"""Fisher-Orthogonal Projection: natural-gradient training at large batch sizes.

optimizer = fop.FOP(model)
"""

from fop import presets
from fop.api import FOP, KFAC
from fop.diagnostics import diagnostics, noise_scale
from fop.layers import LayerAdapter, register_layer
from fop.schedules import scale_to_batch

__version__ = "0.1.0"
__all__ = [
    "FOP",
    "KFAC",
    "LayerAdapter",
    "diagnostics",
    "noise_scale",
    "presets",
    "register_layer",
    "scale_to_batch",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
