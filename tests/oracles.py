"""What FOP and KFAC must compute, as plainly as possible: the reference for the library's tests.

Everything is dense and float64, and nothing of the library is used. Each example runs through the
model *alone*: autograd gives its gradient, and what its layers saw gives the Kronecker factors.
So models whose examples depend on each other (batch norm in training mode) have no reference here.
Small sizes only: a layer of o x (i+1) parameters has an F with (o(i+1))^2 entries.

Symbols, one layer: N examples, S shared positions, matrix [W | b] of shape o x (i+1).
  x [S, i+1] inputs, g [S, o] output gradients of one example's own loss, A and G their second
  moments, F = G (x) A, M = F damped. Row-major flattening of V makes F vec(V) = vec(G V A).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

LossFunction = Callable[[Tensor, Tensor, str], Tensor]  # (output, target, reduction) -> loss
MicroBatch = tuple[Tensor, Tensor]  # inputs and targets; dimension 0 counts the examples
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Layer = nn.Linear | Convolution | Transposed | nn.Embedding  # linear in its weight
Norm = nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.modules.batchnorm._BatchNorm
Factors = tuple[Tensor, Tensor]  # A, G of one group


@dataclass(frozen=True)
class Reference:
    """The options of fop.FOP under their own names; `project=False` is fop.KFAC.

    The exact Fisher differentiates the given loss twice and needs no likelihood: of a dict for
    `fisher`, only the name counts.
    """

    lr: float = 0.1
    momentum: float = 0.7
    weight_decay: float = 0.0
    nesterov: bool = False
    decoupled_weight_decay: bool = False
    damping: float = 1e-3
    damping_mode: Literal["factored", "exact"] = "factored"
    factor_decay: float = 0.95
    update_every: int | Callable[[int], int] = 10
    fisher: Literal["empirical", "exact"] | Mapping[str, str] = "empirical"
    sharing: Literal["expand", "reduce"] = "expand"
    beta: Literal["adaptive"] | float = "adaptive"
    eta: Literal["adaptive"] | float = "adaptive"
    total: Literal["mean", "sum"] = "mean"
    kl_clip: float | None = 1e-3
    loss_reduction: Literal["mean", "sum"] = "mean"
    halves: Literal["auto", "samples", "microbatches"] = "auto"
    curvature: Literal["kronecker", "ekfac", "identity"] = "kronecker"
    fallback: Literal["sgd", "adamw"] = "adamw"
    fallback_lr: float = 1e-3  # of AdamW; SGD takes lr
    norms: Literal["fallback", "unitwise"] = "fallback"
    max_factor_size: int = 8192
    project: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.fisher, str):
            object.__setattr__(self, "fisher", self.fisher["name"])
        choices = {
            "damping_mode": ("factored", "exact"),
            "fisher": ("empirical", "exact"),
            "sharing": ("expand", "reduce"),
            "total": ("mean", "sum"),
            "loss_reduction": ("mean", "sum"),
            "halves": ("auto", "samples", "microbatches"),
            "curvature": ("kronecker", "ekfac", "identity"),
            "norms": ("fallback", "unitwise"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {getattr(self, name)!r}")
        if self.norms == "unitwise" and self.fisher != "empirical":
            raise ValueError("norms='unitwise' has a reference for the empirical Fisher only")
        defaults = ("adaptive", "adaptive", "mean")
        if not self.project and (self.beta, self.eta, self.total) != defaults:
            raise ValueError("project=False is KFAC, without beta, eta and total: leave them out")

    def refreshes(self, step: int) -> bool:
        """Whether the curvature is refreshed on this step (counted from 1)."""
        interval = self.update_every(step) if callable(self.update_every) else self.update_every
        return step in (1, 2, 4) or (step - 1) % interval == 0


@dataclass(frozen=True)
class LayerTrace:
    """What one step computed for one layer; a, d, p, c, u are o x (i+1), u before the KL clip."""

    factors: list[Factors]  # one pair a group, as averaged so far; empty for identity curvature
    F: Tensor
    M: Tensor
    a: Tensor
    d: Tensor
    p: Tensor
    c: Tensor
    u: Tensor
    s: float
    q: float
    D: float
    E: float
    beta: float
    eta: float
    cos2: float


# --- one example, alone ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What one example did to one layer; it adds J^T H J to the second moment of g."""

    x: list[Tensor]  # per group [S, i+1], all calls of the module in a row
    J: Tensor  # [K, S, o]: gradients at the layer's output of K scalars ...
    H: Tensor  # [K, K]: ... and their metric


