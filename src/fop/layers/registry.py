"""Which adapter serves which type of module: torch's types, and those that users register."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager

from torch import nn

from fop.layers.base import LayerAdapter
from fop.layers.conv import ConvAdapter, ConvTransposeAdapter
from fop.layers.embedding import EmbeddingAdapter
from fop.layers.linear import LinearAdapter
from fop.layers.norm import BatchNormAdapter, GroupNormAdapter, LayerNormAdapter, NormAdapter

ADAPTERS: dict[type[nn.Module], type[LayerAdapter]] = {
    nn.Linear: LinearAdapter,
    nn.Conv1d: ConvAdapter,
    nn.Conv2d: ConvAdapter,
    nn.Conv3d: ConvAdapter,
    nn.ConvTranspose1d: ConvTransposeAdapter,
    nn.ConvTranspose2d: ConvTransposeAdapter,
    nn.ConvTranspose3d: ConvTransposeAdapter,
    nn.Embedding: EmbeddingAdapter,
    nn.LayerNorm: LayerNormAdapter,
    nn.RMSNorm: LayerNormAdapter,
    nn.GroupNorm: GroupNormAdapter,
    nn.BatchNorm1d: BatchNormAdapter,
    nn.BatchNorm2d: BatchNormAdapter,
    nn.BatchNorm3d: BatchNormAdapter,
}


class Registration(AbstractContextManager["Registration"]):
    """Ends with `remove()`, or with the `with` statement that it is used in."""

    def __init__(self, module_type: type[nn.Module], adapter_type: type[LayerAdapter]) -> None:
        self._module_type, self._adapter_type = module_type, adapter_type
        self._before = ADAPTERS.get(module_type)
        ADAPTERS[module_type] = adapter_type

    def remove(self) -> None:
        """Back to what was registered before; optimizers that are built keep their adapters."""
        if ADAPTERS.get(self._module_type) is not self._adapter_type:
            return  # replaced, or removed
        if self._before is None:
            del ADAPTERS[self._module_type]
        else:
            ADAPTERS[self._module_type] = self._before

    def __exit__(self, *error: object) -> None:
        self.remove()


def register_layer(
    module_type: type[nn.Module], adapter_type: type[LayerAdapter], *, override: bool = False
) -> Registration:
    """Precondition modules of a type by this adapter, in optimizers that are built from now on.

    Subclasses of the type that inherit its `forward` are served too. A type that has an adapter
    keeps it unless `override` is True. `remove()` of what is returned undoes the registration, as
    with torch's hooks. See `fop.LayerAdapter` for how to write an adapter, and
    `fop.testing.check_layer` for how to test it.
    """
    if not _is_class(module_type, nn.Module):
        raise TypeError(f"module_type must be a class of torch.nn.Module, got {module_type!r}")
    if not _is_class(adapter_type, LayerAdapter):
        raise TypeError(f"adapter_type must be a class of fop.LayerAdapter, got {adapter_type!r}")
    if inspect.isabstract(adapter_type):
        missing = ", ".join(sorted(adapter_type.__abstractmethods__))
        raise TypeError(f"{adapter_type.__name__} lacks what every adapter needs: {missing}")
    if adapter_type.autograd_backward and not issubclass(adapter_type, NormAdapter):
        raise TypeError(
            f"{adapter_type.__name__} has autograd_backward=True, which is for adapters of "
            "normalisation layers: subclass fop.layers.NormAdapter, or leave it out"
        )
    if issubclass(module_type, nn.MultiheadAttention):
        raise ValueError(
            f"{module_type.__name__} can't have an adapter: nn.MultiheadAttention is four layers, "
            "which are found without one"
        )
    before = ADAPTERS.get(module_type)
    if before is not None and not override:
        raise ValueError(
            f"{module_type.__name__} has the adapter {before.__name__} already: pass override=True "
            f"to use {adapter_type.__name__} instead, or remove() the earlier registration"
        )
    return Registration(module_type, adapter_type)


def _is_class(value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def adapter_for(module: nn.Module, *, norms: bool = False) -> LayerAdapter | None:
    """The adapter of a module, or None where its type has none.

    A subclass counts only if it inherits its base's forward. What else may change what a module
    computes is found by its calls (`fop/capture/verify.py`).
    """
    known = supported_type(type(module))
    if known is None or type(module).forward is not known.forward:
        return None
    adapter_type = ADAPTERS[known]
    if issubclass(adapter_type, NormAdapter):  # on request, and some have no parameters
        norms = norms and module._parameters.get("weight") is not None
        return adapter_type(module) if norms else None
    return adapter_type(module)


def supported_type(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The nearest base of a module's class, or itself, that there is an adapter for."""
    return next((base for base in kind.__mro__ if base in ADAPTERS), None)
