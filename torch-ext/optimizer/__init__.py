"""Muon for PyTorch, on one device and sharded."""

from . import muon, newton_schulz, presets
from .muon import Muon
from .presets import MuonAdamW

__all__ = ["Muon", "MuonAdamW", "muon", "newton_schulz", "presets"]