@dataclass(frozen=True)
class Example:
    """One example's parameter gradients (None where unused) and layer records, for its own loss."""

    gradients: dict[str, Tensor | None]
    records: dict[str, Record]


def users_of_weights(model: nn.Module) -> dict[str, list[Layer]]:
    """The modules that use each trained weight, under the name of the first of them.

    An embedding tied to a layer with real inputs is left out: its gradient counts, the curvature is
    the layer's.
    """
    names: dict[nn.Parameter, str] = {}
    users: dict[str, list[Layer]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Layer) and module.weight.requires_grad:
            users.setdefault(names.setdefault(module.weight, name), []).append(module)
    for name, modules in users.items():
        users[name] = [m for m in modules if not isinstance(m, nn.Embedding)] or modules
    return users


def trainable_layers(model: nn.Module) -> dict[str, Layer]:
    """The layers with Kronecker curvature, one for each weight that is trained."""
    return {name: modules[0] for name, modules in users_of_weights(model).items()}


def trainable_norms(model: nn.Module, reference: Reference) -> dict[str, Norm]:
    """The normalisations with unit-wise curvature."""
    return {
        name: module
        for name, module in model.named_modules()
        if reference.norms == "unitwise"
        and isinstance(module, Norm)
        and module.weight is not None
        and module.weight.requires_grad
    }


def has_bias(layer: nn.Module) -> bool:
    """A frozen bias is no coordinate of the layer."""
    bias = getattr(layer, "bias", None)
    return bias is not None and bias.requires_grad


def as_matrix(layer: Layer, weight: Tensor) -> Tensor:
    """[o, i] of a tensor shaped like the weight; the rows of a group follow each other."""
    if isinstance(layer, nn.Embedding):
        return weight.T
    if isinstance(layer, Transposed):  # [inputs, outputs of a group, *kernel]
        grouped = weight.unflatten(0, (layer.groups, -1))
        return grouped.transpose(1, 2).flatten(0, 1).flatten(1)
    return weight.flatten(1)


def from_matrix(layer: Layer, matrix: Tensor) -> Tensor:
    """The inverse of `as_matrix`."""
    if isinstance(layer, nn.Embedding):
        return matrix.T
    if isinstance(layer, Transposed):
        inputs, outputs, *kernel = layer.weight.shape
        grouped = matrix.reshape(layer.groups, outputs, inputs // layer.groups, *kernel)
        return grouped.transpose(1, 2).flatten(0, 1)
    return matrix.reshape(layer.weight.shape)


def examine(
    model: nn.Module, inputs: Tensor, target: Tensor, loss_fn: LossFunction, reference: Reference
) -> Example:
    """Run a batch of one example forward and backward and note what every layer saw."""
    users = users_of_weights(model)
    layers = trainable_layers(model)
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            # Adding a zero leaf gives the gradient at this output whatever happens in place later.
            probe = torch.zeros_like(output, requires_grad=True)
            calls[name].append((args[0].detach().clone(), probe))
            return output + probe

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, modules in users.items()
        for module in modules
    ]
    try:
        output = model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    loss = loss_fn(output, target, reference.loss_reduction)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, allow_unused=True
    )

    scalars = [loss]
    metric = torch.ones(1, 1, dtype=torch.float64)
    if reference.fisher == "exact":  # Gauss-Newton: every output, in the metric of the loss
        scalars = list(output.flatten())
        metric = output_hessian(output.detach(), target, loss_fn, reference.loss_reduction)
    records = {
        name: Record(
            x=input_rows(layers[name], [x for x, _ in seen]),
            J=torch.stack([output_gradient(layers[name], seen, scalar) for scalar in scalars]),
            H=metric,
        )
        for name, seen in calls.items()
        if seen
    }
    return Example(dict(zip(parameters, gradients, strict=True)), records)


