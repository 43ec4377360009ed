"""nn.MultiheadAttention is four linear layers: its steps are those of attention written out.

`PlainAttention` computes the same function with four nn.Linear modules. The dense reference walks
that, and the library has to take the same steps with nn.MultiheadAttention, options and all.
"""

from __future__ import annotations

import copy
import gc
import io
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fop
from tests.attention import aligned, with_plain_attention
from tests.common import Batch, distance, same, snapshot, train
from tests.oracles import Reference, ReferenceOptimizer, accumulate, cross_entropy

TOLERANCE = 1e-7
CLASSES, WIDTH, TOKENS = 3, 4, 5


class Attending(nn.Module):
    """Tokens attend to each other ("self") or to other tokens, then a mean and a linear layer."""

    def __init__(
        self,
        inputs: str = "self",
        *,
        causal: bool = False,
        padding: bool = False,
        need_weights: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, **options)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.inputs, self.causal, self.padding = inputs, causal, padding
        self.need_weights = need_weights
        self.kdim, self.vdim = options.get("kdim", WIDTH), options.get("vdim", WIDTH)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)  # zero at first, which would hide mistakes

    def forward(self, x: Tensor) -> Tensor:
        """[n, TOKENS, 8]: the last four features make the values of "all"."""
        query = x[..., :WIDTH]
        key = value = query
        if self.inputs != "self":
            query, rest = query[:, :2], x[:, 2:]
            key = value = rest[..., : self.kdim]
            if self.inputs == "all":
                value = rest[..., 8 - self.vdim :]
        masks: dict[str, Tensor] = {}
        if self.causal:
            masks["attn_mask"] = torch.ones(query.shape[1], key.shape[1]).triu(1).bool()
        if self.padding:  # any token but the first may be missing
            missing = key[..., 0] > 0.5
            masks["key_padding_mask"] = missing & (torch.arange(key.shape[1]) > 0)
        if not self.attention.batch_first:
            moved = {id(t): t.transpose(0, 1) for t in (query, key, value)}
            query, key, value = (moved[id(t)] for t in (query, key, value))
        need = {"need_weights": self.need_weights}
        output = self.attention(query, key, value, **masks, **need)[0]
        if not self.attention.batch_first:
            output = output.transpose(0, 1)
        return self.head(torch.tanh(output).mean(1))


def attending(inputs: str = "self", *, seed: int = 0, **options: Any) -> Attending:
    torch.manual_seed(seed)
    return Attending(inputs, **options).double()


def tokens(n: int = 7, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, TOKENS, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def check(
    model: nn.Module,
    settings: dict[str, Any],
    data: Callable[[int], list[Batch]],
    *,
    steps: int = 5,
    project: bool = True,
    twin: nn.Module | None = None,
) -> None:
    """The library on the model against the dense reference on its written-out twin."""
    twin = with_plain_attention(twin or model)
    reference = ReferenceOptimizer(twin, Reference(project=project, **settings))
    optimizer = (fop.FOP if project else fop.KFAC)(model, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        accumulate(model, data(step), cross_entropy)
        optimizer.step()
        reference.step(data(step), cross_entropy)
        assert distance(*aligned(model, reference.model)) < TOLERANCE, f"step {step}"


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "exact damping, no clip": {"damping_mode": "exact", "damping": 0.1, "kl_clip": None},
    "reduce": {"sharing": "reduce"},
    "exact Fisher": {"fisher": "exact", "update_every": 2},
    "EKFAC": {"curvature": "ekfac", "damping": 0.1, "update_every": 2},
    "weight decay": {"weight_decay": 0.01, "nesterov": True, "update_every": 1},
}
MODELS: dict[str, dict[str, Any]] = {
    "self": {},
    "self, batch first, masks": {"batch_first": True, "causal": True, "padding": True},
    "self, no bias, weights": {"bias": False, "need_weights": True},
    "keys are values": {"inputs": "kv", "padding": True},
    "keys are values, batch first": {"inputs": "kv", "batch_first": True, "need_weights": True},
    "all different": {"inputs": "all", "causal": True},
    "separate": {"inputs": "all", "kdim": 3, "vdim": 2},
    "separate, batch first": {"inputs": "all", "kdim": 5, "vdim": 4, "batch_first": True},
    "separate, no bias": {"inputs": "all", "kdim": 3, "bias": False, "need_weights": True},
    "more keys": {"add_bias_kv": True, "add_zero_attn": True, "padding": True},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("project", [True, False], ids=["FOP", "KFAC"])
def test_steps_are_those_of_four_linear_layers(options: dict[str, Any], project: bool) -> None:
    check(attending(**options), {}, lambda step: [tokens(seed=step)], project=project)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 3, "batch_first": True}], ids=str)
