"""How the four projections of nn.MultiheadAttention are captured.

The module calls no submodule: it hands its weights to F.multi_head_attention_forward. The way in is
torch's protocol for tensor subclasses, so nothing is patched and nothing outlives a call:

1. A forward pre-hook marks the query: a view of a subclass that knows the call it belongs to.
2. F.multi_head_attention_forward asks the mark, which starts it anew with plain inputs and with
   marks in place of the query's, key's and value's weights.
3. F.linear asks the marks too. Each in-projection is computed as torch would, passed through
   `TrackedCall`, and marked, so that the mark travels with the data up to the F.linear of the
   output's weight. What is returned is plain.

All else (masks, dropout, the attention itself) is torch's own code.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from fop.capture import CapturePlan, LayerCapture
from fop.hooks import TrackedCall, WatchingHook, fit, in_transform, wanted
from fop.layers import (
    IN_ROLES,
    ROLES,
    ProjectionLayer,
    Role,
    attention_parameters,
    has_own_forward,
)

Projections = Mapping[Role, tuple[ProjectionLayer, weakref.ref[LayerCapture]]]

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


class _Marked(Tensor):
    """A tensor on its way through a call of attention; what is computed from it is marked too."""

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
        """What torch computes; marked, but without its call yet."""
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _answer(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` is to return for arguments of which some are marked."""
    call = next(tensor.call for tensor in _marked_in((*args, *kwargs.values())))
    if func is F.multi_head_attention_forward:
        return call.attend(*args, **kwargs)
    if func is F.linear:
        return call.project(*args, **kwargs)
    result = _Marked.unchanged(func, types, args, kwargs)
    for tensor in _marked_in((result,)):
        tensor.call = call
    return result


def _marked_in(values: Iterable[Any]) -> Iterable[_Marked]:
    for value in values:
        if isinstance(value, _Marked):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _marked_in(value)


def _plain(tensor: Any) -> Any:
    return tensor.as_subclass(Tensor) if isinstance(tensor, _Marked) else tensor


class _Call:
    """One call of attention. Of its tensors it keeps only weights, so no cycle holds a graph."""

    def __init__(self, tracked: Projections, *, batch_first: bool) -> None:
        self._tracked = tracked
        self._batch_first = batch_first
        self._weights: dict[Role, Tensor] = {}
        self._biases: dict[Role, Tensor | None] = {}
        self._packed: tuple[Tensor, Tensor | None] | None = None
        # Projections that one product gives, by the first of them; those not asked for yet.
        self._together: dict[Role, tuple[Role, ...]] = {}
        self._products: dict[Role, Tensor] = {}
        self._examples = 1

    def mark(self, tensor: Tensor) -> _Marked:
        marked = tensor.as_subclass(_Marked)
        marked.call = self
        return marked

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
            self._packed = (arguments["in_proj_weight"], bias)
            weights = arguments["in_proj_weight"].chunk(3)
            if key is value and query.dim() == 3:  # as torch does; the last bits depend on it
                self._together = {"key": ("key", "value")}
                if query is key:
                    self._together = {"query": IN_ROLES}
        self._weights = dict(zip(ROLES, (*weights, arguments["out_proj_weight"]), strict=True))
        self._biases = dict(zip(ROLES, (*biases, arguments["out_proj_bias"]), strict=True))
        self._examples = query.shape[1] if query.dim() == 3 else 1
        for name, role in zip(names, IN_ROLES, strict=True):
            arguments[name] = self.mark(self._weights[role])
            arguments[name].role = role
        arguments["use_separate_proj_weight"] = True
        output, attention = F.multi_head_attention_forward(**arguments)
        return _plain(output), _plain(attention)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear of a projection: x [positions, examples, i], or [positions * examples, E]."""
        x = _plain(x)
        if isinstance(weight, _Marked) and weight.role is not None:
            role = weight.role
            output = self._track(role, x, self._in_product(role, x))
            return self.mark(output)
        if weight is not self._weights.get("out_proj"):
            return self.mark(F.linear(x, _plain(weight), _plain(bias)))
        output, sizes = F.linear(x, weight, bias), (-1, self._examples)
        if "out_proj" not in self._tracked:
            return output
        tracked = self._track("out_proj", x.unflatten(0, sizes), output.unflatten(0, sizes))
        return tracked.flatten(0, 1)

    def _in_product(self, role: Role, x: Tensor) -> Tensor:
        if role in self._products:
            return self._products.pop(role)
        roles = self._together.get(role, (role,))
        if len(roles) == 1:
            return F.linear(x, self._weights[role], self._biases[role])
        assert self._packed is not None
        weight, bias = self._packed
        if roles != IN_ROLES:
            rest = weight.shape[0] // 3
            weight, bias = weight[rest:], None if bias is None else bias[rest:]
        stacked = F.linear(x, weight, bias).unflatten(-1, (len(roles), -1))
        self._products.update(zip(roles, stacked.movedim(-2, 0).contiguous(), strict=True))
        return self._products.pop(role)

    def _track(self, role: Role, x: Tensor, output: Tensor) -> Tensor:
        """The output, with a backward that is captured; x and output [positions, examples, ...]."""
        if role not in self._tracked or in_transform(output):
            return output
        projection, reference = self._tracked[role]
        capture, x = reference(), x.transpose(0, 1)
        if capture is None:
            return output
        examples, sequence_first = capture.plan.examples, not self._batch_first
        layout = examples.declared(projection, x, sequence_first=sequence_first)
        layer = fit(capture, projection, layout)
        if layer is None:
            return output
        parameters = (self._weights[role], self._biases[role])
        tracked: Tensor = TrackedCall.apply(  # type: ignore[no-untyped-call]
            x, *parameters, layer, True, reference, (output.transpose(0, 1),)
        )
        return tracked.transpose(0, 1)


class AttentionHook(WatchingHook):
    """The forward pre-hook on nn.MultiheadAttention; like `LayerHook` it is inert in a copy."""

    def __init__(
        self, name: str = "", captures: Mapping[LayerCapture, ProjectionLayer] | None = None
    ) -> None:
        self._name = name
        self._projections: Projections = {
            layer.role: (layer, weakref.ref(capture)) for capture, layer in (captures or {}).items()
        }
        self._mark = torch.compiler.disable(_mark_query) if captures else None
        if captures and _Marked.answer is None:
            _Marked.answer = staticmethod(torch.compiler.disable(_answer))

    @property
    def plan(self) -> CapturePlan | None:
        captures = (capture() for _, capture in self._projections.values())
        return next((capture.plan for capture in captures if capture is not None), None)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._mark is None:
            return None
        if not torch.is_grad_enabled():
            if not torch.compiler.is_compiling():
                _note_layouts(self._projections, module, args, kwargs)
            return None
        marked: tuple[tuple[Any, ...], dict[str, Any]] | None = self._mark(
            self._name, self._projections, module, args, kwargs
        )
        return marked

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionHook:
        return AttentionHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return AttentionHook, ()


def _note_layouts(
    projections: Projections, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Of a call that reentrant activation checkpointing runs again during backward."""
    inputs = {**dict(zip(IN_ROLES, args, strict=False)), **kwargs}
    for role, (layer, reference) in projections.items():
        capture, x = reference(), inputs.get("query" if role == "out_proj" else role)
        if capture is None or capture.plan.examples.current is None or x is None or x.dim() != 3:
            continue
        batch_first = bool(module.batch_first)
        x = x if batch_first else x.transpose(0, 1)
        capture.plan.examples.declared(layer, x, sequence_first=not batch_first)


