"""Training by the Hugging Face Trainer is training by the plain loop, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)
from transformers.pytorch_utils import Conv1D

import fop
from fop.integrations.huggingface import SecondOrderMixin
from fop.testing import check_layer
from tests.common import same, snapshot
from tests.test_register_layer import Conv1DAdapter
from tests.trainers.common import example

LR, CLIP, WORDS, LENGTH = 0.1, 0.5, 40, 8
MICRO_BATCH, EXAMPLES = 4, 22  # an epoch ends with a ragged micro-batch
# BERT looks positions up once for the whole batch, so they belong to no example.
SKIP = "*position_embeddings"
ADAMW = {"skip": SKIP, "fallback": {"name": "adamw", "lr": 1e-3}}
# Renamed in a transformers release that Python 3.10 does not get.
CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(TrainingArguments, "activation_checkpointing")
    else "gradient_checkpointing"
)
Example = dict[str, Tensor]


class FOPTrainer(SecondOrderMixin, Trainer):
    pass


def bert(dropout: float = 0.0) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=3,
        )
    )


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=LENGTH,
        )
    )


def sentences() -> list[Example]:
    """Random words, padded to different lengths; the label is that of the first word."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(EXAMPLES):
        words = torch.randint(WORDS, (LENGTH,), generator=generator)
        length = int(torch.randint(3, LENGTH + 1, (), generator=generator))
        mask = (torch.arange(LENGTH) < length).long()
        found.append({"input_ids": words, "attention_mask": mask, "labels": words[0] % 3})
    return found


def texts() -> list[Example]:
    """The same words to be predicted, without the padding."""
    return [
        {**example, "labels": example["input_ids"].where(example["attention_mask"] == 1, -100)}
        for example in sentences()
    ]


def class_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
    """BERT's own loss is a mean over a micro-batch, which Trainer takes for one over a step."""
    return cross_entropy(outputs["logits"].float(), labels, reduction="sum") / num_items_in_batch


