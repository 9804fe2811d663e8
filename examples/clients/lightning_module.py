"""PyTorch Lightning: the optimizer and its schedule by configure_optimizers, all else as usual.

python examples/clients/lightning_module.py
"""

from __future__ import annotations

from typing import Any

import lightning
from kernels import get_kernel
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from task import Sequences, build_model

optimizer = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])


class Module(lightning.LightningModule):
    def __init__(self, steps: int, **options: Any):
        super().__init__()
        self.steps, self.options = steps, options
        self.model = build_model()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optim = optimizer.Muon.for_model(self, lr=1e-2, weight_decay=0.1, **self.options)
        scheduler = LambdaLR(optim, lambda step: 1 - step / self.steps)
        return {"optimizer": optim, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_trainer(steps: int, **arguments: Any) -> lightning.Trainer:
    defaults = {"max_steps": steps, "gradient_clip_val": 1.0, "logger": False}
    return lightning.Trainer(**{**defaults, **arguments})


def batches() -> DataLoader:
    return DataLoader(Sequences(4096), batch_size=16)


if __name__ == "__main__":
    module = Module(steps=40)
    make_trainer(steps=40, enable_checkpointing=False).fit(module, batches())
    print("losses:", *(f"{loss:.3f}" for loss in module.losses))
