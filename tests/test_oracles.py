"""The reference itself is right: held against autograd, torch.optim and the paper's statements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import (
    LayerTrace,
    LossFunction,
    MicroBatch,
    Reference,
    ReferenceOptimizer,
    accumulate,
    as_matrix,
    binary_cross_entropy,
    cross_entropy,
    dense_curvature,
    examine,
    from_matrix,
    half_of_each_example,
    input_rows,
    output_hessian,
    probed_rows,
    squared_error,
)


class TwiceCalled(nn.Module):
    """One Linear used on two inputs of every example, with in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu_(self.shared(x))
        output: Tensor = self.head(torch.tanh_(self.shared(self.gain * hidden)).mean(1))
        return output


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 2, (2, 1), padding="same", dilation=(1, 2), padding_mode="circular"),
        nn.Flatten(),
        nn.Linear(18, 3),
    )


SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    mlp: (4,),
    cnn: (4, 5, 5),
    TwiceCalled: (3, 4),
}
every_model = pytest.mark.parametrize("build", list(SHAPES), ids=lambda build: build.__name__)


def prepare(
    build: Callable[[], nn.Module], *sizes: int, seed: int = 0
) -> tuple[nn.Module, list[MicroBatch]]:
    torch.manual_seed(seed)
    model = build().double()
    batches = [(torch.randn(n, *SHAPES[build]).double(), torch.randint(3, (n,))) for n in sizes]
    return model, batches


def assert_equal(actual: Tensor, expected: Tensor | None) -> None:
    assert expected is not None
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def inner(x: Tensor, y: Tensor, metric: Tensor | None = None) -> float:
    return float(x.flatten() @ (y.flatten() if metric is None else metric @ y.flatten()))


# --- what the layers saw ------------------------------------------------------------------------

