"""Muon for PyTorch, on one device and sharded."""

from . import muon, newton_schulz, presets
from .muon import Muon
from .presets import DistMuonAdamW, MuonAdamW

__all__ = ["Muon", "MuonAdamW", "DistMuonAdamW", "muon", "newton_schulz", "presets"]
