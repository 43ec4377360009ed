"""Recorded forward passes, run again at displaced parameters, without a trace.

No hook of the user's fires, buffers (running averages) are put back, random numbers are the same in
every run and the generators' states are left alone, autocast and compilation are off. Parameters
are displaced in place, which works for shards too, and get their very values back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fop.capture import Forward

# A displacement: one tensor for each of the parameters that may move.
Direction = Sequence[Tensor]

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class Replay:
    """Runs the forward passes of one step; `values` are the parameters, as memory to write to."""

    def __init__(
        self, model: nn.Module, forwards: Sequence[Forward], values: Sequence[Tensor], seed: int
    ) -> None:
        self._model, self._forwards, self._seed = model, forwards, seed
        self._values = list(values)
        self._before = [value.detach().clone() for value in values]

    def outputs(self, *terms: tuple[float, Direction]) -> list[Tensor]:
        """Of each forward pass, with the parameters displaced by the sum of these terms."""
        try:
            for factor, direction in terms:
                torch._foreach_add_(self._values, list(direction), alpha=factor)
            with _without_trace(self._model, self._seed):
                found = [self._run(forward) for forward in self._forwards]
        finally:
            if terms:
                torch._foreach_copy_(self._values, self._before)
        return found

    def _run(self, forward: Forward) -> Tensor:
        inputs = forward.inputs
        output = inputs.find(self._model(*inputs.args, **inputs.kwargs))
        for module in self._model.modules():
            reshard = getattr(module, "reshard", None)  # FSDP2's root keeps what it has gathered
            if reshard is not None and getattr(module, "unshard", None) is not None:
                reshard()
        return output.detach()


@contextmanager
def _without_trace(model: nn.Module, seed: int) -> Iterator[None]:
    devices = {parameter.device for parameter in model.parameters()}
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    buffers = list(model.buffers())
    before = [buffer.clone() for buffer in buffers]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {device.type for device in devices}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        kind = accelerators[0].type if accelerators else "cuda"
        stack.enter_context(torch.random.fork_rng(accelerators, device_type=kind))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_without_hooks(model))
        torch.manual_seed(seed)
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Only those of torch itself run: FSDP gathers parameters in them, weight_norm computes one."""
    changed: list[tuple[nn.Module, str, Any]] = []
    everywhere = [
        (hooks, dict(hooks)) for hooks in (getattr(torch_module, n) for n in GLOBAL_HOOKS)
    ]
    try:
        for module in model.modules():
            for name in HOOKS:
                hooks = getattr(module, name)
                if hooks:
                    changed.append((module, name, hooks))
                    kept = {key: hook for key, hook in hooks.items() if _is_of_torch(hook)}
                    setattr(module, name, OrderedDict(kept))
        for hooks, _ in everywhere:
            hooks.clear()
        yield
    finally:
        for module, name, hooks in changed:
            setattr(module, name, hooks)
        for hooks, entries in everywhere:
            hooks.update(entries)


def _is_of_torch(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.")
