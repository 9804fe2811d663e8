"""transformers.Trainer, which makes Muon of the model as training starts.

    python examples/clients/transformers_trainer.py

Learning rate and weight decay are Muon's own: those of `TrainingArguments` are for optimizers that
Trainer chooses itself. Its scheduler, accumulation and clipping work as they do there.
"""

from __future__ import annotations

from typing import Any

from kernels import get_kernel
from transformers import Trainer, TrainingArguments

from task import Sequences, build_model

optimizer = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])


def make_trainer(out: str, options: dict[str, Any], **arguments: Any) -> Trainer:
    """A trainer whose optimizer is `Muon.for_model(model, **options)`."""
    defaults = {
        "max_steps": 40,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
    }
    return Trainer(
        build_model(),
        TrainingArguments(out, **{**defaults, **arguments}),
        train_dataset=Sequences(4096),
        optimizer_cls_and_kwargs=(optimizer.MuonForTrainer, options),
    )


if __name__ == "__main__":
    make_trainer("runs/transformers", {"lr": 1e-2, "weight_decay": 0.1}).train()
