"""Muon for PyTorch, on one device and sharded."""

from . import muon, newton_schulz, presets, qk_clip
from .muon import Muon
from .presets import DistMuonAdamW, MuonAdamW
from .qk_clip import QKLogitRecorder

__all__ = [
    "Muon",
    "MuonAdamW",
    "DistMuonAdamW",
    "QKLogitRecorder",
    "muon",
    "newton_schulz",
    "presets",
    "qk_clip",
]
