"""What a layer's rows, curvature and step are, from the module and autograd alone, in float64.

With W~ [groups, o, c] the layer's matrix, c = i + 1 with a bias, the derivative of one output y_e
by W~ has one row that is not zero: the input row that y_e is computed from, with a 1 for the bias.
So the derivatives of all outputs, one by one, tell the input rows, the output that each belongs to
and, by the order of the outputs, the position. Of a linear layer with o = 2 on x = (3, 4):

    d y_0 / d W~ = [[3, 4, 1],        d y_1 / d W~ = [[0, 0, 0],
                    [0, 0, 0]]                        [3, 4, 1]]

Curvature and step follow from these rows by docs/math.md, without the library's own code.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fop.layers import LayerAdapter, NormAdapter

DAMPING = 0.1


def parameters_of(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None:
        raise ValueError(f"{type(module).__name__} has no parameter named 'weight'")
    return weight, bias


def direction(like: Tensor) -> Tensor:
    """Numbers without a pattern, and without the generator of random ones, which is the user's."""
    return torch.arange(like.numel(), dtype=torch.float64).square().cos().view(like.shape).to(like)


class DenseLayer:
    """The layer's rows, by autograd.

    `inputs` r~ [n, groups, s, c] and `outputs`, the output gradients, [n, groups, s, o]. The loss
    is the mean over the examples of sum_e (y_e - t_e)^2 / 2, with t the `target`.
    """

    def __init__(self, adapter: LayerAdapter, module: nn.Module, x: Tensor) -> None:
        self.adapter, module = adapter, copy.deepcopy(module)
        y = module(x)
        weight, bias = parameters_of(module)
        parameters = [weight] if bias is None else [weight, bias]
        derivatives = []
        for element in y.flatten():
            found = torch.autograd.grad(element, parameters, retain_graph=True)
            derivatives.append(adapter.to_matrix(*found, *[None] * (2 - len(found))))
        jacobian = torch.stack(derivatives).unflatten(0, (len(y), -1))  # [n, e, groups, o, c]
        self.target = direction(y)
        gradient = (y - self.target).detach().flatten(1)  # [n, e]
        if isinstance(adapter, NormAdapter):  # an example's gradient, for one constant input
            examples = torch.einsum("ne,negoc->ngoc", gradient, jacobian)
            self.outputs = examples.transpose(2, 3)
            self.inputs = torch.ones_like(examples[:, :, :1])
        else:
            self.inputs, self.outputs = _sorted_rows(jacobian, gradient)

    @property
    def example_gradients(self) -> Tensor:
        """[n, groups, o, c]"""
        return torch.einsum("ngso,ngsi->ngoi", self.outputs, self.inputs)

    def curvature(self, sharing: str) -> Tensor:
        """F = G (x) A of each group, [groups, o c, o c]; see docs/math.md."""
        inputs, outputs = self.inputs, self.outputs
        examples, _, positions, _ = inputs.shape
        if sharing == "reduce":
            inputs, outputs, positions = inputs.mean(2, True), outputs.sum(2, True), 1
        a = second_moment(inputs) / examples
        if self.adapter.one_hot:
            a = torch.diag_embed(a.diagonal(dim1=1, dim2=2))
        g = second_moment(outputs) / (examples * positions)
        return torch.stack([torch.kron(*pair) for pair in zip(g, a, strict=True)])

    def step(self, sharing: str, *, project: bool) -> Tensor:
        """u [groups, o, c] of the paper, with M = F + damping I."""
        gradients, half = self.example_gradients, -(-len(self.inputs) // 2)
        a = gradients.mean(0)
        d = gradients[:half].mean(0) - gradients[half:].mean(0)
        fisher = self.curvature(sharing)
        damped = fisher + DAMPING * torch.eye(fisher.shape[-1], dtype=fisher.dtype)

        def of(matrix: Tensor, v: Tensor) -> Tensor:
            return (matrix @ v.flatten(1).unsqueeze(2)).reshape(v.shape)

        def inner(v: Tensor, w: Tensor) -> float:
            return float((v * w).sum())

        inverse = torch.linalg.inv(damped)
        if not project:
            return of(inverse, a)
        p = d - inner(d, of(fisher, a)) / inner(a, of(fisher, a)) * a
        cross, size = inner(a, of(inverse, p)), inner(p, of(inverse, p))
        q = inner(a, of(inverse, a))
        beta = cross / size if size > 1e-12 * q else 0.0
        eta = (q + beta * cross) / (q + 2 * beta * cross + beta**2 * size)
        return eta * of(inverse, a + beta * p)


def second_moment(rows: Tensor) -> Tensor:
    """Sum of r r^T over rows [n, groups, s, d]: [groups, d, d]."""
    return torch.einsum("ngsi,ngsj->gij", rows, rows)


def _sorted_rows(jacobian: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Of derivatives [n, e, groups, o, c] and loss gradients [n, e], by group, output, position."""
    n, elements, groups, outputs, columns = jacobian.shape
    involved = (jacobian != 0).any(-1).flatten(2)  # [n, e, groups o]
    count = involved.sum(2)
    if bool((count != 1).any()):
        raise AssertionError(
            f"an output depends on {sorted(set(count.flatten().tolist()))} rows of the matrix that "
            "to_matrix makes, instead of 1. (0: give inputs without zeros, and a layer without "
            "outputs that see nothing but padding.)"
        )
    owner = involved.int().argmax(2)
    positions, rest = divmod(elements, groups * outputs)
    equal = torch.arange(groups * outputs).repeat_interleave(positions)
    order = owner.argsort(dim=1, stable=True)
    if rest or not torch.equal(owner.gather(1, order), equal.expand(n, -1)):
        raise AssertionError("the rows of the matrix have unequal numbers of outputs")
    shape = (n, groups, outputs, positions)
    rows = jacobian.sum((2, 3)).gather(1, order.unsqueeze(2).expand(-1, -1, columns))
    rows = rows.reshape(*shape, columns)
    if not torch.allclose(rows, rows[:, :, :1].expand_as(rows)):
        raise AssertionError("the outputs of one position are computed from different input rows")
    return rows[:, :, 0], gradient.gather(1, order).reshape(shape).transpose(2, 3)
