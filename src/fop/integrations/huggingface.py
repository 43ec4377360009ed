"""The Hugging Face `Trainer` builds optimizers from parameters; fop's need the model.

`Trainer(model, args, optimizers=(fop.FOP(model, lr=0.1), None))` works as it is. The mixin adds
what Trainer does for its own optimizers: learning rate and weight decay come from the
`TrainingArguments`, and biases and norms are not decayed. Saving on several ranks needs neither
(`fop.trainers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fop.api import FOP, KFAC


class SecondOrderMixin:
    """Goes before the trainer: `class FOPTrainer(SecondOrderMixin, Trainer): ...`.

    Further options of the optimizer are then given as
    `FOPTrainer(model, args, ..., optimizer_options={"damping": 1e-2})`.
    """

    # What the mixin uses of transformers.Trainer, which is not imported for its types.
    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    get_decay_parameter_names: Any

    def __init__(
        self,
        *args: Any,
        optimizer_type: type[FOP] | type[KFAC] = FOP,
        optimizer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer_type = optimizer_type
        self.optimizer_options = dict(optimizer_options or {})
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Called by Trainer once the model is in place; an optimizer given to it has precedence."""
        if self.optimizer is None:
            model = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(model))
            others = [p for name, p in model.named_parameters() if name not in decayed]
            options = {
                "lr": self.args.learning_rate,
                "weight_decay": self.args.weight_decay,
                "param_groups": [{"params": others, "weight_decay": 0.0}],
            }
            self.optimizer = self.optimizer_type(model, **{**options, **self.optimizer_options})
            self.optimizer.grad_scaler = self.accelerator.scaler  # Trainer unscales, then clips
        return self.optimizer