def _mark_query(
    name: str,
    projections: Projections,
    module: nn.MultiheadAttention,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    inputs = {**dict(zip(IN_ROLES, args, strict=False)), **kwargs}
    if in_transform() or any(role not in inputs for role in IN_ROLES):
        return None  # in the latter case the call is about to fail
    query = inputs["query"]
    if type(query) not in (Tensor, nn.Parameter) or query.is_nested:
        return None
    tracked = {
        role: projection
        for role, projection in projections.items()
        if wanted(projection[1], attention_parameters(module, role)[0], inputs.get(role, query))
    }
    if not tracked or in_transform(*(inputs[role] for role in IN_ROLES)):
        return None
    if has_own_forward(module):
        for _, reference in tracked.values():
            capture = reference()
            if capture is not None:
                capture.disable("its attention has a forward of its own")
        return None
    _refuse_backward_hooks(name, module)
    marked = _Call(tracked, batch_first=module.batch_first).mark(query)
    return (
        tuple(marked if value is query else value for value in args),
        {key: marked if value is query else value for key, value in kwargs.items()},
    )


def _refuse_backward_hooks(name: str, module: nn.Module) -> None:
    """Torch passes a module's arguments through a function that takes the mark off."""
    own = module._is_full_backward_hook and module._backward_hooks
    everywhere = torch_module._global_is_full_backward_hook and torch_module._global_backward_hooks
    before = module._backward_pre_hooks or torch_module._global_backward_pre_hooks
    if own or everywhere or before:
        raise RuntimeError(
            f"attention {name!r} has a full backward hook, with which its projections can't be "
            "captured: put the hook on the module around it, or pass "
            f"skip=[{name!r}] to train it by the fallback rule"
        )


def watch_attention(
    module: nn.Module, name: str, captures: Mapping[LayerCapture, ProjectionLayer]
) -> RemovableHandle:
    """Start watching the calls of nn.MultiheadAttention; the handle stops it."""
    return module.register_forward_pre_hook(AttentionHook(name, captures), with_kwargs=True)