CONVOLUTIONS = [
    {"kernel_size": 3},
    {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 2)},
    {"kernel_size": 2, "padding": "valid", "dilation": (2, 1)},
    {"kernel_size": (2, 4), "padding": "same", "dilation": (3, 1)},
    {"kernel_size": (4, 3), "padding": "same", "padding_mode": "circular"},
    {"kernel_size": 3, "padding": (2, 1), "padding_mode": "circular", "stride": 2},
    {"kernel_size": 3, "padding": 2, "padding_mode": "reflect", "dilation": 2},
    {"kernel_size": 3, "padding": (3, 1), "padding_mode": "replicate"},
    {"kernel_size": 3, "padding": "valid", "padding_mode": "replicate"},
    {"kernel_size": 3, "padding": 1, "groups": 2, "stride": 2},
    {"kernel_size": (1, 3), "groups": 4, "bias": False},
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_a_convolution_is_a_product_with_its_patches(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, **options).double()  # type: ignore[arg-type]
    image = torch.randn(1, 4, 5, 7).double()
    matrix = layer.weight.flatten(1)
    if layer.bias is not None:
        matrix = torch.cat([matrix, layer.bias[:, None]], 1)
    blocks = zip(input_rows(layer, [image]), matrix.chunk(layer.groups), strict=True)
    rebuilt = torch.cat([rows @ block.T for rows, block in blocks], dim=1)
    output = layer(image)
    assert_equal(rebuilt.T.reshape(output.shape), output)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_probing_a_convolution_finds_its_patches(options: dict[str, object]) -> None:
    """Two ways to the same rows; the layers without patches have only this one."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, **{**options, "bias": False}).double()  # type: ignore[arg-type]
    image = torch.randn(1, 4, 5, 7).double()
    for found, wanted in zip(probed_rows(layer, image), input_rows(layer, [image]), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_is_a_product_with_its_probed_rows(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=groups, bias=False).double()
    image = torch.randn(1, 4, 3, 4, dtype=torch.float64)
    blocks = as_matrix(layer, layer.weight).chunk(groups)
    rows = zip(probed_rows(layer, image), blocks, strict=True)
    output = torch.cat([x @ block.T for x, block in rows], dim=1)
    assert torch.allclose(output.T.reshape(layer(image).shape), layer(image))
    assert torch.equal(from_matrix(layer, as_matrix(layer, layer.weight)), layer.weight)


@every_model
def test_inputs_and_output_gradients_rebuild_the_gradient(build: Callable[[], nn.Module]) -> None:
    model, [(inputs, target)] = prepare(build, 1)
    example = examine(model, inputs, target, cross_entropy, Reference())
    accumulate(model, [(inputs, target)], cross_entropy)
    assert example.records
    for name, record in example.records.items():
        parts = zip(record.x, record.J[0].chunk(len(record.x), dim=1), strict=True)
        rebuilt = torch.cat([g.T @ x for x, g in parts])
        weight = model.get_parameter(f"{name}.weight").grad
        assert weight is not None
        assert_equal(rebuilt[:, : weight[0].numel()], weight.flatten(1))
        if rebuilt.shape[1] > weight[0].numel():
            assert_equal(rebuilt[:, -1], model.get_parameter(f"{name}.bias").grad)


@every_model
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weights", [None, [0.5, 0.2, 0.3]])
def test_a_is_the_ordinary_gradient(
    build: Callable[[], nn.Module], reduction: str, weights: list[float] | None
) -> None:
    model, batches = prepare(build, 2, 1, 4)
    oracle = ReferenceOptimizer(model, Reference(loss_reduction=reduction))  # type: ignore[arg-type]
    oracle.step(batches, cross_entropy, weights=weights)
    accumulate(model, batches, cross_entropy, reduction, weights)
    for name, parameter in model.named_parameters():
        assert_equal(oracle.gradients[name], parameter.grad)


# --- the halves ---------------------------------------------------------------------------------


def test_the_odd_example_goes_to_the_smaller_half() -> None:
    assert half_of_each_example([3, 3, 4], "samples") == [[0, 0, 1], [0, 1, 1], [0, 0, 1, 1]]
    assert half_of_each_example([1, 1, 1], "auto") == [[0], [1], [0]]
    assert half_of_each_example([2, 1, 1], "microbatches") == [[0, 0], [1], [0]]


@pytest.mark.parametrize("halves", ["samples", "microbatches"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_d_is_the_difference_of_the_halves_own_gradients(halves: str, reduction: str) -> None:
    model, [first, second] = prepare(mlp, 3, 4)
    options = Reference(halves=halves, loss_reduction=reduction)  # type: ignore[arg-type]
    traces = ReferenceOptimizer(model, options).step([first, second], cross_entropy)
    x, y = torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])
    chosen = torch.tensor([half for part in half_of_each_example([3, 4], halves) for half in part])
    means = []
    for half in (0, 1):
        model.zero_grad()
        accumulate(model, [(x[chosen == half], y[chosen == half])], cross_entropy)
        means.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    scale = 7 if reduction == "sum" else 1
    weight, bias, _ = (scale * (g1 - g2) for g1, g2 in zip(*means, strict=True))
    assert_equal(traces["0"].d, torch.cat([weight, bias[:, None]], 1))


def test_one_example_has_no_difference_and_is_kfac() -> None:
    model, batches = prepare(mlp, 1)
    fop, kfac = (ReferenceOptimizer(model, Reference(project=p)) for p in (True, False))
    trace = fop.step(batches, cross_entropy)["0"]
    kfac.step(batches, cross_entropy)
    assert float(trace.d.abs().max()) == 0
    assert (trace.beta, trace.eta) == (0, 1)
    for mine, theirs in zip(fop.model.parameters(), kfac.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# --- curvature ----------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_f_times_v_is_g_v_a(build: Callable[[], nn.Module], sharing: str) -> None:
    model, batches = prepare(build, 4)
    options = Reference(sharing=sharing)  # type: ignore[arg-type]
    for trace in ReferenceOptimizer(model, options).step(batches, cross_entropy).values():
        V = torch.randn_like(trace.a)
        parts = zip(trace.factors, V.chunk(len(trace.factors)), strict=True)
        expected = torch.cat([G @ part @ A for (A, G), part in parts])
        assert_equal((trace.F @ V.flatten()).reshape(V.shape), expected)


def test_the_empirical_fisher_of_one_example_is_its_gradient_squared() -> None:
    model, batches = prepare(mlp, 1)
    for trace in ReferenceOptimizer(model, Reference()).step(batches, cross_entropy).values():
        assert_equal(trace.F, torch.outer(trace.a.flatten(), trace.a.flatten()))


class Pooled(nn.Module):
    """A deep linear network whose positions are averaged at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x).mean(1)
        return output


