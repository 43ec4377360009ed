"""One preconditioned layer as a step sees it: its capture, its curvature, its matrix."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fop.capture import Recorder, factor_dtype
from fop.costs import Work, refresh_cost
from fop.curvature import Curvature
from fop.curvature.base import CurvatureState, PrefixedState
from fop.layers import Layer
from fop.scaling import LossScale, Number, half_difference
from fop.settings import Settings
from fop.slices import ParameterSlice

State = MutableMapping[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Block:
    """One preconditioned layer."""

    name: str
    module_name: str
    capture: Recorder
    curvature: Curvature

    @property
    def ready(self) -> bool:
        """Whether there is curvature that fits the layer as it is trained at present.

        On every rank, also on those that don't keep the curvature themselves.
        """
        capture = self.capture
        if capture.disabled:
            return False
        return not capture.plan.curvature or capture.curvature_shape == capture.shape

    def state_in(self, state: State) -> CurvatureState:
        """The curvature's part of the optimizer's state; empty where there is none."""
        own, prefix = state.get(self.weight, {}), self.layer.state_prefix
        return PrefixedState(own, prefix) if prefix else own

    @property
    def keys(self) -> list[str]:
        """Names of what the curvature keeps in the state of the weight."""
        return [self.layer.state_prefix + key for key in self.curvature.keys]

    @property
    def layer(self) -> Layer:
        return self.capture.adapter

    @property
    def shape(self) -> tuple[int, int]:
        return self.capture.shape

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Groups, rows and columns of the layer's matrix, as it may be: its bias may be frozen."""
        return [(self.layer.groups, *shape) for shape in self.capture.shapes]

    def refresh_cost(self, settings: Settings) -> float:
        rows, columns = self.shape
        widest = settings.max_factor_size
        diagonal_columns = self.layer.indexed or columns > widest
        return refresh_cost(Work(rows, columns, self.layer.groups, rows > widest, diagonal_columns))

    @property
    def weight(self) -> nn.Parameter:
        return self.capture.weight

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weight and, where it is trained, the bias."""
        bias = self.capture.bias
        return [self.weight] if bias is None else [self.weight, bias]

    @property
    def slices(self) -> list[ParameterSlice]:
        """What the layer has of `parameters`.

        Other layers may have the rest, as in the packed projections of nn.MultiheadAttention.
        """
        weight, bias = self.capture.weight_slice, self.capture.bias_slice
        return [weight] if bias is None else [weight, bias]

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of tensors shaped like `parameters`, the views that belong to this layer."""
        return [part.of(tensor) for part, tensor in zip(self.slices, tensors, strict=True)]

    def gradients(self, gradients: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """The layer's parts of the ordinary gradient; zeros for a bias without one."""
        found = [gradients.get(p, torch.zeros_like(p)) for p in self.parameters[1:]]
        return self.parts([gradients[self.weight], *found])

    def matrix(self, parts: Sequence[Tensor]) -> Tensor:
        """The layer's matrix of such parts, in the precision of the curvature."""
        dtype = factor_dtype(self.weight.dtype)
        return self.layer.to_matrix(*_pair([part.to(dtype) for part in parts]))

    def rescaling(self, loss_scale: LossScale | None) -> Tensor:
        """What brings what was captured to the scale of the gradient that a step uses."""
        ratio = self.capture.gradient_ratio()
        if loss_scale is None or loss_scale.inverse is None:
            return ratio
        return ratio * loss_scale.inverse.to(ratio)

    def difference(
        self,
        average: Tensor,
        signed: Sequence[Tensor] | None,
        examples: tuple[Number, Number],
        rescale: Tensor | None,
    ) -> Tensor | None:
        """g1 - g2 on the scale of the gradient; None if it is known that one half is empty."""
        if signed is None:
            return None
        return half_difference(average, self.matrix(signed), *examples, rescale)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The layer's matrix as parts of its trained parameters."""
        return self.layer.from_matrix(matrix, self.capture.weight_slice, self.capture.bias_slice)

    def write(self, parts: Sequence[Tensor], updates: dict[Tensor, Tensor]) -> None:
        """Enter the layer's parts into the updates of its parameters, all rows of them."""
        for own, part in zip(self.slices, parts, strict=True):
            parameter = own.parameter
            if part.shape == parameter.shape:
                updates[parameter] = part.to(parameter.dtype)
            else:
                if parameter not in updates:
                    updates[parameter] = torch.zeros(
                        parameter.shape, dtype=parameter.dtype, device=parameter.device
                    )
                own.of(updates[parameter]).copy_(part)


def _pair(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    return tensors[0], tensors[1] if len(tensors) > 1 else None
