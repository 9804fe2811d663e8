"""Makes Muon for a transformers Trainer, which makes its optimizer by itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..muon import Muon


class MuonForTrainer:
    """An optimizer factory, as ``transformers.Trainer`` takes it in ``optimizer_cls_and_kwargs``.

    ``Trainer`` makes an instance without arguments as training starts, and calls it with the model
    and the given arguments, which are those of `Muon.for_model`. ``Trainer`` adds none: its
    ``learning_rate`` and ``weight_decay`` have no effect on Muon. With FSDP2 accelerate shards the
    model afterwards, and replaces the parameters in the groups.

    Example:
        >>> muon = {"lr": 2e-3, "adamw_lr": 4e-3, "weight_decay": 0.1}
        >>> Trainer(model, args, optimizer_cls_and_kwargs=(optimizer.MuonForTrainer, muon))
    """

    def __call__(self, model: nn.Module, lr: Any, **arguments: Any) -> Muon:
        return Muon.for_model(model, lr, **arguments)