def deep_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))


def gauss_newton_blocks(
    model: nn.Module, x: Tensor, y: Tensor, loss_fn: LossFunction, reduction: str
) -> dict[str, Tensor]:
    """Mean over the examples of J^T H J, the block of every layer, in the order of [W | b]."""
    names = [name for name, _ in model.named_parameters()]
    blocks: dict[str, Tensor] = {}
    for example in range(len(x)):
        inputs, target = x[example : example + 1], y[example : example + 1]

        def run(*values: Tensor, inputs: Tensor = inputs) -> Tensor:
            output: Tensor = torch.func.functional_call(
                model, dict(zip(names, values, strict=True)), (inputs,)
            )
            return output.flatten()

        jacobians = torch.autograd.functional.jacobian(  # type: ignore[no-untyped-call]
            run, tuple(p.detach() for p in model.parameters())
        )
        by_name = dict(zip(names, jacobians, strict=True))
        hessian = output_hessian(model(inputs).detach(), target, loss_fn, reduction)
        for name in {name.rpartition(".")[0] for name in names}:
            J = by_name[f"{name}.weight"].flatten(2)
            if f"{name}.bias" in by_name:
                J = torch.cat([J, by_name[f"{name}.bias"][..., None]], dim=2)
            J = J.flatten(1)
            blocks[name] = blocks.get(name, 0.0) + J.T @ hessian @ J / len(x)
    return blocks