def output_hessian(output: Tensor, target: Tensor, loss_fn: LossFunction, reduction: str) -> Tensor:
    """Hessian of one example's loss in all K output numbers, [K, K].

    With one label an example this is the Fisher of all classes, sum_c p_c g_c g_c^T. Where the
    example's loss is a mean over T positions or features it is the mean's Hessian: 1/T of the sum.
    """

    def loss(flat: Tensor) -> Tensor:
        return loss_fn(flat.reshape(output.shape), target, reduction)

    hessian: Tensor = torch.autograd.functional.hessian(  # type: ignore[no-untyped-call]
        loss, output.flatten()
    )
    return hessian


def output_gradient(layer: Layer, calls: Sequence[tuple[Tensor, Tensor]], scalar: Tensor) -> Tensor:
    """Gradient of a scalar at the layer's outputs, [S, o] over all positions of all calls."""
    probes = [probe for _, probe in calls]
    gradients = torch.autograd.grad(scalar, probes, retain_graph=True, materialize_grads=True)
    channel = -1 if isinstance(layer, (nn.Linear, nn.Embedding)) else 1
    return torch.cat([g.movedim(channel, -1).flatten(0, -2) for g in gradients])


def input_rows(layer: Layer, inputs: Sequence[Tensor]) -> list[Tensor]:
    """One example's inputs of all calls as rows [S, i+1], one matrix a group."""
    for x in inputs:
        if x.shape[0] != 1:
            raise ValueError(f"dimension 0 must count examples: one gave an input {tuple(x.shape)}")
    if isinstance(layer, nn.Conv2d):
        read = torch.cat([patches(layer, x[0]) for x in inputs])
        groups = [part.flatten(1) for part in read.chunk(layer.groups, dim=1)]
    elif isinstance(layer, nn.Linear):
        groups = [torch.cat([x.flatten(0, -2) for x in inputs])]
    else:
        calls = [probed_rows(layer, x) for x in inputs]
        groups = [torch.cat(rows) for rows in zip(*calls, strict=True)]
    if has_bias(layer):
        groups = [torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1) for rows in groups]
    return groups


@torch.no_grad()
def probed_rows(layer: Layer, x: Tensor) -> list[Tensor]:
    """What every output position of one call reads, [S, i] a group, for any layer linear in its
    weight: with a matrix of zeros and a single one in column j, the output is column j."""
    matrix = torch.zeros_like(as_matrix(layer, layer.weight.detach()))
    groups = getattr(layer, "groups", 1)
    columns = []
    for j in range(matrix.shape[1]):
        matrix[:, j] = 1.0
        probe = {"weight": from_matrix(layer, matrix).contiguous()}
        if has_bias(layer):
            probe["bias"] = torch.zeros_like(layer.bias)  # type: ignore[arg-type]
        output = torch.func.functional_call(layer, probe, (x,))
        output = (
            output.flatten(0, -2) if isinstance(layer, nn.Embedding) else output[0].flatten(1).T
        )
        columns.append(torch.stack([part[:, 0] for part in output.chunk(groups, dim=1)]))
        matrix[:, j] = 0.0
    rows = torch.stack(columns, dim=-1)  # [groups, S, i]
    if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
        rows[..., layer.padding_idx] = 0.0  # its row of the table is never trained
    return list(rows)


