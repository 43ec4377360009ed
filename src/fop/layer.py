"""One preconditioned layer as a step sees it: its slices of parameters, its statistics, its matrix.

Layers of one shape are stacked: their matrices [groups, o, i] one after the other along dimension
0, [L groups, o, i], so that an accelerator is asked once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fop.capture import Recorder, Statistics, factor_dtype
from fop.costs import Work
from fop.curvature.base import Curvature, CurvatureState, PrefixedState
from fop.layers import LayerAdapter
from fop.linalg import on_host
from fop.slices import ParameterSlice

State = MutableMapping[Tensor, dict[str, Any]]
Parts = Sequence[Tensor]  # of a layer: one tensor for each of its slices


class Layer:
    def __init__(
        self, name: str, module_name: str, recorder: Recorder, curvature: Curvature
    ) -> None:
        self.name = name
        self.module_name = module_name
        self.recorder = recorder
        self.curvature = curvature
        self.weight = recorder.weight
        self.sample = recorder.sample()  # what it brings to the present step

    @property
    def adapter(self) -> LayerAdapter:
        return self.recorder.adapter

    @property
    def slices(self) -> list[ParameterSlice]:
        """Of the weight and, where it is trained, the bias."""
        return self.recorder.sample().slices

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [part.parameter for part in self.slices]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix of one group, as trained at present."""
        return self.recorder.shape

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Groups, rows and columns of the layer's matrix, as it may be: its bias may be frozen."""
        return [(self.adapter.groups, *shape) for shape in self.recorder.shapes]

    @property
    def ready(self) -> bool:
        """Whether there is curvature that fits the layer as it is trained at present.

        On every rank, also on those that don't keep the curvature themselves.
        """
        recorder = self.recorder
        fits = not recorder.plan.curvature or recorder.curvature_shape == recorder.shape
        return fits and not recorder.disabled

    def state_in(self, state: State) -> CurvatureState:
        """The curvature's part of the optimizer's state; empty where there is none."""
        own, prefix = state.get(self.weight, {}), self.adapter.state_prefix
        return PrefixedState(own, prefix) if prefix else own

    def let_go(self) -> None:
        """After a step: the sample's tensors belong to the gradients, and go with them."""
        self.sample.difference, self.sample.statistics = None, Statistics()

    def drop_moments(self) -> None:
        """A step has used them up."""
        self.recorder.drop_moments()
        self.sample.statistics = Statistics()

    @property
    def keys(self) -> list[str]:
        """Names of what the curvature keeps in the state of the weight."""
        return [self.adapter.state_prefix + key for key in self.curvature.entries]

    @property
    def work(self) -> Work:
        """For the cost model."""
        forms, (rows, columns) = self.recorder.forms, self.shape
        diagonal = forms.outputs.diagonal, forms.inputs.diagonal
        return Work(rows, columns, self.adapter.groups, *diagonal)


def stacks(
    layers: Iterable[Layer], state: State, look: Callable[[Layer], object]
) -> list[list[Layer]]:
    """Layers whose directions are computed together: those that look alike, on an accelerator.

    A CPU, which is busy with one, would gain nothing, and need more memory. `look` is what else
    must be equal.
    """
    alike: dict[object, list[Layer]] = {}
    for layer in layers:
        key: object = id(layer)
        if not on_host(layer.weight):
            adapter, weight, own = layer.adapter, layer.weight, layer.state_in(state)
            entries = tuple(
                (name, own[name].shape[1:] if isinstance(own[name], Tensor) else None)
                for name in layer.curvature.entries
                if name in own
            )
            sample = layer.sample
            matrix = (type(adapter).to_matrix, adapter.groups, sample.shape, len(sample.slices))
            key = (layer.curvature, entries, matrix, weight.dtype, weight.device, look(layer))
        alike.setdefault(key, []).append(layer)
    return list(alike.values())


def to_matrices(layers: Sequence[Layer], parts: Sequence[Parts]) -> Tensor:
    """The stacked matrices [L groups, o, i] of layers, in the precision of the curvature."""
    first = layers[0]
    dtype = factor_dtype(first.weight.dtype)
    pairs = [_pair(own) for own in parts]
    if len(layers) > 1 and first.adapter.homogeneous_bias and pairs[0][1] is not None:
        # All weights, all biases, and both together: three launches.
        weights = [
            layer.adapter.to_matrix(w, None) for layer, (w, _) in zip(layers, pairs, strict=True)
        ]
        biases = [b.reshape(len(w), -1, 1) for w, (_, b) in zip(weights, pairs, strict=True)]
        return torch.cat([torch.cat(weights).to(dtype), torch.cat(biases).to(dtype)], dim=2)
    matrices = [
        layer.adapter.to_matrix(w.to(dtype), None if b is None else b.to(dtype))
        for layer, (w, b) in zip(layers, pairs, strict=True)
    ]
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def from_matrices(
    layers: Sequence[Layer], matrices: Tensor
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The inverse: for each layer, tensors shaped like its slices; and the memory they are in."""
    first, count = layers[0], len(layers)
    like = [_pair([part.like for part in layer.sample.slices]) for layer in layers]
    if count > 1 and first.adapter.homogeneous_bias and like[0][1] is not None:
        # Apart, they are contiguous, which is what foreach takes in one launch.
        memory = [matrices[..., :-1].contiguous(), matrices[..., -1].contiguous()]
        pieces = [
            [*layer.adapter.from_matrix(w, weight, None), b.reshape(bias.shape)]
            for layer, (weight, bias), w, b in zip(
                layers, like, memory[0].chunk(count), memory[1].chunk(count), strict=True
            )
        ]
    else:
        memory = [matrices]
        pieces = [
            layer.adapter.from_matrix(matrix, *pair)
            for layer, pair, matrix in zip(layers, like, matrices.chunk(count), strict=True)
        ]
    used = {tensor.untyped_storage().data_ptr() for tensor in memory}
    parts = [part for own in pieces for part in own]
    viewed = all(part.untyped_storage().data_ptr() in used for part in parts)
    return pieces, memory if viewed else parts  # the adapter may have copied them


def _pair(both: Sequence[Any]) -> tuple[Any, Any]:
    return both[0], both[1] if len(both) > 1 else None
