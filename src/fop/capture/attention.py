"""How the four projections of nn.MultiheadAttention are recorded.

The module calls no submodule: it hands its weights to F.multi_head_attention_forward. The way in is
torch's protocol for tensor subclasses, so nothing is patched and nothing outlives a call:

1. A forward pre-hook tags the query: a view of a subclass that knows the call it belongs to.
2. F.multi_head_attention_forward asks the tag, which starts it again with plain inputs and with
   tags in place of the query's, key's and value's weights.
3. F.linear asks the tags too. Each in-projection is computed as torch would, passed through
   `RecordedCall`, and tagged, so that the tag travels with the data up to the F.linear of the
   output's weight. What is returned is plain.

All else (masks, dropout, the attention itself) is torch's own code.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fop._torch import has_backward_hooks
from fop.capture.autograd import record_call
from fop.capture.hooks import InertHook, in_transform
from fop.capture.recorder import Recorder
from fop.layers import (
    IN_ROLES,
    ROLES,
    ProjectionAdapter,
    Role,
    attention_parameters,
    has_own_forward,
)

Projections = Mapping[Role, tuple[ProjectionAdapter, weakref.ref[Recorder]]]

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


class _Tagged(Tensor):
    """A tensor on its way through a call of attention; what is computed from it is tagged too."""

    call: _Call
    role: Role | None = None  # of a weight: the projection it stands for
    # `_answer`, hidden from torch.compile, whose graphs can't hold such tensors. Set by the first
    # hook, because hiding makes torch import its compiler.
    answer: ClassVar[Callable[..., Any] | None] = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert cls.answer is not None
        return cls.answer(func, types, args, kwargs or {})

    @classmethod
    def unchanged(cls, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch computes; tagged, but without its call yet."""
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _answer(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` is to return for arguments of which some are tagged."""
    call = next(tensor.call for tensor in _tagged_in((*args, *kwargs.values())))
    if func is F.multi_head_attention_forward:
        return call.attend(*args, **kwargs)
    if func is F.linear:
        return call.project(*args, **kwargs)
    result = _Tagged.unchanged(func, types, args, kwargs)
    for tensor in _tagged_in((result,)):
        tensor.call = call
    return result


def _tagged_in(values: Iterable[Any]) -> Iterable[_Tagged]:
    for value in values:
        if isinstance(value, _Tagged):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tagged_in(value)


def _plain(tensor: Any) -> Any:
    return tensor.as_subclass(Tensor) if isinstance(tensor, _Tagged) else tensor


class _Call:
    """One call of attention. Of its tensors it keeps only weights, so no cycle holds a graph."""

    def __init__(self, recorded: Projections, *, batch_first: bool) -> None:
        self._recorded = recorded
        self._batch_first = batch_first
        self._weights: dict[Role, Tensor] = {}
        self._biases: dict[Role, Tensor | None] = {}
        # Projections that one product gives, by the first of them: with its weight and its bias.
        self._together: dict[Role, tuple[tuple[Role, ...], Tensor, Tensor | None]] = {}
        self._products: dict[Role, Tensor] = {}  # of those that were not asked for yet
        self._examples = 1

    def tag(self, tensor: Tensor) -> _Tagged:
        tagged = tensor.as_subclass(_Tagged)
        tagged.call = self
        return tagged

    def attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """F.multi_head_attention_forward, asking `project` for every projection."""
        arguments = _SIGNATURE.bind(*args, **kwargs).arguments
        plain = {id(arguments[role]): _plain(arguments[role]) for role in IN_ROLES}
        arguments |= {role: plain[id(arguments[role])] for role in IN_ROLES}  # the same stays so
        query, key, value = (arguments[role] for role in IN_ROLES)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        bias = arguments["in_proj_bias"]
        biases = (None, None, None) if bias is None else bias.chunk(3)
        if arguments.get("use_separate_proj_weight", False):
            weights = tuple(arguments[name] for name in names)
        else:
            packed = arguments["in_proj_weight"]
            weights = packed.chunk(3)
            if key is value and query.dim() == 3:  # as torch does; the last bits depend on it
                roles, rows = (IN_ROLES, 0) if query is key else (IN_ROLES[1:], len(weights[0]))
                stacked = packed[rows:], None if bias is None else bias[rows:]
                self._together = {roles[0]: (roles, *stacked)}
        self._weights = dict(zip(ROLES, (*weights, arguments["out_proj_weight"]), strict=True))
        self._biases = dict(zip(ROLES, (*biases, arguments["out_proj_bias"]), strict=True))
        self._examples = query.shape[1] if query.dim() == 3 else 1
        for name, role in zip(names, IN_ROLES, strict=True):
            arguments[name] = self.tag(self._weights[role])
            arguments[name].role = role
        arguments["use_separate_proj_weight"] = True
        output, attention = F.multi_head_attention_forward(**arguments)
        return _plain(output), _plain(attention)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear of a projection: x [positions, examples, i], or [positions * examples, E]."""
        x = _plain(x)
        if isinstance(weight, _Tagged) and weight.role is not None:
            role = weight.role
            return self.tag(self._record(role, x, self._in_product(role, x)))
        if weight is not self._weights.get("out_proj"):
            return self.tag(F.linear(x, _plain(weight), _plain(bias)))
        output, sizes = F.linear(x, weight, bias), (-1, self._examples)
        if "out_proj" not in self._recorded:
            return output
        recorded = self._record("out_proj", x.unflatten(0, sizes), output.unflatten(0, sizes))
        return recorded.flatten(0, 1)

    def _in_product(self, role: Role, x: Tensor) -> Tensor:
        if role in self._products:
            return self._products.pop(role)
        if role not in self._together:
            return F.linear(x, self._weights[role], self._biases[role])
        roles, weight, bias = self._together[role]
        stacked = F.linear(x, weight, bias).unflatten(-1, (len(roles), -1))
        self._products.update(zip(roles, stacked.movedim(-2, 0).contiguous(), strict=True))
        return self._products.pop(role)

    def _record(self, role: Role, x: Tensor, output: Tensor) -> Tensor:
        """The output with a recorded backward; x and output [positions, examples, ...]."""
        if role not in self._recorded or in_transform(output):
            return output
        adapter, reference = self._recorded[role]
        recorder = reference()
        if recorder is None:
            return output
        layout = recorder.plan.examples.layout(
            adapter, adapter, x.transpose(0, 1), sequence_first=not self._batch_first
        )
        # Whatever the module is given, torch computes with positions first.
        layout = replace(layout, sequence_first=True)
        parameters = self._weights[role], self._biases[role]
        recorded = record_call(recorder, adapter, layout, x, output, parameters)
        return output if recorded is None else recorded


class AttentionHook(InertHook):
    """The forward pre-hook on nn.MultiheadAttention, for the recorders of its projections."""

    def __init__(
        self, name: str = "", recorders: Mapping[Recorder, ProjectionAdapter] | None = None
    ) -> None:
        recorders = recorders or {}
        super().__init__(next(iter(recorders), None))
        self._name = name
        self._projections: Projections = {
            adapter.role: (adapter, weakref.ref(recorder))
            for recorder, adapter in recorders.items()
        }
        if recorders and _Tagged.answer is None:
            _Tagged.answer = staticmethod(torch.compiler.disable(_answer))

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._run is None or (torch.compiler.is_compiling() and not torch.is_grad_enabled()):
            return None
        tagged: tuple[tuple[Any, ...], dict[str, Any]] | None
        tagged = self._run(self, module, args, kwargs)
        return tagged

    def run(
        self, module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inputs = {**dict(zip(IN_ROLES, args, strict=False)), **kwargs}
        if not torch.is_grad_enabled():
            self._note_layouts(inputs, batch_first=bool(module.batch_first))
            return None
        if in_transform() or any(role not in inputs for role in IN_ROLES):
            return None  # in the latter case the call is about to fail
        query = inputs["query"]
        if type(query) not in (Tensor, nn.Parameter) or query.is_nested:
            return None
        wanting: dict[Role, Recorder] = {}
        for role, (_, reference) in self._projections.items():
            recorder, weight = reference(), attention_parameters(module, role)[0]
            if recorder is not None and recorder.wants_call(weight, inputs.get(role, query)):
                wanting[role] = recorder
        if not wanting or in_transform(*(inputs[role] for role in IN_ROLES)):
            return None
        if has_own_forward(module):
            for recorder in wanting.values():
                recorder.disable("its attention has a forward of its own")
            return None
        if has_backward_hooks(module):  # torch passes arguments through a function that untags them
            raise RuntimeError(
                f"attention {self._name!r} has a full backward hook, with which its projections "
                "can't be recorded: put the hook on the module around it, or pass "
                f"skip=[{self._name!r}] to train it with the fallback optimizer"
            )
        recorded = {role: self._projections[role] for role in wanting}
        tagged = _Call(recorded, batch_first=module.batch_first).tag(query)
        return (
            tuple(tagged if value is query else value for value in args),
            {key: tagged if value is query else value for key, value in kwargs.items()},
        )

    def _note_layouts(self, inputs: Mapping[str, Any], *, batch_first: bool) -> None:
        """Of a call that reentrant activation checkpointing runs again during backward."""
        for role, (adapter, reference) in self._projections.items():
            recorder, x = reference(), inputs.get("query" if role == "out_proj" else role)
            if recorder is None or recorder.plan.examples.current is None:
                continue
            if x is not None and x.dim() == 3:
                x = x if batch_first else x.transpose(0, 1)
                examples, sequence_first = recorder.plan.examples, not batch_first
                examples.layout(adapter, adapter, x, sequence_first=sequence_first)


def hook_attention(
    module: nn.Module, name: str, recorders: Mapping[Recorder, ProjectionAdapter]
) -> RemovableHandle:
    """Start to record the calls of nn.MultiheadAttention; the handle stops it."""
    return module.register_forward_pre_hook(AttentionHook(name, recorders), with_kwargs=True)
