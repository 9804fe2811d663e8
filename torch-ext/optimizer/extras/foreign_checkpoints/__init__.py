"""Converts checkpoints of other optimizers to state dicts of `Muon`.

`KINDS` lists the sources that can be read: torch's Muon and AdamW, Motif's, LlamaFactory's,
nanochat's and Keller Jordan's. Pure functions: from foreign state dicts and an optimizer's
parameters they take the part of the state that this rank holds. `Muon.load_state_dict` checks and
loads it.
"""

from .conversion import to_state_dict
from .reading import KINDS

__all__ = ["KINDS", "to_state_dict"]