@pytest.mark.parametrize(
    ("build", "shape", "target_shape", "sharing"),
    [
        (deep_linear, (3,), (2,), "expand"),
        (deep_linear, (3,), (2,), "reduce"),
        (deep_linear, (5, 3), (5, 2), "expand"),  # a loss at every position
        (Pooled, (5, 3), (2,), "reduce"),  # one loss after the mean over positions
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_kfac_is_exact_on_deep_linear_networks(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    target_shape: tuple[int, ...],
    sharing: str,
    reduction: str,
) -> None:
    torch.manual_seed(0)
    model = build().double()
    x, y = torch.randn(6, *shape).double(), torch.randn(6, *target_shape).double()
    options = Reference(fisher="exact", sharing=sharing, loss_reduction=reduction)  # type: ignore[arg-type]
    traces = ReferenceOptimizer(model, options).step([(x, y)], squared_error)
    blocks = gauss_newton_blocks(model, x, y, squared_error, reduction)
    assert traces.keys() == blocks.keys()
    for name, block in blocks.items():
        assert_equal(traces[name].F, block)


@pytest.mark.parametrize("loss_fn", [cross_entropy, binary_cross_entropy])
def test_kfac_is_exact_on_one_example_of_a_nonlinear_network(loss_fn: LossFunction) -> None:
    model, [(x, labels)] = prepare(mlp, 1)
    y = labels if loss_fn is cross_entropy else torch.rand(1, 3).double()
    traces = ReferenceOptimizer(model, Reference(fisher="exact")).step([(x, y)], loss_fn)
    for name, block in gauss_newton_blocks(model, x, y, loss_fn, "mean").items():
        assert_equal(traces[name].F, block)


def test_the_exact_fisher_is_the_mean_over_all_classes() -> None:
    model, [(x, y)] = prepare(mlp, 1)
    F = ReferenceOptimizer(model, Reference(fisher="exact")).step([(x, y)], cross_entropy)["2"].F
    expected = torch.zeros_like(F)
    for label, probability in enumerate(model(x).softmax(1)[0].tolist()):
        batch = [(x, torch.tensor([label]))]
        trace = ReferenceOptimizer(model, Reference()).step(batch, cross_entropy)["2"]
        expected += probability * torch.outer(trace.a.flatten(), trace.a.flatten())
    assert_equal(F, expected)


def test_output_hessians_are_those_of_the_likelihoods() -> None:
    output, target = torch.randn(1, 4).double(), torch.rand(1, 4).double()
    assert_equal(
        output_hessian(output, target, squared_error, "mean"), 2 / 4 * torch.eye(4).double()
    )
    assert_equal(output_hessian(output, target, squared_error, "sum"), 2 * torch.eye(4).double())
    chance = output.sigmoid()[0]
    assert_equal(
        output_hessian(output, target, binary_cross_entropy, "mean"),
        torch.diag(chance * (1 - chance)) / 4,
    )
    p = output.softmax(1)[0]
    assert_equal(
        output_hessian(output, torch.tensor([2]), cross_entropy, "mean"),
        torch.diag(p) - torch.outer(p, p),
    )


def test_damping_adds_lambda() -> None:
    torch.manual_seed(0)
    X, Y = torch.randn(3, 3).double(), torch.randn(2, 2).double()
    A, G = X @ X.T, Y @ Y.T
    F, exact = dense_curvature([(A, G)], Reference(damping=0.3, damping_mode="exact"))
    assert_equal(exact - F, 0.3 * torch.eye(6).double())
    _, factored = dense_curvature([(A, G)], Reference(damping=0.3))
    # Expanding the product leaves F, lambda I and two cross terms of equal mean trace.
    pi = math.sqrt(float(A.trace()) / 3 / (float(G.trace()) / 2))
    cross = torch.kron(G, torch.eye(3).double()) * pi, torch.kron(torch.eye(2).double(), A) / pi
    assert float(cross[0].trace()) == pytest.approx(float(cross[1].trace()))
    rest = math.sqrt(0.3) * (cross[0] + cross[1])
    assert_equal(factored - F, 0.3 * torch.eye(6).double() + rest)


def test_factors_do_not_depend_on_the_micro_batches() -> None:
    model, [(x, y)] = prepare(TwiceCalled, 7)
    whole = ReferenceOptimizer(model, Reference()).step([(x, y)], cross_entropy)
    parts = [(x[:2], y[:2]), (x[2:3], y[2:3]), (x[3:], y[3:])]
    split = ReferenceOptimizer(model, Reference()).step(parts, cross_entropy)
    for name, trace in whole.items():
        assert_equal(split[name].F, trace.F)
        assert_equal(split[name].a, trace.a)


def test_ragged_micro_batches_weigh_each_example_as_the_loss_does() -> None:
    model, [first, second] = prepare(mlp, 1, 3)
    oracle = ReferenceOptimizer(model, Reference())
    G = oracle.step([first, second], cross_entropy, weights=[0.5, 0.5])["0"].factors[0][1]
    alone = [
        ReferenceOptimizer(model, Reference()).step([batch], cross_entropy)["0"].factors[0][1]
        for batch in (first, second)
    ]
    # N w_k / n_k is 4 * 0.5 / 1 = 2 for the first example and 2/3 for the others.
    assert_equal(G, (4 * alone[0] + 3 * (2 / 3) ** 2 * alone[1]) / 4)


def test_curvature_is_averaged_on_refresh_steps_only() -> None:
    model, batches = prepare(mlp, *[4] * 8)
    oracle = ReferenceOptimizer(model, Reference(lr=0.0, factor_decay=0.7, update_every=5))
    own = [
        ReferenceOptimizer(model, Reference()).step([batch], cross_entropy)["0"].factors[0][0]
        for batch in batches
    ]
    average = own[0]
    for step, batch in enumerate(batches, start=1):
        A = oracle.step([batch], cross_entropy)["0"].factors[0][0]
        if step in (2, 4, 6):
            average = 0.7 * average + 0.3 * own[step - 1]
        assert_equal(A, average)


# --- the projection -----------------------------------------------------------------------------


def traces_of(reference: Reference, seed: int) -> list[LayerTrace]:
    model, batches = prepare(mlp, 5, 4, seed=seed)
    return list(ReferenceOptimizer(model, reference).step(batches, cross_entropy).values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("total", ["mean", "sum"])
@pytest.mark.parametrize("damping_mode", ["factored", "exact"])
def test_the_papers_statements_about_the_projection(
    seed: int, total: str, damping_mode: str
) -> None:
    k = {"mean": 1, "sum": 2}[total]
    reference = Reference(total=total, damping_mode=damping_mode)  # type: ignore[arg-type]
    for t in traces_of(reference, seed):
        assert t.beta != 0
        assert abs(inner(t.p, t.a, t.F)) < 1e-11 * abs(inner(t.d, t.a, t.F))  # Lemma 1
        assert 0 <= t.cos2 <= 1
        assert k / 2 <= t.eta <= k
        assert t.eta == pytest.approx(k * (1 + t.cos2) / (1 + 3 * t.cos2), rel=1e-11)
        assert_equal((t.M @ t.u.flatten()).reshape(t.a.shape), t.eta * (t.a + t.beta * t.p))
        # What beta takes of p is the M^-1-projection of a on it; eta minimises the damped model.
        rest = torch.linalg.solve(t.M, (t.a - t.beta * t.p).flatten())
        assert abs(inner(t.p, rest)) < 1e-9 * t.E
        solve_c = torch.linalg.solve(t.M, t.c.flatten())
        assert t.eta == pytest.approx(k * inner(t.a, solve_c) / inner(t.c, solve_c), rel=1e-9)
        # KL-norm split.
        Q = torch.linalg.solve(t.M, torch.linalg.solve(t.M, t.F).T)
        split = (
            inner(t.a, t.a, Q) + 2 * t.beta * inner(t.a, t.p, Q) + t.beta**2 * inner(t.p, t.p, Q)
        )
        assert inner(t.u, t.u, t.F) == pytest.approx(t.eta**2 * split, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_swapping_the_halves_leaves_the_update_unchanged(seed: int) -> None:
    model, [(x, y)] = prepare(mlp, 6, seed=seed)
    swapped = torch.tensor([3, 4, 5, 0, 1, 2])
    one = ReferenceOptimizer(model, Reference()).step([(x, y)], cross_entropy)
    other = ReferenceOptimizer(model, Reference()).step([(x[swapped], y[swapped])], cross_entropy)
    for name, trace in one.items():
        assert trace.s == pytest.approx(-other[name].s, rel=1e-9)
        assert trace.beta == pytest.approx(-other[name].beta, rel=1e-9)
        assert trace.beta != 0
        assert_equal(trace.u, other[name].u)


def test_without_beta_the_step_is_kfac() -> None:
    fop = traces_of(Reference(beta=0.0), 0)
    kfac = traces_of(Reference(project=False), 0)
    for mine, theirs in zip(fop, kfac, strict=True):
        assert mine.eta == theirs.eta == 1
        assert_equal(mine.u, theirs.u)
        assert_equal((theirs.M @ theirs.u.flatten()).reshape(mine.a.shape), mine.a)


def test_fixed_beta_and_eta_are_taken_literally() -> None:
    for t in traces_of(Reference(beta=-0.3, eta=1.7), 0):
        assert (t.beta, t.eta) == (-0.3, 1.7)
        assert_equal((t.M @ t.u.flatten()).reshape(t.a.shape), 1.7 * (t.a - 0.3 * t.p))


def test_no_gradient_gives_no_step() -> None:
    model, _ = prepare(mlp, 1)
    x = torch.randn(4, 4).double()
    trace = ReferenceOptimizer(model, Reference(total="sum")).step(
        [(x, model(x).detach())], squared_error
    )["0"]
    assert (trace.beta, trace.eta) == (0, 2)
    assert float(trace.u.abs().max()) == 0


def test_a_scalar_layer_by_hand() -> None:
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, 2.0)
    batch = (torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [4.0]]))
    oracle = ReferenceOptimizer(layer, Reference(lr=0.5, damping=0.01, kl_clip=None))
    trace = oracle.step([batch], squared_error)[""]
    # Errors 1 and 2: output gradients 2 and 4, gradients 2 and 12; A = 5, G = 10, a = 7, d = -10.
    # pi = sqrt(1/2): M = (10 + 0.1 sqrt 2)(5 + 0.1/sqrt 2); in one dimension d is all along a.
    assert (trace.F.item(), trace.a.item()) == pytest.approx((50, 7))
    assert (trace.s, trace.beta, trace.eta) == pytest.approx((-10 / 7, 0, 1))
    expected = 7 / ((10 + 0.1 * math.sqrt(2)) * (5 + 0.1 / math.sqrt(2)))
    assert trace.u.item() == pytest.approx(expected)
    assert oracle.model.weight.item() == pytest.approx(2 - 0.5 * expected)  # type: ignore[operator]


# --- the step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("build", [mlp, TwiceCalled])
def test_identity_curvature_without_projection_is_sgd(
    build: Callable[[], nn.Module], weight_decay: float, nesterov: bool
) -> None:
    model, batches = prepare(build, 4, 4, 3, 4)
    reference = Reference(
        curvature="identity",
        project=False,
        kl_clip=None,
        weight_decay=weight_decay,
        nesterov=nesterov,
        fallback="sgd",
    )
    oracle = ReferenceOptimizer(model, reference)
    sgd = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.7, weight_decay=weight_decay, nesterov=nesterov
    )
    for batch in batches:
        oracle.step([batch], cross_entropy)
        sgd.zero_grad()
        accumulate(model, [batch], cross_entropy)
        sgd.step()
    for mine, theirs in zip(oracle.model.parameters(), model.parameters(), strict=True):
        assert_equal(mine, theirs)