def test_settings_mean_the_same(settings: dict[str, Any], sizes: dict[str, Any]) -> None:
    # Softmax ignores what is added to all keys alike, so an example's key gradients add up to
    # zero, and with "reduce" the keys' G would be round-off: a further key of zeros prevents it.
    model = attending("all", add_zero_attn=True, **sizes)
    check(model, settings, lambda step: [tokens(seed=step)], steps=4)


@pytest.mark.parametrize("halves", ["samples", "microbatches"])
@pytest.mark.parametrize("kind", ["self", "separate, batch first"])
def test_micro_batches_of_odd_sizes_are_one_batch(halves: str, kind: str) -> None:
    def data(step: int) -> list[Batch]:
        return [tokens(n, seed=10 * step + n) for n in (3, 5, 2)]

    check(attending(**MODELS[kind]), {"halves": halves}, data, steps=4)


class Twice(Attending):
    """The same attention for tokens among themselves, then for their mixtures to other tokens."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., :WIDTH].transpose(0, 1)
        mixed = torch.tanh(self.attention(x, x, x)[0])[:3]
        return self.head(torch.tanh(self.attention(mixed, x[1:], x[:-1])[0]).mean(0))


def test_several_calls_in_one_forward_add_positions() -> None:
    torch.manual_seed(0)
    check(Twice().double(), {}, lambda step: [tokens(seed=step)])


def test_no_queries_are_no_examples() -> None:
    model = attending("kv")
    optimizer = fop.FOP(model)
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    assert model.attention(x[:0], x, x)[0].shape == (0, 3, WIDTH)
    train(model, optimizer, [tokens()])


class Encoding(nn.Module):
    def __init__(self, *, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 3, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )
        norm = nn.LayerNorm(WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        missing = (x[..., -1] > 0.5) & (torch.arange(TOKENS) > 0)
        x = x[..., :WIDTH] if self.batch_first else x[..., :WIDTH].transpose(0, 1)
        causal = torch.ones(TOKENS, TOKENS).triu(1).bool()
        x = self.encoder(x, mask=causal, src_key_padding_mask=missing, is_causal=True)
        return self.head(x.mean(1 if self.batch_first else 0))


class Translating(nn.Module):
    def __init__(self, *, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        options = {"batch_first": batch_first, "norm_first": norm_first}
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 3, dropout=0.0, **options)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., :WIDTH] if self.batch_first else x[..., :WIDTH].transpose(0, 1)
        axis = 1 if self.batch_first else 0
        source, target = x.split([3, 2], axis)
        causal = torch.ones(2, 2).triu(1).bool()
        return self.head(self.transformer(source, target, tgt_mask=causal).mean(axis))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [Encoding, Translating])
def test_transformers_take_the_steps_of_their_linear_layers(
    kind: Callable[..., nn.Module], batch_first: bool, norm_first: bool
) -> None:
    """All layers are captured in training, with examples found where batch_first puts them."""
    torch.manual_seed(0)
    model = kind(batch_first=batch_first, norm_first=norm_first).double()
    twin = kind(batch_first=True, norm_first=norm_first).double()
    twin.load_state_dict(model.state_dict())
    check(model, {}, lambda step: [tokens(5, seed=step)], steps=3, twin=twin)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("settings", [{"norms": "unitwise"}, {"halves": "microbatches"}], ids=str)
@pytest.mark.parametrize("kind", [Encoding, Translating])
def test_batch_first_is_a_matter_of_layout(
    kind: Callable[..., nn.Module], settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    models = [kind(batch_first=flag, norm_first=True).double() for flag in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = fop.FOP(model, **settings)
        for step in range(4):
            optimizer.zero_grad()
            accumulate(model, [tokens(4, seed=step), tokens(3, seed=9 + step)], cross_entropy)
            optimizer.step()
    assert distance(snapshot(models[1]), snapshot(models[0])) < 1e-10


# ---- the library on both: attention against attention written out


@pytest.mark.parametrize(
    "settings", [{"fisher": "mc"}, {"max_factor_size": 4}, {"curvature": "identity"}], ids=str
)
@pytest.mark.parametrize("kind", ["self", "separate"])
def test_other_settings_mean_the_same_as_for_linear_layers(
    settings: dict[str, Any], kind: str
) -> None:
    model = attending(**MODELS[kind])
    plain = with_plain_attention(model)
    for one in (model, plain):
        torch.manual_seed(1)
        train(one, fop.FOP(one, **settings), [tokens(seed=seed) for seed in range(4)])
    assert distance(*aligned(model, plain)) < 1e-9


@pytest.mark.parametrize(
    "frozen",
    [["in_proj_bias"], ["in_proj_weight"], ["out_proj.weight"], ["k_proj_weight"]],
    ids=str,
)
def test_frozen_parts_are_left_alone(frozen: list[str]) -> None:
    model = attending(**MODELS["separate" if frozen[0].startswith("k_") else "self"])
    for name in frozen:
        model.attention.get_parameter(name).requires_grad_(False)
    plain = with_plain_attention(model)
    before = {name: model.attention.get_parameter(name).clone() for name in frozen}
    optimizers = [fop.FOP(model), fop.FOP(plain)]
    for unfrozen in (False, True):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            if unfrozen:
                one.requires_grad_(True)
            train(one, optimizer, [tokens(seed=seed) for seed in range(4)])
        assert distance(*aligned(model, plain)) < 1e-9
        kept = [torch.equal(model.attention.get_parameter(n), old) for n, old in before.items()]
        assert all(kept) is not unfrozen


def test_groups_by_name_reach_the_projections() -> None:
    model = attending()
    plain = with_plain_attention(model)
    groups = ([{"names": "attention", "lr": 0.01}], [{"names": "attention.[!o]*", "lr": 0.01}])
    for one, asked in zip((model, plain), groups, strict=True):
        train(one, fop.FOP(one, param_groups=asked), [tokens(seed=seed) for seed in range(4)])
    assert distance(*aligned(model, plain)) < 1e-9


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("attention", {"head"}),
        (nn.MultiheadAttention, {"head"}),
        ("attention.out_proj", {"head", "attention.query", "attention.key", "attention.value"}),
        ((), {"head", *(f"attention.{r}" for r in ("query", "key", "value", "out_proj"))}),
    ],
    ids=["name", "type", "output layer", "nothing"],
)
def test_skip_takes_the_module_or_its_output_layer(skip: Any, left: set[str]) -> None:
    model = attending()
    optimizer = fop.FOP(model, skip=skip)
    train(model, optimizer, [tokens()])
    assert set(fop.diagnostics(optimizer)) == left
    rules = {name: g["rule"] for g in optimizer.param_groups for name in g["param_names"]}
    assert (rules["attention.in_proj_weight"] == "curvature") == ("attention.query" in left)
    assert (rules["attention.out_proj.bias"] == "curvature") == ("attention.out_proj" in left)


def test_bias_k_and_bias_v_follow_the_fallback() -> None:
    model = attending(add_bias_kv=True)
    optimizer = fop.FOP(model, fallback="adamw")
    names = [g["param_names"] for g in optimizer.param_groups if g["rule"] == "adamw"]
    assert names == [["attention.bias_k", "attention.bias_v"]]


class Tied(nn.Module):
    """Two attentions with the same in-projection, or one with its output layer used elsewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)
        if how == "in":
            self.second.in_proj_weight = self.first.in_proj_weight
            self.second.in_proj_bias = self.first.in_proj_bias
        elif how == "out":
            self.head.weight = self.first.out_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., :WIDTH]
        x = self.first(x, x, x)[0]
        x = self.second(x, x, x)[0]
        return self.head(x.mean(1))


