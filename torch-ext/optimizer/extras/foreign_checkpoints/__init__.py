"""Converts checkpoints of torch, Motif, LlamaFactory, nanochat and Keller Jordan to `Muon`'s.

`KINDS` lists the sources that can be read. `to_state_dict` makes of their state dicts, and of an
optimizer's parameters, the part of the state that this rank holds, as a state dict that
`Muon.load_state_dict` checks and loads.
"""

from .conversion import to_state_dict
from .reading import KINDS

__all__ = ["KINDS", "to_state_dict"]