def patches(layer: nn.Conv2d, image: Tensor) -> Tensor:
    """What every output position of a convolution reads, [S, channels, kernel height * width]."""
    before = []
    sizes = []
    for axis in range(2):
        reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        if isinstance(layer.padding, str):
            padded = reach if layer.padding == "same" else 0
            before.append(padded // 2)
        else:
            padded = 2 * int(layer.padding[axis])
            before.append(int(layer.padding[axis]))
        sizes.append((image.shape[axis + 1] + padded - reach - 1) // layer.stride[axis] + 1)

    # One more row and column of zeros stand for everything outside a zero-padded image.
    framed = image.new_zeros(image.shape[0], image.shape[1] + 1, image.shape[2] + 1)
    framed[:, :-1, :-1] = image

    def sources(axis: int, position: int) -> list[int]:
        start = position * layer.stride[axis] - before[axis]
        taps = range(layer.kernel_size[axis])
        size = image.shape[axis + 1]
        return [source(start + layer.dilation[axis] * t, size, layer.padding_mode) for t in taps]

    read = []
    for row in range(sizes[0]):
        for column in range(sizes[1]):
            window = framed[:, sources(0, row)][:, :, sources(1, column)]
            read.append(window.flatten(1))
    return torch.stack(read)


def source(index: int, size: int, mode: str) -> int:
    """The image index that a padded index reads; `size` means a zero."""
    if 0 <= index < size:
        return index
    if mode == "circular":
        return index % size
    if mode == "replicate":
        return 0 if index < 0 else size - 1
    if mode == "reflect":
        return -index if index < 0 else 2 * (size - 1) - index
    return size


# --- curvature ------------------------------------------------------------------------------------


def kronecker_factors(
    records: Sequence[Record], examples: int, sharing: Literal["expand", "reduce"]
) -> list[Factors]:
    """A and G of every group, from the records of a step's examples."""
    groups = len(records[0].x)
    positions = sum(len(record.x[0]) for record in records)
    factors = []
    for group in range(groups):
        xs = [record.x[group] for record in records]
        Js = [record.J.chunk(groups, dim=2)[group] for record in records]
        if sharing == "reduce":
            xs = [x.mean(0, keepdim=True) for x in xs]
            Js = [J.sum(1, keepdim=True) for J in Js]
        A = torch.stack([x.T @ x for x in xs]).sum(0) / examples
        moments = [
            torch.einsum("ksi,kl,lsj->ij", J, record.H, J)
            for J, record in zip(Js, records, strict=True)
        ]
        G = torch.stack(moments).sum(0) / (positions if sharing == "expand" else examples)
        factors.append((A, G))
    return factors


def narrowed(factors: list[Factors], layer: Layer, widest: int) -> list[Factors]:
    """Factors as they are kept: too wide ones, and an embedding's input factor, as a diagonal."""

    def keep(factor: Tensor, always: bool = False) -> Tensor:
        return factor.diag().diag() if always or len(factor) > widest else factor

    return [(keep(A, isinstance(layer, nn.Embedding)), keep(G)) for A, G in factors]


def unit_factors(gradients: Sequence[Tensor]) -> list[Factors]:
    """Of a normalisation, from examples' gradients [units, 1 or 2]: exact blocks, as G (x) 1."""
    single = torch.stack(list(gradients), dim=1)  # [units, n, 1 or 2]
    one = torch.ones(1, 1, dtype=torch.float64)
    return [(one, unit.T @ unit / len(gradients)) for unit in single]


def block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """A layer's matrix from those of its groups, whose rows of [W | b] follow each other."""
    matrix: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return matrix


def dense_curvature(factors: Sequence[Factors], reference: Reference) -> tuple[Tensor, Tensor]:
    """F and M of a layer, block-diagonal over its groups."""
    fisher = block_diagonal([torch.kron(G, A) for A, G in factors])
    if reference.damping_mode == "exact":
        return fisher, fisher + reference.damping * torch.eye(len(fisher), dtype=fisher.dtype)
    blocks = []
    for A, G in factors:
        # The floor only matters for a factor that is exactly zero.
        mean_A, mean_G = (max(float(X.trace()) / len(X), 1e-30) for X in (A, G))
        pi = math.sqrt(mean_A / mean_G)
        root = math.sqrt(reference.damping)
        damped_A = A + pi * root * torch.eye(len(A), dtype=A.dtype)
        damped_G = G + root / pi * torch.eye(len(G), dtype=G.dtype)
        blocks.append(torch.kron(damped_G, damped_A))
    return fisher, block_diagonal(blocks)


@dataclass(frozen=True)
class Corrected:
    """EKFAC's curvature of one group: U diag(S) U^T with the eigenvectors U of G (x) A."""

    U: Tensor  # [o(i+1), o(i+1)]
    S: Tensor | None  # None until measured: the eigenvalues of the factors stand in
    latest: Tensor | None = None  # what the last batch measured, in the basis before U

    def dense(self, A: Tensor, G: Tensor) -> Tensor:
        return torch.kron(G, A) if self.S is None else self.U @ self.S.diag() @ self.U.T


def eigenvectors(A: Tensor, G: Tensor) -> Tensor:
    return torch.kron(torch.linalg.eigh(G)[1], torch.linalg.eigh(A)[1])


def example_fisher(record: Record, group: int) -> Tensor:
    """What one example adds to a group's true Fisher, [o(i+1), o(i+1)]."""
    J = record.J.chunk(len(record.x), dim=2)[group]
    V = torch.einsum("kso,si->koi", J, record.x[group]).flatten(1)
    return V.T @ record.H @ V


def averaged(average: Tensor, last: Tensor, batch: Tensor, rho: float) -> Tensor:
    """A batch ten times above both the average and the batch before it counts as ten times."""
    average_size, last_size, size = (float(m.diagonal().mean()) for m in (average, last, batch))
    usual = max(average_size, last_size)
    if average_size > 0 and size > 10 * usual:
        batch = batch * (10 * usual / size)
    return rho * average + (1 - rho) * batch


def corrected(
    before: Corrected | None,
    records: Sequence[Record],
    group: int,
    A: Tensor,
    G: Tensor,
    rho: float,
) -> Corrected:
    """Measure S in the old basis, average it, and express what it stands for in that of A, G."""
    U = eigenvectors(A, G)
    if before is None:
        return Corrected(U, None)
    fisher = torch.stack([example_fisher(record, group) for record in records]).sum(0)
    measured = (before.U.T @ fisher @ before.U).diagonal() / len(records)
    S = measured
    if before.S is not None and before.latest is not None:
        S = averaged(before.S.diag(), before.latest.diag(), measured.diag(), rho).diagonal()
    return Corrected(U, (U.T @ before.U @ S.diag() @ before.U.T @ U).diagonal(), measured)


def project(
    a: Tensor, d: Tensor, F: Tensor, M: Tensor, reference: Reference, factors: list[Factors]
) -> LayerTrace:
    """The paper's projection and scaling of one layer, from a and d of shape o x (i+1)."""
    k = 1.0 if reference.total == "mean" else 2.0
    vec_a, vec_d = a.flatten(), d.flatten()
    if not reference.project:
        vec_d = torch.zeros_like(vec_d)  # without a difference nothing is left to project: KFAC

    aFa = float(vec_a @ F @ vec_a)
    s = float(vec_d @ F @ vec_a) / aFa if aFa > 0 else 0.0
    p = vec_d - s * vec_a
    solved_a, solved_p = torch.linalg.solve(M, torch.stack([vec_a, p], dim=1)).unbind(1)
    q, D, E = float(vec_a @ solved_a), float(vec_a @ solved_p), float(p @ solved_p)

    informative = q > 0 and E / q > 1e-12
    cos2 = D * D / (q * E) if informative else 0.0
    if q == 0:  # no gradient, no step
        beta, eta = 0.0, k
    else:
        beta = (D / E if informative else 0.0) if reference.beta == "adaptive" else reference.beta
        eta = k * (q + beta * D) / (q + 2 * beta * D + beta * beta * E)
        eta = eta if reference.eta == "adaptive" else reference.eta
    c = vec_a + beta * p
    u = eta * (solved_a + beta * solved_p)
    return LayerTrace(
        factors=factors,
        F=F,
        M=M,
        a=a,
        d=vec_d.reshape(a.shape),
        p=p.reshape(a.shape),
        c=c.reshape(a.shape),
        u=u.reshape(a.shape),
        s=s,
        q=q,
        D=D,
        E=E,
        beta=beta,
        eta=eta,
        cos2=cos2,
    )


# --- the optimizer --------------------------------------------------------------------------------


def half_of_each_example(sizes: Sequence[int], halves: str) -> list[list[int]]:
    """For every micro-batch, the half (0 or 1) that each of its examples belongs to."""
    counts = [0, 0]
    chosen = []
    for number, size in enumerate(sizes):
        if halves == "microbatches":
            first = size if number % 2 == 0 else 0
        else:  # the odd example goes where there are fewer so far, on a tie to the first half
            first = size // 2 + (size % 2 if counts[0] <= counts[1] else 0)
        counts[0] += first
        counts[1] += size - first
        chosen.append([0] * first + [1] * (size - first))
    return chosen


def loss_weights(sizes: Sequence[int], reduction: str) -> list[float]:
    """The weights that make the accumulated loss that of the whole batch."""
    return [1.0 if reduction == "sum" else size / sum(sizes) for size in sizes]


class ReferenceOptimizer:
    """Walks its own float64 copy of a model; parameters in no layer follow the fallback.

    Build it before the library's optimizer sees the model. `reference` may be replaced between
    steps, as a scheduler changes lr. `own` has options of single parameters, by name: lr, momentum,
    nesterov, weight_decay, fallback_lr and, of a layer's weight, damping.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: Reference,
        own: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.model = copy.deepcopy(model).double()
        self.reference = reference
        self.own = own or {}
        self.steps = 0
        self.kl_scale = 1.0  # nu of the last step
        self.gradients: dict[str, Tensor] = {}  # what p.grad was at the last step
        self._averages: dict[str, list[Factors]] = {}
        self._latest: dict[str, list[Factors]] = {}
        self._corrected: dict[str, list[Corrected]] = {}
        self._displacements: dict[str, Tensor] = {}
        self._moments: dict[str, tuple[int, Tensor, Tensor]] = {}  # AdamW's t, m, v
        self._first = reference
        self._largest_lr: dict[str, float] = {}

    def _of(self, name: str) -> Reference:
        """The options of one parameter. AdamW's lr keeps its ratio to lr where only this is own."""
        own = self.own.get(name, {})
        ratio = own.get("lr", self._first.lr) / self._first.lr if self._first.lr else 1.0
        scaled = {"fallback_lr": self.reference.fallback_lr * ratio}
        return replace(self.reference, **{**scaled, **own})

    def _reference_lr(self, name: str) -> float:
        """The largest lr so far."""
        first = self.own.get(name, {}).get("lr", self._first.lr)
        self._largest_lr[name] = max(self._largest_lr.get(name, first), self._of(name).lr)
        return self._largest_lr[name]

    def step(
        self,
        microbatches: Sequence[MicroBatch],
        loss_fn: LossFunction,
        *,
        weights: Sequence[float] | None = None,
        gradient_scale: float = 1.0,
    ) -> dict[str, LayerTrace]:
        """Take the step that follows one backward a micro-batch, each on its weight times its loss.

        `weights`: loss_weights by default. `gradient_scale`: what multiplied p.grad between
        backward and step, as a clip does; a and d follow it, the statistics do not.
        """
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                raise ValueError("batch norm in training mode: examples cannot run alone")
        self.steps += 1
        sizes = [len(inputs) for inputs, _ in microbatches]
        halves = half_of_each_example(sizes, self.reference.halves)
        counts = [sum(chosen.count(half) for chosen in halves) for half in (0, 1)]
        if weights is None:
            weights = loss_weights(sizes, self.reference.loss_reduction)

        sums: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})  # H1 and H2
        records: dict[str, list[Record]] = {}
        norms = trainable_norms(self.model, self.reference)
        unit_gradients: dict[str, list[Tensor]] = {}
        for (inputs, targets), chosen, weight in zip(microbatches, halves, weights, strict=True):
            # Each example's weight in the loss, and the factor of its per-example gradient.
            mean = self.reference.loss_reduction == "mean"
            in_loss = weight / len(inputs) if mean else weight
            per_example = in_loss * sum(sizes) if mean else weight
            for index, half in enumerate(chosen):
                example = examine(
                    self.model,
                    _as_double(inputs[index : index + 1]),
                    _as_double(targets[index : index + 1]),
                    loss_fn,
                    self.reference,
                )
                for name, gradient in example.gradients.items():
                    if gradient is not None:
                        scaled = gradient_scale * in_loss * gradient
                        sums[half][name] = sums[half].get(name, 0.0) + scaled
                for name, record in example.records.items():
                    # The model's own Fisher knows nothing of the weights in the training loss.
                    factor = per_example if self.reference.fisher == "empirical" else 1.0
                    weighted = Record(record.x, factor * record.J, record.H)
                    records.setdefault(name, []).append(weighted)
                for name, norm in norms.items():
                    units = _units(norm, example.gradients, _prefix(name))
                    unit_gradients.setdefault(name, []).append(per_example * units)

        if self.reference.refreshes(self.steps) and self.reference.curvature != "identity":
            layers, widest = trainable_layers(self.model), self.reference.max_factor_size
            for name, seen in records.items():
                factors = kronecker_factors(seen, sum(sizes), self.reference.sharing)
                self._absorb(name, narrowed(factors, layers[name], widest))
                if self.reference.curvature == "ekfac":
                    self._correct(name, seen)
            for name, gradients in unit_gradients.items():
                self._absorb(name, unit_factors(gradients))
        return self._update(*self._gradient_and_difference(sums, counts))

    def _gradient_and_difference(
        self, sums: tuple[dict[str, Tensor], dict[str, Tensor]], counts: list[int]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """a = H1 + H2 and d = (N/n1) H1 - (N/n2) H2 of every parameter that has a gradient."""
        a, d = {}, {}
        for name, parameter in self.model.named_parameters():
            if name in sums[0] or name in sums[1]:
                zero = torch.zeros_like(parameter)
                first, second = (half.get(name, zero) for half in sums)
                a[name] = first + second
                d[name] = zero
                if min(counts) > 0:
                    d[name] = sum(counts) * (first / counts[0] - second / counts[1])
        return a, d

    def _absorb(self, name: str, batch: list[Factors]) -> None:
        rho = self.reference.factor_decay
        averages, latest = self._averages.get(name, batch), self._latest.get(name, batch)
        self._averages[name] = [
            (averaged(A, *of_A, rho), averaged(G, *of_G, rho))
            for (A, G), of_A, of_G in (
                (average, *zip(last, new, strict=True))
                for average, last, new in zip(averages, latest, batch, strict=True)
            )
        ]
        self._latest[name] = batch

    def _correct(self, name: str, seen: Sequence[Record]) -> None:
        before = self._corrected.get(name, [None] * len(self._averages[name]))
        self._corrected[name] = [
            corrected(old, seen, group, A, G, self.reference.factor_decay)
            for group, (old, (A, G)) in enumerate(zip(before, self._averages[name], strict=True))
        ]

    def _update(self, a: dict[str, Tensor], d: dict[str, Tensor]) -> dict[str, LayerTrace]:
        self.gradients = a
        traces = {}
        directions: dict[str, Tensor] = {}
        layers = trainable_layers(self.model)
        norms = trainable_norms(self.model, self.reference)
        for name, layer in layers.items():
            prefix = _prefix(name)
            if f"{prefix}weight" in a:
                options = self._of(f"{prefix}weight")
                traces[name] = self._trace(
                    name, _matrix(layer, a, prefix), _matrix(layer, d, prefix), options
                )
        for name, norm in norms.items():
            prefix = _prefix(name)
            exact = replace(self._of(f"{prefix}weight"), damping_mode="exact")
            traces[name] = self._trace(
                name, _units(norm, a, prefix), _units(norm, d, prefix), exact
            )

        kl_clip = self.reference.kl_clip
        size = abs(
            sum(
                self._reference_lr(f"{_prefix(name)}weight") ** 2 * float((trace.u * trace.c).sum())
                for name, trace in traces.items()
            )
        )
        self.kl_scale = 1.0
        if kl_clip is not None and size > kl_clip:
            self.kl_scale = math.sqrt(kl_clip / size)

        for name, trace in traces.items():
            prefix = _prefix(name)
            u = self.kl_scale * trace.u
            if name in norms:
                parts = zip(("weight", "bias"), u.unbind(1), strict=False)
                shape = norms[name].weight.shape
                directions.update({f"{prefix}{key}": part.reshape(shape) for key, part in parts})
                continue
            layer = layers[name]
            if has_bias(layer):
                directions[f"{prefix}bias"] = u[:, -1]
                u = u[:, :-1]
            directions[f"{prefix}weight"] = from_matrix(layer, u)
        for name, gradient in a.items():
            if name in directions or self.reference.fallback == "sgd":
                self._descend(name, directions.get(name, gradient))
            else:
                self._adamw(name, gradient)
        return traces

    def _trace(self, name: str, a: Tensor, d: Tensor, reference: Reference) -> LayerTrace:
        if reference.curvature == "identity":
            identity = torch.eye(a.numel(), dtype=a.dtype)
            return project(a, d, identity, identity, reference, [])
        if name not in self._averages:
            raise ValueError(f"layer {name!r} has a gradient but never ran on a curvature step")
        factors = self._averages[name]
        if reference.curvature == "ekfac" and name in self._corrected:
            pairs = zip(self._corrected[name], factors, strict=True)
            F = block_diagonal([found.dense(A, G) for found, (A, G) in pairs])
            M = F + reference.damping * torch.eye(len(F), dtype=F.dtype)
            return project(a, d, F, M, reference, factors)
        return project(a, d, *dense_curvature(factors, reference), reference, factors)

    @torch.no_grad()
    def _descend(self, name: str, direction: Tensor) -> None:
        """Weight decay, then momentum on displacements."""
        options = self._of(name)
        parameter = self.model.get_parameter(name)
        if options.decoupled_weight_decay:
            parameter.mul_(1 - options.lr * options.weight_decay)
        else:
            direction = direction + options.weight_decay * parameter
        before = self._displacements.get(name, torch.zeros_like(direction))
        moved = options.momentum * before - options.lr * direction
        self._displacements[name] = moved
        if options.nesterov:
            moved = options.momentum * moved - options.lr * direction
        parameter.add_(moved)

    @torch.no_grad()
    def _adamw(self, name: str, gradient: Tensor) -> None:
        """Loshchilov and Hutter's Algorithm 2, with lr following the schedule of the layers'."""
        options = self._of(name)
        reference_lr = self._reference_lr(name)
        lr = options.fallback_lr * options.lr / reference_lr if reference_lr else 0.0
        zero = torch.zeros_like(gradient)
        t, m, v = self._moments.get(name, (0, zero, zero))
        t, m, v = t + 1, 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        self._moments[name] = (t, m, v)
        parameter = self.model.get_parameter(name)
        parameter.mul_(1 - lr * options.weight_decay)
        parameter.sub_(lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))


