"""transformers.Trainer, given the optimizer (`optimizers=`) or how to make it.

    python examples/clients/transformers_trainer.py

Learning rate and weight decay are Muon's own: those of `TrainingArguments` are for optimizers that
Trainer makes itself. Its scheduler, accumulation and clipping work as they do there.
"""

from __future__ import annotations

from typing import Any

from kernels import get_kernel
from transformers import Trainer, TrainingArguments

from task import Sequences, build_model

optimizer = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])


def make_trainer(out: str, gives_class: bool = False, **arguments: Any) -> Trainer:
    model = build_model()
    groups = optimizer.get_default_muon_param_groups(model)
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if gives_class:  # groups go in as params, or Trainer would make its own, without use_muon
        muon: dict[str, Any] = {
            "optimizer_cls_and_kwargs": (optimizer.Muon, {"params": groups, **options})
        }
    else:
        muon = {"optimizers": (optimizer.Muon(groups, **options), None)}
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
        model,
        TrainingArguments(out, **{**defaults, **arguments}),
        train_dataset=Sequences(4096),
        **muon,
    )


if __name__ == "__main__":
    make_trainer("runs/transformers").train()