def test_parameters_in_no_layer_follow_sgd_unclipped() -> None:
    model, batches = prepare(TwiceCalled, 4)
    reference = Reference(lr=0.2, kl_clip=1e-6, weight_decay=0.1, fallback="sgd")
    oracle = ReferenceOptimizer(model, reference)
    oracle.step(batches, cross_entropy)
    accumulate(model, batches, cross_entropy)
    gain = model.get_parameter("gain")
    assert gain.grad is not None
    assert_equal(oracle.model.get_parameter("gain"), gain - 0.2 * (gain.grad + 0.1 * gain))


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_kl_clip_limits_the_step_before_weight_decay(decoupled: bool) -> None:
    model, batches = prepare(mlp, 6)
    reference = Reference(kl_clip=1e-5, weight_decay=0.3, decoupled_weight_decay=decoupled)
    oracle = ReferenceOptimizer(model, reference)
    traces = oracle.step(batches, cross_entropy)
    sizes = [oracle.kl_scale**2 * 0.1**2 * inner(t.u, t.c) for t in traces.values()]
    assert oracle.kl_scale < 1
    assert sum(sizes) == pytest.approx(1e-5)
    weight = model.get_parameter("2.weight")
    expected = weight - 0.1 * (oracle.kl_scale * traces["2"].u + 0.3 * weight)
    assert_equal(oracle.model.get_parameter("2.weight"), expected)


