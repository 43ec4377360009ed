"""All private API of torch that the library rests on: one function each, and why there is no other.

Everything here is looked up at its use or at import, so that a torch without it fails by name.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

# Those that run at every call or pass are torch's own, without a function of ours around them.

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running backward pass, -1 outside: autograd has no public name for it."""

at_end_of_pass: Callable[[Callable[[], None]], None]
at_end_of_pass = torch.autograd.Variable._execution_engine.queue_callback
"""Runs a call after the backward pass, and what was queued before: public hooks are per tensor."""

innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Of torch.func (vmap, grad, ...), None outside of them, which they say to nobody in public."""

version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How often a tensor was written to: autograd checks saved tensors by it, and keeps it private."""


def is_view(tensor: Tensor) -> bool:
    """Whether it is a view of another tensor, as DDP's gradients are of its buckets: not public."""
    return tensor._is_view()


def view_of(tensor: Tensor) -> Tensor | None:
    """What a tensor is a view of; torch tells C++ alone."""
    return tensor._base


def may_recompute_saved() -> bool:
    """Whether tensors are saved for backward by hooks, as activation checkpointing does.

    Such hooks can be set publicly, but not asked for. Torch before 2.8 can't tell: then True.
    """
    saving = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return saving is None or saving(True) is not None


def gradient_metadata(node: Any) -> Any:
    """Shape and dtype of each gradient that a node of the graph takes: nodes are opaque else."""
    return node._input_metadata


def forward_hooks(module: nn.Module) -> list[object]:
    """The hooks before and after its forward: they can be added and removed, but not listed."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether full backward hooks are around its calls: these can't be listed either."""
    own = module._is_full_backward_hook and module._backward_hooks
    everywhere = torch_module._global_is_full_backward_hook and torch_module._global_backward_hooks
    before = module._backward_pre_hooks or torch_module._global_backward_pre_hooks
    return bool(own or everywhere or before)


def compiled_from(model: nn.Module) -> nn.Module | None:
    """The module inside of what torch.compile returned, which has no accessor; None for others."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def load_hooks(optimizer: torch.optim.Optimizer) -> tuple[Iterable[Any], Iterable[Any]]:
    """The user's hooks before and after load_state_dict, for one that replaces torch's own."""
    before = optimizer._optimizer_load_state_dict_pre_hooks
    return before.values(), optimizer._optimizer_load_state_dict_post_hooks.values()


def timeout_of(group: Any) -> timedelta | None:
    """How long messages of a process group may take: given publicly, but not to be asked for."""
    for device in ("cuda", "cpu"):
        try:
            timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):  # no such backend, or one of others
            continue
        return timeout
    return None


def running_backwards() -> list[tuple[Any, Any]]:
    """What is differentiated by the backward passes that run now, and by which gradients.

    Innermost first; of all threads, as an accelerator's nodes run in one of their own. Autograd
    tells hooks nothing of where a pass began: this reads the arguments of the call that started it.
    """
    code = torch.autograd.graph._engine_run_backward.__code__
    frames = sys._current_frames()
    # That of this call would be a cycle, which keeps all frames and what is in them.
    del frames[threading.get_ident()]
    found = []
    for frame in (sys._getframe(1), *frames.values()):
        while frame is not None:
            if frame.f_code is code:
                found.append((frame.f_locals["t_outputs"], frame.f_locals["args"][0]))
            frame = frame.f_back  # type: ignore[assignment]
    return found


def saved_number(node: Any, name: str) -> Any:
    """A number that a node keeps for its backward; unlike tensors, it is there afterwards too."""
    return getattr(node, f"_saved_{name}")


def age_of(node: Any) -> int:
    """A number that is higher for nodes made later; only the profiler makes use of it."""
    number: int = node._sequence_nr()
    return number
