"""Muon for PyTorch, on one device and sharded."""

from . import muon, newton_schulz, presets, qk_clip
from .description import describe
from .muon import Muon
from .presets import DistMuonAdamW, MuonAdamW
from .qk_clip import QKLogitRecorder, max_qk_logits

__all__ = [
    "Muon",
    "MuonAdamW",
    "DistMuonAdamW",
    "describe",
    "QKLogitRecorder",
    "max_qk_logits",
    "muon",
    "newton_schulz",
    "presets",
    "qk_clip",
]