def test_attentions_that_share_a_projection_are_one_block() -> None:
    torch.manual_seed(0)
    model = Tied("in").double()
    plain = with_plain_attention(model)
    for role in ("query", "key", "value"):
        setattr(plain.second, role, getattr(plain.first, role))  # one module, called twice
    optimizer = fop.FOP(model)
    train(model, optimizer, [tokens(seed=seed) for seed in range(4)])
    train(plain, fop.FOP(plain), [tokens(seed=seed) for seed in range(4)])
    assert "second.query" not in fop.diagnostics(optimizer)
    packed = torch.cat([plain.first.query.weight, plain.first.key.weight, plain.first.value.weight])
    assert distance([model.first.in_proj_weight], [packed]) < 1e-9
    assert distance([model.head.weight], [plain.head.weight]) < 1e-9


def test_a_projection_that_a_layer_of_another_kind_shares_is_left_to_the_fallback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Tied("out").double()
    with caplog.at_level("INFO", logger="fop"):
        optimizer = fop.FOP(model)
    for name in ("first.out_proj", "head"):
        expected = rf"uses the fallback optimizer \(it shares .*\): .*'{name}'"
        assert re.search(expected, caplog.text)
    train(model, optimizer, [tokens()])
    assert not {"first.out_proj", "head"} & set(fop.diagnostics(optimizer))