def test_decoupled_weight_decay_stays_out_of_the_momentum() -> None:
    model, [batch] = prepare(mlp, 4)
    reference = Reference(lr=0.1, weight_decay=0.3, decoupled_weight_decay=True)
    oracle = ReferenceOptimizer(model, reference)
    oracle.step([batch], cross_entropy)
    before = oracle.model.get_parameter("2.weight").detach().clone()
    first = (model.get_parameter("2.weight") * (1 - 0.03) - before) / 0.1
    second = oracle.step([batch], cross_entropy)["2"].u * oracle.kl_scale
    expected = before * (1 - 0.03) - 0.1 * (0.7 * first + second)
    assert_equal(oracle.model.get_parameter("2.weight"), expected)


def test_a_clipped_gradient_scales_a_and_d_and_no_factor() -> None:
    model, batches = prepare(mlp, 5)
    full = ReferenceOptimizer(model, Reference()).step(batches, cross_entropy)["0"]
    oracle = ReferenceOptimizer(model, Reference())
    clipped = oracle.step(batches, cross_entropy, gradient_scale=0.25)["0"]
    for name in ("a", "d", "u"):
        assert_equal(getattr(clipped, name), 0.25 * getattr(full, name))
    assert_equal(clipped.F, full.F)


def test_frozen_parameters_stay_and_a_frozen_bias_is_no_coordinate() -> None:
    model, batches = prepare(mlp, 4)
    model.get_parameter("0.bias").requires_grad_(False)
    model.get_parameter("2.weight").requires_grad_(False)
    oracle = ReferenceOptimizer(model, Reference(weight_decay=0.1))
    traces = oracle.step(batches, cross_entropy)
    assert {name: trace.a.shape for name, trace in traces.items()} == {"0": (5, 4)}
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, oracle.model.get_parameter(name))
        assert moved == parameter.requires_grad


def test_options_the_reference_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="fisher"):
        Reference(fisher="mc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="KFAC"):
        replace(Reference(project=False), beta=0.5)


def test_batch_norm_in_training_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    batch = (torch.randn(4, 4), torch.randint(3, (4,)))
    with pytest.raises(ValueError, match="batch norm"):
        ReferenceOptimizer(model, Reference()).step([batch], cross_entropy)
    ReferenceOptimizer(model.eval(), Reference()).step([batch], cross_entropy)
