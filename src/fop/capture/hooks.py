"""Hooks that do nothing in copies of a model, and which optimizer has put them there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils.hooks import RemovableHandle

from fop._torch import forward_hooks, innermost_transform

if TYPE_CHECKING:
    from fop.capture.plan import CapturePlan


class InertHook:
    """Works for an object while that lives; a copy, as in a deep-copied or pickled model, is inert.

    What it does, `run`, is a Python side effect, which a compiled graph can't hold: torch.compile
    has to break its graph there. (That is left to construction, because it makes torch import its
    compiler.)
    """

    def __init__(self, owner: object | None = None) -> None:
        self._owner: Any = None if owner is None else weakref.ref(owner)
        self._run = None if owner is None else torch.compiler.disable(type(self).run)

    @property
    def plan(self) -> CapturePlan | None:
        """Of the optimizer that it records a layer for, while that is there."""
        owner = None if self._owner is None else self._owner()
        plan: CapturePlan | None = getattr(owner, "plan", None)
        return plan

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def hooked_by(module: nn.Module) -> list[CapturePlan]:
    """The plans of the living optimizers that record this module."""
    hooks = (hook for hook in forward_hooks(module) if isinstance(hook, InertHook))
    return [hook.plan for hook in hooks if hook.plan is not None]


def take_over(modules: Iterable[nn.Module]) -> None:
    """Retire the optimizers that record these modules already: the newest one wins."""
    for module in modules:
        for plan in hooked_by(module):
            plan.retire()


def in_transform(*tensors: Tensor) -> bool:
    """Whether torch.func's transforms are at work, or forward-mode differentiation of a tensor.

    No gradient of the former reaches p.grad, and neither can go through `RecordedCall`.
    """
    if innermost_transform() is not None:
        return True
    return any(unpack_dual(tensor).tangent is not None for tensor in tensors)


class RemovableHandles:
    """Handles of hooks that are placed one after the other, to be removed together."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
