"""Makes Muon for a transformers Trainer, which creates its own optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..muon import Muon


class MuonForTrainer:
    """Makes the optimizer of a ``transformers.Trainer``, as its ``optimizer_cls_and_kwargs``.

    When training starts, ``Trainer`` makes an instance without arguments and calls it with the
    model and the given arguments, which are those of `Muon.for_model`. ``Trainer`` adds no
    arguments: its ``learning_rate`` and ``weight_decay`` don't affect Muon. With FSDP2, accelerate
    then shards the model and replaces the parameters in the groups.

    Example:
        >>> muon = {"lr": 2e-3, "adamw_lr": 4e-3, "weight_decay": 0.1}
        >>> Trainer(model, args, optimizer_cls_and_kwargs=(optimizer.MuonForTrainer, muon))
    """

    def __call__(self, model: nn.Module, lr: Any, **arguments: Any) -> Muon:
        return Muon.for_model(model, lr, **arguments)
