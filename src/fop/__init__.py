"""Fisher-Orthogonal Projection: natural-gradient training at large batch sizes.

optimizer = fop.FOP(model, lr=0.1)
"""

from fop.api import FOP, KFAC
from fop.diagnostics import diagnostics, noise_scale
from fop.schedules import scale_to_batch

__version__ = "0.1.0"
__all__ = ["FOP", "KFAC", "diagnostics", "noise_scale", "scale_to_batch"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
