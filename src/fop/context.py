"""What all phases of one step have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fop.distributed import Ranks
from fop.layer import Layer, State
from fop.messages import Messages
from fop.projection import Coefficients
from fop.scaling import LossScale
from fop.settings import Settings

Options = Mapping[Any, Mapping[str, Any]]  # a parameter's group


@dataclass(frozen=True)
class Context:
    settings: Settings
    ranks: Ranks
    messages: Messages
    number: int  # of the step, counted from 1
    options: Options
    state: State
    loss_scale: LossScale | None
    last: Mapping[Layer, tuple[Coefficients, int]]  # scalars of the last step, by their place there
