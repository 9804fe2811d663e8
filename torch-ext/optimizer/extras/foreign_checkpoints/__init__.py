"""Converts checkpoints of torch, Motif, LlamaFactory, nanochat, and Keller Jordan to `Muon`'s.

`Muon.load_foreign_state_dict` loads the result. The kinds of state dicts are:

- ``"torch_muon"``: ``{"muon": …, "adamw": …}``, from torch.optim.Muon and torch.optim.AdamW.
- ``"torch_adamw"``: from torch.optim.AdamW.
- ``"motif"``: from Motif's ``Muon``.
- ``"llamafactory"``: from Moonlight's ``Muon``, which LlamaFactory ships.
- ``"nanochat"``: from ``MuonAdamW``, or a list with one from ``DistMuonAdamW`` for each rank.
- ``"keller_jordan"``: from any of his Muons, or a list with one for each rank; if AdamW is
  separate, ``{"muon": …, "adamw": …}``.

State dicts keyed by name, as torch.distributed.checkpoint makes them, work if their tensors are
whole, or DTensors placed like the parameters.

Parameters are matched by name if both sides name all of them. Otherwise they are matched by
position, which works if the source's preset made the groups from the source's arguments, or else by
``params``. With two optimizers, each takes its own parameters from ``params``, which may include
frozen ones.

AdamW's moments and step counts are copied. Momentum keeps its dtype and is converted to the style
of its group: with constant μ, averaged momentum (``"ema"``) is 1 − μ times summed momentum
(``"classical"``). A matrix that AdamW trained starts with ``exp_avg`` as averaged momentum. Its
group takes AdamW's rates only with ``adjust_lr="match_rms_adamw"``, and no ``momentum``. Groups
with ``beta2`` take nanochat's second moments.

Example:
    >>> load = functools.partial(torch.load, weights_only=True)
    >>> groups = [{"params": matrices}, {"params": others, "use_muon": False}]
    >>> optim = Muon(**presets.torch_muon(groups))
    >>> saved = {"muon": load("muon.pt"), "adamw": load("adamw.pt")}
    >>> optim.load_foreign_state_dict(saved, kind="torch_muon")
    >>> optim = Muon(get_default_muon_param_groups(model))
    >>> optim.load_foreign_state_dict(load("adamw.pt"), kind="torch_adamw",
    ...                               params=model.parameters())
    >>> optim = Muon(**presets.moonlight(muon_params=matrices, adamw_params=others))
    >>> optim.load_foreign_state_dict(load("optimizer.pt"), kind="llamafactory")
    >>> optim = Muon(**presets.motif(get_default_muon_param_groups(model)))
    >>> optim.load_foreign_state_dict(load("optimizer.pt"), kind="motif")
    >>> optim = DistMuonAdamW(param_groups)
    >>> ranks = [load(f"optim_021400_rank{rank}.pt") for rank in range(8)]
    >>> optim.load_foreign_state_dict(ranks, kind="nanochat")
    >>> optim = Muon(**presets.keller_jordan(param_groups))
    >>> optim.load_foreign_state_dict(ranks, kind="keller_jordan")
"""

from .conversion import to_state_dict
from .kinds import KINDS

__all__ = ["KINDS", "to_state_dict"]
