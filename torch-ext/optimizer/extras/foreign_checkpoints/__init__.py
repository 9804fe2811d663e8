"""Optimizer state from other optimizers' checkpoints, as `Muon.state_dict` would have it.

Pure functions: foreign state dicts and the parameters of an optimizer make the state of whole
tensors for each parameter, of which `to_state_dict` takes the part that this rank holds.
`Muon.load_state_dict` checks and loads it.
"""

from .conversion import to_state_dict
from .reading import KINDS

__all__ = ["KINDS", "to_state_dict"]