def _matrix(layer: Layer, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    """[W | b] of a layer, o x (i+1)."""
    weight = as_matrix(layer, tensors[f"{prefix}weight"])
    return torch.cat([weight, tensors[f"{prefix}bias"][:, None]], 1) if has_bias(layer) else weight


def _units(norm: Norm, tensors: Mapping[str, Tensor | None], prefix: str) -> Tensor:
    """[units, 1 or 2]: scale and shift of every unit of a normalisation."""
    names = ("weight", "bias") if has_bias(norm) else ("weight",)
    parts = [tensors[f"{prefix}{name}"] for name in names]
    return torch.stack([part.flatten() for part in parts if part is not None], dim=1)


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# --- what tests of the library run beside it ------------------------------------------------------


def accumulate(
    model: nn.Module,
    microbatches: Sequence[MicroBatch],
    loss_fn: LossFunction,
    reduction: str = "mean",
    weights: Sequence[float] | None = None,
) -> None:
    """The user's loop before `step()`: one backward a micro-batch, weighted as in the reference."""
    if weights is None:
        weights = loss_weights([len(inputs) for inputs, _ in microbatches], reduction)
    for (inputs, targets), weight in zip(microbatches, weights, strict=True):
        loss = weight * loss_fn(model(inputs), targets, reduction)
        loss.backward()  # type: ignore[no-untyped-call]


def cross_entropy(output: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Goes with likelihood="categorical"."""
    return functional.cross_entropy(output, target, reduction=reduction)


def squared_error(output: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Goes with likelihood="gaussian"."""
    return functional.mse_loss(output, target, reduction=reduction)


def binary_cross_entropy(output: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Goes with likelihood="bernoulli"."""
    return functional.binary_cross_entropy_with_logits(output, target, reduction=reduction)
