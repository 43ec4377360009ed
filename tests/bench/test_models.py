"""The networks have the published sizes, standard initialisation from a seed, and they learn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fop
from fop_bench.methods import METHODS
from fop_bench.models import (
    GPT,
    T2TViT,
    cifar_resnet,
    cnn,
    imagenet_resnet50,
    mlp,
    resnet18_for_cifar,
    seeded,
    t2t_vit_14,
)
from fop_bench.models.attention import DropPath, SelfAttention
from fop_bench.models.resnet import PaddedShortcut
from fop_bench.models.t2t_vit import TokenPerformer, sinusoid_positions


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def small_t2t_vit() -> T2TViT:
    return T2TViT(classes=10, image=32, width=32, depth=2, heads=2)


def small_gpt() -> GPT:
    return GPT(vocabulary=20, length=8, width=16, depth=2, heads=2)


IMAGE = (3, 32, 32)


@pytest.mark.parametrize(
    ("build", "count", "published"),
    [
        (lambda: mlp(784, 128, 64, 10), 109_386, None),
        (cnn, 454_922, None),
        (lambda: cifar_resnet(8), 75_290, None),
        (lambda: cifar_resnet(20), 269_722, 0.27),
        (lambda: cifar_resnet(32), 464_154, 0.46),
        (lambda: cifar_resnet(32, classes=100), 470_004, 0.47),
        (resnet18_for_cifar, 11_173_962, 11.17),
        (imagenet_resnet50, 25_557_032, 25.56),
        (t2t_vit_14, 21_465_806, 21.5),
        (lambda: t2t_vit_14(100), 21_119_306, None),
    ],
)
def test_parameter_counts_are_the_published_ones(
    build: Callable[[], nn.Module], count: int, published: float | None
) -> None:
    with torch.device("meta"):
        model = build()
    assert parameters(model) == count
    if published is not None:
        digits = 1 if published == 21.5 else 2
        assert round(count / 1e6, digits) == published


@pytest.mark.parametrize(
    ("build", "inputs", "classes"),
    [
        (lambda: mlp(784, 128, 64, 10), (1, 28, 28), 10),
        (cnn, (1, 28, 28), 10),
        (lambda: cifar_resnet(8), IMAGE, 10),
        (lambda: cifar_resnet(20), IMAGE, 10),
        (lambda: cifar_resnet(32, classes=100), IMAGE, 100),
        (resnet18_for_cifar, IMAGE, 10),
        (imagenet_resnet50, (3, 224, 224), 1000),
        (lambda: t2t_vit_14(100), (3, 224, 224), 100),
    ],
)
def test_output_is_one_logit_a_class(
    build: Callable[[], nn.Module], inputs: tuple[int, ...], classes: int
) -> None:
    with torch.no_grad():
        output = seeded(build, 0).eval()(torch.zeros(2, *inputs))
    assert output.shape == (2, classes)
    assert output.isfinite().all()


def test_gpt_gives_logits_for_every_position() -> None:
    assert small_gpt()(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 8, 20)
    with pytest.raises(ValueError, match="got 9 tokens, the model has 8 positions"):
        small_gpt()(torch.zeros(3, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("build", "shape", "lr", "steps"),
    [
        (lambda: mlp(784, 32, 10), (16, 1, 28, 28), 0.1, 10),
        (cnn, (16, 1, 28, 28), 0.05, 10),
        (lambda: cifar_resnet(8), (16, *IMAGE), 0.1, 10),
        (resnet18_for_cifar, (4, *IMAGE), 0.02, 6),
        (small_t2t_vit, (8, *IMAGE), 0.1, 40),
    ],
)
def test_a_few_steps_of_sgd_lower_the_loss(
    build: Callable[[], nn.Module], shape: tuple[int, ...], lr: float, steps: int
) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    target = torch.arange(len(inputs)) % 10
    assert last_over_first_loss(build, inputs, target, lr, steps) < 0.7


@pytest.mark.parametrize("optimizer", [fop.KFAC, fop.FOP])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: mlp(784, 32, 10), (16, 1, 28, 28)),
        (lambda: cifar_resnet(8), (8, *IMAGE)),
        (small_t2t_vit, (8, *IMAGE)),
    ],
)
def test_second_order_steps_lower_the_loss(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    target = torch.arange(len(inputs)) % 10
    model = seeded(build, 0)
    losses = train(model, optimizer(model, lr=0.05, fallback="adamw"), inputs, target, steps=8)
    assert losses[-1] < 0.8 * losses[0]


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (lambda: mlp(784, 32, 10), torch.randn(8, 1, 28, 28)),
    "resnet8": (lambda: cifar_resnet(8), torch.randn(4, *IMAGE)),
    "t2t_vit": (small_t2t_vit, torch.randn(4, *IMAGE)),
    "gpt": (small_gpt, torch.randint(20, (4, 8))),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:embedding 'positions' is called with one row")
def test_every_method_takes_steps_on_every_family(family: str, name: str) -> None:
    build, inputs = FAMILIES[family]
    model = seeded(build, 0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = METHODS[name].build(model, 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        output = model(inputs)
        F.cross_entropy(
            output.flatten(0, -2), torch.arange(len(output.flatten(0, -2))) % 10
        ).backward()
        optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert parameter.isfinite().all()
        if parameter.dim() > 1:  # a scale of 1 may have too small a gradient to move in float32
            assert not torch.equal(old, parameter)


def test_gpt_learns() -> None:
    tokens = torch.arange(20).repeat(2)[:32].view(4, 8)
    assert last_over_first_loss(small_gpt, tokens, (tokens + 1) % 20, lr=0.5, steps=10) < 0.7


def last_over_first_loss(
    build: Callable[[], nn.Module],
    inputs: torch.Tensor,
    target: torch.Tensor,
    lr: float,
    steps: int,
) -> float:
    model = seeded(build, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = train(model, optimizer, inputs, target, steps)
    return losses[-1] / losses[0]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    target: torch.Tensor,
    steps: int,
) -> list[float]:
    """The loss at each step, on one batch."""
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # dropout
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs).flatten(0, -2), target.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "build",
    [cnn, lambda: cifar_resnet(8), small_t2t_vit, small_gpt],
    ids=["cnn", "resnet8", "t2t_vit", "gpt"],
)
def test_a_seed_decides_the_weights_and_leaves_the_global_state_alone(
    build: Callable[[], nn.Module],
) -> None:
    before = torch.get_rng_state()
    one = seeded(build, 1).state_dict()
    torch.rand(3)
    torch.set_rng_state(before)
    same, other = seeded(build, 1).state_dict(), seeded(build, 2).state_dict()
    assert torch.get_rng_state().equal(before)
    assert all(one[name].equal(same[name]) for name in one)
    assert not all(one[name].equal(other[name]) for name in one)


def test_convolutions_start_with_the_variance_of_he_et_al() -> None:
    model = seeded(resnet18_for_cifar, 0)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 20
    for conv in convolutions:
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)


def test_transformers_start_small_with_zero_biases() -> None:
    for model in (seeded(small_t2t_vit, 0), seeded(small_gpt, 0)):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                assert module.weight.abs().max() < 0.12
                biases = [p for name, p in module.named_parameters() if name == "bias"]
                assert not any(bias.any() for bias in biases)


def test_all_weights_but_norms_and_class_token_belong_to_layers_kfac_can_see() -> None:
    known = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.BatchNorm2d)
    for model in (small_t2t_vit(), small_gpt(), cifar_resnet(8), imagenet_resnet50()):
        seen = {id(p) for m in model.modules() if isinstance(m, known) for p in m.parameters()}
        others = [name for name, p in model.named_parameters() if id(p) not in seen]
        assert others in ([], ["class_token"])
        assert not any(isinstance(m, nn.MultiheadAttention) for m in model.modules())


def test_depth_must_fit_the_cifar_family() -> None:
    with pytest.raises(ValueError, match=r"depth must be 6 n \+ 2 .* got 18"):
        cifar_resnet(18)


def test_padded_shortcut_takes_every_second_pixel_and_adds_zero_channels() -> None:
    x = torch.randn(2, 4, 6, 6)
    y = PaddedShortcut(4)(x)
    assert y.shape == (2, 8, 3, 3)
    assert y[:, 2:6].equal(x[:, :, ::2, ::2])
    assert not y[:, :2].any()
    assert not y[:, 6:].any()


def test_attention_agrees_with_nn_multihead_attention() -> None:
    ours = SelfAttention(12, 3, causal=False, qkv_bias=True).double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.load_state_dict(ours.proj.state_dict())
        x = torch.randn(2, 5, 12, dtype=torch.double)
        expected, _ = theirs(x, x, x, need_weights=False)
        torch.testing.assert_close(ours(x), expected)


def test_gpt_does_not_look_ahead() -> None:
    model = seeded(small_gpt, 0)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 19
    with torch.no_grad():
        same, different = model(tokens)[0], model(changed)[0]
    assert same[:5].equal(different[:5])
    assert not same[5:].isclose(different[5:]).all(-1).any()


def test_performer_attends_like_its_kernel_written_out() -> None:
    layer = seeded(lambda: TokenPerformer(10, 6), 0).double().eval()
    assert isinstance(layer, TokenPerformer)
    x = torch.randn(2, 7, 10, dtype=torch.double)
    with torch.no_grad():
        query, key, value = (t for t in layer.qkv(layer.norm1(x)).chunk(3, -1))
        w = layer.directions
        exponent = (query @ w.t())[:, :, None] + (key @ w.t())[:, None]  # [n, t, t, m]
        norms = query.square().sum(-1)[:, :, None] + key.square().sum(-1)[:, None]
        kernel = (exponent - norms[..., None] / 2).exp().sum(-1)
        y = value + layer.proj(kernel / kernel.sum(-1, keepdim=True) @ value)
        expected = y + layer.mlp(layer.norm2(y))
        torch.testing.assert_close(layer.double()(x), expected, rtol=1e-5, atol=1e-5)


def test_performer_directions_are_orthogonal() -> None:
    directions = TokenPerformer(10, 64).directions
    torch.testing.assert_close(directions @ directions.t(), 32 * torch.eye(32), atol=1e-3, rtol=0)


def test_t2t_vit_runs_under_autocast() -> None:
    model = seeded(small_t2t_vit, 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(2, *IMAGE)).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_positions_are_sines_and_cosines() -> None:
    table = sinusoid_positions(5, 6)[0]
    assert table[3, 2].item() == pytest.approx(math.sin(3 / 10_000 ** (2 / 6)), rel=1e-5)
    assert table[3, 3].item() == pytest.approx(math.cos(3 / 10_000 ** (2 / 6)), rel=1e-5)


def test_stochastic_depth_drops_whole_examples_and_keeps_the_mean() -> None:
    layer = DropPath(0.25)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        y = layer(torch.ones(4000, 3))
    assert sorted(set(y.flatten().tolist())) == pytest.approx([0, 4 / 3])
    assert (y == y[:, :1]).all()
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert layer.eval()(torch.ones(5, 3)).equal(torch.ones(5, 3))