def test_a_subclass_with_a_forward_of_its_own_is_left_to_the_fallback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    with caplog.at_level("INFO", logger="fop"):
        optimizer = fop.FOP(nn.Sequential(Doubled(WIDTH, 2)))
    assert "optimizer (Doubled has a forward of its own): '0.query'" in caplog.text
    assert {group["rule"] for group in optimizer.param_groups} == {"adamw"}


# ---- torch's own results


def call_options() -> list[dict[str, Any]]:
    causal = torch.ones(4, 4).triu(1).bool()
    missing = torch.tensor([[False, True, False, True]]).expand(6, 4)
    return [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": causal, "is_causal": True, "need_weights": False},
        {"attn_mask": torch.randn(12, 4, 4).double(), "need_weights": False},
        {"key_padding_mask": missing},
        {"key_padding_mask": missing, "attn_mask": causal, "need_weights": False},
    ]


@pytest.mark.parametrize("call", call_options(), ids=lambda call: "+".join(call) or "plain")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout": 0.4},
        {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.4},
        {"kdim": 3, "vdim": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("inputs", ["self", "kv", "all"])
def test_outputs_and_random_numbers_are_torchs_bit_for_bit(
    inputs: str, batch_first: bool, options: dict[str, Any], call: dict[str, Any]
) -> None:
    """Gradients, computed as two halves, to round-off."""
    torch.manual_seed(0)
    watched = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first, **options).double()
    plain = copy.deepcopy(watched)
    optimizer = fop.FOP(watched)
    shape = (6, 4) if batch_first else (4, 6)
    sizes = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    q, k, v = (torch.randn(*shape, i, dtype=torch.float64, requires_grad=True) for i in sizes)
    if inputs == "self" and "kdim" not in options:
        k = v = q
    elif inputs == "kv" and "kdim" not in options:
        v = k
    results = []
    for module in (watched, plain):
        torch.manual_seed(1)
        output, weights = module(q, k, v, **call)
        assert type(output) is Tensor
        assert weights is None or type(weights) is Tensor
        loss = output.square().sum() + (0 if weights is None else weights.square().sum())
        wanted = [*{id(t): t for t in (q, k, v)}.values(), *module.parameters()]
        gradients = torch.autograd.grad(loss, wanted)
        results.append(([output, output if weights is None else weights, torch.rand(3)], gradients))
    assert same(results[0][0], results[1][0])
    assert distance([g + 1 for g in results[0][1]], [g + 1 for g in results[1][1]]) < 1e-12
    assert optimizer.state == {}  # a gradient taken for another purpose leaves no trace


