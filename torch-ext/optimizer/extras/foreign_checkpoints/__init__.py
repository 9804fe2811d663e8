"""Converts checkpoints of torch, Motif, LlamaFactory, nanochat and Keller Jordan to `Muon`'s.

`Muon.load_foreign_state_dict` loads what `to_state_dict` makes: the part of the state that this
rank holds, as a state dict. `KINDS` lists the sources:

- ``"torch_muon"``: torch.optim.Muon's and torch.optim.AdamW's state dicts,
  ``{"muon": …, "adamw": …}``.
- ``"torch_adamw"``: torch.optim.AdamW's.
- ``"motif"``: that of Motif's ``Muon``.
- ``"llamafactory"``: that of Moonlight's ``Muon``, which LlamaFactory ships.
- ``"nanochat"``: ``MuonAdamW``'s, or a list of ``DistMuonAdamW``'s, one for each rank.
- ``"keller_jordan"``: that of any of his Muons, or a list of one for each rank; with another
  AdamW, ``{"muon": …, "adamw": …}``.

State dicts by names, as torch.distributed.checkpoint makes them, will do where they hold whole
tensors, or DTensors that lie as the parameters do.

Parameters are matched by names where both sides have names for all of them; else by position, which
fits where the preset of the source made the groups from what the source was given; else by
``params``. Of two optimizers, each takes its own parameters from ``params``, which may include
frozen ones.

AdamW's moments and steps are taken as they are. Momentum keeps its dtype, and is converted to the
style of its group: with constant μ averaged momentum (``"ema"``) is 1 − μ times summed momentum
(``"classical"``). A matrix that AdamW trained begins with ``exp_avg`` as averaged momentum; its
group takes the rates of AdamW only with ``adjust_lr="match_rms_adamw"``, and no ``momentum``.
Groups with ``beta2`` take nanochat's second moments. The tensors are copied.

Example:
    >>> load = functools.partial(torch.load, weights_only=True)
    >>> groups = [{"params": matrices}, {"params": others, "use_muon": False}]
    >>> optimizer = Muon(**presets.torch_muon(groups))
    >>> saved = {"muon": load("muon.pt"), "adamw": load("adamw.pt")}
    >>> optimizer.load_foreign_state_dict(saved, kind="torch_muon")
    >>> optimizer = Muon(get_default_muon_param_groups(model))
    >>> optimizer.load_foreign_state_dict(load("adamw.pt"), kind="torch_adamw",
    ...                                   params=model.parameters())
    >>> optimizer = Muon(**presets.moonlight(muon_params=matrices, adamw_params=others))
    >>> optimizer.load_foreign_state_dict(load("optimizer.pt"), kind="llamafactory")
    >>> optimizer = Muon(**presets.motif(get_default_muon_param_groups(model)))
    >>> optimizer.load_foreign_state_dict(load("optimizer.pt"), kind="motif")
    >>> optimizer = DistMuonAdamW(param_groups)
    >>> ranks = [load(f"optim_021400_rank{rank}.pt") for rank in range(8)]
    >>> optimizer.load_foreign_state_dict(ranks, kind="nanochat")
    >>> optimizer = Muon(**presets.keller_jordan(param_groups))
    >>> optimizer.load_foreign_state_dict(ranks, kind="keller_jordan")
"""

from .conversion import to_state_dict
from .kinds import KINDS

__all__ = ["KINDS", "to_state_dict"]
