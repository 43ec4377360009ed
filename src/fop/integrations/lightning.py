"""Lightning needs nothing but this: gradient clipping in mixed precision.

Lightning refuses to clip for optimizers that take part in loss scaling, because those usually can't
work with gradients unscaled before step(). Those of fop can.
"""

from __future__ import annotations

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from fop.optimizer import SecondOrderOptimizer


class ClippableMixedPrecision(MixedPrecision):
    """`Trainer(plugins=ClippableMixedPrecision("bf16-mixed", "cpu"), gradient_clip_val=1.0)`."""

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip, after undoing the loss scale where there is one."""
        if clip_val > 0 and self.scaler is not None:
            self.scaler.unscale_(optimizer)
            if isinstance(optimizer, SecondOrderOptimizer):
                optimizer.grad_scaler = self.scaler
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