def test_an_unbatched_call_is_one_example() -> None:
    torch.manual_seed(0)
    watched = nn.MultiheadAttention(WIDTH, 2).double()
    plain = copy.deepcopy(watched)
    optimizer = fop.KFAC(watched)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    for module in (watched, plain):
        module(x, x, x)[0].square().sum().backward()
    assert same([watched(x, x, x)[0]], [plain(x, x, x)[0]])
    gradients = zip(watched.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-14) for a, b in gradients)
    samples = [layer.recorder.sample() for layer in optimizer._engine.layers]
    assert [sample.statistics.examples for sample in samples] == [1] * 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_evaluation_and_no_grad_are_torchs_own() -> None:
    """The fast paths included: they run only where no gradient is asked for."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
    watched = nn.TransformerEncoder(layer, 2).eval()
    plain = copy.deepcopy(watched)
    optimizer = fop.FOP(watched)
    x = torch.randn(6, TOKENS, WIDTH)
    missing = torch.arange(TOKENS).expand(6, TOKENS) > torch.arange(6)[:, None] + 1
    with torch.no_grad():
        for options in ({}, {"src_key_padding_mask": missing}):
            assert torch.allclose(watched(x, **options), plain(x, **options), atol=1e-6)
        attention = watched.layers[0].self_attn
        expected = plain.layers[0].self_attn(x, x, x)
        assert same(attention(x, x, x), expected)
    assert not any(block.recorder.seen.examples for block in optimizer._engine.layers)


# ---- loops


def test_a_failed_call_leaves_nothing_behind() -> None:
    models = [attending(), attending()]
    for index, model in enumerate(models):
        optimizer = fop.FOP(model)
        for seed in range(3):
            if index == 1:
                x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
                with pytest.raises(AssertionError, match="embedding dimension"):
                    model.attention(x[..., :2], x, x)
                with pytest.raises(RuntimeError, match=r"shape of the 2D attn_mask"):
                    model.attention(x, x, x, attn_mask=torch.zeros(7, 7))
                with pytest.raises(TypeError, match="missing"):
                    model.attention(x)
            train(model, optimizer, [tokens(seed=seed)])
    assert same(snapshot(models[0]), snapshot(models[1]))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_the_model_is_not_watched(how: str) -> None:
    model = attending()
    optimizer = fop.FOP(model)
    train(model, optimizer, [tokens()])
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    examples = [list(block.recorder.sample().half_sizes) for block in optimizer._engine.layers]
    cross_entropy(twin(tokens()[0]), tokens()[1], "mean").backward()
    found = [list(block.recorder.sample().half_sizes) for block in optimizer._engine.layers]
    assert found == examples
    fop.FOP(twin)
    train(model, optimizer, [tokens()])  # the twin's was not taken over from this one


@pytest.mark.parametrize("kind", ["self", "separate"])
def test_resume_is_bit_for_bit(kind: str) -> None:
    straight = attending(**MODELS[kind])
    optimizer = fop.FOP(straight)
    train(straight, optimizer, [tokens(seed=seed) for seed in range(5)])
    buffer = io.BytesIO()
    torch.save((straight.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    resumed = attending(**MODELS[kind], seed=7)
    resumed.load_state_dict(weights)
    second = fop.FOP(resumed)
    second.load_state_dict(state)
    for model, one in ((straight, optimizer), (resumed, second)):
        train(model, one, [tokens(seed=seed) for seed in range(5, 12)])
    assert same(snapshot(straight), snapshot(resumed))


def test_half_precision_keeps_precise_curvature_through_a_checkpoint() -> None:
    model = attending().bfloat16()
    optimizer = fop.FOP(model)
    x, y = tokens()
    train(model, optimizer, [(x.bfloat16(), y)])
    twin = fop.FOP(attending().bfloat16())
    twin.load_state_dict(optimizer.state_dict())
    for one in (optimizer, twin):
        state = one.state[one.param_groups[0]["params"][0]]
        assert state["key.input_inverse"].dtype == torch.float32
        assert state["key.input_inverse"].shape == (1, WIDTH + 1, WIDTH + 1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    models = [attending(padding=True), attending(padding=True)]
    for index, model in enumerate(models):
        optimizer = fop.FOP(model)
        for seed in range(4):
            x, y = tokens(seed=seed)
            x.requires_grad_()
            optimizer.zero_grad()
            output = checkpoint(model, x, use_reentrant=reentrant) if index else model(x)
            functional.cross_entropy(output, y).backward()
            optimizer.step()
    assert same(snapshot(models[0]), snapshot(models[1]))


def test_autocast_keeps_torchs_outputs_and_precise_curvature() -> None:
    torch.manual_seed(0)
    watched = Attending(padding=True)
    plain = copy.deepcopy(watched)
    optimizer = fop.FOP(watched)
    x, y = tokens()
    for model in (watched, plain):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x.float())
            functional.cross_entropy(output, y).backward()
    assert torch.equal(watched(x.float()), plain(x.float()))
    pairs = zip(watched.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=2e-2, rtol=5e-2) for a, b in pairs)
    optimizer.step()
    state = optimizer.state[watched.attention.in_proj_weight]
    assert state["value.output_factor"].dtype == torch.float32


def test_function_transforms_pass_through() -> None:
    watched = attending()
    plain = copy.deepcopy(watched)
    optimizer = fop.FOP(watched)
    x, y = tokens()
    gradients = []
    for model in (watched, plain):

        def loss(weights: dict[str, Tensor], model: nn.Module = model) -> Tensor:
            return functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

        gradients.append(torch.func.grad(loss)(dict(model.named_parameters())))
    assert same(gradients[0].values(), gradients[1].values())
    assert not any(block.recorder.sample().statistics.passes for block in optimizer._engine.layers)


def test_a_full_backward_hook_is_refused_by_name() -> None:
    model = attending()
    optimizer = fop.FOP(model)
    handle = model.attention.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"attention 'attention' has a full backward hook"):
        model(tokens()[0])
    with torch.no_grad():
        model(tokens()[0])
    handle.remove()
    train(model, optimizer, [tokens()])


def test_hooks_of_the_user_run_as_ever() -> None:
    models = [attending(), attending()]
    for model in models:
        if model is models[1]:
            optimizer = fop.FOP(model, lr=0.0)
        model.attention.register_forward_pre_hook(
            lambda module, args: tuple(2 * x.contiguous() for x in args)
        )
        model.attention.register_forward_hook(lambda module, args, output: (3 * output[0], None))
        functional.cross_entropy(model(tokens()[0]), tokens()[1]).backward()
    assert same([models[0](tokens()[0])], [models[1](tokens()[0])])
    assert all(block.recorder.sample().statistics.passes for block in optimizer._engine.layers)
    gradients = [[p.grad for p in model.parameters()] for model in models]
    assert distance(*[[g + 1 for g in gs] for gs in gradients]) < 1e-12


def test_a_replaced_projection_is_named() -> None:
    model = attending()
    optimizer = fop.FOP(model)
    model.attention.in_proj_weight = nn.Parameter(model.attention.in_proj_weight.detach().clone())
    functional.cross_entropy(model(tokens()[0]), tokens()[1]).backward()
    with pytest.raises(RuntimeError, match=r"weight of layer 'attention.query' was replaced"):
        optimizer.step()


def test_no_graph_outlives_its_step() -> None:
    """Marks hold their call, which must not close a cycle around the graph."""
    model = attending()
    optimizer = fop.FOP(model)
    train(model, optimizer, [tokens()])
    gc.collect()
    gc.disable()
    try:
        output = model(tokens()[0])
        graph = weakref.ref(output.grad_fn)
        del output
        assert graph() is None
    finally:
        gc.enable()


def encoding() -> nn.Module:
    torch.manual_seed(0)
    return Encoding(batch_first=False, norm_first=False).double()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("build", [encoding, lambda: attending("kv", batch_first=True)])
def test_a_compiled_model_trains_like_a_plain_one(build: Callable[[], nn.Module]) -> None:
    torch.compiler.reset()
    plain, inner = build(), build()
    compiled: Any = inner
    if build is encoding:  # compiled first, or last
        compiled = torch.compile(inner, backend="aot_eager")
    optimizer = fop.FOP(compiled)
    if build is not encoding:
        compiled = torch.compile(inner, backend="aot_eager")
    data = [tokens(seed=seed) for seed in range(4)]
    train(compiled, optimizer, data)
    train(plain, fop.FOP(plain), data)
    assert distance(snapshot(inner), snapshot(plain)) < 1e-10
