"""fop.FOP in the Hugging Face Trainer: a tiny language model learns which number is larger.

Nothing is downloaded: the model is built from its configuration and the texts are made up.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fop.integrations.huggingface import SecondOrderMixin

NUMBERS = 10


class FOPTrainer(SecondOrderMixin, Trainer):
    """Trainer whose optimizer is `fop.FOP`, with the learning rate of the `TrainingArguments`."""


def make_data(n: int, seed: int) -> list[dict[str, Tensor]]:
    """Texts "a b c", where c is the larger of a and b and the only word to be predicted."""
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randint(NUMBERS, (n, 2), generator=generator)
    words = torch.cat([pair, pair.amax(1, keepdim=True)], dim=1)
    labels = words.clone()
    labels[:, :2] = -100
    return [{"input_ids": w, "labels": y} for w, y in zip(words, labels, strict=True)]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUMBERS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=3,
    )
    return LlamaForCausalLM(config)


def main() -> float:
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            learning_rate=0.1,
            lr_scheduler_type="cosine",
            per_device_train_batch_size=32,
            gradient_accumulation_steps=2,
            num_train_epochs=3,
            bf16=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = FOPTrainer(
            model=model,
            args=arguments,
            train_dataset=make_data(1024, seed=1),
            optimizer_options={"damping": 1e-3},
        )
        trainer.train()
    texts = torch.stack([example["input_ids"] for example in make_data(512, seed=2)])
    model.train(False)
    with torch.no_grad():
        answers = model(texts[:, :2]).logits[:, -1].argmax(1)
    return float((answers == texts[:, 2]).float().mean())


if __name__ == "__main__":
    print(f"right answers: {main():.3f}")
