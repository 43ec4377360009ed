"""The scale of a squared error, read from the graph of the loss inside a hook on the output.

From output and gradient alone it can't be told, as every s has its targets z - g / s. By the time
that the gradient has arrived at the output, autograd has freed the targets, but the graph and its
numbers are still there. It must lead from the loss to the output in one line: views, sums and
means, factors of the whole loss, one square, and a difference. Then

    L = s/2 |z - t|^2,   g = s (z - t),   so   s = |g|^2 / 2L

and the factors that the graph shows must agree with it. Where other terms are added to the loss,
those factors count alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fop._torch import age_of, gradient_metadata, running_backwards, saved_number

Edge = tuple[Any, int]  # a node, and which of its gradients

# Every entry goes on as it is; SAME may not change how many there are, PART may leave some out.
SAME = {"Alias", "Clone", "Permute", "Reshape", "Squeeze", "T", "Transpose", "ToCopy"}
SAME |= {"UnsafeView", "Unsqueeze", "View"}
PART = {"Index", "MaskedSelect", "Narrow", "Select", "Slice", "Split", "Unbind"}
# More nodes than a loss has, even with a penalty on every parameter.
MOST = 4000


@dataclass
class _Line:
    """What the way from the loss to the square says."""

    factor: float = 1.0
    factors_hidden: bool = False
    other_terms: bool = False
    squared: int = 0  # entries of the square
    kept: float = 1.0  # the share of them that the loss goes on with
    picked: bool = False


def squared_scale(z: Tensor, g: Tensor) -> Tensor | str:
    """s of a squared error, to be called in a hook on z with its gradient; or why there is none."""
    try:
        return _squared_scale(z, g)
    except Exception as error:
        # Private API of another torch; nothing depends on it.
        return f"the graph of the loss can't be read: {type(error).__name__}"


def _squared_scale(z: Tensor, g: Tensor) -> Tensor | str:
    end = get_gradient_edge(z)
    target: Edge = end.node, end.output_nr
    for outputs, gradients in running_backwards():
        for output, gradient in zip(outputs, gradients, strict=True):
            if not isinstance(output, Tensor) or output.numel() != 1:
                continue
            start = get_gradient_edge(output)
            leading = _leading(start.node, target)
            if leading is None:
                return "the graph of the loss is too large"
            if start.node in leading:
                if len(outputs) > 1:
                    return "several losses"
                line = _follow((start.node, start.output_nr), target, leading)
                return line if isinstance(line, str) else _scale(line, g, output, gradient)
    return "the loss is not found"


def _leading(start: Any, target: Edge) -> set[Any] | None:
    """The nodes below `start` that lead to the target."""
    oldest = age_of(target[0])
    leads: dict[Any, bool] = {}
    stack = [(start, False)]
    while stack:
        node, done = stack.pop()
        if done:
            leads[node] = any(
                (following, number) == target or leads.get(following, False)
                for following, number in node.next_functions
            )
        elif node not in leads and node != target[0]:
            leads[node] = False
            if len(leads) > MOST:
                return None
            # What is older than the output can't be made from it.
            if age_of(node) > oldest or not target[0].next_functions:
                stack.append((node, True))
                stack += [(following, False) for following, _ in node.next_functions if following]
    return {node for node, found in leads.items() if found}


def _follow(edge: Edge, target: Edge, leading: set[Any]) -> _Line | str:
    line = _Line()
    while edge != target:
        node = edge[0]
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        edges = [e for e in node.next_functions if e == target or e[0] in leading]
        after, before = _entries(edge), _entries(edges[0])
        if name == "Mul" and len(edges) == 2 and edges[0] == edges[1] and not line.squared:
            line.factor, line.squared = 2 * line.factor, before
        elif len(edges) > 1:
            return "the output is used more than once"
        elif name == "MseLoss" and not line.squared:
            mean = saved_number(node, "reduction") == 1
            line.factor, line.squared = line.factor * 2 / (before if mean else 1), before
        elif name == "Pow" and not line.squared and saved_number(node, "exponent") == 2:
            line.factor, line.squared = 2 * line.factor, before
        elif name in ("Sum", "Mean") and not line.squared:
            line.factor *= after / before if name == "Mean" else 1
        elif name in ("Add", "Sub") and after == before and saved_number(node, "alpha") == 1:
            first = node.next_functions[0] == edges[0]
            if not line.squared and not first and name == "Sub":
                return "the loss is subtracted"
            line.other_terms |= not line.squared
        elif name in ("Mul", "Div") and after == 1 and not line.squared:
            if name == "Div" and node.next_functions[0] != edges[0]:
                return "the loss is a divisor"
            line.factors_hidden = True
        elif name in PART:
            line.picked, line.kept = True, line.kept * (1 if line.squared else after / before)
        elif name not in SAME or after != before:
            return f"no squared error: {node.name()}"
        edge = edges[0]
    return line if line.squared else "no squared error"


def _entries(edge: Edge) -> int:
    return math.prod(gradient_metadata(edge[0])[edge[1]].shape)


def _scale(line: _Line, g: Tensor, loss: Tensor, gradient: Tensor | None) -> Tensor | str:
    g, loss = g.detach().double(), loss.detach().double().reshape(())
    factor = torch.ones_like(loss) if gradient is None else gradient.double().reshape(())
    used = g != 0
    whole = line.squared == g.numel() and not line.picked
    # As many as were picked, so that none was picked twice.
    if not whole and int(used.sum()) != round(line.squared * line.kept):
        return "the loss leaves out a part of the output that can't be told"
    s = g.square().sum() / (2 * loss * factor)
    if not line.factors_hidden:
        shown = line.factor * factor
        if not line.other_terms and not bool((s / shown - 1).abs() < 2e-2):
            return "no squared error: its value differs"
        s = shown
    elif line.other_terms:
        return "terms are added to the loss, and it has factors that can't be seen"
    if not bool(s.isfinite() & (s > 0)):
        return "the loss is zero, or not finite"
    return s.expand(g.shape) if whole else torch.where(used, s, 0.0)
