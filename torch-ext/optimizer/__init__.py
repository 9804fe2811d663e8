"""Muon for PyTorch, on one device or sharded over many."""

from __future__ import annotations

from typing import Any

from . import muon, newton_schulz, qk_clip
from .muon import Muon, default_is_muon, get_default_muon_param_groups

__all__ = [
    "Muon",
    "MuonAdamW",
    "DistMuonAdamW",
    "MuonForTrainer",
    "QKLogitRecorder",
    "SimulatedHost",
    "default_is_muon",
    "describe",
    "get_default_muon_param_groups",
    "max_qk_logits",
    "muon",
    "newton_schulz",
    "presets",
    "qk_clip",
    "recipes",
    "selfcheck",
]


def __getattr__(name: str) -> Any:
    """Imports names that not every training run needs on first access."""
    if name == "describe":
        from .extras.describe import describe

        return describe
    if name == "selfcheck":
        from .extras.selfcheck import selfcheck

        return selfcheck
    if name == "MuonForTrainer":
        from .extras.trainer import MuonForTrainer

        return MuonForTrainer
    if name == "SimulatedHost":
        from .extras.simulated_host import SimulatedHost

        return SimulatedHost
    if name == "QKLogitRecorder":
        from .extras.qk_logits.recorder import QKLogitRecorder

        return QKLogitRecorder
    if name == "max_qk_logits":
        from .extras.qk_logits.maxima import max_qk_logits

        return max_qk_logits
    if name in ("MuonAdamW", "DistMuonAdamW", "presets"):
        from .presets import DistMuonAdamW, MuonAdamW

        globals().update(MuonAdamW=MuonAdamW, DistMuonAdamW=DistMuonAdamW)
        return globals()[name]  # importing the submodule has set `presets`
    if name == "recipes":
        from .extras import recipes

        return recipes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