def next_word_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
    scores, words = outputs["logits"][:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return cross_entropy(scores, words, reduction="sum") / num_items_in_batch


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "learning_rate": LR,
        "max_grad_norm": CLIP,
        "per_device_train_batch_size": MICRO_BATCH,
        "num_train_epochs": 2,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "linear",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def train(
    model: nn.Module,
    args: TrainingArguments,
    kind: type[Trainer] = FOPTrainer,
    resume: str | None = None,
    **options: Any,
) -> nn.Module:
    defaults = {"train_dataset": sentences(), "compute_loss_func": class_loss}
    if kind is FOPTrainer:
        defaults["optimizer_options"] = {"skip": SKIP}
    kind(model=model, args=args, **{**defaults, **options}).train(resume)
    return model


def plain_loop(
    model: nn.Module | None = None,
    data: list[Example] | None = None,
    loss: Callable[[Any, Tensor, int], Tensor] = class_loss,
    *,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """The reference: no Trainer, the loss a mean over all that is predicted in a step."""
    model, data = model or bert(), data or sentences()
    model.train()
    optimizer = fop.FOP(model, lr=LR, **{"skip": SKIP, **options})
    micro = [data[i : i + MICRO_BATCH] for i in range(0, EXAMPLES, MICRO_BATCH)]
    steps = [micro[i : i + accumulate] for i in range(0, len(micro), accumulate)]
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, 2 * len(steps))
    context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    for step in [*steps, *steps]:
        count = sum(predictions(example["labels"]) for part in step for example in part)
        for part in step:
            batch = {key: torch.stack([example[key] for example in part]) for key in part[0]}
            labels = batch.pop("labels")
            with context:
                outputs = model(**batch)
            loss(outputs, labels, count).backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def predictions(labels: Tensor) -> int:
    """A class is one prediction; a text predicts every word but its first."""
    return 1 if labels.dim() == 0 else int((labels[1:] != -100).sum())


def test_every_way_to_hand_over_the_optimizer(tmp_path: Path) -> None:
    """An optimizer, Trainer's own factory (called twice), or the mixin."""
    reference = plain_loop()
    args = arguments(tmp_path)
    model = bert()
    train(model, args, Trainer, optimizers=(fop.FOP(model, lr=LR, skip=SKIP), None))
    assert same(snapshot(model), snapshot(reference))
    factory = (lambda: fop.FOP, {"lr": LR, "skip": SKIP})
    by_factory = train(bert(), args, Trainer, optimizer_cls_and_kwargs=factory)
    assert same(snapshot(by_factory), snapshot(reference))
    assert same(snapshot(train(bert(), args)), snapshot(reference))


def test_the_mixin_reads_the_arguments(tmp_path: Path) -> None:
    """Weight decay as in Trainer: not of biases and norms."""
    args = arguments(tmp_path, weight_decay=0.1)
    found = train(bert(), args, optimizer_options=ADAMW)
    model = bert()
    others = [p for name, p in model.named_parameters() if "bias" in name or "Norm" in name]
    groups = [{"params": others, "weight_decay": 0.0}]
    expected = plain_loop(model, weight_decay=0.1, param_groups=groups, **ADAMW)
    assert same(snapshot(found), snapshot(expected))


def test_the_mixin_builds_kfac(tmp_path: Path) -> None:
    found = train(bert(), arguments(tmp_path), optimizer_type=fop.KFAC)
    assert same(snapshot(found), snapshot(plain_loop(beta=0.0, eta=1.0)))


def test_accumulation_with_a_ragged_end(tmp_path: Path) -> None:
    """Six micro-batches by four: the last step of an epoch has six examples, the others sixteen."""
    found = train(bert(), arguments(tmp_path, gradient_accumulation_steps=4))
    assert same(snapshot(found), snapshot(plain_loop(accumulate=4)))


@pytest.mark.parametrize("bf16", [False, True])
def test_a_language_model_counts_predicted_words(tmp_path: Path, bf16: bool) -> None:
    """With its own loss, which Trainer tells how many words a whole step predicts."""
    args = arguments(tmp_path, gradient_accumulation_steps=4, bf16=bf16)
    options = {"train_dataset": texts(), "compute_loss_func": None, "optimizer_options": None}
    found = train(llama(), args, **options)
    autocast = torch.bfloat16 if bf16 else None
    expected = plain_loop(
        llama(), texts(), next_word_loss, accumulate=4, autocast=autocast, skip=()
    )
    assert same(snapshot(found), snapshot(expected))


def test_bf16(tmp_path: Path) -> None:
    found = train(bert(), arguments(tmp_path, bf16=True, gradient_accumulation_steps=2))
    reference = plain_loop(autocast=torch.bfloat16, accumulate=2)
    assert same(snapshot(found), snapshot(reference))
    assert not same(snapshot(found), snapshot(plain_loop(accumulate=2)))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(
    tmp_path: Path, reentrant: bool, bf16: bool
) -> None:
    options = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}
    found = train(bert(), arguments(tmp_path, bf16=bf16, **options))
    reference = plain_loop(autocast=torch.bfloat16 if bf16 else None)
    assert same(snapshot(found), snapshot(reference))


@pytest.mark.parametrize("bf16", [False, True])
def test_resumed_training_is_the_uninterrupted(tmp_path: Path, bf16: bool) -> None:
    """Stopped within an epoch, between two refreshes of curvature; Trainer restores the dropout."""
    options = {
        "bf16": bf16,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "random",
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 5,
    }
    whole = train(bert(dropout=0.1), arguments(tmp_path, **options), optimizer_options=ADAMW)
    checkpoint = str(tmp_path / "checkpoint-5")
    others = arguments(tmp_path / "second", **options)
    second = train(bert(dropout=0.1), others, resume=checkpoint, optimizer_options=ADAMW)
    assert same(snapshot(second), snapshot(whole))
    stopped = BertForSequenceClassification.from_pretrained(checkpoint)
    assert not same(snapshot(stopped), snapshot(whole))


def test_the_example_learns() -> None:
    assert example("huggingface_trainer").main() > 0.9  # 0.19 by always answering nine


def test_gpt2_is_preconditioned_through_a_registered_adapter() -> None:
    """Its linear layers are transformers' own, with the weight transposed."""
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": WORDS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    words = torch.randint(WORDS, (6, LENGTH))
    with fop.register_layer(Conv1D, Conv1DAdapter):
        check_layer(Conv1D(3, 4), torch.randn(5, 2, 4))
        optimizer = fop.FOP(model, skip="*wpe")
    model(words, labels=words).loss.backward()
    optimizer.step()
    names = {name for name, module in model.named_modules() if isinstance(module, Conv1D)}
    assert names == set(fop.diagnostics(optimizer)) - {"transformer.wte"}
    assert len(names) == 4
